"""Threads that work for clients by turns."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")
_Work = Callable[[], Any]


class ClientTurns:
    """Threads for work that takes seconds. The clients that wait are served one after the other, each with one piece
    of its work. No client has more than `each` of the threads at once, so that others find one free. Work whose future
    is cancelled before its turn leaves the queue."""

    def __init__(self, threads: int, each: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._each = each
        self._lock = threading.Lock()
        self._lines: dict[str, dict[Future[Any], _Work]] = {}  # the client that is next comes first
        self._busy: Counter[str] = Counter()

    def submit(self, client: str, work: Callable[[], Result]) -> "Future[Result]":
        """The result of `work`. Raises RuntimeError after `close`."""
        future: Future[Result] = Future()
        with self._lock:
            self._lines.setdefault(client, {})[future] = work
        try:
            self._threads.submit(self._work)
        except RuntimeError:
            future.cancel()
            raise
        finally:
            future.add_done_callback(self._leave)
        return future

    def join(self, client: str, future: "Future[Any]") -> None:
        """Lets this client wait for what another has submitted: it may be done in the turn of either. Raises
        RuntimeError after `close`."""
        with self._lock:
            work = next((line[future] for line in self._lines.values() if future in line), None)
            if work is None:
                return  # it has begun
            self._lines.setdefault(client, {})[future] = work
        self._threads.submit(self._work)

    def close(self) -> None:
        """Cancels what waits. Call `wait` for what runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = {future for line in self._lines.values() for future in line}
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
            line = self._lines.pop(client)
            future = next(iter(line))
            work = line.pop(future)
            if line:
                self._lines[client] = line  # behind the others
            self._remove(future)
            self._busy[client] += 1
            return client, future, work

    def _leave(self, future: "Future[Any]") -> None:
        if future.cancelled():
            with self._lock:
                self._remove(future)

    def _remove(self, future: "Future[Any]") -> None:
        for client, line in list(self._lines.items()):
            if line.pop(future, None) is not None and not line:
                del self._lines[client]


def _do(future: "Future[Any]", work: _Work) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
