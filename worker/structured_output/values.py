"""Grammars of the parts of JSON: strings, numbers, literals, and lists of members with their commas."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from worker.structured_output import decimals, regex
from worker.structured_output.charset import Ranges, complement, intersection, literal, pattern
from worker.structured_output.conjunction import Schema
from worker.structured_output.ebnf import (
    EMPTY,
    NEVER,
    Alt,
    Intersection,
    Node,
    Ref,
    Regex,
    Repeat,
    Terminal,
    alt,
    optional,
    seq,
)
from worker.structured_output.error import GrammarError, KeywordError
from worker.structured_output.formats import FORMATS
from worker.structured_output.spelling import JSON, Spelling

_MOST_MULTIPLES = 1_000
_LIMITS = ("minLength", "maxLength", "pattern", "format")
_MOST_STATES = 128  # characters of a string that an automaton counts
_MOST_COUNTED = 100_000

_ONE_STRING = rf'"(?:{pattern(JSON.plain)}|\\(?:["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f])))*"'
_ONE_NUMBER = r"(?:0|-{0,1}[1-9][0-9]*(?:\.[0-9]*[1-9]){0,1}|-{0,1}0\.[0-9]*[1-9])"

# At most one space: a small model that may write any whitespace sometimes never stops.
COMMA = seq(Terminal(","), Ref("space"))
COLON = seq(Terminal(":"), Ref("space"))


def common_rules(spelling: Spelling = JSON) -> dict[str, Node]:
    """The rules that grammars of JSON refer to, among them `any` and `object` for values without a schema."""
    words = [Terminal(word) for word in spelling.words]
    return {
        "space": optional(Terminal(" ")),
        "string": Regex(f'"{spelling.string}"'),
        "number": Regex(decimals.number(None, None) or ""),
        "any": Alt((Ref("object"), Ref("array"), Ref("string"), Ref("number"), *words)),
        "object": seq(Terminal("{"), listed([], seq(Ref("string"), COLON, Ref("any")), 0, None), Terminal("}")),
        "array": array([], Ref("any"), 0, None),
    }


def distinct_rules() -> dict[str, Node]:
    """As `common_rules`, for values that have one spelling each, spaces aside. So an object has at most one member."""
    words = [Terminal(word) for word in JSON.words]
    member = seq(Ref("distinct_string"), COLON, Ref("distinct_any"))
    kinds = [Ref(f"distinct_{kind}") for kind in ("object", "array", "string", "number")]
    return {
        "distinct_string": Regex(_ONE_STRING),
        "distinct_number": distinct_number(number({"minimum": -(10**15)}, "", whole=False)),
        "distinct_any": Alt((*kinds, *words)),
        "distinct_object": seq(Terminal("{"), listed([], member, 0, 1), Terminal("}")),
        "distinct_array": array([], Ref("distinct_any"), 0, None),
    }


def distinct_string(text: Node) -> Node:
    """The strings of `text` in one spelling, which is that of `json.dumps`."""
    if text == Ref("string"):
        return Ref("distinct_string")
    return NEVER if text == NEVER else Intersection((text, Regex(_ONE_STRING)), "uniqueItems")


def distinct_number(found: Node) -> Node:
    """The numbers of `found` without exponent, without zeros at the end of a fraction, and without a sign of zero."""
    return NEVER if found == NEVER else Intersection((found, Regex(_ONE_NUMBER)), "uniqueItems")


def simple_number(value: Any) -> Any:
    """A constant that has one spelling. Raises GrammarError for others."""
    if isinstance(value, list | dict) or (isinstance(value, float) and "e" in repr(value)):
        raise KeywordError(
            "uniqueItems is not supported for items of given objects, arrays and large numbers", "uniqueItems", ""
        )
    return int(value) if isinstance(value, float) and value.is_integer() else value


def array(first: Sequence[Node], rest: Node, least: int, most: int | None) -> Node:
    """An array of `least` to `most` items: those of `first`, then any number of `rest`."""
    return seq(Terminal("["), listed(first, rest, least, most), Terminal("]"))


def listed(first: Sequence[Node], rest: Node, least: int, most: int | None) -> Node:
    """`first`, then `rest` repeated to `least` to `most` items in all, with commas. All of `first` always come."""
    if least > _MOST_COUNTED:
        raise KeywordError(f"a minimum of {least} items is not supported", "minItems", "")
    most = None if most is None else min(most, max(least, _MOST_COUNTED))
    if first:
        commas = [part for node in first[1:] for part in (COMMA, node)]
        done = len(first)
        return seq(first[0], *commas, _repeat(seq(COMMA, rest), least - done, None if most is None else most - done))
    if most == 0:
        return EMPTY
    body = seq(rest, _repeat(seq(COMMA, rest), least - 1, None if most is None else most - 1))
    return body if least else optional(body)


def _repeat(part: Node, least: int, most: int | None) -> Node:
    return EMPTY if most == 0 else Repeat(part, max(0, least), most)


# ---------------------------------------------------------------- strings


def string(schema: Schema, at: str, spelling: Spelling = JSON) -> Node:
    """A string by `format`, `pattern`, `minLength` and `maxLength`. With any of these, its characters need no escape
    where there is a choice. `not` lists texts that it is not."""
    if "not" in schema:
        others = other_name(schema["not"]["enum"], spelling)
        rest = {key: value for key, value in schema.items() if key in _LIMITS}
        whole = string(rest, at, spelling)
        return (
            others
            if whole == Ref("string")
            else NEVER
            if whole == NEVER
            else Intersection((whole, others), f"not at {at}")
        )
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    if most is not None:
        if most < least:
            return NEVER
        most = max(least, min(int(most), _MOST_COUNTED))
    if least > _MOST_COUNTED:
        raise KeywordError(f"minLength at {at}: {least} is not supported", "minLength", at)
    name, expression = schema.get("format"), schema.get("pattern")
    form = FORMATS.get(name) if isinstance(name, str) else None  # other formats are only hints
    if expression is None and form is None:
        return _of_length(least, most, spelling)
    if expression is not None and form is not None:
        parts = [_matching(each, 0, None, at, spelling) for each in (form, _found(expression))]
        return _all_of([*parts, *_counted(least, most, spelling)], f"pattern and format at {at}")
    try:
        return _all_of([_matching(expression or form or "", least, most, at, spelling)], "")
    except _LengthsApart:
        parts = [_matching(expression or form or "", 0, None, at, spelling)]
        return _all_of([*parts, *_counted(least, most, spelling)], f"pattern and limits of length at {at}")


class _LengthsApart(Exception):
    """A pattern and limits of length cannot be one pattern."""


def _found(expression: str) -> str:
    """A pattern of texts in which `expression` is found. As it is where it has branches: these may have anchors."""
    if "|" in expression:
        return expression
    before = "" if expression.startswith("^") else r"[\s\S]*"
    return f"{before}{expression}" + ("" if expression.endswith("$") else r"[\s\S]*")


def found_name(expression: str, at: str, spelling: Spelling = JSON) -> Node:
    """A name in which the pattern is found. NEVER if there is none. Raises GrammarError."""
    try:
        inner = regex.in_json(_found(expression), plain=spelling.plain)
    except GrammarError as error:
        raise KeywordError(f"patternProperties at {at}: {error}", "patternProperties", at) from None
    return NEVER if inner is None else Regex(f'"(?:{inner})"')


def name_without(first: str, spelling: Spelling = JSON) -> Node:
    """A string that begins with none of these characters, of characters that need no escape."""
    taken = complement(tuple(sorted((ord(char), ord(char)) for char in set(first))))
    plain = pattern(spelling.plain)
    return Regex(f'"(?:{pattern(intersection(taken, spelling.plain))}{plain}*){{0,1}}"')


def _matching(expression: str, least: int, most: int | None, at: str, spelling: Spelling) -> Node:
    try:
        inner = regex.in_json(expression, least, most, spelling.plain)
    except regex.LengthError:
        raise _LengthsApart from None
    except GrammarError as error:
        raise KeywordError(f"pattern at {at}: {error}", "pattern", at) from None
    return NEVER if inner is None else Regex(f"(?:{inner})")


def _counted(least: int, most: int | None, spelling: Spelling) -> list[Node]:
    """A string's inside of `least` to `most` characters. Nothing if there are no limits."""
    one = f"(?:{pattern(spelling.plain)}|{spelling.escape})"
    return [Repeat(Regex(one), least, most)] if least or most is not None else []


