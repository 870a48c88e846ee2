"""Formats of calls are described once: the lexer reads what a grammar writes of the same description."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.chat.conversation import Tool
from router.chat.deltas import CallArguments, CallBegin, joined
from router.formats.choice import named
from router.formats.lexer import Lexer
from worker.formats.families import TOOLS
from worker.formats.syntax import Text
from worker.formats.written import CALLS, MARKERS, CallFormat, Quotes, Tags

ROOT = Path(__file__).parents[3]
GIVEN = [Tool("f", parameters={"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}})]
SAMPLES = {"\\n{0,1}": "\n", "[0-9]{1,3}": "0", "(?:number|boolean|null|object|array)": "number"}  # by pattern


def text_of(text: Text) -> str:
    parts = [part if isinstance(part, str) else SAMPLES[part.pattern] for part in text]
    assert all(re.fullmatch(pattern, sample) for pattern, sample in SAMPLES.items())
    return "".join(parts)


def arguments_of(format: CallFormat) -> str:
    form = format.arguments
    if isinstance(form, Tags):
        values = (("a", text_of(form.string), "x y"), ("n", text_of(form.other), "3"))
        between, after = text_of(form.between), text_of(form.after)
        return "".join(f"{form.before}{key}{between}{kind}{value}{after}" for key, kind, value in values)
    if isinstance(form, Quotes):
        return f"{{a:{form.mark}x y{form.mark},n:3}}"
    return 'a="x y", n=3' if form == "python" else '{"a": "x y", "n": 3}'


@pytest.mark.parametrize("name", CALLS)
def test_readers_understand_what_grammars_write(name: str) -> None:
    format = CALLS[name]
    call = f"{text_of(format.before)}f{text_of(format.between)}{arguments_of(format)}{text_of(format.after)}"
    calls = text_of(format.separator).join((call, call) if format.separator or format.closing else (call,))
    between = "".join(format.around or ())
    answer = f"{between}{text_of(format.opening)}{calls}{text_of(format.closing)}{text_of(format.last)}"
    lexer = Lexer(named(name.removesuffix("_list"), None), GIVEN)
    deltas = joined(lexer.push(answer) + lexer.flush())
    assert [delta.name for delta in deltas if isinstance(delta, CallBegin)] == ["f"] * calls.count(call)
    written = [json.loads(delta.text) for delta in deltas if isinstance(delta, CallArguments)]
    assert written == [{"a": "x y", "n": 3}] * calls.count(call)


def test_every_format_of_the_reader_can_be_written() -> None:
    assert TOOLS.keys() <= CALLS.keys()


def texts(path: Path) -> Iterator[str]:
    """String constants, but for docstrings."""
    tree = ast.parse(path.read_text())
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.value


def test_no_other_module_has_markers_of_calls() -> None:
    begins = {text for format in CALLS.values() for text in (*format.opening, *format.before) if isinstance(text, str)}
    markers = [mark for mark in MARKERS if any(mark in text for text in begins)]
    assert len(markers) > 15
    wrong = [
        f"{path.relative_to(ROOT)}: {mark}"
        for room in ("router", "worker")
        for path in sorted((ROOT / room).rglob("*.py"))
        if path.parent != ROOT / "worker" / "formats"
        for text in texts(path)
        for mark in markers
        if mark in text
    ]
    assert wrong == []
