"""Questions about documents: compiled, so that documents that many questions share stand first in the text."""

import sys

import shoal

DOCUMENTS = {
    "shoal": "A shoal is a group of fish that stay together for social reasons. If they swim in one direction, "
    "it is a school.",
    "reef": "A reef is a ridge of rock or coral near the surface of the water. Many fish live there.",
}


def retrieve(question):
    """The documents whose key the question names; all if it names none."""
    return [text for key, text in DOCUMENTS.items() if key in question.lower()] or list(DOCUMENTS.values())


@shoal.function
def answer(s, context, question):
    s += shoal.unordered("Question: " + question + "\n", "Context: " + context + "\n")
    s += "A short answer to the question:" + shoal.gen("answer", max_tokens=32, stop="\n")


def main(questions=("What is a shoal?", "When is a shoal a school?", "What is a reef?")):
    compiled = answer.compile()
    calls = [{"context": " ".join(retrieve(question)), "question": question} for question in questions]
    return [state["answer"].strip() for state in compiled.run_batch(calls, temperature=0)]


if __name__ == "__main__":
    shoal.set_default_backend(shoal.ShoalServer(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
    print(answer.compile().explain())
    print("\n".join(main()))
