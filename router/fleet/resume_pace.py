"""The pace at which streams go on at other replicas after theirs was lost.

Hundreds of streams may lose their replica at once. Their prompts have to be computed again, with the output so far: a
second and more of work for each of the other replicas, in which the streams there would hardly get a token. So resumed
prompts get a share of each busy replica's time (`SHARE`), and wait at the router until it is their turn. Seconds are
predicted by the replicas' own `StepCosts`.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Awaitable, Callable

# Of the time of a replica on which others decode. Simulated (`shoal bench fleet --death`), the 99th percentile of their
# times between tokens then stays within twice its value before, from 3 replicas on; with a half, it was 2.1 times on 3.
SHARE = 1 / 3


class ResumePace:
    """Lets streams go on one after the other, those with the quickest prompts first. One event loop uses it."""

    def __init__(
        self,
        rate: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`rate`: how many predicted seconds of prompts may begin in a second now, on all replicas together; 0 while
        there is no replica, where nothing is gained by waiting. `clock` returns seconds, and `sleep` waits for some."""
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, float, asyncio.Future[None]]] = []  # a heap
        self._free_s = 0.0  # when the next may go on
        self._giving: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Streams that wait for their turn."""
        return sum(not turn.done() for *_, turn in self._waiting)

    async def turn(self, prompt_s: float) -> None:
        """Returns when a stream may go on whose prompt takes a replica `prompt_s` seconds."""
        turn = asyncio.get_running_loop().create_future()
        # The time at which it would be done if it had begun at once: quick ones go first, and none waits for ever.
        due_s = self._clock() + prompt_s / SHARE
        heapq.heappush(self._waiting, (due_s, next(self._order), prompt_s, turn))
        if self._giving is None or self._giving.done():
            self._giving = asyncio.create_task(self._give())
        await turn

    async def close(self) -> None:
        """Ends the work of `turn`. The streams that wait must have been cancelled."""
        if self._giving is not None:
            self._giving.cancel()
            await asyncio.gather(self._giving, return_exceptions=True)

    async def _give(self) -> None:
        await asyncio.sleep(0)  # all streams of a replica are lost in the same moment
        while self._waiting:
            rate, wait_s = self._rate(), self._free_s - self._clock()
            if rate > 0 and wait_s > 0:
                await self._sleep(wait_s)
                continue
            _, _, prompt_s, turn = heapq.heappop(self._waiting)
            if turn.done():
                continue  # its client has gone
            turn.set_result(None)
            if rate > 0:
                self._free_s = self._clock() + prompt_s / rate
