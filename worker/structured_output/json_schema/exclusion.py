"""Whether two JSON schemas exclude each other. `oneOf` is the same as `anyOf` if its branches do."""

from collections.abc import Callable
from typing import Any

from jsonschema import Draft202012Validator

from worker.structured_output.json_schema.conjunction import Schema

_ALL = frozenset(("null", "boolean", "object", "array", "number", "string"))


class Exclusion:
    """Search for proofs that no value generated for one schema validates against another."""

    def __init__(
        self,
        validator: Draft202012Validator,
        simple: Callable[[Any, str], list[Schema]],
        generated_types: Callable[[Schema], list[str]],
    ) -> None:
        """`validator` knows the whole schema. `simple` splits a schema into alternatives without references and
        combinations. `generated_types` returns the types of the values that are generated for such an alternative."""
        self._validator = validator
        self._simple = simple
        self._generated_types = generated_types

    def never(self, made_for: list[Schema], validated_by: list[Schema], depth: int = 0) -> bool:
        """Whether certainly no value generated for one of `made_for` validates against one of `validated_by`. False if
        no proof is found."""
        return depth < 8 and all(self._never(a, b, depth) for a in made_for for b in validated_by)

    def _never(self, a: Schema, b: Schema, depth: int) -> bool:
        for one, other in ((a, b), (b, a)):
            values = [one["const"]] if "const" in one else one.get("enum")
            if values is not None:
                own, validator = self._validator.evolve(schema=one), self._validator.evolve(schema=other)
                return not any(own.is_valid(v) and validator.is_valid(v) for v in values)
        made, admitted = self._types(self._generated_types(a)), self._types(b.get("type", []))
        return not (made & admitted) or (made & admitted == {"object"} and self._never_objects(a, b, depth))

    @staticmethod
    def _types(types: str | list[str]) -> frozenset[str]:
        """Set of the types, with integers as numbers. All types if none is named."""
        named = [types] if isinstance(types, str) else types
        return frozenset("number" if t == "integer" else t for t in named) or _ALL

    def _never_objects(self, a: Schema, b: Schema, depth: int) -> bool:
        mine, theirs = a.get("properties", {}), b.get("properties", {})
        always = set(a.get("required", []))
        named = always | set(mine)
        closed = bool(named) and a.get("additionalProperties", False) is False
        if closed and any(key not in named for key in b.get("required", [])):
            return True
        if b.get("additionalProperties") is False and "patternProperties" not in b and always - set(theirs):
            return True
        return any(
            self.never(self._simple(mine[key], "#"), self._simple(theirs[key], "#"), depth + 1)
            for key in mine
            if key in always and key in theirs
        )
