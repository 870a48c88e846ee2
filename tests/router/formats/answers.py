"""Random answers in every format, with the deltas that they stand for, and random damage to them.

    python -m tests.router.formats.answers 100000

checks that many answers: undamaged ones give the deltas that they were made from, and all give the same deltas wherever
they are cut.
"""

import json
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from router.chat.conversation import Tool
from router.chat.deltas import CallArguments, CallBegin, CallEnd, Delta, TextDelta, ThinkingDelta, joined
from router.formats.choice import named
from router.formats.format import OutputFormat
from router.formats.lexer import Lexer
from worker.formats.families import HARMONY, TOOLS
from worker.formats.syntax import JsonCall, NamedCall, PythonicCall, QuotedCall, TaggedCall, ToolsFormat

FORMATS = (*TOOLS, HARMONY)
NAMES = ("get_weather", "search", "f", "a.b-c_d")
TYPES: Mapping[str, Mapping[str, Any]] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "flag": {"type": "boolean"},
    "items": {"type": "array"},
    "options": {"type": "object"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
SCHEMA = {"type": "object", "properties": TYPES}
TOOL_LIST = [Tool(name, parameters=SCHEMA) for name in NAMES]
FRAGMENTS = (
    "a", "word", " ", " ", "\n", "\n\n", "é", "😀", "\u2028",
    "<", ">", "</", "<t", "<tool", "tool_call>", "{", "}", "[", "]", '"', "'",
    "\\", "\\n", ",", ";", ":", "```", "```json", "</para", "<|", "|>", "<|chan", "[TOOL", "{}", '{"name": ',
    "function", "1", "null", "=",
)  # fmt: skip
_MARK = re.compile("\ue000(.*?)\ue001", re.DOTALL)


@dataclass
class Answer:
    """An answer of a model. `expected`: None if damaged. `marks`: as for `Lexer.push`."""

    format: OutputFormat
    text: str
    marks: dict[int, int]
    thinks: bool
    expected: list[Delta] | None = None
    parts: list[str] = field(default_factory=list)


def answer(seed: int) -> Answer:
    """The answer with this number. Every third one is damaged."""
    rng = random.Random(seed)
    name = FORMATS[seed % len(FORMATS)]
    format = named(name, None if name == HARMONY else rng.choice((None, "qwen3", "mistral")))
    share = rng.choice((0.0, 0.5, 1.0))
    chosen = {marker: 100 + n for n, marker in enumerate(format.markers) if rng.random() < share}
    format = format.bound(chosen.get)
    made = _Channels(rng, format) if name == HARMONY else _Tags(rng, format)
    made.make()
    written = "".join(made.written)
    result = _finished(written, format, made.thinks)
    if seed // len(FORMATS) % 3:
        result.expected = joined(made.expected)
    else:
        result = _finished(_damaged(rng, written, format), format, made.thinks)
    return result


def _finished(written: str, format: OutputFormat, thinks: bool) -> Answer:
    text, marks, last = "", {}, 0
    for match in _MARK.finditer(written):
        text += written[last : match.start()]
        if match[1] in format.bound_markers:
            marks[len(text)] = len(text)
        text += match[1]
        last = match.end()
    return Answer(format, text + written[last:], marks, thinks)


def _damaged(rng: random.Random, written: str, format: OutputFormat) -> str:
    pieces = re.findall("\ue000.*?\ue001|.", written, re.DOTALL)
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(pieces))
        match rng.randrange(4):
            case 0:
                del pieces[at:]
            case 1:
                del pieces[at : at + rng.choice((1, 2, 5))]
            case 2:
                pieces.insert(at, rng.choice((*FRAGMENTS, *format.markers)))
            case 3:
                pieces[at:at] = pieces[: rng.randint(0, len(pieces))]
        pieces = pieces[:3000]
    return "".join(pieces)


