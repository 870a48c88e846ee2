"""Valid and invalid instances of a schema: generated, and judged by jsonschema, with formats, under the schema's own
draft.

Valid ones are what grammars may be asked for without a loss: members in the schema's order, no member that the schema
does not speak of, numbers of few digits. Invalid ones are valid ones with one or two things changed.
"""

import json
import random
import re
import re._constants as op
import re._parser as parser
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from bench.schemas.formats import FORMATS

_MAX_DEPTH = 12
_MAX_BYTES = 4_000
_ATTEMPTS = 40
_SAMPLES = {
    "date-time": ["2024-05-01T10:00:00Z", "1999-12-31T23:59:59.5+02:00"],
    "date": ["2024-02-29"],
    "time": ["10:00:00Z"],
    "duration": ["P1DT2H"],
    "email": ["ann@example.com"],
    "idn-email": ["ann@example.com"],
    "hostname": ["example.com"],
    "idn-hostname": ["example.com"],
    "ipv4": ["192.168.0.1"],
    "ipv6": ["2001:0:0:0:0:0:0:1"],
    "uri": ["https://example.com/a?b=c"],
    "url": ["https://example.com/a"],
    "uri-reference": ["https://example.com/a", "/a/b"],
    "iri": ["https://example.com/a"],
    "iri-reference": ["/a/b"],
    "uri-template": ["/a/{b}"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "json-pointer": ["/a/b"],
    "relative-json-pointer": ["1/a"],
    "regex": ["^a+$"],
}
_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_OTHERS: list[Any] = [None, True, 0, -1, 1.5, 10**6, "", "zz", "x" * 300, [], {}, [1], {"zz": 1}]


class Stuck(Exception):
    """No instance is found along this way."""


@dataclass(frozen=True)
class Instances:
    """Texts of instances in JSON, as a model would write them."""

    valid: tuple[str, ...]
    invalid: tuple[str, ...]


def judge(schema: Any) -> Any:
    """jsonschema's validator of a schema, with formats."""
    return validator_for(schema, default=Draft202012Validator)(schema, format_checker=FORMATS)


def instances(schema: Any, seed: str, valid: int = 4, invalid: int = 8) -> Instances:
    """At most these numbers of each; fewer where the generator finds no more."""
    choose = random.Random(seed)
    validator = judge(schema)
    maker = Maker(schema, choose)
    good: dict[str, Any] = {}
    for _ in range(_ATTEMPTS):
        if len(good) >= valid:
            break
        try:
            value = maker.make(schema, 0)
            if len(_text(value)) <= _MAX_BYTES and validator.is_valid(value):
                good.setdefault(_text(value), value)
        except (Stuck, RecursionError):
            continue
    bad: dict[str, None] = {}
    sources = list(good.values()) or [None, {}, [], ""]
    for _ in range(_ATTEMPTS):
        if len(bad) >= invalid:
            break
        value = mutated(choose.choice(sources), choose)
        if not validator.is_valid(value):
            bad.setdefault(_text(value))
    return Instances(tuple(good), tuple(bad))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class Maker:
    """Makes values that may satisfy a schema."""

    def __init__(self, root: Any, choose: random.Random) -> None:
        self._root, self._choose = root, choose

    def make(self, schema: Any, depth: int) -> Any:
        """A value for a part of the schema. Raises Stuck."""
        if depth > _MAX_DEPTH:
            raise Stuck
        if isinstance(schema, bool):
            if not schema:
                raise Stuck
            return self._choose.choice(["any", 1, True, None])
        schema = self._flat(schema, 0)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._choose.choice(schema["enum"])
        kinds = schema.get("type") or [k for k, keys in _KEYWORDS.items() if any(key in schema for key in keys)]
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        if depth > 3 and len(kinds) > 1:  # so that values end
            kinds = [k for k in kinds if k not in ("object", "array")] or kinds
        return self._of(self._choose.choice(kinds) if kinds else "string", schema, depth)

    def _flat(self, schema: Any, depth: int) -> dict[str, Any]:
        """A schema with one way through its references and combinations merged in."""
        if depth > 2 * _MAX_DEPTH:
            raise Stuck
        if isinstance(schema, bool):
            if not schema:
                raise Stuck
            return {}
        out = {k: v for k, v in schema.items() if k not in ("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else")}
        parts: list[Any] = []
        if isinstance(schema.get("$ref"), str):
            parts.append(self._resolve(schema["$ref"]))
        parts += schema.get("allOf", [])
        parts += [self._choose.choice(schema[key]) for key in ("anyOf", "oneOf") if schema.get(key)]
        if "if" in schema:
            parts.append(schema.get("else", True))
            if self._choose.random() < 0.5:
                parts[-1:] = [schema["if"], schema.get("then", True)]
        for part in parts:
            out = _merged(out, self._flat(part, depth + 1))
        return out

    def _resolve(self, ref: str) -> Any:
        target, pointer = self._root, ref.split("#", 1)[-1]
        if pointer and not pointer.startswith("/"):
            return _named(self._root, pointer)
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~").replace("%25", "%")
            try:
                target = target[int(key)] if isinstance(target, list) else target[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise Stuck from None
        return target

    def _of(self, kind: str, schema: dict[str, Any], depth: int) -> Any:
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number(schema, whole=kind == "integer")
            case "boolean":
                return self._choose.random() < 0.5
        return None

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        needed = set(required) if isinstance(required, list) else set()
        eagerness = self._choose.choice([0.0, 0.2, 0.6]) / (1 + depth // 2)
        wanted = {name for name in properties if self._choose.random() < eagerness} | needed
        while len(wanted) < min(schema.get("minProperties", 0), len(properties)):
            wanted.add(self._choose.choice(list(properties)))
        for key in ("dependencies", "dependentRequired"):
            for name, others in schema.get(key, {}).items():
                if name in wanted and isinstance(others, list):
                    wanted |= set(others)
        more = schema.get("additionalProperties")
        out: dict[str, Any] = {}
        for name in [*properties, *(n for n in schema.get("required", []) if n not in properties)]:
            if name in wanted:
                try:
                    out[name] = self.make(properties.get(name, True if more is None else more), depth + 1)
                except Stuck:
                    if name in needed:
                        raise
        patterns = schema.get("patternProperties", {})
        while len(out) < schema.get("minProperties", 0) or self._choose.random() < 0.3:
            if patterns and self._choose.random() < 0.7:
                pattern, sub = self._choose.choice(list(patterns.items()))
                name = self._matching(pattern)
            elif isinstance(more, dict) or more is True or (more is None and not properties and not patterns):
                names = schema.get("propertyNames")
                name = (
                    self._name(len(out)) if names is None else self.make(_merged({"type": "string"}, names), depth + 1)
                )
                sub = True if more is None else more
            else:
                break
            if name not in properties:
                out[name] = self.make(sub, depth + 1)
        return out

    def _name(self, number: int) -> str:
        """A name of a member that is not declared."""
        return f"key{number}"

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first = schema.get("prefixItems", [])
        items: Any = schema.get("items", not first)
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems", False)
        least, most = schema.get("minItems", 0), schema.get("maxItems", 1_000)
        count = min(most, max(least, len(first), self._choose.choice([0, 1, 2]) if depth < 6 else 0))
        out = [self.make(first[i] if i < len(first) else items, depth + 1) for i in range(count)]
        if "contains" in schema:
            out.append(self.make(schema["contains"], depth + 1))
        return out

    def _string(self, schema: dict[str, Any]) -> str:
        if schema.get("format") in _SAMPLES:
            return self._choose.choice(_SAMPLES[schema["format"]])
        if "pattern" in schema:
            return self._matching(schema["pattern"])
        least, most = int(schema.get("minLength", 0)), int(schema.get("maxLength", 10_000))
        text = self._choose.choice(["", "a", "some text", "Zoë", "x_1", "12", "a/b", 'say "hi"\n'])
        return (text + "b" * least)[: max(least, min(most, len(text)))]

    def _number(self, schema: dict[str, Any], *, whole: bool) -> Any:
        low: Any = schema.get("minimum")
        high: Any = schema.get("maximum")
        for key, bound in (("exclusiveMinimum", low), ("exclusiveMaximum", high)):
            given = schema.get(key)
            if given is not None and given is not False:
                edge = bound if given is True else given
                low, high = (edge + 1, high) if key == "exclusiveMinimum" else (low, edge - 1)
        step = schema.get("multipleOf", 1)
        start = low if low is not None else (min(0, high) if high is not None else 0)
        value = -(-start // step) * step + step * self._choose.choice([0, 0, 1, 2, 7])
        if high is not None and value > high:
            value = high // step * step
        if not whole and "multipleOf" not in schema and self._choose.random() < 0.3:
            return value + 0.5 if high is None or value + 0.5 <= high else value
        return int(value) if value == int(value) else value

    def _matching(self, pattern: str) -> str:
        """A text that a regular expression matches."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parsed = parser.parse(pattern)
                text = self._text_of(list(parsed))
                if re.search(pattern, text):
                    return text
        except (re.error, OverflowError):
            pass
        raise Stuck

    def _text_of(self, items: list[Any]) -> str:
        out = ""
        for kind, value in items:
            if kind is op.LITERAL:
                out += chr(value)
            elif kind is op.ANY:
                out += self._choose.choice("ax1")
            elif kind in (op.IN, op.NOT_LITERAL):
                out += self._one_of(kind, value)
            elif kind is op.BRANCH:
                out += self._text_of(list(self._choose.choice(value[1])))
            elif kind is op.SUBPATTERN:
                out += self._text_of(list(value[3]))
            elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
                least, most = int(value[0]), min(int(value[1]), int(value[0]) + 2)
                out += "".join(self._text_of(list(value[2])) for _ in range(self._choose.randint(least, most)))
            elif kind is not op.AT:
                raise Stuck
        return out

    def _one_of(self, kind: Any, value: Any) -> str:
        if kind is op.NOT_LITERAL:
            return "a" if value != ord("a") else "b"
        letters = "abzAZ019_-. /:@é"
        if value[0][0] is op.NEGATE:
            taken = [letter for letter in letters if not _is_in(value[1:], letter)]
        else:
            taken = [letter for letter in letters if _is_in(value, letter)]
            taken = taken or [chr(v if k is op.LITERAL else v[0]) for k, v in value if k in (op.LITERAL, op.RANGE)]
        if not taken:
            raise Stuck
        return self._choose.choice(taken)


def _is_in(members: Any, letter: str) -> bool:
    tests = {op.CATEGORY_DIGIT: r"\d", op.CATEGORY_SPACE: r"\s", op.CATEGORY_WORD: r"\w"}
    tests |= {op.CATEGORY_NOT_DIGIT: r"\D", op.CATEGORY_NOT_SPACE: r"\S", op.CATEGORY_NOT_WORD: r"\W"}
    for kind, value in members:
        if kind is op.LITERAL and chr(value) == letter:
            return True
        if kind is op.RANGE and value[0] <= ord(letter) <= value[1]:
            return True
        if kind is op.CATEGORY and re.fullmatch(tests[value], letter):
            return True
    return False


def _named(schema: Any, name: str) -> Any:
    """The part of a schema that has this name."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if part.get("$anchor") == name or part.get("$id") == f"#{name}" or part.get("id") == f"#{name}":
                return part
            todo += part.values()
        elif isinstance(part, list):
            todo += part
    raise Stuck


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Roughly the conjunction of two schemas: what it makes is judged later."""
    out = {**a, **b}
    for key in a.keys() & b.keys():
        left, right = a[key], b[key]
        if key in ("properties", "patternProperties", "dependencies", "dependentRequired"):
            shared = {k: {"allOf": [left[k], right[k]]} for k in left.keys() & right.keys()}
            out[key] = {**left, **right, **shared}
        elif key == "required" and isinstance(left, list) and isinstance(right, list):
            out[key] = list(dict.fromkeys(left + right))
        elif key in ("minimum", "minLength", "minItems", "minProperties"):
            out[key] = max(left, right)
        elif key in ("maximum", "maxLength", "maxItems", "maxProperties"):
            out[key] = min(left, right)
        elif key == "enum":
            out[key] = [value for value in left if value in right] or left
        elif key == "additionalProperties" and False in (left, right):
            out[key] = False
        elif key == "items" and isinstance(left, dict) and isinstance(right, dict):
            out[key] = {"allOf": [left, right]}
    return out


def mutated(value: Any, choose: random.Random) -> Any:
    """The value with one or two of its parts changed."""
    value = json.loads(json.dumps(value))
    for _ in range(choose.choice([1, 1, 2])):
        holder, key = choose.choice([(None, None), *_places(value)])
        if holder is None:
            value = _changed(value, choose)
        elif choose.random() < 0.3:
            del holder[key]
        else:
            holder[key] = _changed(holder[key], choose)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(pairs):
        yield value, key
        yield from _places(each)


def _changed(value: Any, choose: random.Random) -> Any:
    if isinstance(value, dict) and choose.random() < 0.6:
        return {**value, choose.choice(["zz_other", "Name", "x-y"]): choose.choice(_OTHERS)}
    if isinstance(value, list) and value and choose.random() < 0.6:
        return choose.choice([[], [*value, value[0]], value[1:], value * 3])
    if isinstance(value, str) and choose.random() < 0.5:
        return choose.choice([value + "!", " " + value, value[:-1], value.upper(), value * 20])
    if isinstance(value, int | float) and not isinstance(value, bool) and choose.random() < 0.5:
        return choose.choice([-value - 1, value + 0.25, value * 1000 + 7, value - 1])
    return choose.choice(_OTHERS)
