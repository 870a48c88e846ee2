"""Negation of JSON schemas, for `not`, and for `if` where it does not hold."""

from itertools import pairwise
from typing import Any

from worker.structured_output.json_schema.conjunction import Schema

_ALL = ("null", "boolean", "object", "array", "number", "string")
_TYPE_OF: dict[type, str] = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
_REVERSED_COUNTS = {"minLength": "string", "minItems": "array", "minProperties": "object"}


def negated(schema: Schema) -> tuple[list[Schema], bool]:
    """Alternatives whose values do not satisfy `schema`, which has no reference and no combination; and whether these
    are all of its complement. Keywords that cannot be negated add no alternative."""
    found: list[Schema] = []
    whole = True
    for key, value in schema.items():
        more = _negated(key, value, schema)
        if key == "type" and "number" not in value and "integer" in value:
            whole = False  # fractions
        if more is None:
            whole = False
        else:
            found += more
    return found, whole


def _negated(key: str, value: Any, schema: Schema) -> list[Schema] | None:
    match key:
        case "type":
            return _other_types([value] if isinstance(value, str) else value)
        case "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties":
            return [
                {"type": "object", "required": [name], "properties": {name: {"not": sub}}}
                for name, sub in value.items()
            ]
        case "const":
            return _other_values([value])
        case "enum":
            return None if "const" in schema else _other_values(value)
        case "minLength" | "minItems" | "minProperties":
            most = "max" + key[3:]
            return [{"type": _REVERSED_COUNTS[key], most: int(value) - 1}] if value > 0 else []
        case "maxLength" | "maxItems":
            least = "min" + key[3:]
            return [{"type": _REVERSED_COUNTS[least], least: int(value) + 1}]
        case "minimum":
            return [{"type": "number", "exclusiveMaximum": value}]
        case "maximum":
            return [{"type": "number", "exclusiveMinimum": value}]
        case "exclusiveMinimum":
            return [{"type": "number", "maximum": value}]
        case "exclusiveMaximum":
            return [{"type": "number", "minimum": value}]
    return None


def _other_types(types: list[str]) -> list[Schema] | None:
    """None if fractions alone are left of the numbers, which no keyword says."""
    if "integer" in types and "number" not in types:
        others = [t for t in _ALL if t not in (*types, "number")]
        return [{"type": others}] if others else None
    others = [t for t in _ALL if t not in types]
    return [{"type": others}] if others else []


def _other_values(values: list[Any]) -> list[Schema] | None:
    """None if a value is an object, an array or a fraction."""
    if any(type(each) not in _TYPE_OF or isinstance(each, float) for each in values):
        return None
    out = _other_types(sorted({_TYPE_OF[type(each)] for each in values})) or []
    texts = [each for each in values if isinstance(each, str)]
    if texts:
        out.append({"type": "string", "not": {"enum": texts}})
    flags = [each for each in values if isinstance(each, bool)]
    out += [{"enum": [flag]} for flag in (False, True) if flags and flag not in flags]
    numbers = sorted(each for each in values if isinstance(each, int) and not isinstance(each, bool))
    if numbers:
        out += [{"type": "number", "exclusiveMaximum": numbers[0]}, {"type": "number", "exclusiveMinimum": numbers[-1]}]
        out += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in pairwise(numbers)
        ]
    return out
