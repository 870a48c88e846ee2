"""Patterns of text in which none of some markers occurs, such as the tags that end a value."""

from collections.abc import Iterable
from typing import Any

from worker.structured_output.charset import Ranges, complement, intersection, literal, pattern, union

# What may stand between tags: any character but the control characters other than tab, line feed and carriage return.
TEXT: Ranges = ((0x09, 0x0A), (0x0D, 0x0D), (0x20, 0xD7FF), (0xE000, 0x10FFFF))


def without_bracket(ranges: Ranges) -> Ranges:
    """The characters without `<`."""
    return _less(ranges, "<")


def may_break(text: str, markers: Iterable[str]) -> bool:
    """Whether a marker occurs in `text`, or could where more text follows or precedes it."""
    return any(mark in text or text.endswith(tuple(mark[:n] for n in range(1, len(mark)))) for mark in markers)


def unmarked(markers: Iterable[str], characters: Ranges, escape: str = "") -> str:
    """A pattern of texts of `characters`, and of what `escape` matches, in which no marker occurs. Each marker begins
    with `<`, and has no other. An escape does not begin with a marker's character."""
    trie: dict[str, Any] = {}
    for marker in markers:
        if marker.rfind("<") != 0:
            raise ValueError(f"{marker!r} does not begin with its only <")
        node = trie
        for char in marker[1:]:
            node = node.setdefault(char, {})
    other = pattern(without_bracket(characters))
    begun = f"(?:<{_begun(trie)})"
    left = f"{begun}*<{_left(trie, characters, escape)}"
    plain = f"{other}|{escape}" if escape else other
    return f"(?:{plain}|{left})*{begun}*"


def _begun(node: dict[str, Any]) -> str:
    """Any beginning of a marker's rest, none at all included, but not the whole."""
    further = [literal(char) + _begun(child) for char, child in sorted(node.items()) if child]
    return f"(?:{'|'.join(further)}){{0,1}}" if further else ""


def _left(node: dict[str, Any], characters: Ranges, escape: str) -> str:
    """A beginning of a marker's rest, and then what does not go on with it."""
    choices = [pattern(_less(characters, "<" + "".join(node)))]
    choices += [escape] if escape else []
    choices += [literal(char) + _left(child, characters, escape) for char, child in sorted(node.items()) if child]
    return f"(?:{'|'.join(choices)})"


def _less(ranges: Ranges, characters: str) -> Ranges:
    return intersection(ranges, complement(union((ord(char), ord(char)) for char in characters)))
