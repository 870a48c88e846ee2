"""Schemas for requests that let go what no grammar enforces: that alone is left out, and it is named."""

import json
from typing import Any

import pytest

from worker.structured_output.conversion.relaxation import Relaxed
from worker.structured_output.error import GrammarError
from worker.structured_output.rules.ebnf import START, to_text

TAGS = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}
STRING = {"type": "string", "maxLength": 3}


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("schema", "not_enforced", "written", "not_written"),
    [
        (closed(a=STRING), [], '{"a": "xyz"}', '{"a": "wxyz"}'),
        (
            closed(tags={**TAGS, "contains": {"const": "b"}, "minContains": 2}),
            ["contains at #/properties/tags", "minContains at #/properties/tags"],
            '{"tags": ["a"]}',
            '{"tags": ["c"]}',
        ),
        (
            closed(**{"a/b": {"type": "string", "pattern": "^(?!x)[a-z]$"}}),
            ["pattern at #/properties/a/b"],
            '{"a/b": "x!"}',
            '{"a/b": 1}',
        ),
        (
            {"$ref": "#/$defs/word", "$defs": {"word": {"type": "string", "pattern": "(?=x)"}}},
            ["pattern at #/$defs/word"],
            '"y"',
            "1",
        ),
        (
            {"$ref": "#word", "$defs": {"w": {"$anchor": "word", "type": "string", "pattern": "(?=x)"}}},
            ["pattern at #word"],
            '"y"',
            "1",
        ),
        # A part of what is negated would leave fewer values if it were left out.
        (
            {"type": "string", "maxLength": 2, "not": {"pattern": "(?=x)"}},
            ["not at #"],
            '"x"',
            '"xyz"',
        ),
        (
            {"if": {"contains": {"const": 1}}, "then": {"maxItems": 2}, "type": "array", "items": {"type": "integer"}},
            ["if at #", "then at #"],
            "[1, 2, 3]",
            "[null]",
        ),
        # A property with the name of a keyword is none.
        (closed(**{"not": {**TAGS, "contains": {"const": "b"}}}), ["contains at #/properties/not"], '{"not": []}', "1"),
        # At least one branch, if not one only.
        (
            {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
            ["oneOf at #"],
            '"a"',
            '"c"',
        ),
        # `uniqueItems` is refused for the order of properties elsewhere.
        (
            closed(
                a={
                    "type": "array",
                    "uniqueItems": True,
                    "items": {"anyOf": [closed(x=STRING, y=STRING), closed(y=STRING, x=STRING)]},
                }
            ),
            ["uniqueItems at #/properties/a"],
            '{"a": [{"x": "", "y": ""}]}',
            '{"a": [1]}',
        ),
        ({"type": "array", "minItems": 10**9}, ["minItems at #"], "[]", "{}"),
        (
            {"type": "object", "patternProperties": {"(?=x)": {"type": "integer"}}, "additionalProperties": False},
            ["patternProperties at #", "additionalProperties at #"],
            '{"y": ""}',
            "[]",
        ),
        # It refers to itself without end.
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "allOf": [{"$ref": "#/$defs/a"}]}}},
            ["all keywords but type at #/$defs/a/allOf/0"],
            "{}",
            "1",
        ),
    ],
)
def test_what_is_left_out_is_named(
    walker: Any, schema: Any, not_enforced: list[str], written: str, not_written: str
) -> None:
    relaxed = Relaxed(json.dumps(schema))
    assert relaxed.not_enforced == not_enforced
    ebnf = to_text(relaxed.rules, START)
    assert walker.accepts(ebnf, written) and not walker.accepts(ebnf, not_written)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strnig"}, "not valid at #/type"),
        ({"$ref": "#/$defs/none"}, "there is no '#/\\$defs/none'"),
        ({"contains": {"$ref": "http://127.0.0.1:1/x"}, "type": "array"}, "references into the schema itself"),
        ({"type": "string", "enum": [1]}, "no value satisfies"),
        (False, "no value satisfies"),
    ],
)
def test_what_is_no_schema_stays_refused(schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        Relaxed(json.dumps(schema))


def test_where_nothing_is_left_any_value_is_written(walker: Any) -> None:
    """What stays without the look-ahead is satisfied by nothing."""
    relaxed = Relaxed(json.dumps(closed(a={"type": "string", "pattern": "(?=x)"}, b=False)))
    assert relaxed.not_enforced == ["all keywords at #"]
    assert walker.accepts(to_text(relaxed.rules, START), '{"b": 1}')
