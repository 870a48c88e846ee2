"""Judgement of whole answers: what is wrong, and how much of the answer comes before that."""

import json
from typing import Any

import pytest

from worker.structured_output.compiling.answer_verdict import AnswerToCheck, AnswerVerdict, answer_verdict
from worker.structured_output.error import GrammarError

BYTES = [bytes([byte]) for byte in range(256)]


def verdict(schema: Any, text: str, **fields: Any) -> AnswerVerdict:
    given = {"after": None, "begin": None, "with_formats": False} | fields
    return answer_verdict(AnswerToCheck(json.dumps(schema), list(text.encode()), **given), BYTES)


@pytest.mark.parametrize(
    ("schema", "text", "where", "kept"),
    [
        ({"items": {"multipleOf": 3}}, "[3, 4, 5]", "#/1: 4", "[3, "),
        ({"uniqueItems": True}, '[ "é", "é"]', "#: ", ""),
        ({"properties": {"b": {"contains": {"const": 1}}}}, '{"a": {"b": 1}, "é" : [], "b" :  [2]}', "#/b: ", None),
        ({"properties": {"a": {"required": ["b"]}}}, '{"x": [{}, "]"], "a": {}}', "#/a: ", '{"x": [{}, "]"], "a": '),
        # The first of several, and the last member of one name.
        ({"items": {"type": "string"}}, "[1, 2]", "#/0: 1", "["),
        ({"properties": {"a": {"const": 1}}}, '{"a": 1, "a": 2}', "#/a: ", '{"a": 1, "a": '),
    ],
)
def test_the_first_violation_is_found(schema: Any, text: str, where: str, kept: str | None) -> None:
    kept = text[: text.rindex("[")] if kept is None else kept
    found = verdict(schema, text)
    assert found.violation is not None and found.violation.startswith(f"at {where}")
    assert found.kept_tokens == len(kept.encode())


def test_a_token_that_reaches_into_the_violation_is_not_kept() -> None:
    tokens = [b'{"a"', b': "', b'b"}']
    answer = AnswerToCheck(json.dumps({"properties": {"a": {"const": 1}}}), [0, 1, 2], None, None, False)
    assert answer_verdict(answer, tokens).kept_tokens == 1


@pytest.mark.parametrize(
    ("text", "begin", "is_valid"),
    [
        ('[1]</think>{"a": 1}', None, True),
        ('<think>x</think>{"a": 1}', "<think>", True),
        ('{"a": "</think>"}', "<think>", True),  # it did not think
        ('{"a": "</think>"}', None, False),
    ],
)
def test_thinking_is_not_judged(text: str, begin: str | None, is_valid: bool) -> None:
    found = verdict({"type": "object", "required": ["a"]}, text, after="</think>", begin=begin)
    assert (found.violation is None) == is_valid


def test_markers_that_are_single_tokens_are_read_as_text() -> None:
    tokens = [b"\xff<think>", b"hm", b"\xff</think>", b"[]"]
    answer = AnswerToCheck('{"minItems": 1}', [0, 1, 2, 3], "</think>", "<think>", False)
    assert answer_verdict(answer, tokens).kept_tokens == 3


def test_formats_are_judged_if_the_grammar_does_not_enforce_them() -> None:
    schema = {"format": "ipv4"}
    assert verdict(schema, '"x"').violation is None
    violation = verdict(schema, '"x"', with_formats=True).violation
    assert violation is not None and violation.startswith("at #: 'x' ") and "'ipv4'" in violation


def test_older_drafts_are_followed() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"const": 1}], "additionalItems": False}
    assert verdict(schema, "[1]").violation is None and verdict(schema, "[1, 2]").violation is not None


@pytest.mark.parametrize("schema", [{"$ref": "http://127.0.0.1:1/x"}, {"pattern": "(?P<"}])
def test_a_schema_that_cannot_be_followed_is_at_fault(schema: Any) -> None:
    """No other schema is fetched."""
    with pytest.raises(GrammarError, match="cannot be followed"):
        verdict(schema, '"x"')
