"""Numbers in a range as regular expressions over their decimal digits, in the notation of xgrammar's automata.

Texts are compared digit by digit, however long they are. A reader that rounds them to doubles comes to the same result:
rounding keeps the order. An exclusive limit of numbers keeps a distance, so that no text is rounded to the limit.

Optional parts are written with {0,1}: xgrammar misreads a question mark after a part that ends in another repetition.
"""

import math
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

_MAX_PLACES = 40  # of limits, after the point, that texts without exponent are compared with
_EXACT = 1 << 53  # whole numbers up to this are doubles
_DISTANCE_DIGITS = 15  # significant digits in which a number differs from a limit that excludes it
_MIN_POSITIVE = Fraction(5, 10**324)  # that no double is less than
_MIN_EXPONENT, _MAX_EXPONENT = -324, 307  # so that no reader comes to zero, or to infinity
_LARGEST = r"1\.7976931348623157[eE]\+{0,1}308"  # which some schemas and programs mean by "no limit"
_MAX_DOUBLE = Fraction(sys.float_info.max)
MAX_COMPARED = Fraction(10) ** 100  # what is further from zero is written with an exponent, or not at all

ANY_NUMBER = (
    r"-{0,1}(?:(?:0|[1-9][0-9]*)(?:\.[0-9]+){0,1}(?:[eE]-[0-9]+){0,1}"
    r"|(?:0|[1-9][0-9]{0,14})(?:\.[0-9]+){0,1}[eE]\+{0,1}[0-9]{1,2}"
    rf"|[1-9](?:\.[0-9]+){{0,1}}[eE]\+{{0,1}}0{{0,1}}(?:[12][0-9]{{2}}|30[0-7])|{_LARGEST})"
)
"""A pattern of numbers without limits."""

Bound = tuple[list[int], list[int]]  # digits before and after the point


class _Range(NamedTuple):
    """Numbers from `low` to `high`, both inclusive and not negative. None: no limit."""

    low: Fraction
    high: Fraction | None


def integer(low: Fraction | None, high: Fraction | None) -> str | None:
    """A pattern for the integers from `low` to `high`, both inclusive, None for no limit. None if there are none."""
    return _either(_signed_integers(low, high))


def number(low: Fraction | None, high: Fraction | None, *, above: bool = False, below: bool = False) -> str | None:
    """As `integer`, for numbers: without exponent, or with one and a single digit before the point. `above` excludes
    `low`, `below` excludes `high`."""
    if low is None and high is None:
        return ANY_NUMBER
    choices = _signed_integers(
        *compared(
            low + 1 if low is not None and above and low.denominator == 1 else low,
            high - 1 if high is not None and below and high.denominator == 1 else high,
        )
    )
    least = None if low is None else _first(low, above)
    most = None if high is None else -_first(-high, below)
    for sign, each in _halves(least, most):
        choices += [f"{sign}{digits}" for digits in [*_decimals(_near(each)), *_scientific(each)]]
    for sign, largest in ("-", -_MAX_DOUBLE), ("", _MAX_DOUBLE):
        if _reaches(low, largest, above) and _reaches(None if high is None else -high, -largest, below):
            choices.append(f"{sign}{_LARGEST}")
    return _either(choices)


def compared(low: Fraction | None, high: Fraction | None) -> tuple[Fraction | None, Fraction | None]:
    """The range of texts without an exponent, which is empty if all its numbers need one."""
    if low is not None and abs(low) > MAX_COMPARED:
        low, high = (-MAX_COMPARED, high) if low < 0 else (low, MAX_COMPARED)
    if high is not None and abs(high) > MAX_COMPARED:
        low, high = (low, MAX_COMPARED) if high > 0 else (-MAX_COMPARED, high)
    return low, high


def _near(wanted: _Range) -> _Range:
    """The part of a range that is written without an exponent. It has no numbers if there is none."""
    if wanted.high is None and wanted.low <= MAX_COMPARED:
        return wanted
    return wanted._replace(high=MAX_COMPARED if wanted.high is None else min(wanted.high, MAX_COMPARED))


def _first(limit: Fraction, excluded: bool) -> Fraction:
    """The least number that texts may stand for. Those of a limit that no text but `_LARGEST` comes near are not
    rounded."""
    if abs(limit) >= 10 ** (_MAX_EXPONENT + 1):
        return limit
    return _next_above(limit) if excluded else _as_read(limit)


def _reaches(low: Fraction | None, value: Fraction, excluded: bool) -> bool:
    return low is None or low < value or (low == value and not excluded)


def _either(choices: list[str]) -> str | None:
    return f"(?:{'|'.join(choices)})" if choices else None


def _halves(low: Fraction | None, high: Fraction | None) -> Iterator[tuple[str, _Range]]:
    """The negative numbers and the others of a range, each without sign."""
    if low is None or low < 0:
        yield "-", _Range(max(Fraction(0), -high) if high is not None else Fraction(0), None if low is None else -low)
    if high is None or high >= 0:
        yield "", _Range(max(Fraction(0), low or Fraction(0)), high)


