"""Tree of thought: several plans, several solutions for each, and the solution that the model finds likeliest."""

import sys

import shoal


@shoal.function
def tree(s, question, width=2):
    s += "Question: " + question + "\n"
    plans = s.fork(width)
    plans += "A plan to solve it:" + shoal.gen("plan", stop="\n", max_tokens=32) + "\n"
    solutions = []
    for plan in plans:
        leaves = plan.fork(width)
        leaves += "The solution, step by step:" + shoal.gen("solution", stop="\n\n", max_tokens=48)
        solutions += list(leaves)
    s += "Proposed solutions:\n"
    for number, leaf in enumerate(solutions):
        s += f"({number}) " + leaf["solution"].strip() + "\n"
    s += "The best solution is (" + shoal.select("best", [str(number) for number in range(len(solutions))]) + ")"
    return solutions[int(s["best"])]["solution"]


def main(question="A train goes 60 km in 45 minutes. How far does it go in 3 hours?"):
    return tree.run(question, temperature=0.7)


if __name__ == "__main__":
    shoal.set_default_backend(shoal.ShoalServer(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
    print(main().text())
