"""Grammars of the parts of JSON: strings, numbers, literals, and lists of members with their commas."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from worker.structured_output.conversion import decimals
from worker.structured_output.conversion.formats import FORMATS
from worker.structured_output.conversion.spelling import JSON, Spelling
from worker.structured_output.error import GrammarError, KeywordError
from worker.structured_output.json_schema.conjunction import Schema, parts_of
from worker.structured_output.matching.intersections import intersection
from worker.structured_output.rules import regex
from worker.structured_output.rules.charset import SCALARS, complement, pattern
from worker.structured_output.rules.ebnf import (
    EMPTY,
    NEVER,
    Alt,
    Node,
    Ref,
    Regex,
    Repeat,
    Terminal,
    alt,
    optional,
    seq,
)
from worker.structured_output.rules.regex import Spell

_MAX_MULTIPLES = 1_000
_MAX_STATES = 128  # characters of a string that an automaton of xgrammar counts
_MAX_COUNTED = 100_000
_MAX_MATCHED_CHARS = 4_000  # characters of a string that are counted along with a pattern, by one automaton for both
_EXACT = 1 << 53  # beyond, doubles are whole numbers, of which they have more digits than their shortest text

_ONE_STRING = rf'"(?:{pattern(JSON.plain)}|\\(?:["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f])))*"'
# Fractions have up to 15 digits: then no two are read as the same double.
_FRACTIONS = "|".join(rf"[1-9][0-9]{{{n - 1}}}\.[0-9]{{0,{14 - n}}}[1-9]" for n in range(1, 15))
_ONE_NUMBER = rf"(?:0|-{{0,1}}[1-9][0-9]*|-{{0,1}}0\.[0-9]{{0,14}}[1-9]|-{{0,1}}(?:{_FRACTIONS}))"

# At most one space: a small model that may write any whitespace sometimes never stops.
COMMA = seq(Terminal(","), Ref("space"))
COLON = seq(Terminal(":"), Ref("space"))


def common_rules(spelling: Spelling = JSON) -> dict[str, Node]:
    """The rules that grammars of JSON refer to, among them `any` and `object` for values without a schema."""
    words = [Terminal(word) for word in spelling.words]
    return {
        "space": optional(Terminal(" ")),
        "string": Regex(f'"{spelling.string}"'),
        "number": Regex(decimals.ANY_NUMBER),
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
        "distinct_number": Regex(_ONE_NUMBER),
        "distinct_any": Alt((*kinds, *words)),
        "distinct_object": seq(Terminal("{"), listed([], member, 0, 1), Terminal("}")),
        "distinct_array": array([], Ref("distinct_any"), 0, None),
    }


def distinct_string(text: Node) -> Node:
    """The strings of `text` in one spelling, which is that of `json.dumps`."""
    if text == Ref("string"):
        return Ref("distinct_string")
    return intersection((text, Regex(_ONE_STRING)), "uniqueItems")


def distinct_number(found: Node) -> Node:
    """The numbers of `found` without exponent, without zeros at the end of a fraction, and without a sign of zero."""
    return intersection((found, Regex(_ONE_NUMBER)), "uniqueItems")


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
    if least > _MAX_COUNTED:
        raise KeywordError(f"a minimum of {least} items is not supported", "minItems", "")
    most = None if most is None else min(most, max(least, _MAX_COUNTED))
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
    """A string by `format`, `pattern`, `minLength` and `maxLength`. `not` lists texts that it is not."""
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    if most is not None:
        if most < least:
            return NEVER
        most = max(least, min(int(most), _MAX_COUNTED))
    if least > _MAX_COUNTED:
        raise KeywordError(f"minLength at {at}: {least} is not supported", "minLength", at)
    name, expression = schema.get("format"), schema.get("pattern")
    form = FORMATS.get(name) if isinstance(name, str) else None  # other formats are only hints
    others = schema["not"]["enum"] if "not" in schema else None
    said = {"format": form, "pattern": expression, "not": others, "minLength": least or None, "maxLength": most}
    keywords = [keyword for keyword, value in said.items() if value is not None]
    if not keywords:
        return Ref("string")

    try:
        parts = inside(form, expression, least, most, at, spelling.one)
        if spelling.unmarked is not None:
            with_bracket = inside(form, expression, least, most, at, spelling.with_bracket.one)
            parts = parts if parts == with_bracket else [*with_bracket, Regex(spelling.unmarked)]
        whole = _between_quotes(intersection(parts, f"{', '.join(keywords)} at {at}")) if parts else NEVER
        if others is None:
            return whole
        other = other_name(others, spelling)
        return other if not parts else intersection((whole, other), f"{', '.join(keywords)} at {at}")
    except KeywordError:
        raise
    except GrammarError as error:
        raise KeywordError(str(error), "pattern" if expression is not None else keywords[-1], at) from None


def narrowed_of_string(schema: Schema) -> list[str]:
    """The keywords of a string of which not all values can be written."""
    form, most = schema.get("format"), schema.get("maxLength", 0)
    is_matched = "pattern" in schema or form in FORMATS
    found = ["format"] if form in FORMATS else []
    return found + ["maxLength"] * (most > (_MAX_MATCHED_CHARS if is_matched else _MAX_COUNTED))


def inside(form: str | None, expression: str | None, least: int, most: int | None, at: str, spell: Spell) -> list[Node]:
    """The nodes of the inside of a string, which matches all of them."""
    limits = [Repeat(Regex(spell(SCALARS) or ""), least, most)] if least or most is not None else []
    try:
        patterns = () if expression is None else parts_of(expression)
        if form is None and len(patterns) == 1 and (one := regex.repeated(patterns[0], spell)) is not None:
            atom, low, high = one
            low, high = max(low, least), most if high is None else high if most is None else min(high, most)
            return [NEVER if high is not None and low > high else Repeat(Regex(atom), low, high)]
        found = [regex.found(each, spell) for each in patterns]
        if form is not None:
            found.append(regex.whole(form, spell))
        elif any(regex.keeps(each, least, most) for each in patterns):
            limits = []
    except GrammarError as error:
        raise KeywordError(f"pattern at {at}: {error}", "pattern", at) from None
    if found and limits and (most or 0) > _MAX_MATCHED_CHARS >= least:
        limits = [Repeat(limits[0].part, least, _MAX_MATCHED_CHARS)]
    return [*(NEVER if each is None else Regex(f"(?:{each})") for each in found), *limits]


def _between_quotes(inside: Node) -> Node:
    if inside == NEVER:
        return NEVER
    if isinstance(inside, Regex):
        return Regex(f'"{inside.pattern}"')
    if (
        isinstance(inside, Repeat)
        and isinstance(inside.part, Regex)
        and max(inside.least, inside.most or 0) <= _MAX_STATES
    ):
        most = "" if inside.most is None else inside.most
        return Regex(f'"{inside.part.pattern}{{{inside.least},{most}}}"')
    return seq(Terminal('"'), inside, Terminal('"'))


def found_name(expression: str, at: str, spelling: Spelling = JSON) -> Node:
    """A name in which the pattern is found. NEVER if there is none. Raises GrammarError."""
    try:
        inner = regex.found(expression, spelling.one)
    except GrammarError as error:
        raise KeywordError(f"patternProperties at {at}: {error}", "patternProperties", at) from None
    return NEVER if inner is None else Regex(f'"(?:{inner})"')


def any_name(spelling: Spelling = JSON) -> Node:
    """A name, of which `found_name` has those in which a pattern is found."""
    return Regex(f'"{spelling.any}*"')


def other_name(names: Iterable[str], spelling: Spelling = JSON) -> Node:
    """A string that is none of `names`."""
    return _other_name(tuple(names), spelling)


@lru_cache(256)  # schemas ask for the same names many times, once for each way to combine their parts
def _other_name(names: tuple[str, ...], spelling: Spelling) -> Regex:
    trie: dict[str, Any] = {}
    spelled = {name: [spelling.one(((ord(char), ord(char)),)) for char in name] for name in names}
    written = {name: "".join(filter(None, each)) for name, each in spelled.items() if None not in each}
    for name in written:
        node = trie
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    taken = tuple(f'"{each}"' for each in written.values())
    return Regex(f'"{_none_of(trie, spelling)}"', (f'"{spelling.any}*"', taken) if taken else None)


def _none_of(trie: dict[str, Any], spelling: Spelling) -> str:
    following = sorted(char for char in trie if char)
    other = spelling.one(complement(tuple((ord(char), ord(char)) for char in following)))
    choices = [f"{other}{spelling.any}*"]
    choices += [f"{spelling.one(((ord(char), ord(char)),))}{_none_of(trie[char], spelling)}" for char in following]
    if "" not in trie:
        choices.append("")
    return f"(?:{'|'.join(choices)})"


# ---------------------------------------------------------------- numbers


def number(schema: Schema, at: str, *, whole: bool) -> Node:
    """A number, or integer, by its limits and `multipleOf`."""
    low, above = _limit(schema, "minimum", "exclusiveMinimum", max)
    high, below = _limit(schema, "maximum", "exclusiveMaximum", min)
    for key, limit in (("minimum", low), ("maximum", None if high is None else -high)) if whole else ():
        if limit is not None and limit > decimals.MAX_COMPARED:
            raise KeywordError(f"{key} at {at}: numbers of more than 100 digits are not compared with it", key, at)
    factor = schema.get("multipleOf")
    if factor is not None and not (whole and factor == 1):
        return _multiples(Fraction(str(factor)), low, high, above, below, at)
    if not whole:
        found = decimals.number(low, high, above=above, below=below)
    else:
        low = low + 1 if low is not None and above and low.denominator == 1 else low
        high = high - 1 if high is not None and below and high.denominator == 1 else high
        found = decimals.integer(*decimals.compared(low, high))
    return NEVER if found is None else Regex(found)


def _limit(schema: Schema, key: str, exclusive_key: str, stricter: Any) -> tuple[Fraction | None, bool]:
    """The stricter of an inclusive and an exclusive limit, and whether that one is exclusive."""
    limits = {k: _exactly(schema[k]) for k in (key, exclusive_key) if k in schema}
    if not limits:
        return None, False
    value = stricter(limits.values())
    return value, limits.get(exclusive_key) == value


def _exactly(limit: int | float) -> Fraction:
    """The number that a limit stands for, exactly as whole numbers are compared with it, and otherwise as it is
    written."""
    return Fraction(limit if isinstance(limit, float) and abs(limit) > _EXACT else str(limit))


def _multiples(
    factor: Fraction, low: Fraction | None, high: Fraction | None, above: bool, below: bool, at: str
) -> Node:
    if factor.denominator != 1:
        raise KeywordError(
            f"multipleOf at {at} is supported for whole numbers only, not {float(factor)}", "multipleOf", at
        )
    step = factor.numerator
    if low is None or high is None or (high - low) / step > _MAX_MULTIPLES:
        raise KeywordError(
            f"multipleOf at {at} is supported only with a minimum and a maximum that have no more than "
            f"{_MAX_MULTIPLES} multiples between them",
            "multipleOf",
            at,
        )
    first, last = -(-low // step) * step, high // step * step
    values = range(first, last + 1, step)
    return alt(Terminal(str(v)) for v in values if not (above and v == low) and not (below and v == high))
