"""Forks that begin together: one request, which ends when its answers have come or when no caller is left."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from shoal.lang.backend import Call, Generated
from shoal.lang.backends.fork_batches import ForkBatches
from shoal.lang.ir import GenParams


class Stream:
    """Answers call number i once `ready[i]` is set, and ends once `over` is. Tells how it ended."""

    def __init__(self) -> None:
        self.ready = [asyncio.Event() for _ in range(2)]
        self.over = asyncio.Event()
        self.ending = "none"

    async def many(
        self, calls: Sequence[Call], common: str, body: dict[str, Any]
    ) -> AsyncGenerator[tuple[int, Generated], None]:
        self.ending = "broken off"
        for number in range(len(calls)):
            await self.ready[number].wait()
            yield number, Generated([f"{number}"], [{}])
        await self.over.wait()
        self.ending = "whole"

    def batches(self) -> ForkBatches:
        async def one(call: Call, body: dict[str, Any]) -> Generated:
            raise AssertionError("these calls go together")

        return ForkBatches(one, self.many)


def call(number: int) -> Call:
    text = f"a text of all {number}"
    return Call("program", f"{number}", "parent", 5, text, [], None, "", False, GenParams())


def begun() -> tuple[Stream, ForkBatches, list[asyncio.Task[Generated]]]:
    """Two calls that go together."""
    stream = Stream()
    batches = stream.batches()
    return stream, batches, [asyncio.create_task(batches.generate(call(i), {})) for i in range(2)]


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_the_end_of_the_stream_is_read_after_the_last_answer() -> None:
    async def run() -> None:
        stream, batches, calls = begun()
        for ready in stream.ready:
            ready.set()
        assert [(await answer).texts for answer in calls] == [["0"], ["1"]]
        await settled()
        stream.over.set()
        await asyncio.gather(*batches.tasks)
        assert stream.ending == "whole"

    asyncio.run(run())


def test_a_stream_without_callers_is_broken_off() -> None:
    async def run() -> None:
        stream, batches, calls = begun()
        await settled()
        calls[0].cancel()
        await settled()
        (running,) = batches.tasks  # the other call still waits
        calls[1].cancel()
        await asyncio.wait([running])
        assert running.cancelled() and stream.ending == "broken off" and not batches.tasks

    asyncio.run(run())


def test_calls_that_are_given_up_at_once_send_nothing() -> None:
    async def run() -> None:
        stream, batches, calls = begun()
        await asyncio.sleep(0)  # the batch is open
        for cancelled in calls:
            cancelled.cancel()
        await settled()
        assert not batches.tasks and stream.ending == "none"

    asyncio.run(run())
