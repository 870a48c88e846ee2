"""`uniqueItems` over values that no list gives: exact for every token, and never without a way to go on."""

import json
import random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tests.worker.structured_output.conftest import Walker
from worker.structured_output.conversion.schema import schema_places, schema_rules
from worker.structured_output.error import GrammarError
from worker.structured_output.matching.engines import LLGUIDANCE, engine_for
from worker.structured_output.matching.lazy_grammar import LazyGrammar
from worker.structured_output.matching.lazy_matcher import LazyMatcher, LazyVocabulary, fill_lazy
from worker.structured_output.rules.ebnf import START, to_text
from worker.structured_output.rules.lark import to_lark

# Tokens that end an item in the middle, or several.
LONGER = [b'","a"', b"1,1", b'",', b', "a', b"true,", b",1]", b"[1,1", b"2, 2"]
ANY: Any = {
    "type": "object",
    "properties": {"t": {"uniqueItems": True, "type": "array"}, "n": {"items": {"const": 1}, "type": "array"}},
    "required": ["t", "n"],
}
RECORD: Any = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x"]}}, "required": ["a"]}
SETS: Any = {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3]}, "maxItems": 2}
# Schema of the items or of the whole, valid values, invalid values.
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "string"}, [["a", "b"], [], ["a", "aa"]], [["a", "a"], ["b", "a", "b"]]),
    ({"type": "string", "pattern": "^[ab]?$"}, [["a", "b", ""]], [["a", "a"]]),
    ({"type": "integer", "minimum": 0, "maximum": 12}, [[1, 2, 12], [1, 11]], [[1, 2, 1]]),
    (RECORD, [[{"a": True}, {"a": False, "b": "x"}]], [[{"a": True}, {"a": True}]]),
    (SETS, [[[1], [2, 1], [1, 2]]], [[[1], [1]], [[1, 1]]]),
    ({"type": ["number", "null"]}, [[1, 2.5, None]], [[None, None], [2.5, 2.5]]),
    (ANY, [{"t": [1, 2, {"a": 1}], "n": [1, 1]}], [{"t": [1, 1], "n": []}]),
]


@pytest.fixture(scope="module")
def vocabulary(walker: Walker) -> LazyVocabulary:
    return LazyVocabulary([*walker.tokens[:-1], *LONGER, b""], [len(walker.tokens) - 1 + len(LONGER)])


def array_of(schema: Any) -> Any:
    return schema if schema is ANY else {"type": "array", "uniqueItems": True, "items": schema}


def grammar_of(schema: Any, vocabulary: LazyVocabulary) -> LazyGrammar:
    text = json.dumps(schema)
    return LazyGrammar(to_lark(schema_rules(text), START), vocabulary, schema_places(text))


def follows(matcher: LazyMatcher, value: Any) -> bool:
    return all(map(matcher.accept_token, json.dumps(value).encode())) and matcher.is_completed()


def allowed(matcher: LazyMatcher, vocabulary: LazyVocabulary) -> list[int]:
    row = np.zeros((1, -(-vocabulary.num_tokens // 32)), dtype=np.int32)
    matcher.fill_next_token_bitmask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8)[0], bitorder="little")[: vocabulary.num_tokens]).tolist()


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=lambda case: json.dumps(case)[:60])
def test_items_that_repeat_are_refused_and_no_others(
    vocabulary: LazyVocabulary, schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    grammar = grammar_of(array_of(schema), vocabulary)
    assert [value for value in valid if not follows(grammar.matcher(), value)] == []
    assert [value for value in invalid if follows(grammar.matcher(), value)] == []


@pytest.mark.parametrize("schema", [case[0] for case in CASES], ids=lambda case: json.dumps(case)[:60])
def test_every_allowed_token_leads_to_a_valid_value_and_the_others_are_refused(
    vocabulary: LazyVocabulary, schema: Any
) -> None:
    whole = array_of(schema)
    grammar, validator, end = grammar_of(whole, vocabulary), Draft202012Validator(whole), vocabulary.end_ids[0]
    texts = [b'"', b",", b"a", b"1", b"true", b"2", *LONGER]
    liked = {i for i, text in enumerate(vocabulary.tokens) if text in texts}
    ended = 0
    for seed in range(8):
        choose, matcher, taken = random.Random(seed), grammar.matcher(), list[int]()
        for _ in range(100):
            tokens = allowed(matcher, vocabulary)
            assert tokens, taken
            if choose.random() < 0.01:
                for token in set(range(vocabulary.num_tokens - 1)) - set(tokens):
                    another = grammar.matcher()
                    assert all(map(another.accept_token, taken)) and not another.accept_token(token)
            good = [token for token in tokens if token in liked]
            token = end if end in tokens else choose.choice(good if good and choose.random() < 0.7 else tokens)
            assert matcher.accept_token(token)
            if token == end:
                ended += 1
                assert validator.is_valid(json.loads(b"".join(vocabulary.tokens[i] for i in taken)))
                break
            taken.append(token)
    assert ended


def test_text_and_steps_taken_back_count_as_tokens_do(vocabulary: LazyVocabulary) -> None:
    matcher = grammar_of(array_of({"type": "string"}), vocabulary).matcher()
    assert matcher.accept_string('["a", "b"')
    before = allowed(matcher, vocabulary)
    assert not matcher.accept_string(', "a"')
    assert matcher.accept_string(', "') and matcher.accept_token(ord("a"))
    assert ord('"') not in allowed(matcher, vocabulary)
    matcher.rollback(2)
    assert allowed(matcher, vocabulary) == before


def test_masks_on_several_threads_are_those_on_one(vocabulary: LazyVocabulary) -> None:
    import torch

    grammar = grammar_of(array_of({"type": "boolean", "not": {"const": None}}), vocabulary)
    matchers = [grammar.matcher() for _ in range(2)]
    assert matchers[0].accept_string("[true") and matchers[1].accept_string("[true,false")
    rows = torch.zeros((2, -(-vocabulary.num_tokens // 32)), dtype=torch.int32)
    fill_lazy(matchers, rows, [0, 1], 2)
    one = torch.zeros_like(rows)
    fill_lazy(matchers, one, [0, 1], 1)
    assert torch.equal(rows, one)
    assert ord(",") in allowed(matchers[0], vocabulary) and ord(",") not in allowed(matchers[1], vocabulary)


def test_llguidance_follows_unique_items_and_xgrammar_names_them() -> None:
    rules = schema_rules(json.dumps(array_of({"type": "string"})))
    assert engine_for(rules) == (LLGUIDANCE,)
    with pytest.raises(GrammarError, match="uniqueItems at #: "):
        to_text(rules, START)


@pytest.mark.parametrize(
    "items",
    [{"type": "string", "pattern": "^a$"}, {"const": {"a": 1}}, {"type": "integer", "minimum": 1, "maximum": 2}],
)
def test_too_few_values_are_refused(items: Any) -> None:
    with pytest.raises(GrammarError, match="uniqueItems"):
        schema_rules(json.dumps({**array_of(items), "minItems": 3}))
