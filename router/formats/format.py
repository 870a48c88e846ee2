"""The description of a format as data: markers, where names and values stand, and how values are typed.

An `OutputFormat` is what the lexer needs to know of a model. A family's formats are in `families.py`. All markers are
texts. Bound to a vocabulary, those that are single tokens there count only where that token was written.
"""

import re
import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class ThinkingFormat:
    """Thinking between two markers. `name`: as in vLLM's `--reasoning-parser`. `label`: may stand after `begin`, and is
    left out. `around`: markers around the text of the answer, left out too. `breaks`: so is a line's end between such a
    marker and the text."""

    name: str
    begin: str = "<think>"
    end: str = "</think>"
    label: str = ""
    around: tuple[str, ...] = ()
    breaks: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, *self.around)

    @cached_property
    def text_marks(self) -> tuple[str, ...]:
        """`around`, with the lines' ends that belong to the markers."""
        if not self.breaks:
            return self.around
        return tuple(mark for each in self.around for mark in (each, f"\n{each}", f"{each}\n"))

    def tells(self, template: str) -> bool:
        """Whether a template shows that its model thinks so. Other formats have these markers too where the text has
        some of its own."""
        is_there = self.begin in template or self.end in template
        return is_there and (not self.breaks or all(mark in template for mark in self.around))

    def is_in(self, token_of: Callable[[str], int | None]) -> bool:
        """Whether a vocabulary has the markers."""
        marks = (self.begin, self.end, *(self.around if self.breaks else ()))
        return all(token_of(mark) is not None for mark in marks)


@dataclass(frozen=True)
class JsonCall:
    """A call as a JSON object with its name and arguments under keys.

    | field | meaning |
    | --- | --- |
    | `name_keys`, `argument_keys` | the keys |
    | `other_keys` | further keys that may be there; None for any. Their values are left out |
    | `needs_arguments` | without the arguments' key, the object is no call, but text |
    | `begin` | a marker that may stand before the call, or before the first of several |
    | `bare` | calls of known tools count outside a section too, after `begin` |
    | `list_begin`, `list_end` | what may surround several calls |
    | `separators` | what may stand between calls, besides white space |
    """

    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    other_keys: tuple[str, ...] | None = None
    needs_arguments: bool = False
    list_begin: str = ""
    list_end: str = ""
    separators: tuple[str, ...] = ()
    begin: str = ""
    end: str = ""
    bare: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin,) if self.begin else ()

    def allows(self, key: str) -> bool:
        """Whether a key other than those of the name and the arguments may be there."""
        return self.other_keys is None or key in self.other_keys


@dataclass(frozen=True)
class NamedCall:
    """A call as its name, followed by its arguments as JSON.

    | field | meaning |
    | --- | --- |
    | `begin`, `end` | markers around the call; none if empty |
    | `prefix` | what may stand before the name |
    | `name` | a pattern of the name as written; its group `name` is the tool's |
    | `is_id` | the name as written is the call's id. A number alone stands for the only tool |
    | `bare` | calls of known tools count outside a section too |
    | `id_begin` | marks an id after the name |
    | `name_ends` | what ends the name, left out |
    | `brace_ends_name` | the arguments may follow the name directly |
    | `fence` | what may stand before and after the arguments |
    """

    begin: str = ""
    end: str = ""
    prefix: str = ""
    name: re.Pattern[str] = re.compile(r"(?P<name>.+)")
    is_id: bool = False
    id_begin: str = ""
    name_ends: tuple[str, ...] = ()
    brace_ends_name: bool = False
    fence: tuple[str, str] = ("", "")
    bare: bool = False
    list_end: str = ""
    separators: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        # A line's end or the like ends a name, and is no marker.
        return tuple(mark for mark in (self.begin, self.end, self.id_begin, *self.name_ends) if len(mark) > 3)


