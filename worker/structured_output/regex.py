"""Converts clients' regular expressions to the notation of xgrammar's automata, without anything that xgrammar
misreads: it ignores look-around, anchors in the middle and flags, and its dot matches line ends.

Python's own parser reads the patterns. The output matches a subset of what Python's `re.fullmatch` and ECMA 262 with
the flag u match: classes such as \\d are ASCII where they admit characters, and Unicode where they exclude them. A
match of the whole text is also a match for clients that search.
"""

import re
import re._constants as op
import re._parser as parser
import warnings
from collections.abc import Callable
from typing import Any

from worker.structured_output import charset
from worker.structured_output.charset import Ranges
from worker.structured_output.error import GrammarError

_MOST_UNROLLED = 128  # beyond, xgrammar counts at run time, which is slow, and wrong with its cache
_MOST_COPIES = 20_000
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CATEGORIES = {
    op.CATEGORY_DIGIT: ("d", False),
    op.CATEGORY_NOT_DIGIT: ("d", True),
    op.CATEGORY_SPACE: ("s", False),
    op.CATEGORY_NOT_SPACE: ("s", True),
    op.CATEGORY_WORD: ("w", False),
    op.CATEGORY_NOT_WORD: ("w", True),
}
_UNSUPPORTED = {
    op.ASSERT: "look-ahead and look-behind",
    op.ASSERT_NOT: "look-ahead and look-behind",
    op.FAILURE: "look-ahead and look-behind",  # how some versions of Python parse (?!)
    op.GROUPREF: "references to groups",
    op.GROUPREF_EXISTS: "conditional groups",
    op.ATOMIC_GROUP: "atomic groups",
    op.POSSESSIVE_REPEAT: "possessive quantifiers",
}
_JSON_ESCAPES = {0x08: "\\b", 0x09: "\\t", 0x0A: "\\n", 0x0C: "\\f", 0x0D: "\\r", 0x22: '\\"', 0x5C: "\\\\"}


class LengthError(GrammarError):
    """A pattern and limits of length that cannot be one pattern."""


Spell = Callable[[Ranges], str | None]
Items = list[tuple[Any, Any]]


def plain(pattern: str) -> str | None:
    """The notation for texts that match `pattern` as a whole, or None if no text does. Raises GrammarError."""
    return _RegexConverter(_spell_plain).whole(list(_parse(pattern)))


def in_json(pattern: str, least: int = 0, most: int | None = None, plain: Ranges = charset.JSON_PLAIN) -> str | None:
    """The notation for the inside of JSON strings whose value matches `pattern` as a whole and has `least` to `most`
    characters, or None if no string does. `plain`: characters that need no escape. Raises GrammarError;
    LengthError if lengths and pattern cannot be combined."""
    return _of_length(pattern, least, most, lambda ranges: _spell_json(ranges, plain))


def of_characters(pattern: str, least: int, most: int | None, characters: Ranges) -> str | None:
    """The notation for texts of these characters that match `pattern` as a whole and have `least` to `most` of them, or
    None if no text does. Raises GrammarError, also if lengths and pattern cannot be combined."""
    return _of_length(pattern, least, most, lambda ranges: _spell_plain(charset.intersection(ranges, characters)))


def _of_length(pattern: str, least: int, most: int | None, spell: Spell) -> str | None:
    parsed = _parse(pattern)
    shortest, longest = parsed.getwidth()
    items = list(parsed)
    if shortest < least or (most is not None and longest > most):
        items = _bound(items, least, most)
    return _RegexConverter(spell).whole(items)


