"""The format of one model's answers, and markers bound to its vocabulary.

An `OutputFormat` is what the lexer needs to know of a model. The formats of families are in `worker.formats`. Bound to
a vocabulary, markers that are single tokens there count only where that token was written.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from worker.formats.syntax import Channels, ThinkingFormat, ToolsFormat

_ANY_TOOLS = ToolsFormat("")


@dataclass(frozen=True)
class OutputFormat:
    """How one model writes its answers. With `channels`, these have thinking and calls too.

    `tokens`: the markers that are single tokens, with their ids. Only that token counts as the marker; the same
    characters written by other tokens are text. `pieces`: ids of tokens that are parts of markers.
    """

    tools: ToolsFormat | None = None
    thinking: ThinkingFormat | None = None
    channels: Channels | None = None
    tokens: tuple[tuple[str, int], ...] = ()
    pieces: tuple[int, ...] = ()
    _sets: dict[tuple[str, ...], "Markers"] = field(default_factory=dict, compare=False, repr=False)

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers, each once."""
        parts = (self.tools, self.thinking, self.channels)
        return tuple(dict.fromkeys(mark for part in parts if part is not None for mark in part.markers))

    def bound(self, token_of: Callable[[str], int | None]) -> "OutputFormat":
        """The format for a vocabulary. `token_of`: the id of the added token with a given text, None if none."""
        found = [(marker, token_of(marker)) for marker in self.markers]
        pieces = [token_of(piece) for piece in (self.tools.pieces if self.tools is not None else ())]
        return replace(
            self,
            tokens=tuple((marker, token_id) for marker, token_id in found if token_id is not None),
            pieces=tuple(token_id for token_id in pieces if token_id is not None),
            _sets={},
        )

    @property
    def name(self) -> str:
        """The name of the form of calls."""
        return "openai" if self.channels is not None else self.tools.name if self.tools is not None else ""

    @property
    def may_think(self) -> bool:
        """Whether answers may have thinking."""
        return self.thinking is not None or self.channels is not None

    @property
    def marks_text(self) -> bool:
        """Whether the text of an answer stands between markers."""
        return self.channels is not None or (self.thinking is not None and bool(self.thinking.around))

    def new_call_id(self, name: str, number: int) -> str:
        """An id for a call that has none of its own. `number`: calls before it in the conversation."""
        return (self.tools or _ANY_TOOLS).new_id(name, number)

    def opens_thinking(self, prompt: str) -> bool:
        """Whether a prompt ends inside thinking that it has opened itself."""
        begin = None if self.thinking is None else (self.thinking.begin, self.thinking.begin + self.thinking.label)
        return begin is not None and prompt.rstrip().endswith(begin)

    def closes_thinking(self, prompt: str) -> bool:
        """Whether a prompt ends with thinking that has ended, so that the answer has none."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.end)

    @cached_property
    def marker_ids(self) -> frozenset[int]:
        """Tokens whose text the lexer must see, even if they are special."""
        return frozenset(token_id for _, token_id in self.tokens) | frozenset(self.pieces)

    @cached_property
    def bound_markers(self) -> frozenset[str]:
        return frozenset(marker for marker, _ in self.tokens)

    def marker_set(self, *markers: str) -> "Markers":
        """Markers ready to be searched for. Empty ones are left out."""
        known = self._sets.get(markers)
        if known is None:
            known = self._sets[markers] = Markers(filter(None, markers), self.bound_markers)
        return known


class Markers:
    """Markers that may come next in a text. Where one begins another, the longer counts.

    | attribute | meaning |
    | --- | --- |
    | `pattern` | those that count wherever their characters stand; None if there are none |
    | `firsts` | a pattern of their first characters |
    | `firsts_and_newline` | the same, and a line's end |
    | `firsts_and_last_space` | the same, and white space at the end of the text |
    | `firsts_and_escapes` | the same, and what JSON escapes in strings |
    | `prefixes` | their proper beginnings |
    | `tokens` | those that count only where one token wrote them |
    """

    def __init__(self, markers: Iterable[str], bound: frozenset[str]) -> None:
        markers = dict.fromkeys(markers)
        free = sorted((marker for marker in markers if marker not in bound), key=len, reverse=True)
        self.tokens = tuple(marker for marker in markers if marker in bound)
        self.prefixes = frozenset(marker[:size] for marker in free for size in range(1, len(marker)))
        self.longest = max(map(len, self.prefixes), default=0)
        self.pattern = re.compile("|".join(map(re.escape, free))) if free else None
        firsts = "".join(re.escape(marker[0]) for marker in free)
        self.firsts = re.compile(f"[{firsts}]") if free else None
        self.firsts_and_newline = re.compile(rf"[{firsts}\n]")
        self.firsts_and_last_space = re.compile(rf"[{firsts}]|\s\Z" if firsts else r"\s\Z")
        self.firsts_and_escapes = re.compile(rf'[{firsts}"\\\x00-\x1f]')
