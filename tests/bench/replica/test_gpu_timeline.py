"""What is read out of a trace: idle time is where nothing runs, and a graph's own gaps are told from the host's."""

from typing import Any

import pytest

from bench.replica.gpu_timeline import read


def kernel(start: float, end: float, launch: int = 0, name: str = "k", kind: str = "kernel") -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": start, "dur": end - start, "args": {"correlation": launch}}


def wait(start: float, end: float, name: str = "cudaEventSynchronize") -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": name, "ts": start, "dur": end - start, "args": {"correlation": 99}}


def test_idle_is_where_nothing_runs() -> None:
    line = read([kernel(10, 20, 1), kernel(25, 30, 2), kernel(30, 50, 3)])
    assert line is not None
    assert line.window_s == pytest.approx(40e-6)
    assert line.idle_s == line.idle_between_s == pytest.approx(5e-6)
    assert line.idle_fraction == pytest.approx(5 / 40)


def test_kernels_that_overlap_are_counted_once() -> None:
    line = read([kernel(0, 50, 1), kernel(10, 20, 2), kernel(40, 60, 3), kernel(61, 70, 4)])
    assert line is not None
    assert line.idle_s == pytest.approx(1e-6)
    assert line.window_s == pytest.approx(70e-6)


def test_events_may_come_in_any_order_and_others_do_not_count() -> None:
    events = [kernel(30, 40, 2), {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100}, kernel(0, 10, 1)]
    line = read([*events, {"ph": "M", "name": "process_name"}])
    assert line is not None
    assert line.idle_s == pytest.approx(20e-6)


def test_copies_are_work_too() -> None:
    line = read([kernel(0, 10), kernel(10, 12, kind="gpu_memcpy"), kernel(12, 20, kind="gpu_memset")])
    assert line is not None and line.idle_s == 0


def test_gaps_inside_a_graph_are_not_the_hosts() -> None:
    line = read([kernel(0, 10, 1), kernel(12, 20, 1), kernel(21, 30, 1), kernel(35, 40, 2), kernel(41, 50, 2)])
    assert line is not None
    assert line.idle_s == pytest.approx(9e-6)
    assert line.idle_between_s == pytest.approx(5e-6)


def test_waiting_counts_inside_the_window_only() -> None:
    line = read([wait(0, 15), kernel(10, 20, 1), wait(22, 24), kernel(24, 30, 2), wait(28, 90), wait(5, 8)])
    assert line is not None
    assert line.waited_s == pytest.approx((5 + 2 + 2) * 1e-6)
    assert read([kernel(0, 9), wait(1, 4, "cudaLaunchKernel")]).waited_s == 0  # type: ignore[union-attr]


def test_kernels_are_summed_by_name_longest_first() -> None:
    line = read([kernel(0, 1, name="b"), kernel(1, 11, name="a"), kernel(11, 14, name="b")])
    assert line is not None
    assert [(k.name, k.launches) for k in line.kernels] == [("a", 1), ("b", 2)]
    assert line.kernels[1].busy_s == pytest.approx(4e-6)


def test_a_trace_without_a_gpu_has_no_timeline() -> None:
    assert read([{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100}, wait(0, 1)]) is None
