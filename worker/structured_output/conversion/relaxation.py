"""Schemas without what no grammar enforces, for requests that allow it (`strict: false`).

A keyword that is refused is taken out where it stands, and the rest is converted again. So a grammar enforces all else,
and `answer_verdict.py` judges the whole answer by the schema as it was.
"""

import copy
from collections.abc import Iterator
from typing import Any

from worker.structured_output.conversion.schema import (
    SchemaConverter,
    any_object_rules,
    any_value_rules,
    parsed,
    refusals,
)
from worker.structured_output.error import ANY, GrammarError, KeywordError
from worker.structured_output.json_schema.combinations import COMBINED
from worker.structured_output.json_schema.modern import anchors, modern, parts_of
from worker.structured_output.json_schema.references import SchemaReferences
from worker.structured_output.rules.ebnf import Node

# Refusals of one schema. The published ones that are refused at all need up to 9.
_MAX_TAKEN_OUT = 64
# Taking one of them out says nothing without the others.
_WITH = {
    "contains": ("minContains", "maxContains"),
    "if": ("then", "else"),
    "patternProperties": ("additionalProperties", "unevaluatedProperties"),
    "prefixItems": ("items", "unevaluatedItems"),
    "pattern": ("format",),
}
_NEGATIVE = ("not", "if", "oneOf")  # what is taken out below them would leave fewer values, not more
_NEEDED = ("$ref", "$dynamicRef")  # one that leads nowhere is no schema at all


class Relaxed:
    """A schema as far as grammars enforce it.

    | attribute | meaning |
    | --- | --- |
    | `schema` | in the words of 2020-12 |
    | `rules` | of its grammar, from `START` on |
    | `not_enforced` | what was taken out: keywords with their places, as `contains at #/properties/tags` |
    | `narrowed` | as `SchemaConverter` has it |
    """

    def __init__(self, text: str) -> None:
        """Raises GrammarError if `text` is not a schema, or one that no value satisfies."""
        schema = parsed(text)
        with refusals():
            self.schema: Any = copy.deepcopy(modern(schema))
        self.not_enforced: list[str] = []
        self.narrowed: list[str] = []
        whole = copy.deepcopy(self.schema)
        self.rules = self._rules()
        if self.not_enforced:
            _check_references(whole)

    def _rules(self) -> dict[str, Node]:
        for _ in range(_MAX_TAKEN_OUT):
            try:
                with refusals():
                    converter = SchemaConverter(self.schema)
                    rules = converter.rules(converter.whole)
                    self.narrowed = converter.narrowed
                    return rules
            except KeywordError as error:
                if error.keyword in _NEEDED:
                    raise
                if not self._take_out(error.keyword, error.at):
                    break
            except GrammarError:
                if not self.not_enforced:
                    raise
                break  # what is left has no values that can be written
        self.not_enforced = ["all keywords at #"]
        kind = self.schema.get("type") if isinstance(self.schema, dict) else None
        self.schema = {"type": "object"} if kind == "object" else {}
        return any_object_rules() if kind == "object" else any_value_rules()

    def _take_out(self, keyword: str, at: str) -> bool:
        """Takes the keyword out at its place, or everywhere if it is not there. Returns whether anything changed."""
        found = _walk(self.schema, at)
        for place, part, outer in found:
            if outer in _NEGATIVE:
                return self._remove(part, outer, place)
        if not found:
            return False
        place, part, _ = found[-1]
        if keyword == ANY:
            removed = [self._remove(part, key, place) for key in COMBINED if key not in _NEEDED]
            return any(removed) or self._remove_all(part, place)
        if self._remove(part, keyword, place):
            return True
        before = len(self.not_enforced)
        for where, each in _parts(self.schema):
            self._remove(each, keyword, where)
        # One that is nowhere comes of another: the negation of `minProperties` is `maxProperties`.
        return len(self.not_enforced) > before or self._take_out(ANY, at)

    def _remove(self, part: Any, keyword: str, place: str) -> bool:
        if not isinstance(part, dict):
            return False
        if keyword == "oneOf" and "oneOf" in part and "anyOf" not in part:
            part["anyOf"] = part.pop("oneOf")  # at least one of them, then
            self.not_enforced.append(f"oneOf at {place}")
            return True
        gone = [key for key in (keyword, *_WITH.get(keyword, ())) if part.pop(key, None) is not None]
        self.not_enforced += [f"{key} at {place}" for key in gone]
        return bool(gone)

    def _remove_all(self, part: Any, place: str) -> bool:
        if not isinstance(part, dict) or not part.keys() - {"type"}:
            return False
        kept = {key: part[key] for key in ("type",) if key in part}
        part.clear()
        part.update(kept)
        self.not_enforced.append(f"all keywords but type at {place}")
        return True


def _check_references(schema: Any) -> None:
    """Raises GrammarError if a reference leads nowhere, also in what was taken out."""
    references = SchemaReferences(schema)
    for place, part in _parts(schema):
        for key in _NEEDED:
            if isinstance(part.get(key), str):
                references.resolve(part[key], place, key)


def _walk(root: Any, at: str) -> list[tuple[str, Any, str | None]]:
    """The parts of a schema on the way to a place, as far as there are any: each with its place, and the keyword that
    has the next one. `at` does not escape names, so they may have slashes in them."""
    name, _, rest = at.removeprefix("#").partition("/")
    words = rest.split("/") if rest else []
    place, part = (f"#{name}", anchors(root).get(name)) if name else ("#", root)
    found: list[tuple[str, Any, str | None]] = []
    while part is not None:
        inside = dict(parts_of(part)) if isinstance(part, dict) else {}
        ways = ("/".join(words[:count]) for count in range(1, len(words) + 1))
        way = next((each for each in ways if each in inside), None)
        found.append((place, part, None if way is None else way.partition("/")[0]))
        place, part = f"{place}/{way}", None if way is None else inside[way]
        words = words[1 if way is None else way.count("/") + 1 :]
    return found


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """All parts of a schema, with their places."""
    todo = [("#", schema)]
    while todo:
        place, part = todo.pop()
        if isinstance(part, dict):
            yield place, part
            todo += ((f"{place}/{where}", each) for where, each in parts_of(part))
