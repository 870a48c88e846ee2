"""Grammars of requests, from their compilation to the end of the request."""

import logging
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from worker.errors import one_line
from worker.messages import Failure, Grammar
from worker.structured_output.compiling.compiler import GrammarCompiler
from worker.structured_output.error import CompilerUnavailable, GrammarError
from worker.structured_output.matching.state import CompiledGrammar, param_of

log = logging.getLogger(__name__)


class GrammarQueue:
    """Compiled grammars, and those being compiled, by request. Used by one thread at a time. The compiler's threads
    call `on_ready` whenever `poll` has something new."""

    def __init__(self, compiler: GrammarCompiler, on_ready: Callable[[], None] | None = None) -> None:
        self._compiler, self._on_ready = compiler, on_ready
        self._compiling: dict[str, tuple[Future[CompiledGrammar], Grammar]] = {}
        self._done: queue.SimpleQueue[tuple[str, Future[CompiledGrammar]]] = queue.SimpleQueue()
        self._there: dict[str, CompiledGrammar] = {}

    def __len__(self) -> int:
        """Number of requests with a grammar."""
        return len(self._compiling) + len(self._there)

    @property
    def has_ready(self) -> bool:
        """Whether `poll` has something new."""
        return not self._done.empty()

    def submit(self, request_id: str, grammar: Grammar, client: str = "") -> None:
        """Begins to compile the grammar of a request of this client."""
        future = self._compiler.submit(grammar, client)
        self._compiling[request_id] = future, grammar
        future.add_done_callback(lambda done: self._wake(request_id, done))

    @property
    def futures(self) -> list[Future[CompiledGrammar]]:
        """Compilations that `poll` has not told of."""
        return [future for future, _ in self._compiling.values()]

    def poll(self) -> Iterator[tuple[str, Failure | None]]:
        """(request, None or failure) for each compilation that has ended since the last call. None: the grammar is
        ready."""
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
                param = "response_format" if error.of_text else param_of(grammar.kind)
                yield request_id, Failure("invalid", str(error), param)
            elif isinstance(error, CompilerUnavailable):
                log.warning("a grammar could not be compiled: %s", error, extra={"sequence": request_id})
                yield request_id, Failure("unavailable", f"{error}: try again later")
            else:
                log.error("a grammar's compiler failed", exc_info=error, extra={"sequence": request_id})
                yield request_id, Failure("internal", f"the grammar's compiler failed: {one_line(error)}")

    def compiled(self, request_id: str) -> CompiledGrammar | None:
        """The compiled grammar of a request, if it has one."""
        return self._there.get(request_id)

    def forget(self, request_id: str) -> None:
        """Drops the grammar of a request that has ended. Requests without a grammar are ignored."""
        self._there.pop(request_id, None)
        future, _ = self._compiling.pop(request_id, (None, None))
        if future is not None:
            future.cancel()

    def _wake(self, request_id: str, future: "Future[CompiledGrammar]") -> None:
        self._done.put((request_id, future))
        if self._on_ready is not None:
            self._on_ready()
