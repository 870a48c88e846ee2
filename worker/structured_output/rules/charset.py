"""Sets of characters as sorted, disjoint ranges of code points, and how xgrammar's regular expressions spell them."""

import re
from collections.abc import Iterable
from functools import lru_cache

Ranges = tuple[tuple[int, int], ...]

# Every character that UTF-8 can carry.
SCALARS: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
# Characters that stand for themselves inside a JSON string.
JSON_PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))

# A range across several lengths of UTF-8 makes xgrammar 0.2.8 accept bytes that are not UTF-8 (for example E0 80 80).
_UTF8_LENGTHS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF))
_SPECIAL = frozenset("\\[](){}|*+?.^$-/")


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    out, start = [], 0
    for first, last in ranges:
        if start < first:
            out.append((start, first - 1))
        start = last + 1
    if start <= 0x10FFFF:
        out.append((start, 0x10FFFF))
    return tuple(out)


def intersection(a: Ranges, b: Ranges) -> Ranges:
    out = []
    for first, last in a:
        for other_first, other_last in b:
            low, high = max(first, other_first), min(last, other_last)
            if low <= high:
                out.append((low, high))
    return tuple(sorted(out))


@lru_cache
def category(escape: str) -> tuple[Ranges, Ranges]:
    """Characters of the class d, s or w: those that every dialect counts, and those that any counts. ECMA 262 counts
    letters and digits in ASCII only. Of the spaces, each dialect has some that the other has not."""
    everything = "".join(map(chr, range(0x110000)))
    found = union((m.start(), m.end() - 1) for m in re.finditer(rf"\{escape}+", everything))
    if escape == "s":
        return intersection(found, complement(((0x1C, 0x1F), (0x85, 0x85)))), union([*found, (0xFEFF, 0xFEFF)])
    return intersection(found, ((0x20, 0x7E),)), found


def literal(text: str) -> str:
    """A pattern for exactly this text."""
    return "".join("\\" + c if c in _SPECIAL else c for c in text)


@lru_cache(1024)
def pattern(ranges: Ranges) -> str:
    """A pattern for one character of the set, which must not be empty."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return literal(chr(ranges[0][0]))
    classes = []
    for length in _UTF8_LENGTHS:
        part = intersection(ranges, (length,))
        if part:
            classes.append("[" + "".join(_range(first, last) for first, last in part) + "]")
    return classes[0] if len(classes) == 1 else f"(?:{'|'.join(classes)})"


def _range(first: int, last: int) -> str:
    return literal(chr(first)) if first == last else f"{literal(chr(first))}-{literal(chr(last))}"
