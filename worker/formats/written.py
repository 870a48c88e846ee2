"""Calls as chat templates write them: the texts that grammars of calls are made of, from the formats of families."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from worker.formats.families import THINKING, TOOLS
from worker.formats.syntax import (
    CallStyle,
    CallSyntax,
    Channels,
    JsonCall,
    NamedCall,
    PythonicCall,
    QuotedCall,
    TaggedCall,
    Text,
    TextPattern,
    ToolsFormat,
)


@dataclass(frozen=True)
class Tags:
    """Arguments between tags.

    | field | meaning |
    | --- | --- |
    | `before`, `between`, `after` | around a key and its value |
    | `string`, `other` | after `between`, for strings as they are and for JSON; the schema tells if both are none |
    | `ends` | what would end a value too early if it occurred in it. Each begins with its only `<` |
    """

    before: str
    between: Text
    after: Text
    ends: tuple[str, ...]
    string: Text = ()
    other: Text = ()


@dataclass(frozen=True)
class Quotes:
    """Arguments as an object without spaces, with bare keys; strings stand between two of `mark`, without escapes. It
    begins with its only `<`."""

    mark: str


@dataclass(frozen=True)
class CallFormat:
    """An answer of calls: `opening`, calls with `separator` between them, `closing`. A call consists of `before`, the
    name, `between`, the arguments, `after`.

    | field | meaning |
    | --- | --- |
    | `arguments` | how they are written: as a JSON object, as Python's keyword arguments, as `Tags` or `Quotes` say |
    | `bare` | in free choice between calls and text, no marker tells which of them begins |
    | `around` | before and after the text, which comes before calls. The prompt has the first, or begins thinking |
    | `last` | ends the answer |
    """

    before: Text = ()
    between: Text = ()
    after: Text = ()
    opening: Text = ()
    separator: Text = ()
    closing: Text = ()
    arguments: Literal["json", "python"] | Tags | Quotes = "json"
    bare: bool = False
    around: tuple[str, str] | None = None
    last: Text = ()


def written(format: ToolsFormat, way: CallStyle) -> CallFormat:
    """The calls of a format in one way to write them."""
    call = format.calls[way.call]
    begin, end = (format.begin, format.end) if way.marked else ("", "")
    lists = (call.list_begin, call.list_end) if isinstance(call, JsonCall | PythonicCall) else ("", "")
    opening = _text(begin, *way.after_begin, lists[0])
    closing = _text(lists[1], *way.before_end, end)
    before, between, after, arguments = _parts(call, way)
    if way.each:
        before, after = _text(*opening, *before), _text(*after, *closing)
        opening = closing = ()
    made = CallFormat(before, between, after, opening, way.separator, closing, arguments, bare=not way.marked)
    if not way.between_marks:
        return made
    text_begin, text_end, last = THINKING[format.thinking].around[:3]
    return replace(made, around=(text_begin, text_end), last=(last,))


def _parts(call: CallSyntax, way: CallStyle) -> tuple[Text, Text, Text, Literal["json", "python"] | Tags | Quotes]:
    """The texts before a name, between it and the arguments, and after them; and the form of the arguments."""
    if isinstance(call, JsonCall):
        name, arguments = call.name_keys[0], call.argument_keys[0]
        return _text(f'{{"{name}": "'), _text(f'", "{arguments}": '), _text("}", *way.after_call), "json"
    if isinstance(call, NamedCall):
        fence, fence_end = call.fence
        lines = ("\n", "\n") if fence else ("", "")
        before = _text(call.begin, call.prefix or way.prefix)
        between = _text(*way.number, call.name_ends[0], fence, lines[0])
        return before, between, _text(lines[1], fence_end, call.end, *way.after_call), "json"
    if isinstance(call, TaggedCall):
        before, between = _text(call.begin, way.quote), _text(way.quote, *way.number, call.name_end, *way.after_name)
        return before, between, _text(call.end, *way.after_call), _tags(call, way)
    if isinstance(call, QuotedCall):
        return _text(call.begin, call.prefix), (), _text(call.end), Quotes(call.quote)
    return (), ("(",), (")",), "python"


def _tags(call: TaggedCall, way: CallStyle) -> Tags:
    after_key = (call.key_end, *way.after_key, call.value_begin)
    kinds = [_text(kind, way.quote, *after_key) if way.kind else () for kind in (way.strings, way.others)]
    return Tags(
        before=call.key_begin + way.quote,
        between=_text(way.quote, *((way.kind, way.quote) if way.kind else after_key)),
        after=_text(*way.before_value_end, call.value_end, *way.after_value),
        ends=(call.value_end, call.key_begin, call.end) if way.ends is None else way.ends,
        string=kinds[0],
        other=kinds[1],
    )


def _text(*parts: str | TextPattern) -> Text:
    """The parts, with neighbouring strings as one."""
    text: list[str | TextPattern] = []
    for part in parts:
        if isinstance(part, str) and text and isinstance(text[-1], str):
            text[-1] += part
        elif part:
            text.append(part)
    return tuple(text)


CALLS: Mapping[str, CallFormat] = {
    **{name: written(format, format.written) for name, format in TOOLS.items()},
    # Mistral's tokenizers before version 11, which have no token [ARGS].
    "mistral_list": written(TOOLS["mistral"], CallStyle(separator=(", ",))),
}
CHANNELS = Channels()


def _markers() -> Iterator[str]:
    for format in TOOLS.values():
        call = format.calls[format.written.call]
        yield from format.pieces
        for mark in (*_section_marks(format, call), *_call_marks(call)):
            # Markers that are spelled with others are no tokens of their own.
            if mark and not any(piece in mark for piece in format.pieces):
                yield mark
    for thinking in THINKING.values():
        if thinking.name not in TOOLS or not any(piece in thinking.begin for piece in TOOLS[thinking.name].pieces):
            yield from (thinking.begin, thinking.end)
    yield from CHANNELS.markers


def _section_marks(format: ToolsFormat, call: CallSyntax) -> tuple[str, ...]:
    if format.begin.isalpha() and isinstance(call, JsonCall):  # a word alone may stand in any text
        return (format.begin + call.list_begin, format.end)
    return (format.begin, format.end)


def _call_marks(call: CallSyntax) -> tuple[str, ...]:
    if isinstance(call, TaggedCall):
        # Tags around which names stand are tokens; those with a name inside are spelled like any text.
        return (*call.markers, call.name_end) if call.begin.endswith(">") else ()
    if isinstance(call, NamedCall):
        return tuple(mark for mark in call.markers if mark != call.id_begin)
    return call.markers


# Texts that are tokens of their own in the vocabularies of the models that use them.
MARKERS = tuple(dict.fromkeys(_markers()))
