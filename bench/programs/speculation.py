"""API speculative execution (`@shoal.function(num_api_spec_tokens=...)`) against plain calls: an extraction of three
fields from each of some documents, on an endpoint that is paid by the token.

A plain run sends the document with each of its three calls. Without `--base-url`, the endpoint is a scripted one in
this process, which always gives the same answer to the same text: then any difference between the two runs is an error.
"""

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import shoal
from bench.programs.scripted_endpoint import ScriptedEndpoint, script
from bench.results import FOLDER, Figure, write

FIELDS = ("name", "year", "profession")
SPEC_TOKENS = 48

PEOPLE = (
    ("Mira Okonkwo", "1962", "marine biologist"),
    ("Tomas Lindqvist", "1931", "violin maker"),
    ("Aiko Brandt", "1978", "civil engineer"),
    ("Rafael Duarte", "1949", "railway clerk"),
    ("Ingrid Solheim", "1987", "cartographer"),
    ("Kwame Petrov", "1955", "translator of plays"),
    ("Lucia Hargreaves", "1920", "physician"),
    ("Samir Novak", "1969", "beekeeper"),
)
STORY = (
    "{name} was born in {year} in a small town by the sea, the youngest of four. After school came two years of odd "
    "jobs, then a long apprenticeship, and at last a living as {profession}. Neighbours remember a patient listener "
    "who kept every letter, walked to work in all weathers, and never owned a car. The papers of these years are in "
    "the archive of the town, in eleven boxes, most of them in order."
)


def prompt(name: str, year: str, profession: str) -> str:
    """A document, and the beginning of its first field."""
    story = STORY.format(name=name, year=year, profession=profession)
    return f"Document:\n{story}\n\nThe person of the document, field by field.\nName:"


def answer(name: str, year: str, profession: str) -> str:
    """The text with which a model goes on after the prompt; it does not stop after the last field."""
    return f" {name}\nYear of birth: {year}\nProfession: {profession}\nPlace: a town by the sea\n"


def extraction(s: Any, document: str) -> None:
    """The program."""
    s += document + shoal.gen("name", stop="\n")
    s += "\nYear of birth:" + shoal.gen("year", stop="\n")
    s += "\nProfession:" + shoal.gen("profession", stop="\n")


def measured(backend: shoal.OpenAI, spec_tokens: int | None) -> tuple[list[dict[str, str]], dict[str, int]]:
    """The fields of all documents, and what the endpoint counted: calls, and tokens in and out."""
    program = shoal.function(extraction, num_api_spec_tokens=spec_tokens)
    backend.token_usage.reset()
    documents = [{"document": prompt(*person)} for person in PEOPLE]
    states = program.run_batch(documents, backend=backend, temperature=0, max_new_tokens=SPEC_TOKENS)
    if failed := [error for state in states if (error := state.error()) is not None]:
        raise failed[0]
    usage = backend.token_usage
    counts = {"calls": usage.calls, "input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    return [{field: state[field] for field in FIELDS} for state in states], counts


def main(argv: list[str] | None = None) -> int:
    """Runs both, and writes the result. Returns 1 if a field of the scripted endpoint differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.programs.speculation", description=__doc__)
    parser.add_argument("--base-url", help="an endpoint with completions instead of the scripted one, up to its /v1")
    parser.add_argument("--model", default="scripted", help="its model (scripted)")
    parser.add_argument("--spec-tokens", type=int, default=SPEC_TOKENS, help=f"num_api_spec_tokens ({SPEC_TOKENS})")
    parser.add_argument("--name", default="programs.api", help="of the result (programs.api)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the result")
    args = parser.parse_args(argv)
    known = script({prompt(*person): answer(*person) for person in PEOPLE})
    with ScriptedEndpoint(known) if args.base_url is None else nullcontext() as endpoint:
        url = f"{endpoint.url}/v1" if endpoint is not None else args.base_url
        key = os.environ.get("OPENAI_API_KEY", "none")
        backend = shoal.OpenAI(args.model, is_chat_model=False, base_url=url, api_key=key)
        fields, plain = measured(backend, None)
        other_fields, speculated = measured(backend, args.spec_tokens)
    different = sum(own != other for own, other in zip(fields, other_fields, strict=True))
    for label, counts in (("plain", plain), ("speculated", speculated)):
        print(f"{label:>10}: " + ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items()))
    print(f"{different} of {len(PEOPLE)} documents have other fields")
    write(
        args.name,
        [
            Figure(
                "programs.api.input_tokens_saved", plain["input_tokens"] / speculated["input_tokens"], "ratio", True
            ),
            Figure("programs.api.calls_saved", plain["calls"] / speculated["calls"], "ratio", True),
            Figure("programs.api.output_tokens", speculated["output_tokens"] / plain["output_tokens"], "ratio", False),
            Figure("programs.api.different_documents", different, "documents", False),
        ],
        {"plain": plain, "speculated": speculated, "fields": fields, "spec_tokens": args.spec_tokens},
        folder=args.out,
    )
    return 1 if different and args.base_url is None else 0


if __name__ == "__main__":
    sys.exit(main())
