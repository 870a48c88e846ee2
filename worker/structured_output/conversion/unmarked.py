"""Patterns of text in which none of some markers occurs, such as the tags that end a value.

Compiling takes tens of milliseconds for each character of a marker. So already the first characters of a marker are
kept out of the text.
"""

from collections.abc import Iterable
from typing import Any

from worker.structured_output.rules.charset import Ranges, complement, intersection, literal, pattern, union

# What may stand between tags: any character but the control characters other than tab, line feed and carriage return.
TEXT: Ranges = ((0x09, 0x0A), (0x0D, 0x0D), (0x20, 0xD7FF), (0xE000, 0x10FFFF))
_TELLING_CHARS = 4  # characters of a marker that seldom begin anything else


def without_bracket(ranges: Ranges) -> Ranges:
    """The characters without `<`."""
    return _less(ranges, "<")


def may_break(text: str, markers: Iterable[str]) -> bool:
    """Whether a marker occurs in `text`, or could where more text follows or precedes it."""
    return any(mark in text or text.endswith(tuple(mark[:n] for n in range(1, len(mark)))) for mark in markers)


def unmarked(
    markers: Iterable[str], characters: Ranges, escape: str = "", *, telling: int | None = _TELLING_CHARS
) -> str:
    """A pattern of texts of `characters`, and of what `escape` matches, in which no marker occurs, nor its first
    `telling` characters (None: all of them). Each marker begins with `<`, and has no other. An escape does not begin
    with a marker's character."""
    trie: dict[str, Any] = {}
    for marker in markers:
        if marker.rfind("<") != 0:
            raise ValueError(f"{marker!r} does not begin with its only <")
        node = trie
        for char in marker[1:telling]:
            node = node.setdefault(char, {})
    other = pattern(without_bracket(characters))
    others = f"(?:{other}|{escape})*" if escape else f"{other}*"
    return f"{others}(?:<{_rest(trie, characters, escape, others)})*"


def _rest(node: dict[str, Any], characters: Ranges, escape: str, others: str) -> str:
    """The texts after `<` and before the next or the end, where the markers go on as the tree says. At each
    character there is but one way to go on, which keeps masks cheap."""
    choices = [pattern(_less(characters, "<" + "".join(node))) + others]
    choices += [escape + others] if escape else []
    choices += [
        literal(char) + _rest(child, characters, escape, others) for char, child in sorted(node.items()) if child
    ]
    return f"(?:{'|'.join(choices)}){{0,1}}"


def _less(ranges: Ranges, characters: str) -> Ranges:
    return intersection(ranges, complement(union((ord(char), ord(char)) for char in characters)))