class _Writer:
    """An answer in the making: what the model writes, and the deltas that this stands for."""

    def __init__(self, rng: random.Random, format: OutputFormat) -> None:
        self.rng = rng
        self.format = format
        self.written: list[str] = []
        self.expected: list[Delta] = []
        self.calls = 0
        self.thinks = False

    def mark(self, marker: str) -> str:
        return f"\ue000{marker}\ue001" if marker else ""

    def space(self) -> str:
        return self.rng.choice(("", "", "\n", " ", "\n\n"))

    def prose(self, quotes: bool = True) -> str:
        """Text that begins and ends with a letter. It may have markers that are tokens, spelled by other tokens."""
        pieces = list(self.rng.choices(FRAGMENTS, k=self.rng.randint(0, 12)))
        if quotes and self.format.tokens and self.rng.random() < 0.3:
            pieces.append(self.rng.choice(self.format.tokens)[0])
            self.rng.shuffle(pieces)
        text = "w" + "".join(pieces) + "x"
        free = [marker for marker in self.format.markers if marker not in self.format.bound_markers]
        return text if not any(marker in text for marker in free) else "plain"

    def string(self) -> str:
        return "".join(self.rng.choices(FRAGMENTS, k=self.rng.randint(0, 8)))

    def value(self, kind: str) -> Any:
        match kind:
            case "text":
                return self.string()
            case "count":
                return self.rng.randint(-5, 10**6)
            case "share":
                return self.rng.choice((0.5, -1.25, 3, 1e30))
            case "flag":
                return self.rng.random() < 0.5
            case "items":
                return [self.string(), {"a": [None, True]}, 1][: self.rng.randint(0, 3)]
            case "options":
                return {self.string(): self.string(), "n": {"deep": [{}]}} if self.rng.random() < 0.7 else {}
        return self.rng.choice((None, 7))

    def arguments(self) -> dict[str, Any]:
        return {kind: self.value(kind) for kind in self.rng.sample(list(TYPES), self.rng.randint(0, 4))}

    def json(self, value: Any) -> str:
        return json.dumps(
            value, ensure_ascii=self.rng.random() < 0.5, indent=self.rng.choice((None, None, 2)),
            separators=self.rng.choice((None, (",", ":"))),
        )  # fmt: skip

    def expect_call(self, name: str, text: str, call_id: str | None = None) -> None:
        self.expected += [CallBegin(self.calls, name, call_id), CallArguments(self.calls, text), CallEnd(self.calls)]
        self.calls += 1

    def text(self, text: str) -> None:
        self.written.append(text)
        self.expected.append(TextDelta(text))


