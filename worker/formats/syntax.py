"""The syntax of thinking and of calls as data: markers, where names and values stand, and how values are typed.

A format has what readers look for, and how templates write it (`CallStyle`) where readers take more. All markers are
texts.
"""

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
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

    A header names a channel, and a recipient for calls: `to=` may stand before or after the channel. `end`, `call`,
    `last`: what ends a message, a call and the answer. `role`: stands between `start` and the rest of the header.
    `namespace`: left out of tools' names. A prompt ends with `start` and `role`.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    end: str = "<|end|>"
    call: str = "<|call|>"
    last: str = "<|return|>"
    role: str = "assistant"
    thinking: tuple[str, ...] = ("analysis",)
    text: tuple[str, ...] = ("final", "commentary")
    namespace: str = "functions."

    @cached_property
    def ends(self) -> tuple[str, ...]:
        return (self.end, self.call, self.last)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.channel, self.constrain, self.message, *self.ends)


@dataclass(frozen=True)
class TextPattern:
    """Any text that a regular expression matches."""

    pattern: str


Text = tuple[str | TextPattern, ...]
LINE = TextPattern("\\n{0,1}")  # where some models of a family write a line's end


@dataclass(frozen=True)
class CallStyle:
    """Calls as the chat templates of a family write them, where readers take other ways too. All else follows from the
    marks of the reader.

    | field | meaning |
    | --- | --- |
    | `call` | which of the format's `calls` it is |
    | `each` | the section's markers stand around each call, not once around all |
    | `marked` | the section's markers are written |
    | `between_marks` | the text of the answer stands between markers of the format's thinking, which also ends it |
    | `prefix` | before the name |
    | `quote` | around the name and each key |
    | `number` | after the name |
    | `kind` | before the kind of a value, after its key; then `strings` or `others`, in `quote` |
    | `after_begin`, `after_name`, `after_key`, `before_value_end`, `after_value`, `after_call`, `before_end` | white space |
    | `separator` | between calls |
    | `ends` | what would end a value too early; None: the marks of the end, of a key and of a value's end |
    """  # noqa: E501

    call: int = 0
    each: bool = False
    marked: bool = True
    between_marks: bool = False
    prefix: str = ""
    quote: str = ""
    number: Text = ()
    kind: str = ""
    strings: str = ""
    others: str | TextPattern = ""
    after_begin: Text = ()
    after_name: Text = ()
    after_key: Text = ()
    before_value_end: Text = ()
    after_value: Text = ()
    after_call: Text = ()
    before_end: Text = ()
    separator: Text = ()
    ends: tuple[str, ...] | None = None


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
    | `trims` | white space between text and the calls after it is no text |
    | `repeats` | models may write the calls of a section again after its end, which is left out |
    | `pieces` | tokens with which markers are spelled, and which must therefore stay in the text |
    | `thinking` | name of the thinking that all models of this format have; empty if their templates tell |
    | `written` | how chat templates write calls |
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
    trims: bool = False
    repeats: bool = False
    pieces: tuple[str, ...] = ()
    thinking: str = ""
    written: CallStyle = CallStyle()
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
