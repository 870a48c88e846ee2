"""Threads by turns of clients: the order, what is dropped, and that no thread is lost."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from contextlib import contextmanager

import pytest

from worker.client_turns import ClientTurns

WAIT_S = 20


@contextmanager
def busy(threads: ClientTurns, *clients: str) -> Iterator[Callable[[], None]]:
    """One thread for each of these clients, busy until the function that this yields is called."""
    release = threading.Event()
    running = []
    for client in clients:
        began = threading.Event()
        running.append(threads.submit(client, lambda began=began: (began.set(), release.wait(WAIT_S))))  # type: ignore[misc]
        assert began.wait(WAIT_S)
    try:
        yield release.set
    finally:
        release.set()
        wait(running, WAIT_S)


def ended(threads: ClientTurns) -> bool:
    """Ends the threads. Whether nothing is left in them."""
    threads.close()
    threads.wait()
    return not (threads._lines or threads._waiting or threads._busy)


def test_clients_that_wait_take_turns() -> None:
    threads, done = ClientTurns(1, "turns"), list[str]()
    with busy(threads, "a") as release:
        assert not threads.has_room("b")
        waiting = [
            threads.submit(who[0], lambda who=who: done.append(who))  # type: ignore[misc]
            for who in ("a1", "a2", "a3", "b1", "c1")
        ]
        release()
        wait(waiting, WAIT_S)
    assert done == ["a1", "b1", "c1", "a2", "a3"]
    assert ended(threads)


def test_a_thread_is_left_to_the_others() -> None:
    threads = ClientTurns(2, "turns", each=1)
    assert threads.has_room("a")
    with busy(threads, "a"):
        assert threads.has_room("b") and not threads.has_room("a")
        own = threads.submit("a", lambda: "a")
        assert threads.submit("b", lambda: "b").result(WAIT_S) == "b" and not own.done()
    assert own.result(WAIT_S) == "a"
    assert ended(threads)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_threads_yield_to_others() -> None:
    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    patient, other = ClientTurns(1, "patient", nice=2), ClientTurns(1, "other")
    try:
        assert patient.submit("a", own).result(WAIT_S) == min(19, own() + 2)
        assert other.submit("a", own).result(WAIT_S) == own()
    finally:
        for threads in (patient, other):
            threads.close()
            threads.wait()


def test_work_of_two_clients_is_done_once_in_the_turn_of_either() -> None:
    threads, done = ClientTurns(1, "turns"), list[str]()
    with busy(threads, "a") as release:
        threads.submit("a", lambda: done.append("a"))
        shared = threads.submit("a", lambda: done.append("shared"))
        for _ in range(2):
            threads.join("b", shared)
        last = threads.submit("b", lambda: done.append("b"))
        release()
        wait([shared, last], WAIT_S)
        threads.join("c", shared)  # it has begun
    assert done == ["a", "shared", "b"]
    assert ended(threads)


def test_work_that_is_cancelled_before_its_turn_is_dropped() -> None:
    threads, done = ClientTurns(1, "turns"), list[str]()
    with busy(threads, "a"):
        gone = [threads.submit("a", lambda: done.append("gone")) for _ in range(3)]
        threads.join("b", gone[0])
        kept = threads.submit("b", lambda: done.append("kept"))
        assert all(each.cancel() for each in gone)
    kept.result(WAIT_S)
    assert done == ["kept"] and ended(threads)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_task_of_a_client_that_has_gone(has_begun: bool) -> None:
    """What waits is never begun. What runs keeps its thread until it has ended."""
    threads, done, began, release = ClientTurns(1, "turns"), list[str](), threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        release.wait(WAIT_S)
        done.append("slow")

    async def work() -> None:
        running = asyncio.create_task(threads.run("a", slow))
        waiting = asyncio.create_task(threads.run("a", done.append, "next"))
        assert await asyncio.to_thread(began.wait, WAIT_S)
        gone = running if has_begun else waiting
        gone.cancel()
        await asyncio.wait([gone])
        assert gone.cancelled() and not threads.has_room("b")
        release.set()
        await asyncio.wait([running, waiting])
        assert await threads.run("b", lambda: 1) == 1

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert done == (["slow", "next"] if has_begun else ["slow"]) and ended(threads)


def test_an_error_is_the_result_and_takes_no_thread() -> None:
    threads = ClientTurns(1, "turns")
    with pytest.raises(ZeroDivisionError):
        threads.submit("a", lambda: 1 // 0).result(WAIT_S)
    assert threads.submit("a", lambda: 1).result(WAIT_S) == 1
    assert ended(threads)


def test_what_waits_at_the_end_is_cancelled_and_nothing_is_taken_any_more() -> None:
    threads = ClientTurns(1, "turns")
    with busy(threads, "a"):
        waiting = threads.submit("a", lambda: 1)
        threads.close()
        with pytest.raises(CancelledError):
            waiting.result(WAIT_S)
        with pytest.raises(RuntimeError):
            threads.submit("a", lambda: 1)
    assert ended(threads)
