"""The time that a router takes to parse an answer, for each format in which models write calls.

    shoal bench parser

Each answer thinks, explains itself, and calls two tools, one with a long string. It comes token by token: pieces of
four characters, and each marker as one piece, once with markers that are tokens and once with markers of plain
characters. The figures are microseconds of CPU time per token: the mean over all formats, and the slowest one.
"""

import json
import re
import statistics
import time
from dataclasses import dataclass

from bench import results
from bench.load.options import count
from bench.results import Figure
from router.conversation import Tool
from router.formats.families import HARMONY, TOOLS, named
from router.formats.format import JsonCall, NamedCall, OutputFormat, PythonicCall, QuotedCall, TaggedCall, ToolsFormat
from router.formats.lexer import Lexer
from shoal.help import Parser

PROSE = (
    "The function reads a file, splits it into lines, and counts how often each word occurs. A line may be empty;\n"
    "then it is left out. For a < b and {c} nothing changes, and so it is enough to look at [1] once more.\n"
)
CODE = 'def count(path):\n    with open(path) as file:\n        return Counter(file.read().split("\\n"))\n'
TOOL = Tool("write_file", parameters={"type": "object", "properties": {"text": {"type": "string"}}})
PIECE = 4  # characters, about as many as a token has


@dataclass(frozen=True)
class TokenisedAnswer:
    """An answer as it arrives: pieces of text, with the marks of each."""

    format: OutputFormat
    pieces: list[tuple[str, dict[int, int]]]


def answer(name: str, as_tokens: bool, repeats: int) -> TokenisedAnswer:
    """An answer in the format `name`. `repeats`: of its prose and its code."""
    format = named(name, None if name == HARMONY else "qwen3")
    if as_tokens:
        format = format.bound({marker: number for number, marker in enumerate(format.markers)}.get)
    text = _written(name, PROSE * repeats, CODE * repeats)
    pieces: list[tuple[str, dict[int, int]]] = []
    markers = re.compile("|".join(re.escape(marker) for marker in sorted(format.markers, key=len, reverse=True)))
    at = 0
    while at < len(text):
        following = markers.search(text, at)
        if following is not None and following.start() == at:
            piece = following.group()
        else:
            piece = text[at : min(at + PIECE, len(text) if following is None else following.start())]
        is_token = piece in format.bound_markers
        pieces.append((piece, {at: len(pieces)} if is_token else {}))
        at += len(piece)
    return TokenisedAnswer(format, pieces)


def _written(name: str, prose: str, code: str) -> str:
    if name == HARMONY:
        call = "<|start|>assistant<|channel|>commentary to=functions.write_file <|constrain|>json<|message|>"
        return (
            f"<|channel|>analysis<|message|>{prose}<|end|><|start|>assistant<|channel|>commentary<|message|>{prose}<|end|>"
            + "".join(f"{call}{_json(text)}<|call|>" for text in (code, "x"))
        )
    tools = TOOLS[name]
    calls = [_call(tools, text) for text in (code, "x")]
    form = tools.calls[0]
    section = form.separators[0].join(calls) if form.separators else "\n".join(calls)
    if isinstance(form, JsonCall | PythonicCall):
        section = f"{form.list_begin}{section}{form.list_end}"
    before = prose if tools.begin or not tools.bare else ""
    return f"<think>\n{prose}\n</think>\n\n{before}{tools.begin}{section}{tools.end}"


def _json(text: str) -> str:
    return json.dumps({"text": text})


def _call(tools: ToolsFormat, text: str) -> str:
    form = tools.calls[0]
    match form:
        case JsonCall():
            return f'{{"name": "write_file", "arguments": {_json(text)}}}'
        case PythonicCall():
            return f"write_file(text={text!r})"
        case NamedCall():
            before, after = (f"{form.fence[0]}\n", f"\n{form.fence[1]}") if form.fence[0] else ("", "")
            return f"{form.begin}{form.prefix}write_file{form.name_ends[0]}{before}{_json(text)}{after}{form.end}"
        case QuotedCall():
            return f"{form.begin}{form.prefix}write_file{{text:{form.quote}{text}{form.quote}}}{form.end}"
        case TaggedCall():
            quote = '"' if form.begin.endswith(("name=", "tool=")) else ""
            said = ""
            if "kind" in form.key.groupindex:
                said = ' type="string"' if "type=" in form.key.pattern else ' string="true"'
            return (
                f"{form.begin}{quote}write_file{quote}{form.name_end}\n{form.key_begin}{quote}text{quote}{said}"
                f"{form.key_end}{form.value_begin}{text}{form.value_end}\n{form.end}"
            )


def us_per_token(answer: TokenisedAnswer, rounds: int) -> float:
    """Microseconds per piece, in the fastest round."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        lexer = Lexer(answer.format, [TOOL])
        for text, marks in answer.pieces:
            lexer.push(text, marks)
        lexer.flush()
        best = min(best, time.process_time() - start)
    return 1e6 * best / len(answer.pieces)


def measure(repeats: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds per token by format, with markers that are tokens and with markers of plain characters."""
    return {
        name: {kind: us_per_token(answer(name, kind == "tokens", repeats), rounds) for kind in ("tokens", "characters")}
        for name in (*TOOLS, HARMONY)
    }


def parser() -> Parser:
    p = Parser("shoal bench parser", __doc__)
    p.add_argument("--repeats", type=count, default=20, help="repetitions of an answer's prose and code (default 20)")
    p.add_argument("--rounds", type=count, default=10, help="rounds, of which the fastest counts (default 10)")
    p.add_argument("--name", default="protocols.parser", help="name of the result (default protocols.parser)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Measures all formats, prints them, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    measured = measure(args.repeats, args.rounds)
    for name, row in measured.items():
        print(f"{name:16} " + "  ".join(f"{value:5.2f} us per token, markers as {kind}" for kind, value in row.items()))
    values = [value for row in measured.values() for value in row.values()]
    figures = [
        Figure("protocols.parser.us_per_token", statistics.fmean(values), "us", False),
        Figure("protocols.parser.slowest.us_per_token", max(values), "us", False),
    ]
    print(f"written: {results.write(args.name, figures, {'us_per_token': measured, 'repeats': args.repeats})}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
