"""Threads that work for clients by turns."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from worker.niceness import yield_to_others

Result = TypeVar("Result")
_Work = Callable[[], Any]


class ClientTurns:
    """Threads whose clients are served one after the other where all threads are busy, each with one piece of its work,
    so that no client waits for another's queue. Work whose future is cancelled before its turn leaves the queue."""

    def __init__(self, threads: int, name: str, each: int | None = None, nice: int = 0) -> None:
        """`each`: the most threads that one client has at once, so that others find one free. `nice`: by how much they
        yield to the process's other threads, and to other processes, where cores are busy (on Linux)."""
        self._threads = ThreadPoolExecutor(threads, name, yield_to_others, (nice,))
        self._count = threads
        self._each = each or threads
        self._lock = threading.Lock()
        self._lines: dict[str, dict[Future[Any], None]] = {}  # the client that is next comes first
        self._waiting: dict[Future[Any], tuple[_Work, set[str]]] = {}  # with the clients in whose lines it is
        self._busy: Counter[str] = Counter()

    def submit(self, client: str, work: Callable[[], Result]) -> "Future[Result]":
        """The result of `work`. Raises RuntimeError after `close`."""
        future: Future[Result] = Future()
        with self._lock:
            self._waiting[future] = work, set()
            self._stand(client, future)
        try:
            self._threads.submit(self._work)
        except RuntimeError:
            future.cancel()
            raise
        finally:
            future.add_done_callback(self._leave)
        return future

    async def run(self, client: str, work: Callable[..., Result], *arguments: object) -> Result:
        """As `submit`, from an event loop. Of a task that is cancelled, work that has not begun is dropped."""
        return await asyncio.wrap_future(self.submit(client, partial(work, *arguments)))

    def join(self, client: str, future: "Future[Any]") -> None:
        """Lets this client wait for what another has submitted: it may be done in the turn of either. Raises
        RuntimeError after `close`."""
        with self._lock:
            if future not in self._waiting:
                return  # it has begun
            self._stand(client, future)
        self._threads.submit(self._work)

    def has_room(self, client: str) -> bool:
        """Whether work of this client would begin at once."""
        with self._lock:
            return not self._waiting and self._busy.total() < self._count and self._busy[client] < self._each

    def close(self) -> None:
        """Cancels what waits. Call `wait` for what runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()

    def wait(self) -> None:
        """Waits until the threads have ended."""
        self._threads.shutdown(wait=True)

    def _work(self) -> None:
        """Does what may be done, one piece after the other."""
        while (found := self._next()) is not None:
            client, future, work = found
            del found
            _do(future, work)
            del future, work  # and what they hold
            with self._lock:
                self._busy[client] -= 1
                if not self._busy[client]:
                    del self._busy[client]

    def _next(self) -> tuple[str, "Future[Any]", _Work] | None:
        with self._lock:
            client = next((name for name in self._lines if self._busy[name] < self._each), None)
            if client is None:
                return None
            future = next(iter(self._lines[client]))
            work = self._remove(future)
            if client in self._lines:
                self._lines[client] = self._lines.pop(client)  # behind the others
            self._busy[client] += 1
            return client, future, work

    def _stand(self, client: str, future: "Future[Any]") -> None:
        self._lines.setdefault(client, {})[future] = None
        self._waiting[future][1].add(client)

    def _leave(self, future: "Future[Any]") -> None:
        with self._lock:
            if future in self._waiting:
                self._remove(future)

    def _remove(self, future: "Future[Any]") -> _Work:
        work, clients = self._waiting.pop(future)
        for client in clients:
            line = self._lines[client]
            del line[future]
            if not line:
                del self._lines[client]
        return work


def _do(future: "Future[Any]", work: _Work) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
