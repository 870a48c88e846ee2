"""Which compiled grammars are kept, and what of one travels."""

import json
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgrammar

from worker.messages import Grammar
from worker.structured_output import CompilerUnavailable, GrammarCompiler, GrammarError
from worker.structured_output.compiling import compiler
from worker.structured_output.compiling.answer_verdict import AnswerToCheck, AnswerVerdict
from worker.structured_output.compiling.process import CompilerProcess
from worker.structured_output.compiling.serialised import serialised
from worker.structured_output.conversion.schema import schema_to_ebnf
from worker.structured_output.matching.engines import CompiledText

pytestmark = pytest.mark.slow

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


def test_what_has_not_been_counted_gives_no_bytes_back(made: Callable[..., GrammarCompiler], size: int) -> None:
    """A grammar that is done, and whose turn to be counted has not come, while another one makes the cache too full."""
    cache = made(cache_bytes=3 * size // 2)
    done = cache.submit(one("a")).result()
    with cache._lock:
        early = cache._kept[one("z")] = compiler._Asked()
        early.future = Future()
        early.future.set_result(done)
        cache._kept.move_to_end(one("z"), last=False)
    cache.submit(one("b")).result()
    with cache._lock:  # `a` has gone, which was counted
        assert list(cache._kept) == [one("z"), one("b")]
        assert cache._cached_bytes == cache._kept[one("b")].future.result().size_bytes
    cache._settle(one("z"), early.future)
    with cache._lock:
        assert cache._cached_bytes == sum(each.future.result().size_bytes for each in cache._kept.values())


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
    monkeypatch.setattr(compiler, "_MAX_MEMORY_WAIT_S", 0.0)
    cache = made(cache_bytes=size)
    held = [cache.submit(one(letter)).result() for letter in "abc"]
    with pytest.raises(CompilerUnavailable, match="take all memory"):
        cache.submit(one("d")).result()
    monkeypatch.setattr(compiler, "_MAX_MEMORY_WAIT_S", 60.0)
    waiting = cache.submit(one("d"))
    held.clear()  # its requests have ended
    assert waiting.result().param == "choice"


def test_who_waits_too_long_for_others_is_not_at_fault(
    made: Callable[..., GrammarCompiler], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_MAX_QUEUED_S", -1.0)
    cache = made()
    with pytest.raises(CompilerUnavailable, match="other requests"):
        cache.submit(one("a")).result()
    assert not asked
    monkeypatch.setattr(compiler, "_MAX_QUEUED_S", 60.0)
    assert cache.submit(one("a")).result().param == "choice"


class Held:
    """Compilations of letters that begin and go on until `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, letters: str) -> None:
        self.began = threading.Semaphore(0)
        self.release = threading.Event()
        compile_ = CompilerProcess.compile

        def held(process: CompilerProcess, kind: str, text: str, *rest: Any, **strict: Any) -> CompiledText:
            if json.loads(text)[0] in letters:
                self.began.release()
                assert self.release.wait(20)
            return compile_(process, kind, text, *rest, **strict)

        monkeypatch.setattr(CompilerProcess, "compile", held)


def test_slow_grammars_of_one_client_keep_no_other_out(
    made: Callable[..., GrammarCompiler], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that nobody waits for any more are never compiled."""
    slow, cache = Held(monkeypatch, "abcdefgh"), made()
    futures = [cache.submit(one(letter), "greedy") for letter in "abcdefgh"]
    try:
        for _ in range(2):
            assert slow.began.acquire(timeout=20)
        assert cache.submit(one("x"), "other").result(20).param == "choice"
        both = cache.submit(one("h"), "other")  # in the turn of who comes first
        assert slow.began.acquire(timeout=20)
        for future in futures[2:]:
            future.cancel()
    finally:
        slow.release.set()
    assert both.result(20).param == "choice" and futures[0].result(20) and futures[1].result(20)
    cache.close()
    assert sorted(asked) == sorted(one(letter).text for letter in "abxh")


def test_a_grammar_that_was_dropped_may_be_asked_for_again(
    made: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, cache = Held(monkeypatch, "ab"), made()
    futures = [cache.submit(one(letter), "greedy") for letter in "abx"]
    try:
        for _ in range(2):
            assert slow.began.acquire(timeout=20)
        again = cache.submit(one("x"), "greedy")
        futures[2].cancel()  # one of two that wait
        again.cancel()
        last = cache.submit(one("x"), "greedy")
    finally:
        slow.release.set()
    assert last.result(20).param == "choice"


def test_answers_of_one_client_are_judged_before_all_of_another(
    made: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def check(process: CompilerProcess, answer: AnswerToCheck, cpu_s: float) -> AnswerVerdict:
        assert answer.schema == "fast" or release.wait(20)
        return AnswerVerdict(None)

    monkeypatch.setattr(CompilerProcess, "check", check)
    cache = made()
    slow = [cache.check(AnswerToCheck("slow", [], None, None, False), "greedy") for _ in range(5)]
    try:
        fast = AnswerToCheck("fast", [], None, None, False)
        assert cache.check(fast, "other").result(20) == AnswerVerdict(None)
    finally:
        release.set()
    assert [each.result(20).violation for each in slow] == [None] * 5


def test_refusals_are_remembered_for_a_while(
    made: Callable[..., GrammarCompiler], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = made()
    refused = [Grammar("regex", f"(?={letter})") for letter in "abc"]
    messages = []
    for grammar in [*refused, *refused]:
        with pytest.raises(GrammarError) as caught:
            cache.submit(grammar, str(len(messages))).result(20)
        messages.append(str(caught.value))
    assert len(asked) == 3 and messages[:3] == messages[3:]
    for name, value in (("_MAX_REFUSED_CHARS", 0), ("_REFUSED_S", -1.0)):  # no room for any, and no time
        with monkeypatch.context() as patched:
            patched.setattr(compiler, name, value)
            for count in (len(asked) + 1, len(asked) + 2):
                with pytest.raises(GrammarError):
                    cache.submit(Grammar("regex", f"(?={name})")).result(20)
                assert len(asked) == count
    with monkeypatch.context() as broken:
        broken.setattr(CompilerProcess, "compile", _unavailable)
        with pytest.raises(CompilerUnavailable):
            cache.submit(one("a")).result(20)
    assert cache.submit(one("a")).result(20).param == "choice"  # it was not at fault


def _unavailable(*_: Any, **__: Any) -> CompiledText:
    raise CompilerUnavailable("no")


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