def _parse(pattern: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise GrammarError(f"the regular expression {_short(pattern)} is not valid: {error}") from None
    if parsed.state.flags & ~re.UNICODE:
        raise GrammarError(f"the regular expression {_short(pattern)} sets flags, which is not supported")
    return parsed


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")


def _bound(items: Items, least: int, most: int | None) -> Items:
    """Narrows a pattern of one repeated character, such as ^[a-z]*$, to these lengths."""
    bare = [item for item in items if item[0] is not op.AT]
    if len(bare) == 1 and bare[0][0] in (op.MAX_REPEAT, op.MIN_REPEAT):
        low, high, body = bare[0][1]
        if len(body) == 1 and body[0][0] in (op.IN, op.LITERAL, op.NOT_LITERAL, op.ANY):
            high = high if most is None else min(int(high), most)
            narrowed = [(op.MAX_REPEAT, (max(int(low), least), high, body))]
            return [item for item in items if item[0] is op.AT and _is_start(item)] + narrowed
    raise LengthError("a pattern cannot be combined with limits of length that it does not keep by itself")


def _is_start(item: tuple[Any, Any]) -> bool:
    return item[1] in (op.AT_BEGINNING, op.AT_BEGINNING_STRING)


def _spell_plain(ranges: Ranges) -> str | None:
    possible = charset.intersection(ranges, charset.SCALARS)
    return charset.pattern(possible) if possible else None


def _spell_json(ranges: Ranges, plain: Ranges) -> str | None:
    """Leaves out characters that need an escape, if there are others."""
    possible = charset.intersection(ranges, plain)
    if possible:
        return charset.pattern(possible)
    escaped = [c for first, last in charset.intersection(ranges, ((0, 0x7F),)) for c in range(first, last + 1)]
    spelled = [charset.literal(_JSON_ESCAPES.get(c, f"\\u{c:04x}")) for c in escaped]
    return f"(?:{'|'.join(spelled)})" if spelled else None


class _RegexConverter:
    """Converts a pattern that Python's parser has read. In all methods None means "matches nothing"."""

    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._copies = 0

    def whole(self, items: Items) -> str | None:
        return self._items(items, at_start=True, at_end=True, copies=1)

    def _items(self, items: Items, *, at_start: bool, at_end: bool, copies: int) -> str | None:
        out = ""
        width = [i for i, item in enumerate(items) if item[0] is not op.AT]
        for i, item in enumerate(items):
            first = at_start and all(i <= j for j in width)
            last = at_end and all(i >= j for j in width)
            part = self._item(item, at_start=first, at_end=last, copies=copies)
            if part is None:
                return None
            out += part
        return out

    def _item(self, item: tuple[Any, Any], *, at_start: bool, at_end: bool, copies: int) -> str | None:
        kind, value = item
        if kind is op.AT:
            return self._anchor(item, at_start, at_end)
        if kind is op.BRANCH:
            parts = [self._items(list(p), at_start=at_start, at_end=at_end, copies=copies) for p in value[1]]
            choices = [part for part in parts if part is not None]
            return f"(?:{'|'.join(choices)})" if choices else None
        if kind is op.SUBPATTERN:
            _, added, removed, body = value
            if added or removed:
                raise GrammarError("flags inside a regular expression are not supported")
            inner = self._items(list(body), at_start=at_start, at_end=at_end, copies=copies)
            return None if inner is None else f"(?:{inner})"
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeat(int(value[0]), None if value[1] is op.MAXREPEAT else int(value[1]), value[2], copies)
        if kind in _UNSUPPORTED:
            raise GrammarError(f"a regular expression uses {_UNSUPPORTED[kind]}, which a grammar cannot follow")
        self._copies += copies
        if self._copies > _MOST_COPIES:
            raise GrammarError(f"a regular expression counts more than {_MOST_COPIES} characters")
        return self._spell(_set(item))

    @staticmethod
    def _anchor(item: tuple[Any, Any], at_start: bool, at_end: bool) -> str:
        if _is_start(item) and at_start:
            return ""
        if item[1] in (op.AT_END, op.AT_END_STRING) and at_end:
            return ""
        raise GrammarError("a regular expression has an anchor (^, $ or \\b) other than at its start and its end")

    def _repeat(self, least: int, most: int | None, body: Any, copies: int) -> str | None:
        once = (least, most) == (1, 1)
        times = max(1, least if most is None else most)
        inner = self._items(list(body), at_start=once, at_end=once, copies=copies * times)
        if inner is None or inner == "" or most == 0:
            return "" if least == 0 or inner == "" else None
        atom = f"(?:{inner})"
        out = _counted(atom, least, least)
        return out + (f"{atom}*" if most is None else _counted(atom, 0, most - least))


def _counted(atom: str, least: int, most: int) -> str:
    """`atom` from `least` to `most` times, in pieces that are small enough to unroll. `least` must be 0 or `most`."""
    whole, rest = divmod(most, _MOST_UNROLLED)
    pieces = [_MOST_UNROLLED] * whole + [rest] * (rest > 0)
    return "".join(f"{atom}{{{n if least else 0},{n}}}" for n in pieces)


def _set(item: tuple[Any, Any]) -> Ranges:
    """The characters that one item of a pattern admits."""
    kind, value = item
    if kind is op.LITERAL:
        return ((value, value),)
    if kind is op.NOT_LITERAL:
        return charset.complement(((value, value),))
    if kind is op.ANY:
        return charset.complement(_LINE_ENDS)
    if kind is not op.IN:
        raise GrammarError(f"a regular expression uses {str(kind).lower()}, which is not supported")
    negated = value[0][0] is op.NEGATE
    members: list[tuple[int, int]] = []
    for member, detail in value[negated:]:
        if member is op.CATEGORY:
            escape, excluded = _CATEGORIES[detail]
            narrow, wide = charset.category(escape)
            # Holds in every dialect: a negated class leaves out the characters that any dialect counts.
            members += charset.complement(narrow if negated else wide) if excluded else (wide if negated else narrow)
        else:
            members.append((detail, detail) if member is op.LITERAL else detail)
    return charset.complement(charset.union(members)) if negated else charset.union(members)