class _Tags(_Writer):
    def make(self) -> None:
        rng, tools = self.rng, self.format.tools
        assert tools is not None
        if self.format.thinking is not None and rng.random() < 0.7:
            self.think()
        has_text = False
        for _ in range(rng.randint(0, 3)):
            if rng.random() < 0.5:
                self.text(self.prose() + ("" if has_text else self.space()))
                has_text = True
                continue
            if not tools.begin and tools.bare and (has_text or self.calls):
                continue
            self.written.append("" if has_text and not tools.trims else self.space())
            if has_text and tools.trims and isinstance(text := self.expected[-1], TextDelta):
                self.expected[-1] = TextDelta(text.text.rstrip())
            self.section(tools, bare=bool(tools.bare) and not has_text and not self.calls)
            has_text = False
            if rng.random() < 0.3:
                break
        if not has_text and self.calls:
            self.written.append(self.space())

    def think(self) -> None:
        thinking = self.format.thinking
        assert thinking is not None
        self.thinks = self.rng.random() < 0.5
        text = self.prose() if self.rng.random() < 0.8 else ""
        self.written += ["" if self.thinks else self.space() + self.mark(thinking.begin), "\n" * self.rng.randint(0, 2)]
        if thinking.label and self.rng.random() < 0.8:
            self.written += [thinking.label, "\n" * self.rng.randint(0, 2)]
        self.written += [text, "\n" * self.rng.randint(0, 2), self.mark(thinking.end), "\n" * self.rng.randint(0, 2)]
        if text:
            self.expected.append(ThinkingDelta(text))

    def section(self, tools: ToolsFormat, bare: bool) -> None:
        rng = self.rng
        form = rng.choice(tools.calls)
        count = rng.randint(1, 3) if form.separators or form.begin or tools.end else 1
        list_begin = getattr(form, "list_begin", "")
        without = bare and rng.random() < 0.7
        begin, end = (self.mark(tools.begin), self.mark(tools.end)) if not without else ("", "")
        self.written += [begin, self.space() if begin else "", list_begin]
        for number in range(count):
            if number:
                self.written += [self.space(), rng.choice(form.separators) if form.separators else "", self.space()]
            self.call(form)
        self.written += [form.list_end if list_begin else "", self.space() if end else "", end]

    def call(self, form: Any) -> None:
        name, arguments = self.rng.choice(NAMES), self.arguments()
        match form:
            case JsonCall():
                text = self.json(arguments)
                given = json.dumps(text) if self.rng.random() < 0.1 else text
                key = f'"{self.rng.choice(form.argument_keys)}": {given}'
                keys = [f'"name": {json.dumps(name)}', key]
                if not arguments and not form.needs_arguments and self.rng.random() < 0.3:
                    keys, text = keys[:1], "{}"
                if form.other_keys is None or "id" in form.other_keys:
                    keys.insert(self.rng.randint(0, len(keys)), f'"id": {json.dumps(self.string())}')
                if self.rng.random() < 0.2:
                    self.rng.shuffle(keys)
                self.written.append("{" + self.space() + ", ".join(keys) + self.space() + "}")
                self.expect_call(name, text)
            case NamedCall():
                self.named(form, name, self.json(arguments))
            case TaggedCall():
                self.tagged(form, name, arguments)
            case QuotedCall():
                shown = self.quoted(form, arguments)
                self.written += [self.mark(form.begin), form.prefix, name, shown, self.space(), self.mark(form.end)]
                self.expect_call(name, json.dumps(arguments))
            case PythonicCall():
                self.written.append(
                    f"{name.replace('-', '_')}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
                )
                self.expect_call(name.replace("-", "_"), json.dumps(arguments, ensure_ascii=False))

    def named(self, form: NamedCall, name: str, text: str) -> None:
        written, call_id = name, None
        if form.is_id:
            written = call_id = f"functions.{name}:{self.calls}"
        if form.id_begin and self.rng.random() < 0.5:
            call_id = "abcDEF123"
        end = self.mark(form.name_ends[0]) if len(form.name_ends[0]) > 3 else form.name_ends[0]
        if form.brace_ends_name and call_id is None and self.rng.random() < 0.5:
            end = ""
        before, after = (f"{form.fence[0]}\n", f"\n{form.fence[1]}") if form.fence[0] else ("", "")
        if text == "{}" and self.rng.random() < 0.3 and form.end:
            shown = ""
        else:
            shown = text
        self.written += [self.mark(form.begin), form.prefix, written]
        if call_id is not None and form.id_begin:
            self.written += [self.mark(form.id_begin), call_id]
        self.written += [end, before, shown]
        self.written += [after if shown else "", self.mark(form.end)]
        self.expect_call(name, text, call_id)

    def tagged(self, form: TaggedCall, name: str, arguments: dict[str, Any]) -> None:
        quote = '"' if form.begin.endswith(("name=", "tool=")) else ""
        self.written += [
            self.mark(form.begin),
            quote,
            name,
            quote,
            self.mark(form.name_end) if len(form.name_end) > 3 else form.name_end,
            self.space() if form.name_end else "\n",
        ]
        texts = []
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else self.json(value)
            if isinstance(value, str):
                if form.trims:
                    shown = f"\n{value}\n"
                texts.append(json.dumps(value, ensure_ascii=False))
            else:
                texts.append(shown)
                shown = shown if not form.trims else f"\n{shown}\n"
            self.written += [self.mark(form.key_begin), quote, key, quote]
            if "kind" in form.key.groupindex:
                kind = "string" if isinstance(value, str) else "object"
                by_type = "type=" in form.key.pattern
                self.written.append(f' type="{kind}"' if by_type else f' string="{str(kind == "string").lower()}"')
            end = form.key_end
            self.written += [self.mark(end) if len(end) > 3 else end]
            self.written += [self.space() + self.mark(form.value_begin) if form.value_begin else ""]
            self.written += [shown, self.mark(form.value_end), self.space()]
        self.written.append(self.mark(form.end))
        self.expect_call(
            name, "{" + ", ".join(f"{json.dumps(k)}: {t}" for k, t in zip(arguments, texts, strict=True)) + "}"
        )

    def quoted(self, form: QuotedCall, value: Any) -> str:
        """A value with bare keys, where these can stand so, and strings between quotes of the format's own."""
        match value:
            case str():
                free = form.quote not in self.format.bound_markers and form.quote in value
                return json.dumps(value) if free else f"{self.mark(form.quote)}{value}{self.mark(form.quote)}"
            case dict():
                names = [key if key.isidentifier() else self.quoted(form, key) for key in value]
                parts = [f"{n}:{self.quoted(form, v)}" for n, v in zip(names, value.values(), strict=True)]
                return "{" + f",{self.space()}".join(parts) + "}"
            case list():
                return "[" + ",".join(self.quoted(form, each) for each in value) + "]"
        return self.rng.choice(("None", "null")) if value is None else json.dumps(value)


