"""Lower limits of the number of values that satisfy a JSON schema, for arrays of unique items."""

from collections.abc import Callable
from typing import Any

from worker.structured_output.conversion.formats import FORMATS
from worker.structured_output.json_schema.conjunction import Schema
from worker.structured_output.json_schema.keywords import generated_types

_MAX_DEPTH = 4
_MAX_NEEDED_VALUES = 90  # fewer than the strings of one character, and than those of each format


class ValueCounts:
    """Counts of the values of one schema's parts."""

    def __init__(self, simple: Callable[[Any, str], list[Schema]], listed: Callable[[Schema], list[Any]]) -> None:
        """`simple` splits a schema into alternatives without references and combinations. `listed` returns the values
        of an alternative that lists them."""
        self._simple, self._listed = simple, listed

    def has(self, schema: Any, count: int, at: str, depth: int = 0) -> bool:
        """Whether certainly at least `count` values satisfy the schema, if any does. False if there is no telling."""
        if count <= 1:
            return True
        if depth > _MAX_DEPTH or count > _MAX_NEEDED_VALUES:
            return False
        return any(self._has(part, count, at, depth) for part in self._simple(schema, at))

    def _has(self, part: Schema, count: int, at: str, depth: int) -> bool:
        if "enum" in part or "const" in part:
            listed = self._listed(part)
            return sum(all(a != b for b in listed[:i]) for i, a in enumerate(listed)) >= count
        types = generated_types(part)
        return not types or any(self._has_of_type(t, part, count, at, depth) for t in types)

    def _has_of_type(self, type_: str, part: Schema, count: int, at: str, depth: int) -> bool:
        match type_:
            case "boolean":
                return count <= 2
            case "string":
                limited = "pattern" in part or "not" in part or part.get("maxLength", 1) < 1
                if part.get("format") in FORMATS:
                    return not limited and not {"minLength", "maxLength"} & part.keys()
                return not limited
            case "integer" | "number":
                if "multipleOf" in part:
                    return False
                low = max((part[k] for k in ("minimum", "exclusiveMinimum") if k in part), default=-1e14)
                high = min((part[k] for k in ("maximum", "exclusiveMaximum") if k in part), default=1e14)
                return bool(high - low >= count + 1)
            case "array":
                return not ({"prefixItems", "maxItems", "uniqueItems"} & part.keys()) and part.get("items") is not False
            case "object":
                named = part.get("properties", {})
                free = part.get("additionalProperties", True) is not False
                if not named and not part.get("required"):
                    return free and not {"patternProperties", "propertyNames", "maxProperties"} & part.keys()
                needed = (named.get(name, True) for name in part.get("required", ()))
                return any(self.has(each, count, at, depth + 1) for each in needed)
        return False
