"""llguidance follows the same grammars as xgrammar: the same texts, the same masks, the same methods."""

import json
import random
import threading
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tests.worker.structured_output.conftest import Walker
from worker.structured_output import (
    CompiledGrammar,
    GrammarError,
    GrammarState,
    GrammarThreads,
    accept_tokens,
    fill_masks,
    fill_masks_after,
    new_bitmask,
)
from worker.structured_output.conversion.schema import schema_rules
from worker.structured_output.conversion.text_rules import text_rules
from worker.structured_output.matching import lazy_grammar
from worker.structured_output.matching.engines import LLGUIDANCE, XGRAMMAR, engine_for
from worker.structured_output.matching.lazy_grammar import LazyGrammar
from worker.structured_output.matching.lazy_matcher import LazyMatcher, LazyVocabulary, accept_lazy
from worker.structured_output.rules.ebnf import START, Complement, Intersection, Regex, Seq, Terminal, to_text
from worker.structured_output.rules.lark import to_lark

SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b/": {"enum": ["x/y", 1, None]}}, "required": ["b/"]},
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 300}}, "additionalProperties": {"const": 1}},
    {"type": "array", "items": {"anyOf": [{"type": "number", "minimum": -2.5}, {"$ref": "#"}]}, "maxItems": 3},
    {"type": "string", "pattern": "^[a-c/\\\\\\n]{2,5}é?$"},
    {"type": "string", "format": "date"},
    {"type": ["string", "null"], "minLength": 3, "maxLength": 4},
    {"const": {"a": ["\u0007", '"', "/", "🦊"]}},
    {"patternProperties": {"^x-": {"type": "boolean"}}, "additionalProperties": False, "type": "object"},
]


@pytest.fixture(scope="module")
def vocabulary(walker: Walker) -> LazyVocabulary:
    return LazyVocabulary(walker.tokens, [walker.eos])


def lazy(vocabulary: LazyVocabulary, rules: Any) -> LazyMatcher:
    return LazyGrammar(to_lark(rules, START), vocabulary).matcher()


def allowed(matcher: Any, walker: Walker) -> list[int]:
    return walker.allowed(matcher)


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_masks_are_those_of_xgrammar_along_random_walks(
    walker: Walker, vocabulary: LazyVocabulary, schema: Any
) -> None:
    import xgrammar

    rules = schema_rules(json.dumps(schema))
    ahead, grammar = walker.compile(to_text(rules, START)), LazyGrammar(to_lark(rules, START), vocabulary)
    ended = 0
    for seed in range(6):
        choose, text = random.Random(seed), b""
        one, other = xgrammar.GrammarMatcher(ahead), grammar.matcher()
        for _ in range(60):
            tokens = allowed(other, walker)
            assert tokens == allowed(one, walker), text
            token = walker.eos if walker.eos in tokens else choose.choice(tokens)
            assert one.accept_token(token) and other.accept_token(token)
            text += walker.tokens[token]
            assert one.is_terminated() == other.is_terminated()
            if other.is_terminated():
                assert Draft202012Validator(schema).is_valid(json.loads(text)), text
                ended += 1
                break
    assert ended


def test_steps_are_taken_back(walker: Walker, vocabulary: LazyVocabulary) -> None:
    matcher = lazy(vocabulary, text_rules("choice", '["abc", "abcd", "xyz"]'))
    beginning = allowed(matcher, walker)
    assert matcher.find_jump_forward_string() == ""
    assert matcher.accept_string("ab") and matcher.find_jump_forward_string() == "c"
    assert not matcher.accept_string("cx")
    assert matcher.accept_string("c") and matcher.is_completed()
    assert matcher.find_jump_forward_string() == ""  # the output may end, or go on
    assert matcher.accept_token(walker.eos) and matcher.is_terminated() and not matcher.accept_token(ord("d"))
    matcher.rollback(1)
    assert not matcher.is_terminated() and matcher.accept_token(ord("d"))
    assert allowed(matcher, walker) == [walker.eos]
    assert matcher.accept_token(walker.eos)
    matcher.rollback(4)
    assert allowed(matcher, walker) == beginning
    assert not matcher.accept_token(walker.eos) and matcher.accept_string("xyz")


def test_the_forced_text_may_end_within_a_character(walker: Walker, vocabulary: LazyVocabulary) -> None:
    matcher = lazy(vocabulary, text_rules("choice", '["é", "è"]'))
    with pytest.raises(UnicodeDecodeError) as raised:
        matcher.find_jump_forward_string()
    assert raised.value.object == "é".encode()[:1]


