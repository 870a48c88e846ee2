"""Markers in texts, written as tokens where the vocabulary has them; and free text up to a marker."""

import re
from collections.abc import Iterable, Mapping

from worker.structured_output.rules.ebnf import FreeText, Node, Regex, Terminal, Token, optional, seq

_LINE_ENDS = Regex("\\n{0,2}")  # models write up to two after their thinking


class Speller:
    """Writes texts with markers for one vocabulary."""

    def __init__(self, markers: Iterable[str], added: Mapping[str, int]) -> None:
        """`added`: ids of added tokens by their texts."""
        markers = list(markers)
        self._ids = {mark: added[mark] for mark in markers if mark in added}
        # A marker that is spelled with other tokens is written as these.
        whole = [mark for mark in markers if mark in self._ids or not any(other in mark for other in self._ids)]
        longest_first = sorted(whole, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def parts(self, text: str) -> list[Terminal | Token]:
        """The text in parts: each marker is one, as a token if it is one."""
        parts: list[Terminal | Token] = []
        at = 0
        for match in self._split.finditer(text):
            parts += [Terminal(text[at : match.start()])] if match.start() > at else []
            parts.append(self.mark(match[0]))
            at = match.end()
        return parts + ([Terminal(text[at:])] if at < len(text) else [])

    def node(self, *texts: str | Node) -> Node:
        """All of the texts, one after the other."""
        return seq(*(part for text in texts for part in (self.parts(text) if isinstance(text, str) else [text])))

    def mark(self, marker: str) -> Terminal | Token:
        """A marker by itself."""
        return Token(self._ids[marker]) if marker in self._ids else Terminal(marker)

    def up_to(self, end: str, *others: str) -> Node:
        """Free text up to the marker `end` and including it. None of `others` occurs in the text, nor the beginning of
        `end` if that is spelled with a token."""
        first = self.parts(end)[0]
        excluded = [first, *(mark for each in others if type(mark := self.mark(each)) is type(first) and mark != first)]
        return seq(FreeText(excludes=tuple(map(key, excluded))), self.node(end))

    def thinking_before(self, end: str, begin: str | None, *others: str) -> Node:
        """Thinking that ends with `end`, and the lines' ends after it. It begins with `begin`, or is left out. None: it
        has begun already, and must end."""
        rest = seq(self.up_to(end, *others), _LINE_ENDS)
        return rest if begin is None else optional(seq(self.node(begin), rest))


def key(mark: Terminal | Token) -> str | int:
    """How free text names a marker."""
    return mark.id if isinstance(mark, Token) else mark.text
