"""Values that validators accept, as documents have them: quotes, paths, line ends, markup, emoji, long texts, long
numbers. Grammars must be able to write all of them, the order of members and spaces aside.
"""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

from jsonschema import ValidationError
from jsonschema.validators import extend

from bench.schemas.instances import Maker, Stuck, judge, mutated

_TEXTS = (
    *("", "a", "Zoë", "12", "some text", 'She said "yes"', "it's", "C:\\Users\\ann", "first\nsecond\r\n\tthird"),
    *("<b>bold</b> & a < b", "</parameter>", "https://example.com/a%20b?q=1#x", "a/b", "Grüße aus Köln", "図書館"),
    *("😀👍🏽", "line\u2028separator", "\u0001\x7f", "null", "{}", '{"a": [1]}', "50 %", "~/.config", "--flag=1"),
    *("2024-05-01", "ann@example.com", "x" * 130, 'He wrote: "' + "many words, " * 40 + '"', "\\d+\\.\\d+", "`code`"),
)
_INTEGERS = (
    *(0, 1, -1, 7, 42, 100, 255, 65_535, 10**6, 1_719_859_200_000, 4_111_111_111_111_111, 2**53 + 1, 2**63 - 1),
    *(-(2**63), 1_234_567_890_123_456_789, 18_446_744_073_709_551_615, 10**24),
)
_FRACTIONS = (0.5, 1.5, -2.25, 0.1 + 0.2, 3.141592653589793, 1e-7, 2.5e-10, 99.99, 1e21, 6.02214076e23, 5e-324, 1e100)
_FORMATS = {
    "date-time": ["2024-05-01T10:00:00.123456789Z", "2024-05-01T10:00:00-05:00"],
    "time": ["10:00:00.5+02:00"],
    "email": ["o'brien+tag@mail.example.com", "first.last@sub-domain.example.org"],
    "hostname": ["localhost", "a-b.c1.example.com"],
    "ipv6": ["::1", "2001:db8::8a2e:370:7334", "fe80::1"],
    "uri": ["https://user@example.com:8080/a%20b/?q=%22#top", "mailto:a@b.c", "http://[::1]/", "urn:isbn:0451450523"],
    "uri-reference": ["../a?b=c", "#top", ""],
    "iri": ["https://example.com/ä"],
    "uuid": ["123E4567-E89B-12D3-A456-426614174000"],
    "regex": ["^(a|b)+\\d{2,}$"],
    "json-pointer": ["/a~1b/0", ""],
}
_AROUND = ("", "", "", "x", " ", '"', "é", "1", "\n", "/path")
_ATTEMPTS = 4  # for each value that is wanted
_MAX_BYTES = 4_000


class NaturalMaker(Maker):
    """Makes such values."""

    def _name(self, number: int) -> str:
        return self._choose.choice(
            [f"key{number}", f'a "quoted" {number}', f"C:\\{number}", f"é{number}", f"x-{number}"]
        )

    def make(self, schema: Any, depth: int) -> Any:
        if schema is True or schema == {}:
            return self._choose.choice([*_TEXTS, *_INTEGERS, *_FRACTIONS, None, True, [], {}, [{"a": '"'}]])
        return super().make(schema, depth)

    def _string(self, schema: dict[str, Any]) -> str:
        if schema.get("format") in _FORMATS and self._choose.random() < 0.7:
            return self._choose.choice(_FORMATS[schema["format"]])
        if "pattern" in schema or "format" in schema:
            return super()._string(schema)
        least, most = int(schema.get("minLength", 0)), int(schema.get("maxLength", 10_000))
        text = self._choose.choice(_TEXTS)
        while len(text) < least:
            text += self._choose.choice(_TEXTS[1:])
        return text[: max(least, min(most, len(text)))]

    def _number(self, schema: dict[str, Any], *, whole: bool) -> Any:
        usual = super()._number(schema, whole=whole)
        if "multipleOf" in schema or self._choose.random() < 0.3:
            return usual
        low, high = (schema.get(key) for key in ("minimum", "maximum"))
        found = [each for each in (_INTEGERS if whole else (*_INTEGERS, *_FRACTIONS)) if _is_within(each, low, high)]
        return self._choose.choice(found) if found else usual

    def _matching(self, pattern: str) -> str:
        """A text in which the pattern is found, with something around it if there still is."""
        inner = super()._matching(pattern)
        text = self._choose.choice(_AROUND) + inner + self._choose.choice(_AROUND)
        return text if _is_found(pattern, text) else inner


def _is_within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def natural(schema: Any, seed: str, count: int) -> tuple[list[Any], list[Any]]:
    """At most `count` different values that satisfy the schema, and as many that do not, made of these."""
    choose = random.Random(seed)
    validator, maker = judge(schema), NaturalMaker(schema, choose)
    as_ecma = extend(type(validator), {"pattern": _pattern_of_ecma})(schema, format_checker=validator.format_checker)
    has_patterns = '"pattern"' in json.dumps(schema)
    good: dict[str, Any] = {}
    for _ in range(_ATTEMPTS * count):
        if len(good) >= count:
            break
        try:
            value = maker.make(schema, 0)
            text = json.dumps(value)
            if len(text) > _MAX_BYTES or text in good:
                continue
            if validator.is_valid(value) and (not has_patterns or as_ecma.is_valid(value)):
                good[text] = value
        except (Stuck, RecursionError):
            continue
    bad = [changed for value in good.values() if not validator.is_valid(changed := mutated(value, choose))]
    return list(good.values()), bad


