"""Numbers in a range as regular expressions over their decimal digits, in the notation of xgrammar's automata.

Optional parts are written with {0,1}: xgrammar misreads a question mark after a part that ends in another repetition.
"""

from fractions import Fraction

# Significant digits that a double distinguishes. Up to these, two texts are in the same order as the doubles read.
_DIGITS = 15
_MOST_FRACTION = 10

Digits = list[tuple[int, int]]


def integer(low: Fraction | None, high: Fraction | None) -> str | None:
    """A pattern for the integers of up to 15 digits from `low` to `high`, both inclusive, None for no limit. None if
    there are no such integers."""
    return _signed(low, high, fraction=False)


def number(low: Fraction | None, high: Fraction | None, *, above: bool = False, below: bool = False) -> str | None:
    """As `integer`, for decimal numbers with up to 15 digits, up to 10 of them after the point. `above` excludes `low`,
    `below` excludes `high`."""
    if low is None and high is None:
        return r"-{0,1}(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15}){0,1}(?:[eE][+\-]{0,1}[0-9]{1,2}){0,1}"
    return _signed(low, high, fraction=True, above=above, below=below)


def _signed(
    low: Fraction | None, high: Fraction | None, *, fraction: bool, above: bool = False, below: bool = False
) -> str | None:
    limit = Fraction(10**_DIGITS)
    low, above = (-limit, True) if low is None or low < -limit else (low, above)
    high, below = (limit, True) if high is None or high > limit else (high, below)
    parts = [f"-(?:{p})" for p in _positive(-high, -low, below, above, fraction, zero=False)]
    parts += _positive(low, high, above, below, fraction, zero=True)
    return f"(?:{'|'.join(parts)})" if parts else None


def _positive(low: Fraction, high: Fraction, above: bool, below: bool, fraction: bool, *, zero: bool) -> list[str]:
    """Patterns for the non-negative numbers of a range: one or more for each length of the integer part."""
    out: list[str] = []
    for length in range(1, _DIGITS + 1):
        places = min(_MOST_FRACTION, _DIGITS - length) if fraction else 0
        scale = 10**places
        first = _ceil(low * scale, above)
        last = -_ceil(-high * scale, below)
        # Numbers of this length, without leading zeros.
        first = max(first, 10 ** (length - 1) * scale if length > 1 else (0 if zero else 1))
        last = min(last, 10**length * scale - 1)
        while above and first <= last and Fraction(first / scale) <= _as_double(low):
            first += 1  # a double may round up to the limit
        while below and first <= last and Fraction(last / scale) >= _as_double(high):
            last -= 1
        if first <= last:
            width = length + places
            out += [_spell(digits, length) for digits in _split(_pad(first, width), _pad(last, width))]
    return out


def _as_double(value: Fraction) -> Fraction:
    return Fraction(float(value))


def _ceil(value: Fraction, strict: bool) -> int:
    """The smallest integer that is at least `value`, or with `strict` larger than it."""
    whole = -(-value.numerator // value.denominator)
    return whole + 1 if strict and whole == value else whole


def _pad(value: int, length: int) -> list[int]:
    return [int(c) for c in str(value).rjust(length, "0")]


def _split(first: list[int], last: list[int]) -> list[Digits]:
    """The numbers from `first` to `last`, which have equally many digits, as lists of ranges digit by digit."""
    if not first:
        return [[]]
    rest = len(first) - 1
    head, tail = first[0], last[0]
    if first[1:] == [0] * rest and last[1:] == [9] * rest:
        return [[(head, tail)] + [(0, 9)] * rest]
    if head == tail:
        return [[(head, head), *digits] for digits in _split(first[1:], last[1:])]
    out = [[(head, head), *digits] for digits in _split(first[1:], [9] * rest)]
    if head + 1 <= tail - 1:
        out.append([(head + 1, tail - 1)] + [(0, 9)] * rest)
    return out + [[(tail, tail), *digits] for digits in _split([0] * rest, last[1:])]


def _spell(digits: Digits, length: int) -> str:
    """The pattern of numbers whose integer part has `length` digits. Trailing zeros of the fraction are optional."""
    whole, after = digits[:length], digits[length:]
    needed = len(after)
    while needed and after[needed - 1][0] == 0:
        needed -= 1
    tail = _optional(after[needed:])
    integer_part = "".join(_digit(d) for d in whole)
    if not after:
        return integer_part
    if needed:
        return integer_part + r"\." + "".join(_digit(d) for d in after[:needed]) + tail
    return integer_part + rf"(?:\.{_digit(after[0])}{_optional(after[1:])}){{0,1}}"


def _optional(digits: Digits) -> str:
    if all(d == digits[0] for d in digits):
        return f"{_digit(digits[0])}{{0,{len(digits)}}}" if digits else ""
    return f"(?:{_digit(digits[0])}{_optional(digits[1:])}){{0,1}}"


def _digit(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return str(low) if low == high else f"[{low}-{high}]"