def test_intersections_and_complements_are_for_llguidance(walker: Walker, vocabulary: LazyVocabulary) -> None:
    parts = (Regex("[a-d]{1,9}"), Complement(Regex("[a-d]*b[a-d]*")), Complement(Terminal("ac")))
    some = Intersection(parts, "not at #")
    rules = {START: Seq((Terminal("<"), some, Terminal(">")))}
    assert engine_for(rules) == (LLGUIDANCE,)
    assert engine_for(schema_rules('{"type": "null"}')) == (XGRAMMAR, LLGUIDANCE)
    grammar = LazyGrammar(to_lark(rules, START), vocabulary)
    for text, is_right in [("<a>", 1), ("<acd>", 1), ("<ac>", 0), ("<abd>", 0), ("<>", 0), ("<aaaaaaaaaa>", 0)]:
        matcher = grammar.matcher()
        assert (matcher.accept_string(text) and matcher.is_completed()) == bool(is_right), text
    with pytest.raises(GrammarError, match="not at #: "):
        to_text(rules, START)


def test_a_large_grammar_is_for_llguidance() -> None:
    names = [f"name_{i}" for i in range(100)]
    assert engine_for(schema_rules(json.dumps({"properties": dict.fromkeys(names, True)}))) == (LLGUIDANCE,)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"pattern": "^a.*z$", "minLength": 3, "maxLength": 5}, ["abz", "a.z"], ["az", "abbbbz", "abb"]),
        ({"pattern": "^20", "format": "date"}, ["2024-02-29"], ["2023-02-29", "1999-01-01", "20"]),
        ({"format": "uri-reference", "maxLength": 4}, ["/a?b", "", "a/b"], ["/aaaa", "a b", "//a"]),
        ({"format": "json-pointer"}, ["", "/a~1b/~0"], ["a", "/~2"]),
        ({"format": "relative-json-pointer"}, ["1/a", "0#"], ["a", "01"]),
        ({"format": "uri-template"}, ["/a/{b}", "https://a.de/{x}?q={y}"], ["/{", "a b"]),
        ({"format": "regex"}, ["^a+(b|[0-9]c)?$", "\\\\d*"], ["(", "a**", "["]),
        ({"format": "idn-email"}, ["a@b.de"], ["a"]),
        ({"format": "idn-hostname"}, ["a.de"], ["a b"]),
        ({"format": "iri"}, ["https://a.de/b"], ["/b"]),
        ({"format": "iri-reference"}, ["https://a.de/b", "/b"], ["<"]),
    ],
)
def test_formats_and_patterns_together(
    vocabulary: LazyVocabulary, schema: Any, right: list[str], wrong: list[str]
) -> None:
    grammar = LazyGrammar(to_lark(schema_rules(json.dumps({"type": "string", **schema})), START), vocabulary)
    for text in [*right, *wrong]:
        matcher = grammar.matcher()
        assert (matcher.accept_string(f'"{text}"') and matcher.is_completed()) == (text in right), text


