"""Masks of many states at once, and where a state is at its end."""

import json
import random

import numpy as np
import pytest
import xgrammar

from worker.structured_output import (
    CompiledGrammar,
    GrammarError,
    GrammarState,
    fill_masks,
    fill_masks_after,
    new_bitmask,
)
from worker.structured_output.conversion.schema import schema_to_ebnf
from worker.structured_output.matching import batch

WORDS = "ab", "abc", "x" * 9
COUNT = 40


@pytest.fixture
def compiled(walker) -> CompiledGrammar:
    choices = " | ".join(f'"{word}"' for word in WORDS)
    return CompiledGrammar(walker.compile(f"root ::= {choices}"), "choice")


def allowed(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def test_masks_of_many_states(compiled: CompiledGrammar, walker) -> None:
    states = [GrammarState(compiled) for _ in range(COUNT)]
    for i, one in enumerate(states):
        for token in b"abc"[: i % 4]:
            one.accept(token)
    bitmask = new_bitmask(COUNT + 5, len(walker.tokens))
    rows = list(range(COUNT + 4, 4, -1))
    assert fill_masks(states, bitmask, rows) == {}
    vocabulary = {text: i for i, text in enumerate(walker.tokens) if text}
    after = [{b"a", b"x", b"ab"}, {b"b"}, {b"c"}, set()]
    for i, row in enumerate(rows):
        wanted = {vocabulary[text] for text in after[i % 4]} | ({walker.eos} if i % 4 >= 2 else set())
        assert allowed(bitmask[row].numpy()) == wanted
    assert not bitmask[:5].any()


def test_the_end_is_an_end_token(compiled: CompiledGrammar, walker) -> None:
    one, other = GrammarState(compiled), GrammarState(compiled)
    for token in b"abc":
        one.accept(token)
        assert not one.terminated
    with pytest.raises(GrammarError, match="token 97 as number 4"):
        one.accept(ord("a"))
    one.accept(walker.eos)
    assert one.terminated and one.num_tokens == 4
    errors = fill_masks([other, one], new_bitmask(2, len(walker.tokens)), [0, 1])
    assert list(errors) == [1] and "complete already" in str(errors[1])


def test_a_state_without_a_token(walker) -> None:
    """The letter of its grammar is not in its vocabulary."""
    info = xgrammar.TokenizerInfo([b"a", b"<end>"], xgrammar.VocabType.RAW, stop_token_ids=[1])
    handle = xgrammar.GrammarCompiler(info).compile_grammar('root ::= "a" "z"')
    stuck = GrammarState(CompiledGrammar(handle, "ebnf"))
    stuck.accept(0)
    errors = fill_masks([stuck], new_bitmask(1, 2), [0])
    assert "allows no token" in str(errors[0])


def test_who_is_slow_is_found(compiled: CompiledGrammar, walker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_SLOW_FILL_S", -1.0)
    errors = fill_masks([GrammarState(compiled)], new_bitmask(1, len(walker.tokens)), [0])
    assert "too slow" in str(errors[0])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer"}, "b/": {"enum": ["x/y", 1]}}, "required": ["b/"]},
        {"type": "array", "items": {"anyOf": [{"type": "number"}, {"$ref": "#"}, {"type": "string", "maxLength": 9}]}},
    ],
    ids=json.dumps,
)
def test_a_state_that_looked_ahead_has_the_masks_of_one_that_did_not(walker, schema: object) -> None:
    compiled = CompiledGrammar(walker.compile(schema_to_ebnf(json.dumps(schema))), "json_schema")
    rows = list(range(8))
    for seed in range(20):
        choose, way = random.Random(seed), list[int]()
        one = GrammarState(compiled)
        while not one.terminated and len(way) < 40:
            before = walker.allowed(one.matcher)
            ahead = [choose.choice(before), *(choose.randrange(len(walker.tokens)) for _ in rows[1:])]
            fill_masks_after([one], [ahead], new_bitmask(len(rows), len(walker.tokens)), [rows])
            fresh = GrammarState(compiled)
            for token in way:
                fresh.accept(token)
            assert walker.allowed(one.matcher) == walker.allowed(fresh.matcher) == before
            way.append(choose.choice(before))
            one.accept(way[-1])
