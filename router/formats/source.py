"""The text of an answer as a parser reads it, while it is still being written.

A parser is a generator that yields whenever it needs more text than there is. What it decides depends only on the text,
and never on how the text was cut into pieces: each reading method either has all characters that decide, or waits.
"""

import re
from collections.abc import Generator, Mapping
from typing import TypeVar

from router.formats.format import Markers, OutputFormat

T = TypeVar("T")
Reading = Generator[None, None, T]
_SPACE = re.compile(r"\s*")
_NEWLINES = re.compile(r"\n*")


class Source:
    """The text that is not yet consumed, from `at` on. Offsets count from the beginning of the whole text.

    `kept`: an offset to which a parser may want to go back, None if there is none. `marks`: offsets where a single
    token wrote a marker, with the number of tokens before it. `ended`: no more text comes.
    """

    def __init__(self, format: OutputFormat) -> None:
        self.text = ""
        self.at = 0
        self.base = 0
        self.ended = False
        self.kept: int | None = None
        self.marks: dict[int, int] = {}
        self._since: int | None = None  # the offset from which on what is dropped is recorded
        self._dropped: list[str] = []
        self._bound = format.bound_markers

    @property
    def offset(self) -> int:
        return self.base + self.at

    def feed(self, text: str, marks: Mapping[int, int]) -> None:
        drop = self.at if self.kept is None else self.kept - self.base
        if self._since is not None:
            self._dropped.append(self.text[max(0, self._since - self.base) : drop])
        self.text = self.text[drop:] + text
        self.base += drop
        self.at -= drop
        if self.marks:
            self.marks = {offset: tokens for offset, tokens in self.marks.items() if offset >= self.base}
        self.marks.update(marks)

    def keep(self) -> int:
        """Keeps the text from here on, so that a parser may go back. Returns the offset."""
        self.kept = self.offset
        return self.kept

    def release(self) -> None:
        self.kept = None

    def go_to(self, offset: int) -> None:
        self.at = offset - self.base

    def record(self) -> None:
        """Keeps what comes from here on for `recorded`."""
        self._since, self._dropped = self.offset, []

    def recorded(self, end: int) -> str:
        """The text from the last `record` up to the offset `end`, which is kept. Ends the recording."""
        since, self._since = self._since, None
        if since is None:
            return ""
        return "".join([*self._dropped, self.text[max(0, since - self.base) : end - self.base]])

    def forget(self) -> None:
        """Ends the recording."""
        self._since, self._dropped = None, []

    def since(self, offset: int) -> str:
        """The text from a kept offset up to here."""
        return self.text[offset - self.base : self.at]

    def take(self, end: int) -> str:
        """Consumes the text up to the position `end`, and returns it."""
        taken = self.text[self.at : end]
        self.at = end
        return taken

    def find(self, markers: Markers) -> tuple[int, str | None]:
        """The position of the first marker from here on, and the marker; or the position up to which there is surely
        none, and None."""
        text, end = self.text, len(self.text)
        found, at = "", end
        if markers.pattern is not None:
            match = markers.pattern.search(text, self.at)
            if match is not None:
                found, at = match.group(), match.start()
            if not self.ended:
                assert markers.firsts is not None
                first = markers.firsts.search(text, max(self.at, end - markers.longest), at + 1)
                while first is not None:
                    if text[first.start() :] in markers.prefixes:
                        found, at = "", first.start()
                        break
                    first = markers.firsts.search(text, first.end(), at + 1)
        if markers.tokens:
            for offset in self.marks:
                start = offset - self.base
                if not self.at <= start <= at or start == end:
                    continue
                for marker in markers.tokens:
                    is_first = start < at or len(marker) > len(found)
                    if is_first and text.startswith(marker, start):
                        found, at = marker, start
                    elif is_first and not self.ended and marker.startswith(text[start:]):
                        found, at = "", start
        return at, found or None

    def pattern(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Consumes all that the pattern matches: a repetition of single characters."""
        parts = []
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None
            parts.append(match.group())
            self.at = match.end()
            if self.at < len(self.text) or self.ended:
                return "".join(parts)
            yield

    def up_to(self, markers: Markers, most: int) -> Reading[str]:
        """Consumes what comes before one of the markers; if that has more than `most` characters, more than these, or
        exactly `most` that no marker follows."""
        while True:
            at, marker = self.find(markers)
            if marker is not None or self.ended or at - self.at >= most:
                return self.take(at)
            yield

    def space(self) -> Reading[str]:
        return self.pattern(_SPACE)

    def newlines(self) -> Reading[str]:
        return self.pattern(_NEWLINES)

    def character(self) -> Reading[str]:
        """The next character, not consumed; empty at the end of the text."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def sees(self, *expected: str) -> Reading[str]:
        """The longest of these texts that comes next, not consumed; empty if none does. Empty ones are left out."""
        while True:
            seen, waits = "", False
            for option in expected:
                if len(option) <= len(seen):
                    continue
                if option in self._bound and self.at < len(self.text) and self.offset not in self.marks:
                    continue
                if self.text.startswith(option, self.at):
                    seen = option
                else:
                    waits |= option.startswith(self.text[self.at :])
            if self.ended or not waits:
                return seen
            yield

    def accept(self, *expected: str) -> Reading[str]:
        """Consumes the one of these texts that comes next, and returns it; empty if none."""
        seen = yield from self.sees(*expected)
        self.at += len(seen)
        return seen
