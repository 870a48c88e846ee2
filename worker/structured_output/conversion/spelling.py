"""Ways to write JSON values: as JSON, as JSON in which markers do not occur, and as Python's literals."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from worker.structured_output.conversion.unmarked import may_break, unmarked, without_bracket
from worker.structured_output.rules.charset import (
    JSON_PLAIN,
    SCALARS,
    Ranges,
    complement,
    intersection,
    pattern,
    union,
)
from worker.structured_output.rules.ebnf import Terminal

_HEX = "[0-9a-fA-F]"
_UNIT = rf"[0-9a-cA-CefEF]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}"
# Surrogates are written in pairs or not at all.
_JSON_ESCAPE = rf'\\(?:["\\/bfnrt]|u(?:{_UNIT}|[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}))'
_PYTHON_ESCAPE = rf'\\(?:["\\bfnrt]|u(?:{_UNIT}))'
_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x2F: "/", 0x5C: "\\"}
# Characters that writers of JSON never write by number: ASCII without control characters, and without those that some
# writers escape for the sake of HTML.
_NEVER_ESCAPED = intersection(((0x20, 0x7E),), complement(union((ord(c), ord(c)) for c in "\"\\/<>&'")))
_BY_NUMBER = intersection(SCALARS, complement(_NEVER_ESCAPED))
_FIRST_ASTRAL, _SURROGATES = 0x10000, 0x400


@dataclass(frozen=True)
class Spelling:
    """A way to write JSON values.

    | field | meaning |
    | --- | --- |
    | `plain` | characters that stand for themselves in strings, and in names |
    | `escape` | a pattern of one escape in a string |
    | `string` | a pattern of what may stand in a string that has no schema |
    | `words` | true, false and null |
    | `write` | writes a value |
    | `unmarked` | a pattern that the inside of every string with a `<` matches too, None if there is nothing like it |
    """

    plain: Ranges
    escape: str
    string: str
    words: tuple[str, str, str]
    write: Callable[[Any], str]
    unmarked: str | None = None

    def constant(self, value: Any) -> Terminal:
        """Exactly this value, in one spelling."""
        return Terminal(self.write(value))

    def one(self, characters: Ranges) -> str | None:
        """A pattern of one of these characters inside of a string, as it is or as an escape. None if there is none."""
        return _one(characters, self.plain, self.escape == _PYTHON_ESCAPE)

    @property
    def any(self) -> str:
        """A pattern of one character inside of a string."""
        return self.one(SCALARS) or ""

    @property
    def with_bracket(self) -> "Spelling":
        """The same with `<` as it is."""
        return replace(self, plain=JSON_PLAIN, unmarked=None)


@lru_cache(2048)
def _one(characters: Ranges, plain: Ranges, is_python: bool) -> str | None:
    choices = []
    if bare := intersection(characters, plain):
        choices.append(pattern(bare))
    letters = [ord(letter) for code, letter in _SHORT.items() if _has(characters, code)]
    if is_python and ord("/") in letters:
        letters.remove(ord("/"))
    escapes = [pattern(union((code, code) for code in letters))] if letters else []
    numbered = intersection(characters, _BY_NUMBER)
    if units := intersection(numbered, ((0, _FIRST_ASTRAL - 1),)):
        escapes.append(f"u{_hexadecimal(units, 4)}")
    if not is_python and (astral := intersection(numbered, ((_FIRST_ASTRAL, 0x10FFFF),))):
        escapes += [f"u{high}\\\\u{low}" for high, low in _pairs(astral)]
    if escapes:
        choices.append(rf"\\(?:{'|'.join(escapes)})")
        return f"(?:{'|'.join(choices)})"
    return choices[0] if choices else None


def _has(characters: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in characters)


@lru_cache(4096)
def _hexadecimal(numbers: Ranges, places: int) -> str:
    """A pattern of these numbers in hexadecimal digits, of either case."""
    if numbers == ((0, 16**places - 1),):
        return f"{_HEX}{{{places}}}" if places else ""
    size = 16 ** (places - 1)
    digits: dict[str, list[int]] = {}
    for digit in range(16):
        part = intersection(numbers, ((digit * size, (digit + 1) * size - 1),))
        if part:
            rest = tuple((first - digit * size, last - digit * size) for first, last in part)
            digits.setdefault(_hexadecimal(rest, places - 1), []).append(digit)
    choices = [_digits(first) + rest for rest, first in digits.items()]
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"


def _digits(values: Sequence[int]) -> str:
    letters = {letter for value in values for letter in (f"{value:x}", f"{value:X}")}
    return pattern(union((ord(letter), ord(letter)) for letter in letters))


def _pairs(astral: Ranges) -> list[tuple[str, str]]:
    """Patterns of the two surrogates of characters beyond U+FFFF."""
    lows: dict[int, list[tuple[int, int]]] = {}
    full: list[tuple[int, int]] = []  # first surrogates that all second ones may follow
    last_low = _SURROGATES - 1
    for first, last in astral:
        (high, low), (high_end, low_end) = (divmod(code - _FIRST_ASTRAL, _SURROGATES) for code in (first, last))
        if high == high_end:
            lows.setdefault(high, []).append((low, low_end))
            continue
        lows.setdefault(high, []).append((low, last_low))
        lows.setdefault(high_end, []).append((0, low_end))
        if high + 1 < high_end:
            full.append((high + 1, high_end - 1))
    highs: dict[Ranges, list[tuple[int, int]]] = {((0, last_low),): full} if full else {}
    for high, ranges in lows.items():
        highs.setdefault(union(ranges), []).append((high, high))
    return [
        (_hexadecimal(_shifted(union(high), 0xD800), 4), _hexadecimal(_shifted(low, 0xDC00), 4))
        for low, high in highs.items()
    ]


def _shifted(ranges: Ranges, by: int) -> Ranges:
    return tuple((first + by, last + by) for first, last in ranges)


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair needs an escape
        text = json.dumps(value)
    return text


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json(key)}: {_python(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return repr(value) if value is None or isinstance(value, bool) else _json(value)


def json_without(markers: Iterable[str]) -> Spelling:
    """JSON in whose text none of `markers` occurs. Each begins with `<`, and has no other."""
    marks = tuple(markers)

    def write(value: Any) -> str:
        text = _json(value)
        return text.replace("<", "\\u003c") if may_break(text, marks) else text

    inside = unmarked(marks, JSON_PLAIN, _JSON_ESCAPE)
    whole = unmarked(marks, JSON_PLAIN, _JSON_ESCAPE, telling=None)
    return Spelling(without_bracket(JSON_PLAIN), _JSON_ESCAPE, inside, ("true", "false", "null"), write, whole)


def _whole(escape: str, words: tuple[str, str, str], write: Callable[[Any], str]) -> Spelling:
    return Spelling(JSON_PLAIN, escape, f"(?:{pattern(JSON_PLAIN)}|{escape})*", words, write)


JSON = _whole(_JSON_ESCAPE, ("true", "false", "null"), _json)
PYTHON = _whole(_PYTHON_ESCAPE, ("True", "False", "None"), _python)