@dataclass(frozen=True)
class TaggedCall:
    """A call whose arguments stand one by one between tags. Tools' schemas say what type a value has.

    | field | meaning |
    | --- | --- |
    | `begin`, `end` | the call's tags. The name follows `begin` |
    | `name` | a pattern of what stands up to the end of the name, with the group `name` |
    | `name_end` | ends the name; if empty, a line's end, the first argument or the call's end does |
    | `key_begin`, `key_end` | what surrounds a key |
    | `key` | a pattern of what stands there, with the group `key`, and perhaps `kind` |
    | `value_begin` | stands between `key_end` and the value; nothing if empty |
    | `value_end` | ends a value |
    | `trims` | a line's end at the start and the end of a value is not part of it |
    | `bare` | calls of known tools count outside a section too |

    The group `kind` is "true" or "string" where the model says that the value is a string; otherwise the value is JSON.
    """

    begin: str
    end: str
    key_begin: str
    key_end: str
    value_end: str
    value_begin: str = ""
    name_end: str = ""
    name: re.Pattern[str] = re.compile(r"\s*(?P<name>[^\s<>\"'=]+)\s*")
    key: re.Pattern[str] = re.compile(r"\s*(?P<key>[^<>]*?)\s*")
    trims: bool = False
    bare: bool = False
    list_end: str = ""
    separators: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        marks = (self.begin, self.end, self.key_begin, self.key_end, self.value_begin, self.value_end)
        return tuple(mark for mark in marks if len(mark) > 3)


@dataclass(frozen=True)
class PythonicCall:
    """A call as Python writes it: a name, and keyword arguments that are literals."""

    list_begin: str = "["
    list_end: str = "]"
    separators: tuple[str, ...] = (",",)
    begin: str = ""
    end: str = ""
    bare = False

    @property
    def markers(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class QuotedCall:
    """A call as its name after `prefix`, then an object. This is JSON, but keys stand as they are, and strings between
    two of `quote`, without escapes."""

    begin: str
    end: str
    prefix: str
    quote: str
    list_end: str = ""
    separators: tuple[str, ...] = ()
    bare = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, self.quote)


CallSyntax = JsonCall | NamedCall | TaggedCall | PythonicCall | QuotedCall


@dataclass(frozen=True)
class Channels:
    """OpenAI's harmony: an answer is a sequence of messages, each with a header.

    A header names a channel, and a recipient for calls: `to=` may stand before or after the channel. `ends`: what ends
    a message. `role`: stands between `start` and the rest of the header. `namespace`: left out of tools' names.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")
    role: str = "assistant"
    thinking: tuple[str, ...] = ("analysis",)
    text: tuple[str, ...] = ("final", "commentary")
    namespace: str = "functions."

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.channel, self.constrain, self.message, *self.ends)


@dataclass(frozen=True)
class ToolsFormat:
    """How calls are written, and how tools are described to a model whose template does not.

    | field | meaning |
    | --- | --- |
    | `name` | as in vLLM's `--tool-call-parser`, where it has one |
    | `begin`, `end` | markers around a section of calls; none if empty |
    | `others` | further pairs of such markers, which count as well |
    | `calls` | the forms of one call; the first that fits counts |
    | `bare` | the first character of calls without markers |
    | `ids` | how ids of calls look: `random`, `nine` letters and digits, `counted` with the tool's name |
    | `pieces` | tokens with which markers are spelled, and which must therefore stay in the text |
    | `thinking` | name of the thinking that all models of this format have; empty if their templates tell |
    | `instruction` | describes tools in a system message; `{tools}` stands for one JSON object per line |
    | `result` | puts a tool's result into a user message; `{name}` and `{text}` stand for its parts |
    """

    name: str
    begin: str = ""
    end: str = ""
    others: tuple[tuple[str, str], ...] = ()
    calls: tuple[CallSyntax, ...] = ()
    bare: str = ""
    ids: Literal["random", "nine", "counted"] = "random"
    pieces: tuple[str, ...] = ()
    thinking: str = ""
    instruction: str = ""
    result: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.begins, *self.ends, *(mark for call in self.calls for mark in call.markers))

    @cached_property
    def begins(self) -> tuple[str, ...]:
        """The markers that begin a section."""
        return tuple(filter(None, (self.begin, *(begin for begin, _ in self.others))))

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The markers that end a section."""
        return tuple(filter(None, (self.end, *(end for _, end in self.others))))

    def new_id(self, name: str, number: int) -> str:
        """An id for a call that has none of its own. `number`: calls before it in the conversation."""
        if self.ids == "counted":
            return f"functions.{name}:{number}"
        alphabet = string.ascii_letters + string.digits
        drawn = "".join(secrets.choice(alphabet) for _ in range(9 if self.ids == "nine" else 24))
        return drawn if self.ids == "nine" else f"call_{drawn}"


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
        self.firsts_and_escapes = re.compile(rf'[{firsts}"\\\x00-\x1f]')
