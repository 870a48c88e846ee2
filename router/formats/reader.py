"""The part that all formats share: where their readers read, where deltas go, and JSON that is still being written."""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from json.encoder import encode_basestring

from router.chat.conversation import Tool
from router.chat.deltas import CallArguments, CallBegin, CallEnd, Delta, TextDelta, ThinkingDelta
from router.formats.format import Markers, OutputFormat
from router.formats.source import Reading, Source
from router.formats.typed_values import as_object, is_text, unwrapped, wrappers

# What JSON allows in a string, and what of an escape may still become one.
_STRING = re.compile(r'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+')
_ANY_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_ENDS_STRING = re.compile(r'["\\\x00-\x1f]')
_STRUCTURE = re.compile(r'["{}\[\]]')
_SCALAR = re.compile(r"[-+.\w]*")
_IS_SCALAR = re.compile(r"null|true|false|-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CLOSES = {"{": "}", "[": "]"}


class AnswerReader:
    """An answer while it is read: the source, and the deltas so far.

    | attribute | meaning |
    | --- | --- |
    | `index` | calls that have begun |
    | `plain` | what makes a delta of text that does not match a pattern; None if all text must be read first |
    | `is_thinking` | the text here is thinking |
    | `pending` | the marker of the call or header that is being read and has no name yet; empty for none |
    | `thinking_tokens` | tokens of thinking that has ended, where the format's markers are tokens |

    A call is written in three steps. Before `begin`, a reader may go back, and all is text. After it, everything up to
    the call's end belongs to the call.
    """

    def __init__(self, format: OutputFormat, tools: Sequence[Tool]) -> None:
        self.format = format
        self.tools = {tool.name: tool for tool in tools}
        self.source = Source(format)
        self.out: list[Delta] = []
        self.index = 0
        self.plain: tuple[Callable[[str], Delta], re.Pattern[str] | None] | None = None
        self.is_thinking = False
        self.thinking_tokens = 0
        self.tokens_before_call: int | None = None
        self.pending = ""
        self._called = ""
        self._thinking_since: int | None = None

    def text(self, text: str) -> None:
        if text:
            self.out.append(TextDelta(text))

    def thinking(self, text: str) -> None:
        if text:
            self.out.append(ThinkingDelta(text))

    def open_thinking(self, tokens: int | None) -> None:
        """Thinking begins. `tokens`: output tokens before it; None where markers are no tokens."""
        self.is_thinking = True
        self._thinking_since = tokens

    def close_thinking(self, tokens: int | None) -> None:
        """Thinking has ended. `tokens`: output tokens before the marker; None where markers are no tokens."""
        self.is_thinking = False
        if tokens is not None and self._thinking_since is not None:
            self.thinking_tokens += max(0, tokens - self._thinking_since)
        self._thinking_since = None

    def thinking_tokens_of(self, num_tokens: int) -> int:
        """Tokens of thinking among the first `num_tokens` of the output, thinking that goes on included."""
        since = self._thinking_since
        return self.thinking_tokens + (0 if since is None else max(0, num_tokens - since))

    def stream(
        self, kind: type[TextDelta] | type[ThinkingDelta], *ends: str, holds_space: bool = False
    ) -> Reading[str | None]:
        """Passes on what comes before one of the markers, and returns that; None at the end of the text. `holds_space`:
        white space before a marker is not consumed."""
        source, markers = self.source, self.format.marker_set(*ends)
        while True:
            at, marker = source.find(markers)
            if holds_space and not (source.ended and marker is None):
                at = source.at + len(source.text[source.at : at].rstrip())
            if at > source.at:
                self.out.append(kind(source.take(at)))
            if marker is not None or source.ended:
                return marker
            if source.at == len(source.text):
                self.plain = kind, markers.firsts_and_last_space if holds_space else markers.firsts
            yield

    def begin(self, name: str, call_id: str | None = None) -> None:
        """The call begins; there is no way back from here. Thinking before it has ended."""
        if self.is_thinking:
            self.close_thinking(self.tokens_before_call)
        self.pending = ""
        self._called = name
        self.source.release()
        self.out.append(CallBegin(self.index, name, call_id))
        self.index += 1

    def arguments(self, text: str) -> None:
        if text:
            self.out.append(CallArguments(self.index - 1, text))

    def end(self) -> None:
        self.out.append(CallEnd(self.index - 1))

    def read_arguments(self, ends: tuple[str, ...]) -> Reading[bool]:
        """Passes the arguments of the call on, JSON that comes next. `ends`: markers after them, never inside. Returns
        whether the call has ended.

        JSON without end is passed on up to a marker, and so is what is no JSON: the model ended the call there, and
        nothing is lost. Only the end of the text leaves a call open.
        """
        source = self.source
        yield from source.space()
        if not (first := (yield from source.character())):
            return False
        if (yield from source.sees(*ends)):
            self.arguments("{}")
            self.end()
            return True
        parts: list[str] = []
        if (yield from self._sees_wrapper()):
            complete = yield from self.read_value(parts.append, ends)
            self.arguments(self._without_wrapper("".join(parts)) if complete else "".join(parts))
        elif first in "{[":
            complete = yield from self.read_value(self.arguments, ends, to_arguments=True)
        else:
            complete = yield from self.read_value(parts.append, ends)
            self.arguments(as_object("".join(parts)) if complete else "".join(parts))
        if not complete:
            return (yield from self.read_raw(ends))
        self.end()
        return True

    def _sees_wrapper(self) -> Reading[bool]:
        """Whether the arguments that come next begin with an object under a name that the tool does not have."""
        source, tool = self.source, self.tools.get(self._called)
        names = () if tool is None else sorted(wrappers(tool.parameters))
        if not names:
            return False
        start = source.keep()
        found = True
        for expected in (("{",), tuple(f'"{name}"' for name in names), (":",), ("{",)):
            found = bool((yield from source.accept(*expected)))
            if not found:
                break
            yield from source.space()
        source.go_to(start)
        source.release()
        return found

    def _without_wrapper(self, raw: str) -> str:
        """The arguments in a wrapper; the text itself if they are none of the tool's, or not all that there is."""
        try:
            (value,) = json.loads(raw).values()
        except (ValueError, RecursionError):
            return raw
        inner = json.dumps(value, ensure_ascii=False)
        return raw if unwrapped(inner, self.tools[self._called].parameters) is None or not is_text(inner) else inner

    def read_raw(self, ends: tuple[str, ...]) -> Reading[bool]:
        """Passes on as arguments what comes before one of the markers. Returns whether there was one."""
        source, markers = self.source, self.format.marker_set(*ends)
        while True:
            at, marker = source.find(markers)
            self.arguments(source.take(at))
            if marker is not None:
                self.end()
                return True
            if source.ended:
                return False
            yield

    def read_value(
        self, emit: Callable[[str], None], ends: tuple[str, ...], to_arguments: bool = False
    ) -> Reading[bool]:
        """Reads a JSON value to its end, and emits its text piece by piece. Brackets and strings are followed, the rest
        is not checked. In strings, control characters are escaped, and so is a backslash that begins no escape: models
        leave that out, and there is one way to read it. Returns False where the value breaks off: before a bracket
        that closes another, before a marker outside strings, at the end of the text."""
        source, markers = self.source, self.format.marker_set(*ends)
        first = yield from source.character()
        if first and first not in '"{[':
            scalar = yield from source.pattern(_SCALAR)
            emit(scalar)
            return _IS_SCALAR.fullmatch(scalar) is not None
        brackets: list[str] = []  # that close the open ones
        in_string = is_broken = False
        while True:
            text, at = source.text, source.at
            limit = len(text)
            while at < limit:
                if in_string:
                    at = _end(_STRING.match(text, at))
                    if at < limit and text[at] != '"' and (mended := self._mended(at)):
                        emit(source.take(at))
                        emit(mended[0])
                        source.at = at = at + mended[1]
                        continue
                    if at == limit or text[at] != '"':  # cut, perhaps in an escape
                        break
                    in_string = False
                else:
                    place = _start(_STRUCTURE.search(text, at), limit)
                    stop, marker = self._stop(markers, at, place)
                    at = min(stop, place)
                    if at == limit or stop <= place:
                        is_broken = marker is not None
                        break
                    if text[at] == '"':
                        in_string = True
                    elif text[at] in _CLOSES:
                        brackets.append(_CLOSES[text[at]])
                    elif brackets and brackets[-1] == text[at]:
                        brackets.pop()
                    else:
                        is_broken = True
                        break
                at += 1
                if not in_string and not brackets:
                    emit(source.take(at))
                    return True
            emit(source.take(at))
            if is_broken or source.ended:
                if not is_broken:
                    emit(source.take(limit))
                return False
            if to_arguments and in_string and source.at == limit:
                self.plain = partial(CallArguments, self.index - 1), _ENDS_STRING
            yield

    def _mended(self, at: int) -> tuple[str, int] | None:
        """The text that JSON has in a string for a control character, or for a backslash that begins no escape, and how
        many characters it takes the place of; None while more text decides."""
        text = self.source.text
        if text[at] != "\\":
            return encode_basestring(text[at])[1:-1], 1
        if _HALF_ESCAPE.fullmatch(text, at):
            return None
        return ("'", 2) if text[at + 1] == "'" else ("\\\\", 1)

    def _stop(self, markers: Markers, start: int, place: int) -> tuple[int, str | None]:
        """The first marker from `start` on, or what may become one, and the marker. None up to `place` is missed."""
        source = self.source
        if not markers.tokens and (
            markers.firsts is None or markers.firsts.search(source.text, start, place + 1) is None
        ):
            return len(source.text), None
        before, source.at = source.at, start
        found = source.find(markers)
        source.at = before
        return found

    def read_string(self) -> Reading[str | None]:
        """Reads a JSON string, and returns what it stands for; None if there is none."""
        source = self.source
        if not (yield from source.accept('"')):
            return None
        while True:
            end = _end(_ANY_STRING.match(source.text, source.at))
            if source.text[end : end + 1] == '"':
                raw = source.take(end)
                source.at += 1
                try:
                    text = str(json.loads(f'"{raw}"', strict=False))
                except ValueError:
                    return None
                return text if is_text(text) else None
            if source.ended:
                return None
            yield


def _end(match: re.Match[str] | None) -> int:
    assert match is not None
    return match.end()


def _start(match: re.Match[str] | None, otherwise: int) -> int:
    return otherwise if match is None else match.start()
