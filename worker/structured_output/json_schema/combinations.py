"""Combinations of JSON schemas (`$ref`, `allOf`, `anyOf`, `oneOf`, `not`, `if`, `dependent*`) as alternatives."""

import json
from itertools import chain
from typing import Any

from jsonschema import Draft202012Validator

from worker.structured_output.error import ANY, GrammarError, KeywordError
from worker.structured_output.json_schema import drafts
from worker.structured_output.json_schema.conjunction import Schema, conjoin
from worker.structured_output.json_schema.exclusion import Exclusion
from worker.structured_output.json_schema.keywords import ASSERTIONS, generated_types
from worker.structured_output.json_schema.negation import negated
from worker.structured_output.json_schema.references import SchemaReferences

COMBINED = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "dependentRequired", "dependentSchemas", "not", "if")
_UNSUPPORTED = ("dependencies", "contains", "unevaluatedItems", "$recursiveRef")
_MAX_ALTERNATIVES = 1024
_MAX_DECIDING_DEPTH = 2


class Combinations:
    """Splits the parts of one schema into alternatives.

    `narrowed`: how many parts it has made narrower than they are. `narrowed_at`: their keywords and places.
    """

    def __init__(self, root: Any, references: SchemaReferences, validator: Draft202012Validator) -> None:
        """`root`: the whole schema, in the words of 2020-12."""
        self._root, self._references = root, references
        self._exclusion = Exclusion(validator, self._exact, generated_types)
        self._deciding = 0  # calls of `_is_decided` that have not returned
        self._decided: dict[str, tuple[bool, int]] = {}  # answers of `_is_decided`, and how often they narrowed
        self.narrowed = 0
        self.narrowed_at: dict[str, None] = {}

    def simple(self, schema: Any, at: str, depth: int = 0) -> list[Schema]:
        """Splits a schema into alternatives that have no `$ref`, `allOf`, `anyOf` or `oneOf` themselves."""
        if isinstance(schema, bool):
            return [{}] if schema else []
        if depth > 32:
            raise KeywordError(f"the schema at {at} refers to itself without end", ANY, at)
        self.refuse(schema, at)
        out: list[Schema] = [{k: v for k, v in schema.items() if k in ASSERTIONS}]
        for key in ("$ref", "$dynamicRef"):
            if key in schema:
                out = self._product(out, self.simple(*self._references.resolve(schema[key], at, key), depth + 1), at)
        for name, others in schema.get("dependentRequired", {}).items():
            there: list[Schema] = [{"required": [name, *(other for other in others if other != name)]}]
            out = self._product(out, [{"properties": {name: False}}, *there], at)
        for name, part in schema.get("dependentSchemas", {}).items():
            there = self.simple(part, f"{at}/dependentSchemas/{name}", depth + 1)
            there = self._product([{"required": [name]}], there, at)
            out = self._product(out, [{"properties": {name: False}}, *there], at)
        for i, part in enumerate(schema.get("allOf", ())):
            out = self._product(out, self.simple(part, f"{at}/allOf/{i}", depth + 1), at)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                before = self.narrowed
                branches = [self.simple(s, f"{at}/{key}/{i}", depth + 1) for i, s in enumerate(schema[key])]
                branches = [self._product(out, branch, at) for branch in branches]
                if key == "oneOf":
                    exact = self.narrowed == before
                    branches = self._exclusive(branches, schema["oneOf"], at, depth, exact=exact)
                out = [simple for branch in branches for simple in branch]
        if "not" in schema:
            out = self._product(out, self._complement(schema["not"], f"{at}/not", at, depth), at)
        if "if" in schema:
            there = self.simple(schema["if"], f"{at}/if", depth + 1)
            there = self._product(there, self.simple(schema.get("then", True), f"{at}/then", depth + 1), at)
            others = self.simple(schema.get("else", True), f"{at}/else", depth + 1)
            others = self._product(self._complement(schema["if"], f"{at}/if", at, depth), others, at)
            out = self._product(out, [*there, *others], at)
        return out

    def one_of(self, schemas: list[Any], at: str) -> list[list[Schema]] | None:
        """Alternatives of each branch of the `oneOf` at `at`, without the values of the others. None if no branch has
        any of these."""
        before = self.narrowed
        branches = [self.simple(each, f"{at}/oneOf/{i}") for i, each in enumerate(schemas)]
        found = self._exclusive(branches, schemas, at, 0, exact=self.narrowed == before)
        return None if found == branches else found

    def _exact(self, schema: Any, at: str) -> list[Schema]:
        before = self.narrowed
        parts = self.simple(schema, at)
        if self.narrowed != before:
            raise KeywordError(
                f"oneOf at {at} is not supported for branches that are enforced more narrowly", "oneOf", at
            )
        return parts

    def _complement(self, schema: Any, place: str, at: str, depth: int) -> list[Schema]:
        """Alternatives of which no value satisfies the schema. Raises GrammarError if there is no telling."""
        key = place.rsplit("/", 1)[1]
        if _is_list_of_texts(schema):
            return [{"not": schema}]  # as `negated` leaves it
        before = self.narrowed
        parts = self.simple(schema, place, depth + 1)
        if self.narrowed != before:
            raise KeywordError(
                f"{key} at {at} is not supported: a part of it is enforced more narrowly than it says", key, at
            )
        out: list[Schema] = [{}]
        for part in parts:
            others, whole = negated(part)
            decided = [each for each in others if self._is_decided(each, at, depth)]
            others, whole = decided, whole and len(decided) == len(others)
            self.narrowed += not whole
            if not whole:
                self.narrowed_at[f"{key} at {at}"] = None
            if not others and not whole:
                raise KeywordError(f"{key} at {at} is not supported for {', '.join(part)}", key, at)
            out = self._product(out, others, at)
        return out

    def _is_decided(self, schema: Schema, at: str, depth: int) -> bool:
        """Whether what `negated` leaves to be negated can be. Not if it is nested too deeply to be looked into."""
        left = [each for each in schema.get("properties", {}).values() if isinstance(each, dict) and "not" in each]
        if not left or self._deciding >= _MAX_DECIDING_DEPTH:
            return not left
        # Schemas of schemas lead to the same question thousands of times.
        key = f"{self._deciding} {json.dumps(left)}"
        if key not in self._decided:
            before = self.narrowed
            self._deciding += 1
            try:
                for each in left:
                    self.simple(each, at, depth + 1)
                is_decided = True
            except GrammarError:
                is_decided = False
            finally:
                self._deciding -= 1
            self._decided[key] = is_decided, self.narrowed - before
            self.narrowed = before
        is_decided, narrowed = self._decided[key]
        self.narrowed += narrowed
        return is_decided

    @staticmethod
    def _product(left: list[Schema], right: list[Schema], at: str) -> list[Schema]:
        if len(left) * len(right) > _MAX_ALTERNATIVES:
            raise KeywordError(f"the schema at {at} combines more than {_MAX_ALTERNATIVES} alternatives", ANY, at)
        both = (conjoin(a, b, at) for a in left for b in right)
        return [schema for schema in both if schema is not None]

    def _exclusive(
        self, branches: list[list[Schema]], schemas: list[Any], at: str, depth: int, *, exact: bool
    ) -> list[list[Schema]]:
        """The branches of `oneOf`, each without the values of the others. A branch is left out if what others admit of
        it cannot be told. Raises GrammarError if no branch stays."""
        if not exact:
            raise KeywordError(
                f"oneOf at {at} is not supported for branches that are enforced more narrowly", "oneOf", at
            )
        out: list[list[Schema]] = []
        refusal: GrammarError | None = None
        for i, branch in enumerate(branches):
            left = branch
            for j, other in enumerate(branches):
                if i == j or not left or self._exclusion.never(left, other):
                    continue
                try:
                    left = self._product(left, self._complement(schemas[j], f"{at}/oneOf", at, depth), at)
                except GrammarError:
                    left = []
                    self.narrowed += 1
                    self.narrowed_at[f"oneOf at {at}"] = None
                refusal = refusal or self._overlap(i, j, at)
            out.append(left)
        if refusal is not None and not any(map(_may_have_values, chain(*out))):
            raise refusal
        return out

    @staticmethod
    def _overlap(i: int, j: int, at: str) -> GrammarError:
        return KeywordError(
            f"oneOf at {at}: a value could match branches {min(i, j)} and {max(i, j)} at once, which a grammar cannot "
            "rule out; use anyOf, or give each branch a required property of its own value",
            "oneOf",
            at,
        )

    def refuse(self, schema: Schema, at: str) -> None:
        """Raises GrammarError for keywords that a grammar cannot enforce."""
        for key in _UNSUPPORTED:
            if key in schema:
                raise KeywordError(f"{key} at {at} {drafts.gone(key) or 'is not supported'}", key, at)
        if not isinstance(schema.get("unevaluatedProperties", True), bool):
            raise KeywordError(
                f"unevaluatedProperties at {at} is supported as true or false only", "unevaluatedProperties", at
            )
        if "$id" in schema and schema is not self._root:
            raise KeywordError(f"$id at {at} is supported at the root of the schema only", "$id", at)


def _may_have_values(schema: Schema) -> bool:
    """Whether a schema does not need a property that it rules out."""
    named = schema.get("properties", {})
    return not any(named.get(name, True) in (False, {"not": {}}) for name in schema.get("required", ()))


def _is_list_of_texts(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.keys() == {"enum"} and all(isinstance(v, str) for v in schema["enum"])
