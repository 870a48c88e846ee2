"""The lexer: turns the text of an answer, as it comes, into text, thinking, and calls of tools.

    lexer = Lexer(format, tools, thinks=True)
    deltas = lexer.push("So the user wants")
    ...
    deltas += lexer.flush()

- The deltas, joined, depend only on the text and its marks, never on where the text is cut.
- White space alone between thinking, calls and the end is markup, and is dropped. So are the lines' ends at both ends
  of thinking, and those before the text that follows it; and, where the format says so, white space between text and
  a call.
- Thinking begins where a token says so. Where markers are no tokens, only at the beginning of the answer. So it does
  where its label alone is the first line. A token that ends thinking where there is none is no text either.
- A call may begin in thinking, and then ends it, if the marker is a token, or begins a section and has one in it.
- A call without markers may be of any tool where it begins the answer, and elsewhere of a known tool only. So may one
  outside a section, if its own marker tells it from text; the end of a section that did not begin is dropped.
- Between the beginning of a section and the marker of its first call, what is none is dropped. Where the format says
  so, a section without its beginning that repeats the one before is dropped too.
- What looks like a call and is none, before its name is known, is text, markers included. Afterwards it is a call, and
  what is wrong in it is passed on as its arguments, or comes back as text after it.
- A call of a tool that was not given is a call all the same: the protocol decides what to do with it.
"""

from collections.abc import Mapping, Sequence

from router.chat.conversation import Tool
from router.chat.deltas import Delta, TextDelta, ThinkingDelta
from router.formats.calls import read_call
from router.formats.channels import read_channels
from router.formats.format import OutputFormat
from router.formats.reader import AnswerReader
from router.formats.source import Reading
from worker.formats.syntax import CallSyntax, JsonCall, ThinkingFormat, ToolsFormat

_NO_TOOLS = ToolsFormat("")
_MAX_NOISE_CHARS = 2048  # characters before the first call of a section
_NOTHING: Mapping[int, int] = {}


