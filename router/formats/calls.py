"""Readers of one call, one for each way in which calls are written.

Each returns whether there was a call. Where there was none, it has emitted nothing, and the caller goes back. Where one
has begun but is wrongly written, the rest of it is passed on as its arguments.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from router.formats.object_call import read_object
from router.formats.quoted_call import read_quoted
from router.formats.reader import AnswerReader
from router.formats.source import Reading
from router.formats.tagged_call import read_tagged
from router.formats.typed_values import literal, plain, typed, value_types
from worker.formats.syntax import CallSyntax, JsonCall, NamedCall, PythonicCall, QuotedCall, TaggedCall, ToolsFormat

_NAME = re.compile(r"[\w.:/-]*")
_PYTHON_NAME = re.compile(r"[\w.]*")
_NO_PYTHON_NAME = re.compile(r"[0-9]|.*[^\w.]")
_BLANKS = re.compile(r"[ \t]*")
_PYTHON_PLAIN = re.compile(r"[^\"'()\[\]{},]*")
_IN_QUOTES = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_NUMBER = frozenset({"number"})  # without quotes, `05` is one
_AFTER_STRING = frozenset((",", ":", ""))
_MAX_NAME_CHARS = 256


def read_call(reader: AnswerReader, tools: ToolsFormat, syntax: CallSyntax, known_only: bool) -> Reading[bool]:
    """Reads a call in one of the forms of `tools`. `known_only`: others than those of known tools are none."""
    if isinstance(syntax, JsonCall):
        return (yield from read_object(reader, syntax, _ends(reader, tools, syntax), known_only))
    if isinstance(syntax, NamedCall):
        return (yield from _read_named(reader, syntax, _ends(reader, tools, syntax), known_only))
    if isinstance(syntax, TaggedCall):
        return (yield from read_tagged(reader, syntax, _ends(reader, tools, syntax), known_only))
    if isinstance(syntax, QuotedCall):
        return (yield from read_quoted(reader, syntax, _ends(reader, tools, syntax)))
    return (yield from _read_pythonic(reader, syntax, _ends(reader, tools, syntax), known_only))


def _ends(reader: AnswerReader, tools: ToolsFormat, syntax: CallSyntax) -> tuple[str, ...]:
    """Marks where a call ends that does not end itself: its end, the section's, and a token that begins another."""
    begins = tuple(mark for mark in (*tools.begins, syntax.begin) if mark in reader.format.bound_markers)
    return tuple(mark for mark in dict.fromkeys((syntax.end, *tools.ends, *begins)) if mark)


# ---------------------------------------------------------------- the name, then the arguments


def _read_named(reader: AnswerReader, syntax: NamedCall, ends: tuple[str, ...], known_only: bool) -> Reading[bool]:
    source = reader.source
    if syntax.begin and not (yield from source.accept(syntax.begin)):
        return False
    yield from source.space()
    yield from source.accept(syntax.prefix)
    yield from source.space()
    written = yield from source.pattern(_NAME)
    match = syntax.name.fullmatch(written)
    if match is None or len(written) > _MAX_NAME_CHARS:
        return False
    call_id = written if syntax.is_id else None
    yield from source.pattern(_BLANKS)
    if (yield from source.accept(syntax.id_begin)):
        call_id = (yield from source.pattern(_NAME)) or None
        yield from source.pattern(_BLANKS)
    if not (yield from source.accept(*syntax.name_ends)) and (
        not syntax.brace_ends_name or (yield from source.character()) != "{"
    ):
        return False
    name = match["name"]
    if syntax.is_id and name.isdigit():  # the call's number alone: of the only tool there is
        if len(reader.tools) != 1:
            return False
        name = next(iter(reader.tools))
    if known_only and name not in reader.tools:
        return False
    reader.begin(name, call_id)
    before, after = syntax.fence
    yield from source.space()
    yield from source.accept(before)
    if (yield from reader.read_arguments(ends)):
        start = source.keep()
        yield from source.space()
        if (yield from source.accept(after)):
            start = source.keep()
            yield from source.space()
        if not (yield from source.accept(syntax.end)):
            source.go_to(start)
        source.release()
    return True


# ---------------------------------------------------------------- Python