def _all_of(parts: Sequence[Node], what: str) -> Node:
    """A string whose inside matches all parts. `what`: as `Intersection` has it."""
    if NEVER in parts:
        return NEVER
    if len(parts) == 1 and isinstance(parts[0], Regex):
        return Regex(f'"{parts[0].pattern}"')
    return seq(Terminal('"'), Intersection(tuple(parts), what), Terminal('"'))


def _of_length(least: int, most: int | None, spelling: Spelling) -> Node:
    plain = pattern(spelling.plain)
    if least == 0 and most is None:
        return Ref("string")
    if least > _MOST_STATES or (most or 0) > _MOST_STATES:
        return seq(Terminal('"'), Repeat(Regex(plain), least, most), Terminal('"'))
    if most is None:
        return Regex(f'"(?:{plain}|{spelling.escape}){{{least}}}{spelling.string}"')
    return Regex(f'"{plain}{{{least},{most}}}"')


def other_name(names: Iterable[str], spelling: Spelling = JSON) -> Node:
    """A string that is none of `names`, of characters that need no escape."""
    return _other_name(tuple(names), spelling.plain)


@lru_cache(256)  # schemas ask for the same names many times, once for each way to combine their parts
def _other_name(names: tuple[str, ...], plain: Ranges) -> Regex:
    trie: dict[str, Any] = {}
    written = [name for name in names if all(any(first <= ord(c) <= last for first, last in plain) for c in name)]
    for name in written:
        node = trie
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    any_name, taken = f'"{pattern(plain)}*"', tuple(f'"{name}"' for name in written)
    return Regex(f'"{_none_of(trie, plain)}"', (any_name, taken) if taken else None)


