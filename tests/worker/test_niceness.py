"""Steps on a CPU yield to what takes milliseconds."""

import os
import sys
import threading

import pytest
import torch

from worker.niceness import STEPS_NICE, run_steps, yield_to_others

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")


def own() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def of_threads() -> dict[int, int]:
    """The niceness of each thread of this process."""
    return {int(each): os.getpriority(os.PRIO_PROCESS, int(each)) for each in os.listdir("/proc/self/task")}


def test_steps_on_a_cpu_and_all_threads_of_their_products_yield() -> None:
    before, seen = of_threads(), dict[int, int]()

    def work() -> None:
        torch.set_num_threads(2)
        torch.ones(1 << 20).exp().sum()
        seen.update(of_threads())

    threads = torch.get_num_threads()
    try:
        run_steps(work, "cpu")
    finally:
        torch.set_num_threads(threads)
    came = {nice for thread, nice in seen.items() if thread not in before}
    assert came == {min(19, own() + STEPS_NICE)} and own() == before[threading.get_native_id()]


def test_steps_on_a_gpu_do_not() -> None:
    found: list[int] = []
    run_steps(lambda: found.append(threading.get_native_id()), "cuda")
    assert found == [threading.get_native_id()]


def test_an_error_of_a_step_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_steps(lambda: print(1 // 0), "cpu")


def test_where_priorities_may_not_be_changed_all_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    yield_to_others(1)