class Lexer:
    """Reads one answer.

    - `thinks`: the prompt has opened the thinking, so the answer begins inside it.
    - `calls`: whether calls are looked for. Otherwise their text is text.
    """

    def __init__(
        self, format: OutputFormat, tools: Sequence[Tool] = (), *, thinks: bool = False, calls: bool = True
    ) -> None:
        self._reader = AnswerReader(format, tools)
        self._source = self._reader.source
        self._thinking = format.thinking
        self._tools = format.tools if calls and format.tools is not None else _NO_TOOLS
        begins = (*self._tools.begins, *(call.begin for call in self._tools.calls), self._tools.bare)
        self._call_begins = frozenset(filter(None, begins))
        self._is_first = True  # nothing of the answer has come yet
        self._in_section = False
        self._has_called = False
        self._steps = (
            self._read(thinks) if format.channels is None else read_channels(self._reader, format.channels, calls)
        )
        next(self._steps)

    def push(self, text: str, marks: Mapping[int, int] = _NOTHING) -> list[Delta]:
        """Returns what is certain after more text. `marks`: for each marker that one token wrote, its offset in the
        whole text, and the number of output tokens before it. They come with the marker's first character, or
        earlier."""
        source = self._source
        if (plain := self._reader.plain) is not None and not marks and not source.marks:
            delta, pattern = plain
            if pattern is None or pattern.search(text) is None:
                # All text so far is consumed, so it does not matter that `source` lacks this one.
                source.base += len(text)
                return [delta(text)] if text else []
        source.feed(text, marks)
        return self._step()

    def flush(self) -> list[Delta]:
        """Returns what was held back. No more text comes."""
        self._source.ended = True
        return self._step()

    @property
    def consumed(self) -> int:
        """Characters of the text that are surely read."""
        source = self._source
        return source.offset if source.kept is None else source.kept

    def begins_call(self, is_cut: bool) -> bool:
        """Whether what is held back begins as a call or a marker does, so that it is markup and no text if nothing
        follows. `is_cut`: more would have followed; otherwise only a token says so."""
        marker, rest = self._reader.pending, self._source.text[self._source.at :]
        format = self._reader.format
        if self._tools.trims:
            rest = rest.lstrip()
        if format.tools is not None and any(piece in rest for piece in format.tools.pieces):
            return any(mark.startswith(rest) for mark in format.markers)
        if not marker or marker == self._tools.bare:
            return False
        return is_cut or marker in format.bound_markers

    @property
    def is_thinking(self) -> bool:
        """Whether more text would be thinking."""
        return self._reader.is_thinking

    def thinking_tokens(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` output tokens are thinking, markers not counted. 0 where markers are no
        tokens."""
        return self._reader.thinking_tokens_of(num_tokens)

    def _step(self) -> list[Delta]:
        self._reader.plain = None
        next(self._steps, None)
        out, self._reader.out = self._reader.out, []
        return out

    # ---------------------------------------------------------------- text and thinking

    def _read(self, thinks: bool) -> Reading[None]:
        reader, source = self._reader, self._source
        if thinks and self._thinking is not None:
            reader.open_thinking(0 if self._thinking.end in reader.format.bound_markers else None)
            yield
            yield from self._think(self._thinking, opened=True)
            self._is_first = False
        else:
            yield
        has_text = False
        while True:
            start = source.keep()
            yield from source.space()
            if not (yield from source.character()):
                if not self._has_called:
                    reader.text(source.since(start))
                return
            marker = yield from source.sees(*self._markers())
            if (yield from self._special(marker, may_be_bare=not has_text)):
                self._is_first = False
                continue
            # No markup: the white space is text, and so is the first character, even if a marker begins there.
            end = source.at + 1
            source.go_to(start)
            source.release()
            reader.text(source.take(end))
            self._is_first = False
            has_text = True
            while True:
                markers = self._markers()
                found = yield from reader.stream(TextDelta, *markers, holds_space=self._tools.trims)
                if found is None:
                    return
                at, _ = source.find(reader.format.marker_set(*markers))
                if found not in self._call_begins:
                    reader.text(source.take(at))
                start, end = source.keep(), source.base + at + 1
                source.at = at
                if (yield from self._special(found, may_be_bare=False)):
                    break
                source.go_to(start)
                source.release()
                reader.text(source.take(end - source.base))

    def _markers(self) -> tuple[str, ...]:
        """Markers that end the text here."""
        tools, thinking = self._tools, self._thinking
        marks = [*tools.begins, *(thinking.text_marks if thinking is not None else ())]
        if thinking is not None and thinking.end in self._reader.format.bound_markers:
            marks.append(thinking.end)
        if thinking is not None and (self._is_first or thinking.begin in self._reader.format.bound_markers):
            marks.append(thinking.begin)
        if thinking is not None and thinking.label and self._is_first:
            marks.append(f"{thinking.label}\n")
        if self._in_section:
            marks += tools.ends
        marks += (call.begin for call in tools.calls if self._in_section or not tools.begin or call.bare)
        marks.append(tools.bare)
        return tuple(dict.fromkeys(filter(None, marks)))

    def _special(self, marker: str, may_be_bare: bool) -> Reading[bool]:
        """Reads what begins with a marker; empty for none. Returns whether it was thinking, calls or mere markup.
        If not, the source is where it was. Somewhere before that, the text is kept. `may_be_bare`: here, a call without
        markers may be of any tool."""
        source, tools, thinking = self._source, self._tools, self._thinking
        if thinking is not None and marker in (thinking.begin, f"{thinking.label}\n"):
            before = source.marks.get(source.offset)
            source.at += len(marker)
            source.release()
            self._reader.open_thinking(None if before is None else before + 1)
            yield from self._think(thinking)
            return True
        if thinking is not None and marker in (thinking.end, *thinking.text_marks):
            source.at += len(marker)
            source.release()
            if marker == thinking.end and self._is_first:
                yield from source.newlines()
            return True
        if self._in_section and marker in tools.ends:
            source.at += len(marker)
            source.release()
            self._in_section = False
            return True
        if not marker:
            return False
        start, kept = source.offset, source.kept
        begins_section = marker in tools.begins
        self._reader.pending = marker
        if begins_section:
            source.at += len(marker)
            yield from source.space()
            if tools.repeats:
                source.record()
            known_only = False
        elif marker == tools.bare:
            known_only = not may_be_bare or self._has_called
        else:
            known_only = bool(tools.begin) and not self._in_section
        after = source.offset
        syntax = yield from self._call(known_only, marker)
        if syntax is None and begins_section:
            source.go_to(after)
            syntax = yield from self._call_after_noise(marker)
        if syntax is None:
            source.kept = kept
            source.go_to(start)
            if begins_section:
                source.forget()
            return False
        self._in_section |= bool(tools.ends) and (begins_section or marker == tools.bare)
        yield from self._more_calls(syntax)
        return True

    def _think(self, thinking: ThinkingFormat, opened: bool = False) -> Reading[None]:
        """Reads thinking up to its end, and the lines' ends around that. `opened`: by the prompt, and the model may do
        so once more."""
        reader, source = self._reader, self._source
        yield from source.newlines()
        before = source.marks.get(source.offset)
        if opened and (yield from source.accept(thinking.begin)):
            reader.open_thinking(None if before is None else before + 1)
            yield from source.newlines()
        if (yield from source.accept(thinking.label)):
            yield from source.newlines()
        bound = reader.format.bound_markers
        tokens = [mark for mark in self._tools.begins if reader.format.tells(mark)]
        tokens += (call.begin for call in self._tools.calls if call.begin in bound)
        markers = reader.format.marker_set(thinking.end, *dict.fromkeys(tokens))
        while True:
            at, marker = source.find(markers)
            ended = marker is None and source.ended
            reader.thinking(source.take(at if ended else max(source.at, len(source.text[:at].rstrip("\n")))))
            if ended:
                return
            if marker is None:
                if source.at == len(source.text):
                    reader.plain = ThinkingDelta, markers.firsts_and_newline
                yield
                continue
            start = source.keep()
            source.at = at
            reader.tokens_before_call = source.marks.get(source.offset)
            if marker == thinking.end:
                reader.close_thinking(reader.tokens_before_call)
                source.at += len(marker)
                source.release()
                yield from source.newlines()
                return
            if (yield from self._special(marker, may_be_bare=False)):
                return
            end = source.at + 1
            source.go_to(start)
            source.release()
            reader.thinking(source.take(end))

    # ---------------------------------------------------------------- calls

    def _call(self, known_only: bool, marker: str) -> Reading[CallSyntax | None]:
        """Reads a call in one of the format's forms, and returns the form; None if there is no call, and the source is
        where it was. `known_only`: of a known tool. `marker`: what says that a call comes."""
        source = self._source
        start, kept = source.offset, source.kept
        self._reader.pending = marker
        for syntax in self._tools.calls:
            if (yield from read_call(self._reader, self._tools, syntax, known_only)):
                self._has_called = True
                return syntax
            source.kept = kept
            source.go_to(start)
        self._reader.pending = ""
        return None

    def _call_after_noise(self, marker: str) -> Reading[CallSyntax | None]:
        """Looks for the first call of a section behind what is none, and returns its form; None if there is none before
        the section's end, another's beginning, or too much text. `marker`: what began the section."""
        source, tools, reader = self._source, self._tools, self._reader
        begins = tuple(
            dict.fromkeys(call.begin for call in tools.calls if call.begin and call.begin not in tools.begins)
        )
        if not begins or not tools.ends:
            return None
        start = source.offset
        markers = reader.format.marker_set(*begins, *tools.begins, *tools.ends)
        reader.pending = marker
        while True:
            source.at, found = source.find(markers)
            if source.offset - start > _MAX_NOISE_CHARS or (found is None and source.ended) or found in tools.ends:
                break
            if found is None:
                yield
                continue
            if found in tools.begins:
                break
            at = source.offset
            syntax = yield from self._call(False, marker)
            if syntax is not None:
                return syntax
            reader.pending = marker
            source.go_to(at + 1)
        reader.pending = ""
        return None

    def _more_calls(self, syntax: CallSyntax) -> Reading[None]:
        """Reads the calls that follow in the same section, and its end, which may be there without a beginning."""
        source, tools = self._source, self._tools
        is_list = True
        while True:
            start = source.keep()
            yield from source.space()
            if (yield from source.accept(*tools.ends)):
                self._in_section = False
                source.release()
                yield from self._leave_out(source.recorded(start) if tools.repeats else "")
                return
            if is_list and (yield from source.accept(syntax.list_end)):
                is_list = False
                continue
            if is_list:
                follows = yield from source.accept(*syntax.separators)
                yield from source.space()
                is_list_or_section = bool(follows) or self._in_section
                if (is_list_or_section or syntax.begin or isinstance(syntax, JsonCall)) and (
                    yield from self._call(
                        known_only=bool(tools.begin) and not is_list_or_section,
                        marker=tools.begin if is_list_or_section else syntax.begin,
                    )
                ):
                    continue
            source.go_to(start)
            source.release()
            return

    def _leave_out(self, section: str) -> Reading[None]:
        """Drops what repeats the calls of a section, each time with the section's end. Otherwise the source is where it
        was."""
        source = self._source
        found = bool(section)
        while found:
            start = source.keep()
            yield from source.space()
            found = bool((yield from source.accept(section)))
            if found:
                yield from source.space()
                found = bool((yield from source.accept(*self._tools.ends)))
            if not found:
                source.go_to(start)
            source.release()