def _none_of(trie: dict[str, Any], plain: Ranges) -> str:
    following = sorted(char for char in trie if char)
    taken = complement(tuple((ord(char), ord(char)) for char in following))
    choices = [f"{pattern(intersection(taken, plain))}{pattern(plain)}*"]
    choices += [literal(char) + _none_of(trie[char], plain) for char in following]
    if "" not in trie:
        choices.append("")
    return f"(?:{'|'.join(choices)})"


# ---------------------------------------------------------------- numbers


def number(schema: Schema, at: str, *, whole: bool) -> Node:
    """A number, or integer, by its limits and `multipleOf`."""
    low, above = _limit(schema, "minimum", "exclusiveMinimum", max)
    high, below = _limit(schema, "maximum", "exclusiveMaximum", min)
    factor = schema.get("multipleOf")
    if factor is not None and not (whole and factor == 1):
        return _multiples(Fraction(str(factor)), low, high, above, below, at)
    if not whole:
        found = decimals.number(low, high, above=above, below=below)
    else:
        low = low + 1 if low is not None and above and low.denominator == 1 else low
        high = high - 1 if high is not None and below and high.denominator == 1 else high
        found = decimals.integer(low, high)
    return NEVER if found is None else Regex(found)


def _limit(schema: Schema, key: str, exclusive_key: str, stricter: Any) -> tuple[Fraction | None, bool]:
    """The stricter of an inclusive and an exclusive limit, and whether that one is exclusive."""
    limits = [Fraction(str(schema[k])) for k in (key, exclusive_key) if k in schema]
    if not limits:
        return None, False
    value = stricter(limits)
    return value, exclusive_key in schema and Fraction(str(schema[exclusive_key])) == value


def _multiples(
    factor: Fraction, low: Fraction | None, high: Fraction | None, above: bool, below: bool, at: str
) -> Node:
    if factor.denominator != 1:
        raise KeywordError(
            f"multipleOf at {at} is supported for whole numbers only, not {float(factor)}", "multipleOf", at
        )
    step = factor.numerator
    if low is None or high is None or (high - low) / step > _MOST_MULTIPLES:
        raise KeywordError(
            f"multipleOf at {at} is supported only with a minimum and a maximum that have no more than "
            f"{_MOST_MULTIPLES} multiples between them",
            "multipleOf",
            at,
        )
    first, last = -(-low // step) * step, high // step * step
    values = range(first, last + 1, step)
    return alt(Terminal(str(v)) for v in values if not (above and v == low) and not (below and v == high))
