"""Schemas of older drafts, as their `$schema` declares them, in the words of 2020-12."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from jsonschema import (
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
    FormatChecker,
)

from worker.structured_output.error import GrammarError
from worker.structured_output.rules import regex
from worker.structured_output.rules.ecma import in_python

_DRAFTS = {
    "draft-04": Draft4Validator,
    "draft-06": Draft6Validator,
    "draft-07": Draft7Validator,
    "draft/2019-09": Draft201909Validator,
}
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    *("additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
# Annotations, whose values later drafts may not allow, and what only schemas of schemas have.
_DROPPED = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
    *("$recursiveAnchor", "$vocabulary"),
)
_ANCHOR = re.compile("[A-Za-z_][-A-Za-z0-9._]*")
_BEFORE_2019 = ("draft-04", "draft-06", "draft-07")
_OF_2019 = ("$anchor", "$dynamicAnchor")  # keywords without a meaning before


def modern(schema: Any) -> Any:
    """The schema in the words of 2020-12, and its patterns in those of Python. Otherwise as it is if it declares that
    draft, none, or one that is not known.

    Keywords next to `$ref` stay: drafts up to draft-07 ignore them, so that the result may be narrower. Raises
    SchemaError (of jsonschema) if the schema is not valid by its own draft.
    """
    schema = with_patterns_of_python(schema)
    declared = schema.get("$schema") if isinstance(schema, dict) else None
    match = re.search(r"json-schema\.org/(draft[-/][\d-]+)/schema", declared) if isinstance(declared, str) else None
    draft = _DRAFTS.get(match[1]) if match is not None else None
    if draft is None:
        return schema
    draft.check_schema(schema, format_checker=FORMATS)
    if match is not None and match[1] in _BEFORE_2019:
        schema = _without_later(schema)
    return {**_modern(schema), "$schema": Draft202012Validator.META_SCHEMA["$id"]}


def with_patterns_of_python(schema: Any) -> Any:
    """The schema with its patterns in the words of Python's `re`, those that can be said in them."""
    if not isinstance(schema, dict):
        return schema
    out = _with_parts(schema, with_patterns_of_python)
    if isinstance(out.get("pattern"), str):
        out["pattern"] = _of_python(out["pattern"])
    if isinstance(out.get("patternProperties"), dict):
        out["patternProperties"] = {_of_python(key): value for key, value in out["patternProperties"].items()}
    return out


def _of_python(pattern: str) -> str:
    try:
        return in_python(pattern)
    except GrammarError:
        return pattern  # its place is told where it is converted


def _is_expression(value: object) -> bool:
    return not isinstance(value, str) or regex.check(value)


FORMATS = FormatChecker(())
"""Formats that a schema itself must keep to."""
FORMATS.checkers = {**Draft202012Validator.FORMAT_CHECKER.checkers, "regex": (_is_expression, (GrammarError,))}


def _without_later(schema: Any) -> Any:
    """The schema without what only later drafts see in it. There, `$defs` may hold anything; references lead to what is
    a schema of it."""
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key not in _OF_2019}
    if isinstance(kept.get("$defs"), dict):
        kept["$defs"] = {name: each for name, each in kept["$defs"].items() if isinstance(each, dict | bool)}
    return _with_parts(kept, _without_later)


def _modern(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    out = _with_parts({key: value for key, value in schema.items() if key not in _DROPPED}, _modern)
    more = out.pop("additionalItems", None)
    if isinstance(out.get("items"), list):
        out["prefixItems"] = out.pop("items")
        if more is not None:
            out["items"] = more
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(out.get(key), bool) and out.pop(key) and bound in out:
            out[key] = out.pop(bound)
    for name, each in out.pop("dependencies", {}).items():
        kind = "dependentRequired" if isinstance(each, list) else "dependentSchemas"
        out[kind] = {**out.get(kind, {}), name: each}
    for key in ("$id", "id"):
        if isinstance(out.get(key), str) and out[key].startswith("#"):
            name = out.pop(key)[1:]
            if _ANCHOR.fullmatch(name):  # others, such as `#/definitions/a`, name nothing
                out["$anchor"] = name
    if out.get("$recursiveRef") == "#" and "$ref" not in out:
        out["$ref"] = out.pop("$recursiveRef")
    return out


def _with_parts(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            out[key] = {name: change(each) for name, each in value.items()}
        elif (key in _LISTS or key == "items") and isinstance(value, list):
            out[key] = [change(each) for each in value]
        else:
            out[key] = change(value) if key in _SINGLE else value
    return out


def anchors(schema: Any) -> dict[str, Any]:
    """The parts of a schema that have a name (`$anchor`, `$dynamicAnchor`), without names that are given twice."""
    found: dict[str, Any] = {}
    twice: set[str] = set()
    for part in _parts(schema):
        for name in {part[key] for key in ("$anchor", "$dynamicAnchor") if isinstance(part.get(key), str)}:
            if name in found:
                twice.add(name)
            found[name] = part
    return {name: part for name, part in found.items() if name not in twice}


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            yield part
            todo += (each for _, each in parts_of(part))


def parts_of(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, not those in them, each with its way there: a keyword, and a name or a number after a
    slash where it has several."""
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            yield from ((f"{key}/{name}", each) for name, each in value.items())
        elif (key in _LISTS or key == "items") and isinstance(value, list):
            yield from ((f"{key}/{number}", each) for number, each in enumerate(value))
        elif key in _SINGLE:
            yield key, value
