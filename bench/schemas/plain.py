"""xgrammar's and llguidance's own conversions of a schema, each in a process of its own with limits."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from worker.structured_output.compiling.forks import in_fork
from worker.structured_output.matching.lazy_matcher import LazyVocabulary
from worker.structured_output.tokens import GrammarVocabulary

_CPU_S, _BYTES = 10.0, 1 << 30


class GrammarVerdict(NamedTuple):
    """The reason why a schema is refused, None if it is accepted, and then the instances that its grammar allows."""

    refusal: str | None
    accepted: frozenset[str]


Work = Callable[[], GrammarVerdict]


def _limited(work: Work) -> GrammarVerdict:
    def run() -> bytes:
        try:
            refusal, accepted = work()
        except (RuntimeError, ValueError, UnicodeDecodeError) as error:
            refusal, accepted = str(error)[:200], frozenset()
        return json.dumps([refusal, sorted(accepted)]).encode()

    found = in_fork(run, _CPU_S, _BYTES)
    if found is None:
        return GrammarVerdict("too much time or memory", frozenset())
    refusal, accepted = json.loads(found)
    return GrammarVerdict(refusal, frozenset(accepted))


def _by_xgrammar(
    model_dir: Path, vocab_size: int, end_ids: tuple[int, ...], text: str, ways: Mapping[str, list[int]]
) -> GrammarVerdict:
    import xgrammar

    info = _xgrammar_info(model_dir, vocab_size, end_ids)

    def work() -> GrammarVerdict:
        compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(text, strict_mode=False)
        accepted = set()
        for instance, way in ways.items():
            matcher = xgrammar.GrammarMatcher(compiled)
            if all(matcher.accept_token(token_id) for token_id in way):
                accepted.add(instance)
        return GrammarVerdict(None, frozenset(accepted))

    return _limited(work)


def _by_llguidance(
    model_dir: Path, vocab_size: int, end_ids: tuple[int, ...], text: str, ways: Mapping[str, list[int]]
) -> GrammarVerdict:
    import llguidance

    vocabulary = _lazy_vocabulary(model_dir, vocab_size, end_ids)

    def work() -> GrammarVerdict:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
        first = llguidance.LLMatcher(vocabulary.handle, grammar, log_level=0)
        if first.is_error():
            return GrammarVerdict(str(first.get_error())[:200], frozenset())
        accepted = set()
        for instance, way in ways.items():
            matcher = first.deep_copy()
            if matcher.try_consume_tokens(way[:-1]) == len(way) - 1 and matcher.is_accepting():
                accepted.add(instance)
        return GrammarVerdict(None, frozenset(accepted))

    return _limited(work)


@cache
def _texts(model_dir: Path, vocab_size: int) -> list[bytes]:
    return GrammarVocabulary(model_dir, vocab_size).token_bytes()


@cache
def _xgrammar_info(model_dir: Path, vocab_size: int, end_ids: tuple[int, ...]) -> Any:
    import xgrammar

    texts = _texts(model_dir, vocab_size)
    return xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(end_ids))


@cache
def _lazy_vocabulary(model_dir: Path, vocab_size: int, end_ids: tuple[int, ...]) -> LazyVocabulary:
    return LazyVocabulary(_texts(model_dir, vocab_size), end_ids)


PLAIN: dict[str, Callable[..., GrammarVerdict]] = {"xgrammar": _by_xgrammar, "llguidance": _by_llguidance}
