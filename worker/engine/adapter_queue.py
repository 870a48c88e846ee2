"""Adapters (LoRA) of requests, from their folders to the end of the request."""

import logging
import queue
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from pathlib import Path

from worker.errors import one_line
from worker.executor.executor import Executor
from worker.messages import Adapter, Failure

log = logging.getLogger(__name__)


class _HostCopy:
    """An adapter in the host's memory, or on its way there, and the requests that use it."""

    def __init__(self, adapter: Adapter, number: int, read: Future[None]) -> None:
        self.adapter, self.number, self.read = adapter, number, read
        self.requests: set[str] = set()
        self.was_told = False  # whether `poll` has said that it is there
        self.waiting: set[str] = set()  # those to which `poll` has yet to say that it is there


class AdapterQueue:
    """Adapters in the host's memory, and those that are being read. Used by one thread at a time. The executor's
    threads call `on_ready` whenever `poll` has something new.

    Each copy has a number of its own for plans. Copies that no request uses are forgotten when there are more than
    `most_copies`, those used least recently first.
    """

    def __init__(self, executor: Executor, most_copies: int, on_ready: Callable[[], None] | None = None) -> None:
        self._executor, self._most_copies, self._on_ready = executor, most_copies, on_ready
        self._copies: dict[Adapter, _HostCopy] = {}  # the one that was used least recently first
        self._by_request: dict[str, _HostCopy] = {}
        self._done: queue.SimpleQueue[_HostCopy] = queue.SimpleQueue()
        self._last_number = 0

    def __len__(self) -> int:
        """Number of requests with an adapter."""
        return len(self._by_request)

    @property
    def has_ready(self) -> bool:
        """Whether `poll` has something new."""
        return not self._done.empty()

    @property
    def futures(self) -> list[Future[None]]:
        """Reads that have not ended."""
        return [copy.read for copy in self._copies.values() if not copy.read.done()]

    def names(self, numbers: Collection[int]) -> list[str]:
        """The names of adapters, from their numbers, without those that were forgotten; ascending."""
        return sorted({copy.adapter.name for copy in self._copies.values() if copy.number in numbers})

    def open(self, request_id: str, adapter: Adapter) -> tuple[int, bool]:
        """Finds a request's adapter, and begins to read it if it is not there. Returns its number, and whether it is
        there already; if not, `poll` tells."""
        copy = self._copies.pop(adapter, None)
        if copy is None:
            self._last_number += 1
            read = self._executor.prepare_adapter(self._last_number, Path(adapter.path))
            copy = _HostCopy(adapter, self._last_number, read)
            read.add_done_callback(lambda _, own=copy: self._wake(own))  # type: ignore[misc]
        self._copies[adapter] = copy
        copy.requests.add(request_id)
        self._by_request[request_id] = copy
        self._shrink()
        if not copy.was_told:
            copy.waiting.add(request_id)
        return copy.number, copy.was_told

    def poll(self) -> Iterator[tuple[str, Failure | None]]:
        """(request, None or failure) for each request whose adapter was read since the last call. None: it is there."""
        while not self._done.empty():
            copy = self._done.get()
            failure = None
            if (error := copy.read.exception()) is not None:
                failure = Failure("internal", f"adapter {copy.adapter.name!r} could not be read: {one_line(error)}")
                if isinstance(error, ValueError):
                    failure = Failure("invalid", str(error), "model")
                log.warning("adapter %s cannot be used: %s", copy.adapter.name, one_line(error))
                if self._copies.get(copy.adapter) is copy:  # the next request tries again
                    del self._copies[copy.adapter]
                    self._executor.forget_adapter(copy.number)
            copy.was_told = True
            told, copy.waiting = sorted(copy.waiting), set()
            for request_id in told:
                yield request_id, failure

    def forget(self, request_id: str) -> None:
        """Drops the adapter of a request that has ended. Requests without one are ignored."""
        copy = self._by_request.pop(request_id, None)
        if copy is not None:
            copy.requests.discard(request_id)
            copy.waiting.discard(request_id)
            self._shrink()

    def _shrink(self) -> None:
        unused = [copy for copy in self._copies.values() if not copy.requests and copy.read.done()]
        for copy in unused[: max(0, len(self._copies) - self._most_copies)]:
            del self._copies[copy.adapter]
            self._executor.forget_adapter(copy.number)

    def _wake(self, copy: _HostCopy) -> None:
        self._done.put(copy)
        if self._on_ready is not None:
            self._on_ready()
