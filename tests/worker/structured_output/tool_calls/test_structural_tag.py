"""Structural tags: which texts their grammars take, and that all of these are as they say."""

import json
import re
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import xgrammar

from worker.structured_output.error import GrammarError
from worker.structured_output.rules.ebnf import to_text
from worker.structured_output.tool_calls.structural_tag import structural_tag_rules

PERSON = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": PERSON}
LEGACY = {"structures": [{"begin": "<f=a>", "schema": PERSON, "end": "</f>"}, {"begin": "<f=b>", "end": "</f>"}]}
LEGACY["triggers"] = ["<f="]
A = {"type": "tag", "begin": "<f=a>", "content": JSON, "end": "</f>"}
B = {"type": "tag", "begin": "<f=b>", "content": {"type": "any_text"}, "end": ["</f>", "!"]}


def triggered(**more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": [A, B], **more}


def ebnf(tag: Any, special: dict[str, int] | None = None) -> str:
    vocabulary: Any = SimpleNamespace(special=special or {})
    return to_text(*structural_tag_rules(json.dumps(tag if "structures" in tag else {"format": tag}), vocabulary))


@pytest.mark.parametrize(
    ("tag", "taken", "refused"),
    [
        (LEGACY, ["", "x", '<f=a>{"n": 1}</f>', 'a <f=b>[1]</f> b <f=a>{"n": 2}</f>'], ["<f=", "<f=c>", "<f=a>1</f>"]),
        (LEGACY | {"stop_after_first": True}, ['x<f=a>{"n": 1}</f>'], ['<f=a>{"n": 1}</f> ']),
        (LEGACY | {"at_least_one": True}, ['<f=a>{"n": 1}</f>x'], ["", "x", 'x<f=a>{"n": 1}</f>']),
        (triggered(), ["", "<f=b>any<</f> <f=b>!", 'x<f=a>{"n": 1}</f>'], ["<f=b>any", '<f=a>{"n": "1"}</f>']),
        (triggered(at_least_one=True, stop_after_first=True), ["<f=b></f>"], ["", "<f=b></f>x"]),
        (triggered(excludes=["no"]), ["yes n o"], ["yes no"]),
        (A, ['<f=a>{"n": 1}</f>'], ["", "<f=a></f>", '<f=a>{"n": 1}</f>x']),
        ({"type": "const_string", "value": 'a"\n'}, ['a"\n'], ["", "a"]),
        ({"type": "regex", "pattern": "[ab]{2}"}, ["ab"], ["a", "abc"]),
        ({"type": "any_text", "excludes": ["x"]}, ["", "abc"], ["axc"]),
        ({"type": "or", "elements": [A, {"type": "const_string", "value": "no"}]}, ["no"], ["", "no "]),
        ({"type": "sequence", "elements": [B, A, {"type": "any_text"}]}, ['<f=b>x!<f=a>{"n": 1}</f>y'], ["<f=b>x!"]),
        ({"type": "optional", "content": A}, ["", '<f=a>{"n": 1}</f>'], ["x"]),
        ({"type": "star", "content": B}, ["", "<f=b>!<f=b>1!"], ["x"]),
        ({"type": "plus", "content": B}, ["<f=b>!<f=b>1!"], [""]),
        (
            {"type": "tags_with_separator", "tags": [A, B], "separator": ", "},
            ["", "<f=b>1!", '<f=b>1!, <f=a>{"n": 1}</f>'],
            ["<f=b>1!,", "<f=b>1!<f=b>1!"],
        ),
        ({"type": "tags_with_separator", "tags": [B], "separator": ",", "at_least_one": True}, ["<f=b>1!"], [""]),
        ({"type": "tags_with_separator", "tags": [B], "separator": ",", "stop_after_first": True}, [""], ["<f=b>1!,"]),
        (A | {"content": triggered(), "begin": "(", "end": ")"}, ["(x<f=b>1!)"], ["(x", "(<f=b>1)"]),
        (A | {"content": {"type": "json_schema", "json_schema": True}}, ["<f=a>[1, {}]</f>"], ["<f=a>x</f>"]),
    ],
)
def test_texts(walker: Any, tag: Any, taken: list[str], refused: list[str]) -> None:
    grammar = ebnf(tag)
    assert [text for text in taken if not walker.accepts(grammar, text)] == []
    assert [text for text in refused if walker.accepts(grammar, text)] == []


def test_every_schema_in_a_text_holds(walker: Any) -> None:
    grammar, found = ebnf(triggered(at_least_one=True)), 0
    for seed in range(24):
        text = walker.walk(grammar, seed)
        for part in re.findall(rb"<f=a>(.*?)</f>", text or b"", re.DOTALL):
            jsonschema.validate(json.loads(part), PERSON)
            found += 1
    assert found > 3


def test_special_tokens_are_written_as_tokens(walker: Any) -> None:
    begin, end = walker.eos - 1, walker.eos - 2
    tag = {"type": "triggered_tags", "triggers": ["<b>"], "tags": [{**B, "begin": "<b>", "end": "<e>"}]}
    grammar = walker.compile(ebnf(tag, {"<b>": begin, "<e>": end}))
    for token_ids, whole in (([97, begin, 98, end, 97], True), ([97, begin, 98], False), ([*b"<b>"], True)):
        matcher = xgrammar.GrammarMatcher(grammar)
        assert all(map(matcher.accept_token, token_ids))
        assert matcher.accept_token(walker.eos) is whole


@pytest.mark.parametrize(
    "tag",
    [
        {"type": "nope"},
        {"type": None},
        {"structures": [], "triggers": ["a"]},
        {"structures": [{"begin": "<f=a>", "schema": {"type": "nope"}, "end": "</f>"}], "triggers": ["<f="]},
        {"structures": [{"begin": "<g>", "end": "</g>"}], "triggers": ["<f="]},
        {"structures": [{"begin": "<g>", "end": "</g>"}], "triggers": ["<", "<g"]},
        {"structures": [{"begin": "<g>", "end": "</g>"}], "triggers": [""]},
        {"type": "sequence", "elements": [{"type": "any_text"}, A]},
        {"type": "star", "content": {"type": "any_text"}},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"},
        {"type": "regex", "pattern": "("},
        {"type": "tag", "begin": "x", "content": {"type": "any_text"}, "end": ""},
        {"type": "tag", "begin": 1, "content": A, "end": "x"},
        {"type": "tag", "begin": "x", "content": A, "end": []},
        {"type": "triggered_tags", "triggers": ["x"], "tags": [1]},
        {"type": "any_text", "excludes": [""]},
        {"type": "or", "elements": []},
    ],
)
def test_what_is_no_structural_tag(tag: Any) -> None:
    with pytest.raises(GrammarError):
        ebnf(tag)


def test_what_is_nested_too_deeply() -> None:
    tag: dict[str, Any] = A
    for _ in range(200):
        tag = {"type": "optional", "content": tag}
    with pytest.raises(GrammarError, match="nested"):
        ebnf(tag)