def test_automata_are_built_again_beside_the_outputs(
    walker: Walker, vocabulary: LazyVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.structured_output.matching.lazy_grammar._OUTPUTS_A_MATCHER", 2)
    grammar = LazyGrammar(to_lark(text_rules("choice", '["ab", "b"]'), START), vocabulary)
    first, begun, may_end = grammar._first, threading.Event(), threading.Event()
    build = grammar._new

    def slow() -> Any:
        begun.set()
        assert may_end.wait(20)
        return build()

    monkeypatch.setattr(grammar, "_new", slow)
    masks = [allowed(grammar.matcher(), walker) for _ in range(5)]  # no output waits
    assert begun.wait(20) and grammar._first is first
    may_end.set()
    assert grammar._next is not None
    wait([grammar._next])
    masks.append(allowed(grammar.matcher(), walker))
    assert grammar._first is not first
    assert all(mask == masks[0] for mask in masks)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_mixes_engines(
    walker: Walker, vocabulary: LazyVocabulary, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(GrammarThreads, "choose", lambda *_: threads)
    rules = text_rules("choice", '["ab", "b"]')
    made = CompiledGrammar(walker.compile(to_text(rules, START)), "choice")
    other = CompiledGrammar(LazyGrammar(to_lark(rules, START), vocabulary), "choice", engine=LLGUIDANCE)
    states = [GrammarState(each) for each in (made, other, other, made)]
    states[2].accept(ord("b"))
    bitmask = new_bitmask(6, len(walker.tokens))
    assert fill_masks(states, bitmask, [5, 1, 0, 3], GrammarThreads(2)) == {}

    def texts(row: int) -> set[bytes]:
        bits = np.unpackbits(bitmask[row].numpy().view(np.uint8), bitorder="little")
        return {walker.tokens[token_id] for token_id in np.flatnonzero(bits)}

    assert texts(5) == texts(1) == texts(3) == {b"a", b"b", b"ab"} and texts(0) == {b""}
    ahead = [[ord("a"), ord("b"), walker.eos]] * 2 + [[walker.eos], [ord("b"), ord("a"), ord("a")]]
    rows = [[2, 4, 4], [0, 1, 1], [2], [3, 3, 3]]
    assert fill_masks_after(states, ahead, bitmask, rows, GrammarThreads(2)) == [2, 2, 0, 1]
    assert texts(2) == texts(0) == {b"b"} and texts(4) == texts(1) == texts(3) == {b""}
    token_ids = [ord("b"), ord("x"), walker.eos, ord("a")]
    errors = accept_tokens(states, token_ids, GrammarThreads(2))
    assert list(errors) == [1] and f"token {ord('x')} as number 1" in str(errors[1])
    assert [(each.num_tokens, each.terminated) for each in states] == [(1, False), (0, False), (2, True), (1, False)]
    assert accept_tokens([states[0], states[3]], [walker.eos, ord("b")], GrammarThreads(2)) == {}
    assert states[0].terminated and not states[3].terminated


def test_a_batch_of_nothing_but_end_tokens(
    walker: Walker, vocabulary: LazyVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance's call for many outputs takes no empty list."""
    monkeypatch.setattr(GrammarThreads, "choose", lambda *_: 2)
    grammar = CompiledGrammar(LazyGrammar(to_lark({START: Seq((Terminal("a"),))}, START), vocabulary, []), "regex")
    states = [GrammarState(grammar) for _ in range(2)]
    assert accept_tokens(states, [ord("a")] * 2, GrammarThreads(2)) == {}
    assert accept_tokens(states, [walker.eos] * 2, GrammarThreads(2)) == {}
    assert all(state.terminated for state in states)


def test_an_output_whose_automata_grow_too_large_does_not_end(
    walker: Walker, vocabulary: LazyVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.structured_output.matching.lazy_grammar._MAX_STATES", 8)
    matcher = lazy(vocabulary, text_rules("regex", "(?:a|b)*a(?:a|b){12}c"))
    choose = random.Random(0)
    while (tokens := allowed(matcher, walker)) and matcher.accept_token(choose.choice(tokens)):
        assert walker.eos not in tokens
    assert not matcher.is_completed() and not matcher.accept_token(walker.eos)


def test_nothing_is_allowed_after_an_error(walker: Walker, vocabulary: LazyVocabulary) -> None:
    rules = text_rules("choice", '["a"]')
    state = GrammarState(CompiledGrammar(LazyGrammar(to_lark(rules, START), vocabulary), "choice"))
    assert not state.matcher.handle.consume_token(ord("b"))
    bitmask = new_bitmask(1, len(walker.tokens))
    error = fill_masks([state], bitmask, [0])[0]
    assert isinstance(error, GrammarError) and "no token" in str(error)
    assert fill_masks_after([state], [[ord("a")]], bitmask, [[0]]) == [0]


@pytest.mark.parametrize(
    ("text", "expected"), [('{"": 1}', True), ('{"ab": 1, "c": 2}', True), ('{"a1": 1}', False), ('{"ab": "x"}', False)]
)
def test_names_of_patterns_are_those_of_property_names(
    walker: Walker, vocabulary: LazyVocabulary, text: str, expected: bool
) -> None:
    schema = {
        "type": "object",
        "propertyNames": {"anyOf": [{"const": ""}, {"pattern": "^[a-z]+$"}]},
        "patternProperties": {"^.*$": {"type": "integer"}},
        "additionalProperties": False,
    }
    matcher = lazy(vocabulary, schema_rules(json.dumps(schema)))
    assert matcher.accept_string(text) == expected == Draft202012Validator(schema).is_valid(json.loads(text))


def test_a_long_text_goes_on_when_the_automaton_is_full(
    walker: Walker, vocabulary: LazyVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each character of a string that is counted takes states of its own."""
    monkeypatch.setattr(lazy_grammar, "_MAX_STATES", 2_000)
    rules = schema_rules('{"type": "string", "pattern": "@", "maxLength": 3000}')
    grammar = LazyGrammar(to_lark(rules, START), vocabulary)
    matcher, text = grammar.matcher(), '"@' + 'a\\"é' * 300 + '"'
    first = matcher.handle
    for byte in text.encode():
        assert byte in allowed(matcher, walker)
        assert accept_lazy([matcher], [byte], 1) == [True]
    assert matcher.handle is not first and matcher.is_completed()
    matcher.rollback(5)
    assert not matcher.is_completed() and matcher.accept_string('\\\\"') and matcher.accept_token(walker.eos)
    assert not grammar.matcher().accept_string('"' + "a" * 3_000 + '"')
