"""Grammars of requests: while they compile, and until the requests end."""

import logging
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from worker.grammar.compiler import GrammarCompiler
from worker.grammar.error import GrammarError
from worker.grammar.state import CompiledGrammar
from worker.messages import Failure, Grammar
from worker.refusal import in_one_line

log = logging.getLogger(__name__)


class Awaited:
    """One thread at a time, but for the compiler's, which calls `on_ready` whenever `take` has something new."""

    def __init__(self, compiler: GrammarCompiler, on_ready: Callable[[], None] | None = None) -> None:
        self._compiler, self._on_ready = compiler, on_ready
        self._compiling: dict[str, tuple[Future[CompiledGrammar], Grammar]] = {}
        self._done: queue.SimpleQueue[tuple[str, Future[CompiledGrammar]]] = queue.SimpleQueue()
        self._there: dict[str, CompiledGrammar] = {}

    def __len__(self) -> int:
        """Requests with a grammar."""
        return len(self._compiling) + len(self._there)

    @property
    def has_done(self) -> bool:
        """Whether `take` has something to say."""
        return not self._done.empty()

    def submit(self, request_id: str, grammar: Grammar) -> None:
        """A request is to wait for its grammar."""
        future = self._compiler.submit(grammar)
        self._compiling[request_id] = future, grammar
        future.add_done_callback(lambda done: self._wake(request_id, done))

    def wait(self) -> None:
        """Until one more has been compiled, or has failed to be."""
        wait([future for future, _ in self._compiling.values()], return_when=FIRST_COMPLETED)

    def take(self) -> Iterator[tuple[str, Failure | None]]:
        """Requests whose grammar is there now, and those whose grammar will not be, with the reason."""
        while not self._done.empty():
            request_id, done = self._done.get()
            future, grammar = self._compiling.get(request_id, (None, None))
            if future is not done or grammar is None:
                continue  # forgotten meanwhile
            del self._compiling[request_id]
            error = done.exception()
            if error is None:
                self._there[request_id] = done.result()
                yield request_id, None
            elif isinstance(error, GrammarError):
                yield request_id, Failure("invalid", str(error), _param(grammar))
            else:
                log.error("a grammar's compiler failed", exc_info=error)
                yield request_id, Failure("internal", f"the grammar's compiler failed: {in_one_line(error)}")

    def get(self, request_id: str) -> CompiledGrammar | None:
        """That of a request, if it has one."""
        return self._there.get(request_id)

    def forget(self, request_id: str) -> None:
        """The request has ended, if it was one of these."""
        self._there.pop(request_id, None)
        future, _ = self._compiling.pop(request_id, (None, None))
        if future is not None:
            future.cancel()

    def _wake(self, request_id: str, future: "Future[CompiledGrammar]") -> None:
        self._done.put((request_id, future))
        if self._on_ready is not None:
            self._on_ready()


def _param(grammar: Grammar) -> str:
    """What the client calls it."""
    return "response_format" if grammar.kind in ("json_schema", "json_object") else grammar.kind
