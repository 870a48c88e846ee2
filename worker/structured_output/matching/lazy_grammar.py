"""Grammars that llguidance follows, ready for any number of outputs."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

from worker.structured_output.json_schema.unique_places import Place
from worker.structured_output.matching.lazy_matcher import LazyMatcher, LazyVocabulary
from worker.structured_output.matching.unique_items import UniqueMatcher

# Most states of a grammar's automata, of 1 to 2 kB each. llguidance's default is 250,000.
_MAX_STATES = 20_000
# Outputs after which a grammar's automata are dropped and built again, so that they do not grow without end.
_OUTPUTS_A_MATCHER = 64
# Memory of a grammar, roughly, by the size of its text.
LAZY_BYTES, LAZY_BYTES_PER_BYTE = 2 << 20, 20


class LazyGrammar:
    """A grammar in Lark, ready for use by any number of outputs. They share automata."""

    def __init__(self, lark: str, vocabulary: LazyVocabulary, places: Sequence[Place] = ()) -> None:
        """`places`: those of unique items. Raises ValueError with llguidance's words if the grammar is wrong."""
        self._lark, self.vocabulary, self._places = lark, vocabulary, places
        self._first = self._new()
        self._used = 0
        self._next: Future[Any] | None = None

    def matcher(self) -> LazyMatcher:
        """A new matcher at the grammar's beginning."""
        if self._used >= _OUTPUTS_A_MATCHER and self._next is None:
            # Takes up to 0.1 s, and is called between steps. Until it is there, outputs get the old one.
            self._next = _threads().submit(self._new)
        if self._next is not None and self._next.done():
            self._first, self._used, self._next = self._next.result(), 0, None
        self._used += 1
        if self._places:
            return UniqueMatcher(self.vocabulary, self._first.deep_copy(), self._places, self._new)
        return LazyMatcher(self.vocabulary, self._first.deep_copy(), self._new)

    def _new(self) -> Any:
        import llguidance

        limits = llguidance.LLParserLimits(max_lexer_states=_MAX_STATES, verbose_errors=False)
        grammar = llguidance.LLMatcher.grammar_from_lark(self._lark)
        matcher = llguidance.LLMatcher(self.vocabulary.handle, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(str(matcher.get_error()))
        return matcher


@cache
def _threads() -> ThreadPoolExecutor:
    """The thread that builds automata again."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="automata")
