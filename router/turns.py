"""Threads that serve clients in turns."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


class Turns:
    """Work of many clients in few threads. After each piece of a client's work, a piece of the next client's comes; the
    pieces of one client come in their order. A piece whose caller has gone is left out. One event loop uses
    it."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._waiting = OrderedDict[Hashable, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]]()

    async def run(self, client: Hashable, work: Callable[[], Result]) -> Result:
        """Returns what `work` returns, or raises what it raises, in a thread."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((work, future))
        self._begin()
        return await future

    async def close(self) -> None:
        """Waits for the pieces that have begun, and leaves out the others."""
        waiting, self._waiting = self._waiting, OrderedDict()
        for _, future in (piece for pieces in waiting.values() for piece in pieces):
            future.cancel()
        await asyncio.to_thread(self._threads.shutdown)

    def _begin(self) -> None:
        while self._free and self._waiting:
            client, pieces = self._waiting.popitem(last=False)
            work, future = pieces.popleft()
            if pieces:
                self._waiting[client] = pieces  # behind all others
            if not future.cancelled():
                self._free -= 1
                asyncio.get_running_loop().run_in_executor(self._threads, work).add_done_callback(
                    partial(self._ended, future)
                )

    def _ended(self, future: "asyncio.Future[Any]", piece: "asyncio.Future[Any]") -> None:
        self._free += 1
        error = piece.exception()
        if not future.done():
            if error is None:
                future.set_result(piece.result())
            else:
                future.set_exception(error)
        self._begin()
