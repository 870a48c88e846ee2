"""A conversation of several turns, streamed as it comes."""

import sys

import shoal


@shoal.function
def chat(s, questions):
    s += shoal.system("You answer in one sentence.")
    for number, question in enumerate(questions):
        s += shoal.user(question)
        s += shoal.assistant(shoal.gen(f"answer_{number}", max_tokens=48))


def main(questions=("What is a shoal?", "And what is a school of fish?"), stream=False):
    return chat.run(list(questions), temperature=0, stream=stream)


if __name__ == "__main__":
    shoal.set_default_backend(shoal.ShoalServer(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
    for piece in main(stream=True).text_iter():
        print(piece, end="", flush=True)
