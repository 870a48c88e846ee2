"""The reader of calls whose arguments are JSON but for bare keys, and strings between marks of their own."""

import json
import re
from functools import partial
from json.encoder import encode_basestring

from router.chat.deltas import CallArguments
from router.formats.reader import AnswerReader
from router.formats.source import Reading
from router.formats.typed_values import literal, plain
from worker.formats.syntax import QuotedCall

_NAME = re.compile(r"[\w.:/-]*")
_KEY = re.compile(r"[^:,{}\[\]<\"]*")
_SCALAR = re.compile(r"[^,{}\[\]<\"]*")
_CLOSES = {"{": "}", "[": "]"}
_MAX_NAME_CHARS = 256


def read_quoted(reader: AnswerReader, syntax: QuotedCall, ends: tuple[str, ...]) -> Reading[bool]:
    """Reads a call. Strings are passed on as they come, other values once they are complete."""
    source = reader.source
    if not (yield from source.accept(syntax.begin)):
        return False
    yield from source.space()
    if not (yield from source.accept(syntax.prefix, syntax.prefix[-1])):  # some models leave out its word
        return False
    yield from source.space()
    name = yield from source.pattern(_NAME)
    yield from source.space()
    first = yield from source.character()
    if not name or not first or len(name) > _MAX_NAME_CHARS:
        return False
    reader.begin(name)
    if first != "{":  # no arguments, or something else than these
        yield from reader.read_arguments(ends)
    elif not (yield from _QuotedArguments(reader, syntax, ends).read()):
        if not (yield from reader.read_raw(ends)):
            return True
    else:
        reader.end()
        start = source.keep()
        yield from source.space()
        if not (yield from source.sees(syntax.end)):
            source.go_to(start)
        source.release()
    yield from source.accept(syntax.end)
    return True


class _QuotedArguments:
    """The arguments of one call while they are read."""

    def __init__(self, reader: AnswerReader, syntax: QuotedCall, ends: tuple[str, ...]) -> None:
        self._reader = reader
        self._source = reader.source
        self._quote = syntax.quote
        self._ends = ends
        tokens = (mark for mark in ends if mark in reader.format.bound_markers)
        self._string_ends = reader.format.marker_set(syntax.quote, *tokens)

    def read(self) -> Reading[bool]:
        """Passes an object on as JSON. Returns False where it breaks off."""
        source, emit = self._source, self._reader.arguments
        brackets: list[str] = []  # that close the open ones
        while True:
            first = yield from source.character()
            has_opened = first in _CLOSES
            if has_opened:
                source.at += 1
                emit(first)
                brackets.append(_CLOSES[first])
            elif not (yield from self._simple()):
                return False
            may_follow = has_opened
            while True:
                yield from source.space()
                if (yield from source.accept(brackets[-1])):
                    emit(brackets.pop())
                    if not brackets:
                        return True
                    has_opened = may_follow = False
                elif not may_follow and (yield from source.accept(",")):
                    may_follow = True
                else:
                    break
            if not may_follow:
                return False
            emit("" if has_opened else ", ")
            if brackets[-1] == "}" and not (yield from self._key()):
                return False
            yield from source.space()

    def _key(self) -> Reading[bool]:
        """Passes on a key and its colon. Keys between quotes are read too. Returns False if there is none, and the
        source is where it was."""
        source = self._source
        start = source.keep()
        key: str | None
        if (yield from source.accept(self._quote)):
            while (found := source.find(self._string_ends))[1] is None and not source.ended:
                yield
            key = source.take(found[0])
            if not (yield from source.accept(self._quote)):
                key = None
        elif (yield from source.character()) == '"':
            key = yield from self._reader.read_string()
        else:
            key = (yield from source.pattern(_KEY)).strip() or None
        yield from source.space()
        if key is None or not (yield from source.accept(":")):
            source.go_to(start)
            source.release()
            return False
        source.release()
        self._reader.arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
        return True

    def _simple(self) -> Reading[bool]:
        """Passes on a value other than an object or a list. Returns False if there is none, or it is cut off."""
        source, reader = self._source, self._reader
        if (yield from source.accept(self._quote)):
            return (yield from self._string())
        if (yield from source.character()) == '"':
            return (yield from reader.read_value(reader.arguments, self._ends, to_arguments=True))
        written = yield from source.pattern(_SCALAR)
        value = written.strip()
        if not value or (source.ended and source.at == len(source.text)):
            reader.arguments(written)
            return False
        read = plain(value)
        if read is None:
            read = literal(value)
        reader.arguments(json.dumps(value, ensure_ascii=False) if read is None else read)
        return True

    def _string(self) -> Reading[bool]:
        source, reader, ends = self._source, self._reader, self._string_ends
        reader.arguments('"')
        while True:
            at, marker = source.find(ends)
            reader.arguments(encode_basestring(source.take(at))[1:-1])
            if marker is not None:
                break
            if source.ended:
                return False
            if source.at == len(source.text):
                reader.plain = partial(CallArguments, reader.index - 1), ends.firsts_and_escapes
            yield
        if marker != self._quote:
            return False
        source.at += len(marker)
        reader.arguments('"')
        return True
