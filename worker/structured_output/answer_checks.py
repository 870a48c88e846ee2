"""Answers whose schema a grammar enforces in part: each is held when it ends, until it has been judged."""

import logging
import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from worker.errors import one_line
from worker.messages import Generate, Grammar, Output, SchemaCheck
from worker.structured_output.compiling.answer_verdict import AnswerToCheck, AnswerVerdict
from worker.structured_output.compiling.compiler import GrammarCompiler
from worker.structured_output.matching.state import CompiledGrammar

log = logging.getLogger(__name__)


@dataclass
class _Watched:
    """An answer as it grows, of this client. `last`: its last output, while it is judged."""

    grammar: Grammar
    token_ids: list[int]
    client: str = ""
    is_told: bool = False
    not_enforced: list[str] = field(default_factory=list)
    narrowed: list[str] = field(default_factory=list)
    last: Output | None = None

    @property
    def told(self) -> SchemaCheck:
        """The check before the answer is judged."""
        return SchemaCheck(self.not_enforced, narrowed=self.narrowed)


class AnswerChecks:
    """The answers to requests that let a part of their schema go (`Grammar.strict` is false). Used by one thread at a
    time. The compiler's threads call `on_ready` whenever `pass_on` has something new."""

    def __init__(self, compiler: GrammarCompiler, on_ready: Callable[[], None] | None = None) -> None:
        self._compiler, self._on_ready = compiler, on_ready
        self._watched: dict[str, _Watched] = {}
        self._judging: dict[str, Future[AnswerVerdict]] = {}
        self._done: queue.SimpleQueue[tuple[str, Future[AnswerVerdict]]] = queue.SimpleQueue()

    def __len__(self) -> int:
        """Number of answers that are watched."""
        return len(self._watched)

    @property
    def has_ready(self) -> bool:
        """Whether an answer that was held has been judged."""
        return not self._done.empty()

    @property
    def futures(self) -> list["Future[AnswerVerdict]"]:
        """Verdicts that are waited for."""
        return list(self._judging.values())

    def add(self, request: Generate) -> None:
        """Watches the answer to a request, if need be."""
        grammar = request.sampling.grammar
        if grammar is not None and not grammar.strict:
            self._watched[request.request_id] = _Watched(grammar, list(request.output_ids), request.client)

    def forget(self, request_id: str) -> None:
        """Drops a request. Others than those that are watched are ignored."""
        self._watched.pop(request_id, None)
        if (future := self._judging.pop(request_id, None)) is not None:
            future.cancel()

    def pass_on(self, outputs: Iterable[Output], compiled: Callable[[str], CompiledGrammar | None]) -> Iterator[Output]:
        """The outputs in their order, without the last of each answer that must be judged, and those that have been
        judged since. `compiled` has the grammars of requests."""
        for output in outputs:
            watched = self._watched.get(output.request_id)
            if watched is None or not self._is_held(output, watched, compiled(output.request_id)):
                yield output
        while not self._done.empty():
            request_id, done = self._done.get()
            if self._judging.get(request_id) is not done:
                continue  # forgotten meanwhile
            del self._judging[request_id]
            watched = self._watched.pop(request_id)
            assert watched.last is not None
            watched.last.check = _check(request_id, watched, done)
            yield watched.last

    def _is_held(self, output: Output, watched: _Watched, grammar: CompiledGrammar | None) -> bool:
        if grammar is not None and not watched.is_told:
            watched.is_told = True
            watched.not_enforced, watched.narrowed = list(grammar.not_enforced), list(grammar.narrowed)
            if watched.not_enforced:
                output.check = watched.told
        watched.token_ids += output.token_ids
        if output.finish_reason is None:
            return False
        if output.finish_reason != "stop" or not watched.not_enforced:
            if watched.not_enforced:
                output.check = watched.told
            del self._watched[output.request_id]
            return False
        token_ids = watched.token_ids[:-1] if output.stop_token_id is not None else watched.token_ids
        grammar_of, with_formats = watched.grammar, any(each.startswith("format ") for each in watched.not_enforced)
        answer = AnswerToCheck(grammar_of.text, token_ids, grammar_of.after, grammar_of.begin, with_formats)
        watched.last = output
        future = self._judging[output.request_id] = self._compiler.check(answer, watched.client)
        request_id = output.request_id
        future.add_done_callback(lambda done: self._wake(request_id, done))
        return True

    def _wake(self, request_id: str, future: "Future[AnswerVerdict]") -> None:
        self._done.put((request_id, future))
        if self._on_ready is not None:
            self._on_ready()


def _check(request_id: str, watched: _Watched, done: "Future[AnswerVerdict]") -> SchemaCheck:
    told = watched.told
    if done.cancelled():
        return msgspec.structs.replace(told, violation="not judged: the compiler is closed")
    if (error := done.exception()) is not None:
        log.warning("an answer could not be judged: %s", error, extra={"sequence": request_id})
        return msgspec.structs.replace(told, violation=f"not judged: {one_line(error)}")
    violation, kept = done.result()
    return msgspec.structs.replace(told, valid=violation is None, violation=violation, kept_tokens=kept)
