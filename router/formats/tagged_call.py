"""The reader of calls whose arguments stand between tags, each made JSON by the tool's schema."""

import json
import re
from collections.abc import Mapping
from functools import partial
from json.encoder import encode_basestring
from typing import Any

from router.chat.deltas import CallArguments
from router.formats.reader import AnswerReader
from router.formats.source import Reading
from router.formats.typed_values import as_object, plain, typed, unwrapped, value_types, wrappers
from worker.formats.syntax import TaggedCall

_STRING = frozenset({"string"})
_NO_TYPES: frozenset[str] = frozenset()
_MAX_NAME_CHARS = 256
_NAME = re.compile(r"[^<>{}]*")
_KEY = re.compile(r"[^<>]*")
_ANYTHING: Mapping[str, Any] = {}


def read_tagged(reader: AnswerReader, syntax: TaggedCall, ends: tuple[str, ...], known_only: bool) -> Reading[bool]:
    """Reads a call; with `known_only` that of a known tool. Strings are passed on as they come, other values once they
    are complete. What stands between the arguments and is none comes back as text, after the call."""
    source = reader.source
    if not (yield from source.accept(syntax.begin)):
        return False
    name = yield from _name(reader, syntax)
    if name is None or (known_only and name not in reader.tools):
        return False
    reader.begin(name)
    tool = reader.tools.get(name)
    return (yield from _Arguments(reader, syntax, ends, None if tool is None else tool.parameters).read())


def _name(reader: AnswerReader, syntax: TaggedCall) -> Reading[str | None]:
    source = reader.source
    written = yield from source.pattern(_NAME)
    if syntax.name_end:
        if not (yield from source.accept(syntax.name_end)):
            return None
    elif "\n" not in written.lstrip() and not (yield from source.sees(syntax.key_begin, syntax.end)):
        return None
    match = syntax.name.fullmatch(written)
    return None if match is None or len(written) > _MAX_NAME_CHARS else match["name"]


class _Arguments:
    """The arguments of one call while they are read. `schema`: None if the tool is not known."""

    def __init__(
        self, reader: AnswerReader, syntax: TaggedCall, ends: tuple[str, ...], schema: Mapping[str, Any] | None
    ) -> None:
        self._reader = reader
        self._source = reader.source
        self._syntax = syntax
        self._schema = _ANYTHING if schema is None else schema
        self._wrappers = wrappers(schema)
        self._held = "", ""  # the key and the value of an argument that may be all of them
        self._count = 0
        self._stray: list[str] = []  # what is no argument
        # An argument that lacks its end ends where a line begins the next one, or ends the call.
        bound = reader.format.bound_markers
        self._bare_ends = tuple(mark for mark in (syntax.key_begin, syntax.end) if mark in bound)
        line_ends = (f"\n{mark}" for mark in (syntax.key_begin, syntax.end) if mark not in bound)
        self._value_ends = reader.format.marker_set(syntax.value_end, *self._bare_ends, *line_ends)
        self._not_plain = self._value_ends.firsts_and_escapes
        self._expected = (syntax.key_begin, *ends)
        self._between = reader.format.marker_set(*self._expected)

    def read(self) -> Reading[bool]:
        source, syntax = self._source, self._syntax
        while True:
            yield from self._leave_stray()
            at_key = yield from source.accept(syntax.key_begin)
            if not at_key:
                break
            start = source.keep()
            key = yield from self._key()
            if key is None:
                if source.ended and source.at == len(source.text):
                    return self._leave(False)
                source.go_to(start)
                self._stray.append(at_key)
            source.release()
            if key is not None and not (yield from self._value(*key)):
                return self._leave(False)
        if source.ended and source.at == len(source.text):
            return self._leave(False)
        yield from source.accept(syntax.end)
        return self._leave(True)

    def _leave(self, complete: bool) -> bool:
        if complete and (inner := self._unwrapped()) is not None:
            self._reader.arguments(inner)
        else:
            self._emit("" if not complete else "}" if self._count else "{}")
        if complete:
            self._reader.end()
        self._reader.text("".join(self._stray))
        return True

    def _emit(self, text: str) -> None:
        self._reader.arguments("".join(self._held) + text)
        self._held = "", ""

    def _unwrapped(self) -> str | None:
        """The value of the only argument, if that is an object of all arguments of the tool; otherwise None."""
        return unwrapped(as_object(self._held[1]), self._schema) if self._held[1] else None

    def _leave_stray(self) -> Reading[None]:
        """Goes to the next argument or to the end of the call. White space on the way is dropped."""
        source = self._source
        passed: list[str] = []
        while True:
            at, marker = source.find(self._between)
            passed.append(source.take(at))
            if marker is not None or source.ended:
                break
            yield
        stray = "".join(passed)
        is_cut_marker = marker is None and any(mark.startswith(stray.strip()) for mark in self._expected)
        if stray.strip() and not is_cut_marker:
            self._stray.append(stray)

    def _key(self) -> Reading[tuple[str, frozenset[str], bool] | None]:
        """The key, the types of its value, and whether the model said itself that it is no string."""
        source, syntax = self._source, self._syntax
        written = yield from source.pattern(_KEY)
        match = syntax.key.fullmatch(written)
        if match is None or not match["key"] or not (yield from source.accept(syntax.key_end)):
            return None
        if syntax.value_begin:
            yield from source.space()
            if not (yield from source.accept(syntax.value_begin)):
                return None
        kind = match.groupdict().get("kind")
        types = value_types(self._schema, match["key"])
        is_string = kind in ("true", "string")
        if is_string and "string" in types:
            types = _STRING
        return match["key"], types, kind is not None and not is_string

    def _value(self, key: str, types: frozenset[str], is_json: bool) -> Reading[bool]:
        """Passes a value on. Returns False if the text ended before it did."""
        source, reader, syntax = self._source, self._reader, self._syntax
        is_held = not self._count and key in self._wrappers
        is_string = types == _STRING and not is_json and not is_held
        parts: list[str] = []
        before = f"{', ' if self._count else '{'}{json.dumps(key, ensure_ascii=False)}: "
        self._count += 1
        if is_held:
            self._held = before, ""
        else:
            self._emit(before + ('"' if is_string else ""))
        if syntax.trims:
            yield from source.accept("\n")
        while True:
            at, marker = source.find(self._value_ends)
            end = at
            if at > source.at and source.text[at - 1] == "\n" and not (marker is None and source.ended):
                end -= 1  # perhaps not part of the value
            part = source.take(end)
            if (
                marker is not None
                and not (syntax.trims and marker == syntax.value_end)
                and marker not in self._bare_ends
            ):
                part += source.take(at)
            source.at = at if marker is not None else end
            if is_string:
                reader.arguments(encode_basestring(part)[1:-1])
            else:
                parts.append(part)
            if marker is not None:
                break
            if source.ended:
                self._emit("".join(parts))
                return False
            if is_string and source.at == len(source.text):
                reader.plain = partial(CallArguments, reader.index - 1), self._not_plain
            yield
        if is_string:
            reader.arguments('"')
        else:
            value = "".join(parts)
            as_json = plain(value) if is_json else None
            if as_json == "null" and value_types(self._schema, key, _NO_TYPES) == _STRING:
                as_json = '"null"'  # the schema has strings only
            written = typed(value, types) if as_json is None else as_json
            if is_held:
                self._held = before, written
            else:
                reader.arguments(written)
        if marker == syntax.value_end:
            source.at += len(marker)
        elif marker.startswith("\n"):
            source.at += 1
        return True
