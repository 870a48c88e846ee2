"""Converts clients' regular expressions to the notation of xgrammar's automata, without anything that xgrammar
misreads: it ignores look-around, anchors in the middle and flags, and its dot matches line ends.

Python's own parser reads the patterns, after `ecma.py`. The output matches a subset of what Python's `re` and ECMA 262
with the flag u match: classes such as \\d are those characters that both dialects admit, and leave out those that
either leaves out.
"""

import re
import re._constants as op
import re._parser as parser
import warnings
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Any

from worker.structured_output.error import GrammarError
from worker.structured_output.rules import charset
from worker.structured_output.rules.charset import Ranges
from worker.structured_output.rules.ecma import in_python

_MAX_COPIES = 20_000
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


Spell = Callable[[Ranges], str | None]
Items = list[tuple[Any, Any]]


@lru_cache(512)  # schemas ask for the same formats and patterns many times
def whole(pattern: str, spell: Spell) -> str | None:
    """The notation for texts that match `pattern` as a whole, or None if no text does. `spell`: a pattern of one
    character of a set, None if it has none that can be written. Raises GrammarError."""
    return _RegexConverter(spell, searches=False).convert(list(_parse(pattern)))


@lru_cache(512)
def found(pattern: str, spell: Spell) -> str | None:
    """The notation for texts in which `pattern` is found, or None if there are none. Raises GrammarError."""
    return _RegexConverter(spell, searches=True).convert(list(_parse(pattern)))


def keeps(pattern: str, least: int, most: int | None) -> bool:
    """Whether every text in which the pattern is found certainly has `least` to `most` characters."""
    parsed = _parse(pattern)
    shortest, longest = parsed.getwidth()
    return shortest >= least and (most is None or (_is_anchored(list(parsed)) and longest <= most))


def repeated(pattern: str, spell: Spell) -> tuple[str, int, int | None] | None:
    """The one character of a pattern such as ^[a-z]*$, in the notation, and how often it comes. None for
    other patterns, and for a character that cannot be written."""
    items = list(_parse(pattern))
    if not (_is_anchored(items) and len(items) == 3 and items[1][0] in (op.MAX_REPEAT, op.MIN_REPEAT)):
        return None
    least, most, body = items[1][1]
    if len(body) != 1 or body[0][0] not in (op.IN, op.LITERAL, op.NOT_LITERAL, op.ANY):
        return None
    one = spell(_set(body[0]))
    return None if one is None else (one, int(least), None if most is op.MAXREPEAT else int(most))


def of_characters(pattern: str, characters: Ranges) -> str | None:
    """The notation for texts of these characters that match `pattern` as a whole, or None if no text does. Raises
    GrammarError."""
    return whole(pattern, spell_plain(characters))


def spell_plain(characters: Ranges = charset.SCALARS) -> Spell:
    """Characters that stand for themselves."""

    def spell(ranges: Ranges) -> str | None:
        possible = charset.intersection(charset.intersection(ranges, characters), charset.SCALARS)
        return charset.pattern(possible) if possible else None

    return spell


def check(pattern: str) -> bool:
    """True. Raises GrammarError for what is no regular expression, not for what is not supported."""
    try:
        pattern = in_python(pattern)
    except GrammarError:
        return True
    _parse(pattern)
    return True


@lru_cache(512)
def counted(pattern: str) -> tuple[int, int]:
    """Number of characters, and of sets of them, in a pattern of the notation, each as often as it is counted; and the
    largest count."""
    return _counted(list(parser.parse(pattern)))


def _counted(items: Items) -> tuple[int, int]:
    characters = most = 0
    for kind, value in items:
        if kind is op.BRANCH:
            parts = [(1, list(each)) for each in value[1]]
        elif kind is op.SUBPATTERN:
            parts = [(1, list(value[3]))]
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            times = max(1, int(value[0] if value[1] is op.MAXREPEAT else value[1]))
            parts, most = [(times, list(value[2]))], max(most, times)
        else:
            parts, characters = [], characters + 1
        for times, part in parts:
            found, inner = _counted(part)
            characters, most = characters + times * found, max(most, inner)
    return characters, most