def _read_pythonic(
    reader: AnswerReader, syntax: PythonicCall, ends: tuple[str, ...], known_only: bool
) -> Reading[bool]:
    source = reader.source
    if (yield from source.accept(syntax.list_begin)):
        yield from source.space()
    name = yield from source.pattern(_NAME)
    known_only = known_only or _NO_PYTHON_NAME.match(name) is not None
    if not name or len(name) > _MAX_NAME_CHARS or (known_only and name not in reader.tools):
        return False
    if not (yield from source.accept("(")):
        return False
    yield from source.space()
    if (yield from source.accept(")")):
        reader.begin(name)
        reader.arguments("{}")
        reader.end()
        return True
    tool = reader.tools.get(name)
    parameters: Mapping[str, Any] = {} if tool is None else tool.parameters
    has_begun = False
    while True:
        start = source.offset if not has_begun else source.keep()
        yield from source.space()
        if has_begun and (yield from source.accept(")")):
            break
        key = yield from source.pattern(_PYTHON_NAME)
        yield from source.space()
        if not key or len(key) > _MAX_NAME_CHARS or not (yield from source.accept("=")):
            if not has_begun:
                return False
            source.go_to(start)
            source.release()
            yield from reader.read_raw(ends)
            return True
        if not has_begun:
            reader.begin(name)
        source.release()
        reader.arguments(("{" if not has_begun else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        has_begun = True
        yield from source.space()
        value, complete = yield from _python_value(reader, ends)
        if not complete:
            reader.arguments(value)
            yield from reader.read_raw(ends)
            return True
        reader.arguments(_as_json(value.strip(), value_types(parameters, key, _NUMBER)))
        yield from source.accept(",")
    source.release()
    reader.arguments("}")
    reader.end()
    return True


def _python_value(reader: AnswerReader, ends: tuple[str, ...]) -> Reading[tuple[str, bool]]:
    """Reads up to the comma or bracket after a value. Returns its text, and whether it is complete."""
    source = reader.source
    parts: list[str] = []
    brackets: list[str] = []
    while True:
        parts.append((yield from source.pattern(_PYTHON_PLAIN)))
        character = yield from source.character()
        if not brackets and character in (",", ")"):
            return "".join(parts), True
        if not character or (character in ")]}" and brackets[-1:] != [character]):
            return "".join(parts), False
        if character in _CLOSES:
            brackets.append(_CLOSES[character])
        elif character in ")]}":
            brackets.pop()
        source.at += 1
        parts.append(character)
        if character in "\"'":
            complete = yield from _python_string(reader, character, parts, brackets[-1] if brackets else "")
            if not complete:
                return "".join(parts), False


def _python_string(reader: AnswerReader, quote: str, parts: list[str], bracket: str) -> Reading[bool]:
    """Adds the rest of a string to `parts`, its quote included. Returns whether it is complete. A quote that nothing
    follows which may come after a string is part of it. `bracket`: closes the innermost open one in the value."""
    source = reader.source
    if (yield from source.accept(quote * 2)):
        if not (yield from _ends_string(reader, bracket)):
            return (yield from _long_string(reader, quote, parts))
        source.at -= 2
    while True:
        parts.append((yield from source.pattern(_IN_QUOTES[quote])))
        following = yield from source.character()
        source.at += len(following)
        if following == quote and not (yield from _ends_string(reader, bracket)):
            following = f"\\{quote}"
        parts.append(following)
        if following == "\\":
            escaped = yield from source.character()
            source.at += len(escaped)
            parts.append(escaped)
        elif following in ("", quote):
            return bool(following)


def _long_string(reader: AnswerReader, quote: str, parts: list[str]) -> Reading[bool]:
    """Adds the rest of a string that began with three quotes."""
    source = reader.source
    parts.append(quote * 2)
    while True:
        parts.append((yield from source.pattern(_IN_QUOTES[quote])))
        if (yield from source.accept(quote * 3)):
            parts.append(quote * 3)
            return True
        for _ in range(2 if (yield from source.character()) == "\\" else 1):
            following = yield from source.character()
            source.at += len(following)
            parts.append(following)
        if not following:
            return False


def _ends_string(reader: AnswerReader, bracket: str) -> Reading[bool]:
    """Whether what comes next may follow a string. The source stays where it is."""
    source = reader.source
    start, kept = source.offset, source.kept
    if kept is None:
        source.keep()
    space = yield from source.space()
    following = yield from source.character()
    if following == ")" and not bracket:  # the call's end, after which no other closes
        source.at += 1
        may_follow = (yield from source.character()) not in (")", "'", '"')
    elif following in (")", "]", "}"):
        may_follow = following == bracket
    else:
        may_follow = following in _AFTER_STRING or (bool(space) and following in _IN_QUOTES)
    source.kept = kept
    source.go_to(start)
    return may_follow


def _as_json(value: str, types: frozenset[str]) -> str:
    """The JSON of a Python literal. What is none is JSON already, or becomes what the tool's schema says."""
    found = literal(value)
    if found is None:
        found = plain(value)
    return typed(value, types) if found is None else found
