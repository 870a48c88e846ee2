"""Few-shot questions: a batch whose programs share a long prefix, and answers that end at a line."""

import sys

import shoal

EXAMPLES = (("France", "Paris"), ("Germany", "Berlin"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"))


@shoal.function
def capital(s, country):
    s += "The following are questions with answers.\n\n"
    for other, answer in EXAMPLES:
        s += f"Q: What is the capital of {other}?\nA: {answer}\n"
    s += f"Q: What is the capital of {country}?\nA:" + shoal.gen("answer", stop="\n", max_tokens=8)


def main(countries=("Portugal", "Norway", "Greece")):
    states = capital.run_batch([{"country": country} for country in countries], temperature=0)
    return {country: state["answer"].strip() for country, state in zip(countries, states, strict=True)}


if __name__ == "__main__":
    shoal.set_default_backend(shoal.ShoalServer(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
    print(main())