def _next_above(limit: Fraction) -> Fraction:
    """The least number with few digits that no reader takes for `limit` or less."""
    if limit == 0:
        return _MIN_POSITIVE
    step = Fraction(10) ** (_exponent(abs(limit)) - _DISTANCE_DIGITS + 1)
    found = (limit // step + 1) * step
    while Fraction(float(found)) <= max(limit, Fraction(float(limit))):
        found += step
    return found


def _as_read(limit: Fraction) -> Fraction:
    """A limit for texts that are read as doubles: if it is a whole number, the least double from `limit` on, or the
    shortest text that is read as this, if that is less."""
    if limit.denominator != 1 or abs(limit) <= _EXACT:
        return limit
    read = float(limit)
    least = math.nextafter(read, math.inf) if Fraction(read) < limit else read
    return min(Fraction(least), Fraction(repr(least)))


def _exponent(value: Fraction) -> int:
    """The exponent of ten of a positive number, written with one digit before the point."""
    found = len(str(value.numerator)) - len(str(value.denominator))
    return found if Fraction(10) ** found <= value else found - 1


# ---------------------------------------------------------------- whole numbers


def _signed_integers(low: Fraction | None, high: Fraction | None) -> list[str]:
    first = None if low is None else -(-low.numerator // low.denominator)
    last = None if high is None else high.numerator // high.denominator
    out: list[str] = []
    if first is None or first < 0:
        least = 1 if last is None else max(1, -last)
        out += [f"-{each}" for each in _integers(least, None if first is None else -first)]
    if last is None or last >= 0:
        out += _integers(max(0, first or 0), last)
    return out


def _integers(first: int, last: int | None) -> list[str]:
    """Patterns of the whole numbers from `first`, which is not negative."""
    if last is not None and first > last:
        return []
    out, text = list[str](), str(first)
    shortest, longest = len(text), len(str(last)) if last is not None else None
    if first == 0 and (last is None or last > 9):
        out, shortest = ["0", *_of_lengths(1, 1 if longest is None else min(1, longest - 1))], 1
    else:
        top = "9" * shortest if longest is None or longest > shortest else str(last)
        out += _between(_digits(text), _digits(top))
    if longest is None:
        return [*out, *_of_lengths(shortest + 1, None)]
    if longest > shortest:
        out += _of_lengths(shortest + 1, longest - 1)
        out += _between([1] + [0] * (longest - 1), _digits(str(last)))
    return out


def _of_lengths(least: int, most: int | None) -> list[str]:
    """Numbers of `least` to `most` digits, without zeros at their beginning."""
    if most is not None and most < least:
        return []
    return [f"[1-9]{_times(least - 1, None if most is None else most - 1)}"]


def _times(least: int, most: int | None) -> str:
    if most is None:
        return f"{_times(least, least)}[0-9]*"
    if most == 0:
        return ""
    return "[0-9]" if (least, most) == (1, 1) else f"[0-9]{{{least},{most}}}"


def _digits(text: str) -> list[int]:
    return [int(char) for char in text]


def _between(first: list[int], last: list[int]) -> list[str]:
    """The numbers from `first` to `last`, which have equally many digits."""
    if not first:
        return [""]
    rest = len(first) - 1
    head, tail = first[0], last[0]
    free = _times(rest, rest)
    if first[1:] == [0] * rest and last[1:] == [9] * rest:
        return [_digit(head, tail) + free]
    if head == tail:
        return [_digit(head, head) + each for each in _between(first[1:], last[1:])]
    out = [_digit(head, head) + each for each in _between(first[1:], [9] * rest)]
    if head + 1 <= tail - 1:
        out.append(_digit(head + 1, tail - 1) + free)
    return out + [_digit(tail, tail) + each for each in _between([0] * rest, last[1:])]


def _digit(low: int, high: int) -> str:
    return str(low) if low == high else f"[{low}-{high}]"


# ---------------------------------------------------------------- with a point


def _decimals(wanted: _Range) -> list[str]:
    """Patterns of the numbers of a range that have a point."""
    low, high = _bound(wanted.low, up=True), None if wanted.high is None else _bound(wanted.high, up=False)
    shortest, longest = len(low[0]), None if high is None else len(high[0])
    if longest is not None and (wanted.high or 0) < wanted.low:
        return []
    out: list[str] = []
    if longest == shortest:
        return _with_point(low, high, shortest)
    out += _with_point(low, None, shortest)
    between = _of_lengths(shortest + 1, None if longest is None else longest - 1)
    out += [rf"{each}\.[0-9]+" for each in between]
    if high is not None and longest is not None:
        out += _with_point(([1] + [0] * (longest - 1), []), high, longest)
    return out


def _bound(value: Fraction, *, up: bool) -> Bound:
    """The digits of a limit, which is rounded if it has too many."""
    scaled = value * 10**_MAX_PLACES
    whole = -(-scaled.numerator // scaled.denominator) if up else scaled.numerator // scaled.denominator
    before, after = divmod(whole, 10**_MAX_PLACES)
    return _digits(str(before)), _digits(str(after).rjust(_MAX_PLACES, "0").rstrip("0"))


def _with_point(low: Bound, high: Bound | None, length: int) -> list[str]:
    """Numbers with `length` digits before the point. All but those of the limits have any fraction: so the pattern is
    nested only as deep as the limits have places."""
    first, last = _whole(low), 10**length - 1 if high is None else _whole(high)
    if first == last and high is not None:
        rest = _fraction(low[1], high[1])
        return [] if rest is None else [f"{first}{rest}"]
    out = list[str]()
    if any(low[1]):
        out.append(f"{first}{_fraction(low[1], None)}")
        first += 1
    if high is not None:
        out.append(f"{last}{_fraction(None, high[1])}")
        last -= 1
    if first <= last:
        out += [rf"{each}\.[0-9]+" for each in _between(_digits(str(first)), _digits(str(last)))]
    return out


def _whole(bound: Bound) -> int:
    return int("".join(map(str, bound[0])))


def _fraction(low: list[int] | None, high: list[int] | None) -> str | None:
    """A pattern of the texts from the point on, from the places of `low` to those of `high`. None: no limit."""
    places = _places(0, low, high)
    if places is None:
        return None
    return {"[0-9]*": r"\.[0-9]+", "0*": r"\.0+"}.get(places, rf"\.{places}")


def _places(at: int, low: list[int] | None, high: list[int] | None) -> str | None:
    """A pattern of the text after `at` places, which are those of `low` and of `high`, or within one that is None."""
    if low is not None and not any(low[at:]):
        low = None
    if high is not None and not any(high[at:]):
        return "0*" if low is None else None
    if low is None and high is None:
        return "[0-9]*"
    found = _either(list(_next(at, low, high)))
    return f"{found}{{0,1}}" if found is not None and low is None and at else found


def _next(at: int, low: list[int] | None, high: list[int] | None) -> Iterator[str]:
    """The choices of the next place, each with what may follow it."""
    least = low[at] if low is not None and at < len(low) else 0
    most = 9 if high is None else high[at] if at < len(high) else 0
    if low is not None and high is not None and least == most:
        rest = _places(at + 1, low, high)
        if rest is not None:
            yield f"{least}{rest}"
        return
    if low is not None and least <= most:
        rest = _places(at + 1, low, None)
        if rest is not None:
            yield f"{least}{rest}"
        least += 1
    top = most if high is None else most - 1
    if least <= top:
        yield f"{_digit(least, top)}{_places(at + 1, None, None)}"
    if high is not None and (low is None or most >= least):
        rest = _places(at + 1, None, high)
        if rest is not None:
            yield f"{most}{rest}"


# ---------------------------------------------------------------- with an exponent


def _scientific(wanted: _Range) -> list[str]:
    """Patterns of the numbers of a range with an exponent, and one digit before the point."""
    if wanted.high is not None and (wanted.high < wanted.low or wanted.high == 0):
        return []
    out: list[str] = []
    first = None if wanted.low == 0 else max(_exponent(wanted.low), _MIN_EXPONENT)
    last = _MAX_EXPONENT if wanted.high is None else min(_exponent(wanted.high), _MAX_EXPONENT)
    for exponent in sorted({each for each in (first, last) if each is not None and each <= _MAX_EXPONENT}):
        ten = Fraction(10) ** exponent
        low = max(Fraction(1), wanted.low / ten)
        high = None if wanted.high is None else wanted.high / ten
        mantissa = _mantissas(low, Fraction(10) if high is None else min(high, Fraction(10)))
        out += [f"{each}{_exponents(exponent, exponent)}" for each in mantissa]
    free = _exponents(None if first is None else first + 1, last - 1)
    return [*out, rf"[1-9](?:\.[0-9]+){{0,1}}{free}"] if free else out


def _mantissas(low: Fraction, high: Fraction) -> list[str]:
    """Patterns of the numbers from `low` to `high`, of those from 1 to less than 10."""
    if low >= 10:
        return []
    most = min(high.numerator // high.denominator, 9)
    out = [*_integers(-(-low.numerator // low.denominator), most)]
    if high >= 10:
        return [*out, *_with_point(_bound(low, up=True), None, 1)]
    return [*out, *_decimals(_Range(low, high))]


def _exponents(first: int | None, last: int) -> str:
    """A pattern of the exponents from `first` (None: any negative one) to `last`. Empty if there are none."""
    parts: list[str] = []
    if first is None or first < 0:
        least = 1 if last >= 0 else -last
        parts += [f"-0{{0,2}}{each}" for each in _integers(least, None if first is None else -first)]
    if last >= 0 and (first is None or first <= last):
        parts += [rf"\+{{0,1}}0{{0,2}}{each}" for each in _integers(max(0, first or 0), last)]
    return f"[eE](?:{'|'.join(parts)})" if parts else ""