def _is_found(pattern: str, text: str) -> bool:
    r"""Whether ECMA 262 finds the pattern, for which \w and \d are in ASCII, and $ is the end alone."""
    at_end = re.sub(r"(?<!\\)\$(?=$|\||\))", r"\\Z", pattern)
    try:
        return re.search(at_end, text, re.ASCII) is not None
    except re.error:  # a set has what looks like an end
        return re.search(pattern, text, re.ASCII) is not None


def _pattern_of_ecma(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _is_found(pattern, value):
        yield ValidationError("the pattern is not found")


def is_writable(matcher: Any, value: Any) -> bool:
    """Whether a grammar allows the value in JSON, with its members in some order. `matcher`: at its beginning."""
    if matcher.accept_string(json.dumps(value, ensure_ascii=False)):
        return bool(matcher.is_completed())
    return _ValueWriter(matcher).writes(value) and bool(matcher.is_completed())


class _ValueWriter:
    """Writes one value. Members come in the order in which the grammar has them: one that leads past others, which
    could have come before, is not next."""

    def __init__(self, matcher: Any) -> None:
        self._matcher, self._steps = matcher, 0

    def writes(self, value: Any, before: str = "") -> bool:
        if isinstance(value, dict) and value:
            return self._takes(before + "{") and self._members(value) and self._takes("}")
        if isinstance(value, list) and value:
            items = (self.writes(each, ", " if i else "") for i, each in enumerate(value))
            return self._takes(before + "[") and all(items) and self._takes("]")
        return self._takes(before + json.dumps(value, ensure_ascii=False))

    def _members(self, value: dict[str, Any]) -> bool:
        names = {name: json.dumps(name, ensure_ascii=False) + ": " for name in value}
        before = ""
        while names:
            possible = [name for name, text in names.items() if self._could(before + text)]
            now = self._steps
            for name in possible:
                written = self.writes(value[name], before + names[name])
                if written and all(self._could(", " + names[each]) for each in possible if each != name):
                    break
                self._back(now)
            else:
                return False
            del names[name]
            before = ", "
        return True

    def _takes(self, text: str) -> bool:
        taken = bool(self._matcher.accept_string(text))
        self._steps += taken
        return taken

    def _could(self, text: str) -> bool:
        now = self._steps
        could = self._takes(text)
        self._back(now)
        return could

    def _back(self, steps: int) -> None:
        if self._steps > steps:
            self._matcher.rollback(self._steps - steps)
            self._steps = steps


# ---------------------------------------------------------------- schemas

_PATTERNS = (
    *("^sk-", "@", r"\.py$", "[A-Z]", r"\d", r"^\d+\.\d+\.\d+", "^(http|ftp)://", r"\S", "^/", "^https?://", r"^\S+$"),
    *("a|b", "^a|b$", r"^[a-z][a-z0-9_-]*$", r"^.{1,50}$", r"^[\s\S]+$", r"^[^\n]+$", r"^\d{4}-\d{2}$", "^$|^x", r"\s"),
    *(r'^[^"]*$', r"^[A-Z]{2,3}$", "^#[0-9a-fA-F]{6}$", r"\\", '"', r"^[\w.-]+@[\w-]+\.[a-z]{2,}$", "é|ü"),
)
_LIMITS = (0, 0.5, 1, 10, 100, -5, 1e-7, 99.99, 2**53, 18_446_744_073_709_551_615, 1e21, 10**19)


def made_schema(seed: int) -> dict[str, Any]:
    """A schema of the kinds in which grammars are easily too narrow: strings and numbers with limits, and names."""
    choose = random.Random(seed)

    def string() -> dict[str, Any]:
        out: dict[str, Any] = {"type": "string"}
        if choose.random() < 0.5:
            out["pattern"] = choose.choice(_PATTERNS)
        if choose.random() < 0.6:
            out["maxLength"] = choose.choice([10, 40, 130, 300, 2_000, 100_000])
        if choose.random() < 0.4:
            out["minLength"] = choose.choice([1, 2, 5, 8])
        if len(out) == 1:
            out |= choose.choice(
                [{"format": choose.choice(list(_FORMATS))}, {"not": {"const": "a"}}, {"minLength": 200}]
            )
        return out

    def number() -> dict[str, Any]:
        out: dict[str, Any] = {"type": choose.choice(["integer", "number"])}
        low, high = sorted(choose.sample(_LIMITS, 2))
        if choose.random() < 0.5:
            out[choose.choice(["minimum", "exclusiveMinimum"])] = low
        if choose.random() < 0.3:
            out[choose.choice(["maximum", "exclusiveMaximum"])] = high
        return out

    def names() -> dict[str, Any]:
        kind = choose.randrange(3)
        if kind == 0:
            found = choose.sample(["^x-", "_id$", "^[a-z]+$", "é"], 2)
            return {
                "type": "object",
                "patternProperties": {each: leaf() for each in found},
                "additionalProperties": leaf(),
            }
        if kind == 1:
            return {"type": "object", "propertyNames": string(), "additionalProperties": leaf()}
        return {"type": "object", "properties": {"a": leaf(), 'b"c': leaf()}, "additionalProperties": leaf()}

    def leaf() -> dict[str, Any]:
        return choose.choice([string, string, number])()

    def some() -> dict[str, Any]:
        return choose.choice([leaf, leaf, names, lambda: {"type": "array", "items": leaf()}])()

    properties = {name: some() for name in choose.sample(["id", "name", "text", "path", "n", "x-y"], 3)}
    needed = [name for name in properties if choose.random() < 0.7]
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}
