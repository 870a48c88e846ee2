"""Conjunction of two JSON schemas, as `allOf` means it, and keywords next to `$ref` and `anyOf`."""

import json
import re
from typing import Any

from worker.structured_output.error import KeywordError

Schema = dict[str, Any]

_LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_BOTH = ("additionalProperties", "items", "propertyNames")  # schemas that apply to the same values
_NUMBERS = {"integer", "number"}


class Patterns(str):
    """Several values of `pattern` as one that Python's `re` can read. `parts` has them."""

    parts: tuple[str, ...]

    @classmethod
    def of(cls, *patterns: str) -> "Patterns":
        """All of these, of which some may have parts themselves."""
        parts = tuple(dict.fromkeys(part for each in patterns for part in parts_of(each)))
        made = cls("^" + "".join(rf"(?=[\s\S]*(?:{part}))" for part in parts))
        made.parts = parts
        return made


def parts_of(pattern: str) -> tuple[str, ...]:
    """The patterns that a value of `pattern` stands for."""
    return pattern.parts if isinstance(pattern, Patterns) else (pattern,)


def conjoin(a: Schema, b: Schema, at: str) -> Schema | None:
    """A schema for the values that satisfy both `a` and `b`, or None if no value does. Neither has `$ref`, `allOf`,
    `anyOf` or `oneOf`. Raises GrammarError, naming `at`, for keywords that cannot be combined."""
    out: Schema = {**a, **b}
    for key in a.keys() & b.keys():
        if key in _LARGER:
            out[key] = max(a[key], b[key])
        elif key in _SMALLER:
            out[key] = min(a[key], b[key])
        elif key in _BOTH:
            out[key] = both(a[key], b[key])
        elif key == "patternProperties":
            pass  # below
        elif key == "pattern":
            out[key] = a[key] if a[key] == b[key] else Patterns.of(a[key], b[key])
        elif key == "not":  # of texts
            out[key] = {"enum": [*a[key]["enum"], *b[key]["enum"]]}
        elif key == "uniqueItems":
            out[key] = a[key] or b[key]
        elif key == "required":
            out[key] = list(dict.fromkeys(a[key] + b[key]))
        elif key not in ("type", "enum", "const", "properties", "prefixItems") and a[key] != b[key]:
            raise KeywordError(
                f"{key} is given twice, by {at} and by a schema it is combined with, which is not supported", key, at
            )
    if "prefixItems" in out and _items(a) and _items(b) and _items(a) != _items(b):
        raise KeywordError(
            f"prefixItems at {at} is combined with another schema of the items, which is not supported",
            "prefixItems",
            at,
        )
    out |= _properties(a, b)
    if "patternProperties" in out:
        out["patternProperties"] = {**_patterns(a, b), **_patterns(b, a)}
    if "type" in a and "type" in b:
        out["type"] = _types(a["type"], b["type"])
        if not out["type"]:
            return None
    values = _values(a, b)
    if values is not None:
        out.pop("const", None)
        out["enum"] = values
    return out


def both(a: Any, b: Any) -> Any:
    """A schema for the values that satisfy both `a` and `b`. They are combined later: they may refer to each other."""
    if a is True or a == b:
        return b
    if b is True:
        return a
    return False if a is False or b is False else {"allOf": [a, b]}


def _items(schema: Schema) -> Schema:
    return {key: schema[key] for key in ("prefixItems", "items") if key in schema}


def _properties(a: Schema, b: Schema) -> Schema:
    """The `properties` of both. A property that only one schema names must also satisfy the other's
    `additionalProperties`."""
    if "properties" not in a and "properties" not in b:
        return {}
    mine, theirs = a.get("properties", {}), b.get("properties", {})
    out = {}
    for key in (*mine, *(k for k in theirs if k not in mine)):
        left = mine.get(key, _speaks_of(a, key) or a.get("additionalProperties", True))
        right = theirs.get(key, _speaks_of(b, key) or b.get("additionalProperties", True))
        out[key] = both(left, right)
    return {"properties": out}


def _patterns(a: Schema, b: Schema) -> Schema:
    """The `patternProperties` of `a`, whose members must also satisfy what `b` says of them. What it says only of those
    without a name or a pattern is applied to all."""
    theirs, others = b.get("patternProperties", {}), b.get("additionalProperties", True)
    mine = a.get("patternProperties", {})
    return {pattern: both(value, theirs.get(pattern, others)) for pattern, value in mine.items()}


def _speaks_of(schema: Schema, name: str) -> bool:
    """Whether a pattern of `patternProperties` is found in the name."""
    try:
        return any(re.search(each, name) for each in schema.get("patternProperties", {}))
    except re.error:
        return False


def _types(a: str | list[str], b: str | list[str]) -> list[str]:
    left, right = ([t] if isinstance(t, str) else t for t in (a, b))
    out = [t for t in left if t in right]
    if "integer" not in out and _NUMBERS & {*left} and _NUMBERS & {*right} and "number" not in out:
        out.append("integer")  # one schema says integer, the other number
    return out


def _values(a: Schema, b: Schema) -> list[Any] | None:
    """The values that `enum` and `const` of both schemas admit, or None if neither has these keywords."""
    lists = [s["enum"] for s in (a, b) if "enum" in s] + [[s["const"]] for s in (a, b) if "const" in s]
    if not lists:
        return None
    texts = [{json.dumps(v, sort_keys=True) for v in values} for values in lists[1:]]
    return [v for v in lists[0] if all(json.dumps(v, sort_keys=True) in text for text in texts)]
