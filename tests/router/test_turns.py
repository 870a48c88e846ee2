"""Threads by turns of clients: the order, what is dropped, and that no thread is lost."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.turns import TurnThreads

WAIT_S = 20


@asynccontextmanager
async def busy(threads: TurnThreads, *clients: str) -> AsyncIterator[Callable[[], None]]:
    """One thread for each of these clients, busy until the function that this yields is called."""
    release = threading.Event()
    tasks = [asyncio.create_task(threads.run(client, release.wait, WAIT_S)) for client in clients]
    await asyncio.sleep(0)
    try:
        yield release.set
    finally:
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, WAIT_S))


def test_clients_that_wait_take_turns() -> None:
    async def work() -> None:
        threads, done = TurnThreads(1, "turns"), list[str]()
        async with busy(threads, "a") as release:
            waiting = [
                asyncio.create_task(threads.run(who[0], done.append, who)) for who in ("a1", "a2", "a3", "b1", "c1")
            ]
            await asyncio.sleep(0)
            release()
            await asyncio.gather(*waiting)
        assert done == ["a1", "b1", "c1", "a2", "a3"] and threads.has_room("a")
        threads.close()

    run(work())


def test_a_thread_is_left_to_the_others() -> None:
    async def work() -> None:
        threads = TurnThreads(2, "turns", each=1)
        async with busy(threads, "a"):
            own = asyncio.create_task(threads.run("a", lambda: "a"))
            assert await threads.run("b", lambda: "b") == "b"
            assert not threads.has_room("a") and threads.has_room("b") and not own.done()
        assert await own == "a"
        threads.close()

    run(work())


@pytest.mark.parametrize("is_running", [True, False])
def test_work_of_a_client_that_has_gone(is_running: bool) -> None:
    """What waits is never begun. What runs keeps its thread until it has ended."""

    async def work() -> None:
        threads, begun = TurnThreads(1, "turns"), list[str]()
        release, began = threading.Event(), threading.Event()

        def slow() -> None:
            began.set()
            release.wait(WAIT_S)

        running = asyncio.create_task(threads.run("a", slow))
        waiting = [asyncio.create_task(threads.run("a", begun.append, "a")) for _ in range(3)]
        while not began.is_set():
            await asyncio.sleep(0)
        gone = [running] if is_running else waiting
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        assert not threads.has_room("a") and begun == []
        release.set()
        await asyncio.gather(running, *waiting, return_exceptions=True)
        assert begun == (["a"] * 3 if is_running else [])
        while not threads.has_room("a"):
            await asyncio.sleep(0)
        assert await threads.run("b", lambda: 1) == 1 and not threads._lines and not threads._busy
        threads.close()

    run(work())


def test_a_turn_that_comes_as_its_client_goes_is_passed_on() -> None:
    async def work() -> None:
        threads = TurnThreads(1, "turns")
        async with busy(threads, "a") as release:
            leaving = asyncio.create_task(threads.run("b", lambda: "b"))
            staying = asyncio.create_task(threads.run("c", lambda: "c"))
            await asyncio.sleep(0)
            (turn,) = threads._lines["b"]
            turn.add_done_callback(lambda _: leaving.cancel())  # before the task goes on
            release()
            assert await staying == "c"
        assert threads.has_room("b")
        threads.close()

    run(work())


def test_after_the_end_there_is_an_error_and_no_thread_is_missing() -> None:
    async def work() -> None:
        threads = TurnThreads(1, "turns")
        threads.close()
        for _ in range(2):
            with pytest.raises(RuntimeError):
                await threads.run("a", lambda: 1)

    run(work())
