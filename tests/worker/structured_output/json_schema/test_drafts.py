"""Schemas of older drafts are refused with the keyword, its draft, and what to write today."""

import json

import pytest

from worker.structured_output.conversion.schema import schema_to_ebnf
from worker.structured_output.error import GrammarError
from worker.structured_output.json_schema.modern import modern

BOUND = {"type": "integer", "minimum": 0, "exclusiveMinimum": True}
OLD = "http://json-schema.org/draft-07/schema#"


def refusal(schema: object) -> str:
    with pytest.raises(GrammarError) as error:
        schema_to_ebnf(json.dumps(schema))
    return str(error.value)


@pytest.mark.parametrize(
    ("schema", "where", "whose", "today"),
    [
        ({"items": [{"type": "string"}]}, "#/items", "before 2020-12", "prefixItems"),
        ({"properties": {"items": {"items": []}}}, "#/properties/items/items", "before 2020-12", "prefixItems"),
        ({"properties": {"n": BOUND}}, "#/properties/n/exclusiveMinimum", "draft-04", "instead of minimum"),
        ({"exclusiveMaximum": False}, "#/exclusiveMaximum", "draft-04", "instead of maximum"),
        ({"properties": {"n": {"required": True}}}, "#/properties/n/required", "draft-03", "list the names"),
        ({"properties": {"n": {"type": "any"}}}, "#/properties/n/type", "draft-03", "leave type out"),
        ({"$defs": {"n": {"$id": "#n"}}}, "#/$defs/n/$id", "draft-07", "$anchor"),
        ({"properties": {"n": {"$ref": "#gone"}}}, "$ref at #/properties/n", "draft-07", "$anchor"),
        (
            {"properties": {"n": {"dependencies": {"a": ["b"]}}}},
            "dependencies at #/properties/n",
            "07",
            "dependentRequired",
        ),
        ({"items": {"$recursiveRef": "#"}}, "$recursiveRef at #/items", "2019-09", "$ref"),
    ],
)
def test_a_keyword_of_an_older_draft(schema: object, where: str, whose: str, today: str) -> None:
    said = refusal(schema)
    assert where in said and whose in said and today in said
    assert "draft 2020-12" in said


@pytest.mark.parametrize("schema", [{"items": 3}, {"properties": {"items": [1]}}, {"type": "nope"}, {"$id": "a#b"}])
def test_what_was_never_valid_is_no_draft_s(schema: object) -> None:
    assert "draft" not in refusal(schema)


def test_a_refusal_tells_of_a_draft_that_is_not_read() -> None:
    said = refusal({"$schema": "http://json-schema.org/draft-03/schema#", "contains": {}})
    assert said.startswith("contains at #") and "its $schema" in said and "draft-03" in said


@pytest.mark.parametrize(
    "declared", ["https://json-schema.org/draft/2020-12/schema", OLD, "https://example.com/mine", 3]
)
def test_a_refusal_is_silent_about_any_other(declared: object) -> None:
    assert "its $schema" not in refusal({"$schema": declared, "contains": {}})


def test_an_older_draft_is_no_reason_to_refuse() -> None:
    assert schema_to_ebnf(json.dumps({"$schema": OLD, "type": "string"}))


@pytest.mark.parametrize(
    ("draft", "old", "new"),
    [
        (
            "draft-07",
            {"items": [{"type": "null"}], "additionalItems": False},
            {"prefixItems": [{"type": "null"}], "items": False},
        ),
        ("draft-07", {"items": [{}]}, {"prefixItems": [{}]}),
        (
            "draft-04",
            {"minimum": 3, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False},
            {"exclusiveMinimum": 3, "maximum": 9},
        ),
        (
            "draft-07",
            {"dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
            {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": {"required": ["d"]}}},
        ),
        (
            "draft-06",
            {"definitions": {"a": {"$id": "#n"}}, "$ref": "#n"},
            {"definitions": {"a": {"$anchor": "n"}}, "$ref": "#n"},
        ),
        (
            "draft-04",
            {"properties": {"items": {"items": [{"id": "#n"}]}, "dependencies": {}}},
            {"properties": {"items": {"prefixItems": [{"$anchor": "n"}]}, "dependencies": {}}},
        ),
        ("draft/2019-09", {"$recursiveAnchor": True, "items": {"$recursiveRef": "#"}}, {"items": {"$ref": "#"}}),
        ("draft-07", {"deprecated": "since 3", "default": {"items": []}}, {}),
    ],
)
def test_a_declared_draft_is_read_as_what_it_means(draft: str, old: dict[str, object], new: dict[str, object]) -> None:
    declared = f"https://json-schema.org/{draft}/schema#"
    assert modern({"$schema": declared, **old}) == {"$schema": "https://json-schema.org/draft/2020-12/schema", **new}
    assert modern(old) == old


def test_a_schema_is_checked_by_its_own_draft() -> None:
    assert "not valid at #/items" in refusal({"$schema": OLD, "items": 3})
    assert "not valid at #/exclusiveMinimum" in refusal({"$schema": OLD, "minimum": 1, "exclusiveMinimum": True})


def test_what_an_older_draft_does_not_know_is_not_read() -> None:
    """`$defs` may hold anything there, `$anchor` too, and an `$id` that is a path names nothing."""
    kept = modern(
        {
            "$schema": OLD,
            "$defs": {"a": {"$anchor": "/a", "type": "null"}, "description": "of the parts"},
            "definitions": {"b": {"$id": "#/definitions/b", "$ref": "#/$defs/a"}, "c": {"$id": "#c"}},
        }
    )
    assert kept["$defs"] == {"a": {"type": "null"}}
    assert kept["definitions"] == {"b": {"$ref": "#/$defs/a"}, "c": {"$anchor": "c"}}
