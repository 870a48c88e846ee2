"""An essay is judged along several dimensions at once (forks), and then given a grade (select)."""

import sys

import shoal

DIMENSIONS = ("clarity", "originality", "evidence")


@shoal.function
def judge(s, essay):
    s += "Evaluate the following essay.\n\n" + essay + "\n\n"
    forks = s.fork(len(DIMENSIONS))
    for fork, dimension in zip(forks, DIMENSIONS, strict=True):
        fork += f"The {dimension} of the essay is" + shoal.gen("judgement", stop="\n", max_tokens=48)
    forks.join()
    for dimension, judgement in zip(DIMENSIONS, s["judgement"], strict=True):
        s += f"{dimension}: {judgement.strip()}\n"
    s += "All in all, the grade of the essay is " + shoal.select("grade", ["A", "B", "C", "D"])


def main(essay="Dogs are loyal. Cats are independent. Both make good pets, if one has the time."):
    return judge.run(essay, temperature=0)


if __name__ == "__main__":
    shoal.set_default_backend(shoal.ShoalServer(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
    state = main()
    print(state.text())
    print(state.calls_table())
