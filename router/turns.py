"""Threads that work for clients by turns."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")


class TurnThreads:
    """Threads for short work. Where all are busy, the clients that wait are served one after the other, each with one
    piece of its work, so that no client waits for another's queue. Used from one event loop."""

    def __init__(self, threads: int, name: str, each: int | None = None, ahead: int = 0) -> None:
        """`each`: how many pieces of one client may be in the threads at once. `ahead`: pieces that the threads find
        when they have ended one, as long as the event loop has not given them more: it may be busy for longer than a
        piece takes."""
        self._executor = ThreadPoolExecutor(threads, name)
        self._free = threads + ahead
        self._each = each or self._free
        self._busy: Counter[str] = Counter()
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # the client that is next comes first

    async def run(self, client: str, work: Callable[..., Result], *arguments: object) -> Result:
        """Returns what `work` makes of the arguments. A task that is cancelled while it waits leaves the queue, and
        its work is never begun. A task that is cancelled later keeps its thread until the work has ended."""
        if self.has_room(client):
            self._take(client)
        else:
            await self._turn(client)
        try:
            done = self._executor.submit(work, *arguments)
        except RuntimeError:  # closed
            self._give(client)
            raise
        try:
            return await asyncio.wrap_future(done)
        finally:
            if done.done():
                self._give(client)
            else:
                loop = asyncio.get_running_loop()
                done.add_done_callback(lambda _: _soon(loop, partial(self._give, client)))

    def close(self) -> None:
        """Begins no more work."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def end(self) -> None:
        """Closes, and waits for the work that has begun."""
        self.close()
        await asyncio.to_thread(self._executor.shutdown)

    def has_room(self, client: str) -> bool:
        """Whether work of this client would go to the threads at once."""
        return self._free > 0 and self._busy.get(client, 0) < self._each

    async def _turn(self, client: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                line = self._lines[client]
                line.remove(turn)
                if not line:
                    del self._lines[client]
            else:  # its turn had just come
                self._give(client)
            raise

    def _take(self, client: str) -> None:
        self._free -= 1
        self._busy[client] += 1

    def _give(self, client: str) -> None:
        self._free += 1
        self._busy[client] -= 1
        if not self._busy[client]:
            del self._busy[client]
        for name, line in self._lines.items():
            waiting = next((turn for turn in line if not turn.done()), None)
            if waiting is None or self._busy[name] >= self._each:
                continue
            line.remove(waiting)
            del self._lines[name]
            if line:
                self._lines[name] = line  # behind the others
            self._take(name)
            waiting.set_result(None)
            break


def _soon(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(work)
