"""Which compiled grammars are kept, and what of one travels."""

import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xgrammar

from worker.messages import Grammar
from worker.structured_output import CompilerUnavailable, GrammarCompiler, compiler
from worker.structured_output.schema import schema_to_ebnf
from worker.structured_output.serialised import serialised

EOS = 256
SCHEMA = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}}},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "é"]}},
        "node": {"$ref": "#/$defs/node"},
    },
    "required": ["name", "tags"],
}


def one(letter: str) -> Grammar:
    return Grammar("choice", json.dumps([letter]))


@pytest.fixture(scope="module")
def size(folder: Path) -> int:
    """Bytes of a grammar of one letter, give or take a few."""
    compiler = GrammarCompiler(folder, EOS + 1, 20.0, [EOS])
    try:
        return compiler.submit(one("a")).result().size_bytes
    finally:
        compiler.close()


def test_those_used_last_are_kept(made: Callable[..., GrammarCompiler], asked: list[str], size: int) -> None:
    compiler = made(cache_bytes=5 * size // 2)
    for letter in "abac":  # the last one takes the place of b, which was used before a was again
        compiler.submit(one(letter)).result()
    assert asked == [one(letter).text for letter in "abc"]
    compiler.submit(one("a")).result()
    assert len(asked) == 3
    compiler.submit(one("b")).result()
    assert asked[3:] == [one("b").text]


def test_what_is_not_kept_is_freed(
    made: Callable[..., GrammarCompiler], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed = threading.Semaphore(0)
    monkeypatch.setattr(compiler, "_trim", trimmed.release)
    cache = made(cache_bytes=5 * size // 2)
    grammars = []
    for letter in "abcdefgh":
        grammars.append(weakref.ref(cache.submit(one(letter)).result()))
        if len(grammars) > 2:
            assert trimmed.acquire(timeout=20)  # once for each that goes
    cache.close()  # the threads have let go of all
    assert [grammar() is not None for grammar in grammars] == [False] * 6 + [True] * 2
    assert size < cache._bytes < 3 * size


def test_a_large_one_gives_back_what_reading_it_took(
    made: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    trims = []
    monkeypatch.setattr(compiler, "_trim", lambda: trims.append(1))
    monkeypatch.setattr(compiler, "_WORTH_A_TRIM_BYTES", 0)
    made().submit(one("a")).result()
    assert trims


def test_grammars_of_requests_are_bounded_too(
    made: Callable[..., GrammarCompiler], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_MOST_ROOM_S", 0.0)
    cache = made(cache_bytes=size)
    held = [cache.submit(one(letter)).result() for letter in "abc"]
    with pytest.raises(CompilerUnavailable, match="take all memory"):
        cache.submit(one("d")).result()
    monkeypatch.setattr(compiler, "_MOST_ROOM_S", 60.0)
    waiting = cache.submit(one("d"))
    held.clear()  # its requests have ended
    assert waiting.result().param == "choice"


def test_who_waits_too_long_for_others_is_not_at_fault(
    made: Callable[..., GrammarCompiler], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_MOST_QUEUED_S", -1.0)
    cache = made()
    with pytest.raises(CompilerUnavailable, match="other requests"):
        cache.submit(one("a")).result()
    assert not asked
    monkeypatch.setattr(compiler, "_MOST_QUEUED_S", 60.0)
    assert cache.submit(one("a")).result().param == "choice"


def test_a_rule_takes_its_own_states_with_it(walker) -> None:
    """The masks, and the bytes for the way, are those of the whole."""
    whole = walker.compile(schema_to_ebnf(json.dumps(SCHEMA)))
    text = serialised(whole).decode()
    assert len(text) < len(whole.serialize_json()) / 2
    info = xgrammar.TokenizerInfo(walker.tokens, xgrammar.VocabType.RAW, stop_token_ids=[walker.eos])
    read = xgrammar.CompiledGrammar.deserialize_json(text, info)
    for seed in range(20):
        choose = np.random.default_rng(seed)
        matchers = xgrammar.GrammarMatcher(whole), xgrammar.GrammarMatcher(read)
        for _ in range(60):
            allowed, others = map(walker.allowed, matchers)
            assert allowed and allowed == others
            token = int(choose.choice(allowed))
            assert all(matcher.accept_token(token) for matcher in matchers)
            if matchers[0].is_terminated():
                assert matchers[1].is_terminated()
                break
