"""ReAct: thoughts, actions and observations in turns. The tool is a plain function, run in a thread."""

import sys

import shoal

FACTS = {"linux": "Linux was created by Linus Torvalds.", "torvalds": "Linus Torvalds was born in Helsinki, Finland."}
SHOT = """Question: Which country does the founder of Microsoft live in?
Thought 1: I need to search for the founder of Microsoft.
Action 1: Search [founder of Microsoft]
Observation 1: The founder of Microsoft is Bill Gates.
Thought 2: I need to search for where Bill Gates lives.
Action 2: Search [Bill Gates]
Observation 2: Bill Gates lives in the United States.
Thought 3: The answer is the United States.
Action 3: Finish [United States]

"""


def search(query):
    """The sentences that share a word with the query."""
    found = [fact for key, fact in FACTS.items() if key in query.lower()]
    return " ".join(found) or "Nothing was found."


@shoal.function
def react(s, question, max_turns=3):
    s += SHOT + "Question: " + question + "\n"
    for turn in range(1, max_turns + 1):
        s += f"Thought {turn}:" + shoal.gen(stop="\n", max_tokens=32) + "\n"
        s += f"Action {turn}: " + shoal.select("action", ["Search", "Finish"])
        s += " [" + shoal.gen("argument", stop=["]", "\n"], max_tokens=12) + "]\n"
        if s["action"] == "Finish":
            return s["argument"]
        s += f"Observation {turn}: " + shoal.in_thread(search, s["argument"]) + "\n"
    return None


def main(question="Which country was the creator of Linux born in?"):
    return react.run(question, temperature=0)


if __name__ == "__main__":
    shoal.set_default_backend(shoal.ShoalServer(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
    print(main().text())