class _Channels(_Writer):
    def make(self) -> None:
        rng, channels = self.rng, self.format.channels
        assert channels is not None
        end, call, last = channels.ends
        for number in range(rng.randint(1, 4)):
            kind = rng.choice(("analysis", "commentary", "final", "call", "call"))
            start = self.mark(channels.start) + channels.role if number else ""
            if kind == "call":
                name, text = rng.choice(NAMES), self.json(self.arguments())
                channel, message = self.mark(channels.channel), self.mark(channels.message)
                constrain = rng.choice(("", " json", f" {self.mark(channels.constrain)}json"))
                to = f"to=functions.{name}"
                headers = (f"{channel}commentary {to}{constrain}", f" {to}{channel}commentary{constrain}")
                self.written += [start, rng.choice(headers), message, text, self.mark(call)]
                self.expect_call(name, text)
                continue
            text = self.prose()
            self.written += [start, self.mark(channels.channel), kind, self.mark(channels.message)]
            if kind == "analysis":
                self.written.append(text)
                self.expected.append(ThinkingDelta(text))
            else:
                self.text(text)
            self.written.append(self.mark(end if kind != "final" else last))


# ---------------------------------------------------------------- checks


def read(answer: Answer, cuts: Sequence[int]) -> list[Delta]:
    """The deltas of an answer that is cut at these offsets."""
    lexer = Lexer(answer.format, TOOL_LIST, thinks=answer.thinks)
    deltas: list[Delta] = []
    edges = [0, *sorted(cuts), len(answer.text)]
    for start, end in pairwise(edges):
        marks = {offset: tokens for offset, tokens in answer.marks.items() if start <= offset < end}
        deltas += lexer.push(answer.text[start:end], marks)
    return joined(deltas + lexer.flush())


def check(seed: int) -> None:
    """Asserts that the answer `seed` gives what it was made from, and the same wherever it is cut."""
    case = answer(seed)
    whole = read(case, [])
    rng = random.Random(~seed)
    if case.expected is not None:
        assert _parsed(whole) == _parsed(case.expected), (seed, case.text, whole, case.expected)
    size = len(case.text)
    for cuts in (range(1, size), [rng.randint(0, size) for _ in range(rng.randint(1, 6))]):
        assert read(case, list(cuts)) == whole, (seed, case.text, list(cuts))
    if (
        not any(isinstance(delta, CallBegin) for delta in whole)
        and case.format.thinking is None
        and not case.format.channels
    ):
        assert "".join(delta.text for delta in whole if isinstance(delta, TextDelta)) == case.text, (seed, case.text)


def _parsed(deltas: list[Delta]) -> list[Any]:
    """The deltas with arguments as objects."""
    return [(delta.index, json.loads(delta.text)) if isinstance(delta, CallArguments) else delta for delta in deltas]


def main() -> None:
    count, start = int(sys.argv[1]), time.perf_counter()
    for seed in range(count):
        check(seed)
    print(f"{count} answers in {time.perf_counter() - start:.0f} s: all as they were made, wherever they are cut")


if __name__ == "__main__":
    main()