def _parse(pattern: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = parser.parse(in_python(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise GrammarError(f"the regular expression {_short(pattern)} is not valid: {error}") from None
    if parsed.state.flags & ~re.UNICODE:
        raise GrammarError(f"the regular expression {_short(pattern)} sets flags, which is not supported")
    return parsed


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")


def _is_anchored(items: Items) -> bool:
    """Whether a text in which these are found is one that they match as a whole."""
    return len(items) > 1 and _is_anchor(items[0], start=True) and _is_anchor(items[-1], start=False)


def _is_anchor(item: tuple[Any, Any], *, start: bool) -> bool:
    places = (op.AT_BEGINNING, op.AT_BEGINNING_STRING) if start else (op.AT_END, op.AT_END_STRING)
    return item[0] is op.AT and item[1] in places


def _has_anchor(items: Items, *, start: bool) -> bool:
    """Whether the first items (the last ones without `start`) may be an anchor, in any branch."""
    for kind, value in items if start else reversed(items):
        if _is_anchor((kind, value), start=start):
            return True
        if kind is op.BRANCH:
            return any(_has_anchor(list(branch), start=start) for branch in value[1])
        if kind is op.SUBPATTERN:
            return _has_anchor(list(value[3]), start=start)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            return _has_anchor(list(value[2]), start=start)
        if kind is not op.AT:
            return False
    return False


class _Edge(Enum):
    """Text before, or after, a part of a pattern."""

    TEXT = "other parts"
    NOTHING = "nothing: an anchor stands there, or may"
    ANYTHING = "any text, unless the part itself has an anchor there"


class _RegexConverter:
    """Converts a pattern that Python's parser has read. In all methods None means "matches nothing"."""

    def __init__(self, spell: Spell, *, searches: bool) -> None:
        self._spell = spell
        self._around = _Edge.ANYTHING if searches else _Edge.NOTHING
        self._any = f"{spell(charset.SCALARS)}*" if searches else ""
        self._copies = 0

    def convert(self, items: Items) -> str | None:
        return self._items(items, self._around, self._around, 1)

    def _items(self, items: Items, before: _Edge, after: _Edge, copies: int) -> str | None:
        at_start, before = self._edge(items, before, start=True)
        at_end, after = self._edge(items, after, start=False)
        if not items:
            return at_start or at_end
        out = ""
        width = [i for i, item in enumerate(items) if item[0] is not op.AT]
        for i, item in enumerate(items):
            first = before if all(i <= j for j in width) else _Edge.TEXT
            last = after if all(i >= j for j in width) else _Edge.TEXT
            part = self._item(item, first, last, copies)
            if part is None:
                return None
            out += part
        return at_start + out + at_end

    def _edge(self, items: Items, edge: _Edge, *, start: bool) -> tuple[str, _Edge]:
        """The notation at an edge of the items, and what they have there then."""
        if edge is not _Edge.ANYTHING:
            return "", edge
        if items and _is_anchor(items[0 if start else -1], start=start):
            return "", _Edge.NOTHING
        return ("", edge) if _has_anchor(items, start=start) else (self._any, _Edge.TEXT)

    def _item(self, item: tuple[Any, Any], before: _Edge, after: _Edge, copies: int) -> str | None:
        kind, value = item
        if kind is op.AT:
            return self._anchor(item, before, after)
        if kind is op.BRANCH:
            return _either([self._items(list(each), before, after, copies) for each in value[1]])
        if kind is op.SUBPATTERN:
            _, added, removed, body = value
            if added or removed:
                raise GrammarError("flags inside a regular expression are not supported")
            inner = self._items(list(body), before, after, copies)
            return None if inner is None else f"(?:{inner})"
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most = int(value[0]), None if value[1] is op.MAXREPEAT else int(value[1])
            if most == 1 and (before, after) != (_Edge.TEXT, _Edge.TEXT):
                bodies = [list(value[2]), *([[]] if least == 0 else [])]
                return _either([self._items(each, before, after, copies) for each in bodies])
            return self._repeat(least, most, value[2], copies)
        if kind in _UNSUPPORTED:
            raise GrammarError(f"a regular expression uses {_UNSUPPORTED[kind]}, which a grammar cannot follow")
        self._copies += copies
        if self._copies > _MAX_COPIES:
            raise GrammarError(f"a regular expression counts more than {_MAX_COPIES} characters")
        return self._spell(_set(item))

    @staticmethod
    def _anchor(item: tuple[Any, Any], before: _Edge, after: _Edge) -> str:
        for edge, start in ((before, True), (after, False)):
            if _is_anchor(item, start=start) and edge is not _Edge.TEXT:
                return ""
        raise GrammarError("a regular expression has an anchor (^, $ or \\b) other than at its start and its end")

    def _repeat(self, least: int, most: int | None, body: Any, copies: int) -> str | None:
        times = max(1, least if most is None else most)
        inner = self._items(list(body), _Edge.TEXT, _Edge.TEXT, copies * times)
        if inner is None or inner == "" or most == 0:
            return "" if least == 0 or inner == "" else None
        atom = f"(?:{inner})"
        return f"{atom}*" if (least, most) == (0, None) else f"{atom}{{{least},{'' if most is None else most}}}"


def _either(parts: list[str | None]) -> str | None:
    """A choice of those parts that match anything."""
    choices = [part for part in parts if part is not None]
    if choices[1:] == [""]:
        return f"(?:{choices[0]}){{0,1}}" if choices[0] else ""
    return f"(?:{'|'.join(choices)})" if choices else None


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
    admitted: list[tuple[int, int]] = []
    classes = {_CATEGORIES[detail] for member, detail in value if member is op.CATEGORY}
    if any((escape, not excluded) in classes for escape, excluded in classes):  # such as [\\s\\S]
        return () if negated else charset.SCALARS
    for member, detail in value[negated:]:
        if member is op.CATEGORY:
            escape, excluded = _CATEGORIES[detail]
            narrow, wide = charset.category(escape)
            # Holds in every dialect, whether the class is negated or not.
            counted = wide if excluded != negated else narrow
            admitted += charset.complement(counted) if excluded else counted
        else:
            admitted.append((detail, detail) if member is op.LITERAL else detail)
    return charset.complement(charset.union(admitted)) if negated else charset.union(admitted)
