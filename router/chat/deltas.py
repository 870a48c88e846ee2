"""The deltas of an answer, piece by piece: text, thinking, and calls of tools.

A lexer (`router/formats/lexer.py`) makes these from the text of a model. The writers of the protocols turn them into
events. Where a text is cut into pieces changes where deltas are cut, and nothing else: `joined` is the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The call number `index` begins, counted from 0. `id`: the model's own, None where its format has none."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the call's arguments, a JSON object as text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call's arguments are complete."""

    index: int


Delta = TextDelta | ThinkingDelta | CallBegin | CallArguments | CallEnd


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The deltas with neighbours of one kind made one."""
    whole: list[Delta] = []
    for delta in deltas:
        last = whole[-1] if whole else None
        match last, delta:
            case TextDelta(before), TextDelta(text):
                whole[-1] = TextDelta(before + text)
            case ThinkingDelta(before), ThinkingDelta(text):
                whole[-1] = ThinkingDelta(before + text)
            case CallArguments(index, before), CallArguments(of, text) if index == of:
                whole[-1] = CallArguments(index, before + text)
            case _:
                whole.append(delta)
    return whole
