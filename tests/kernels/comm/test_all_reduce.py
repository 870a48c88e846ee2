"""Sums over ranks that have each other's memory: processes here, which share it, in Triton's interpreter."""

import importlib
from itertools import pairwise
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

pytest.importorskip("triton")

from kernels.comm import all_reduce
from kernels.comm.all_reduce import MEMORY_BYTES, PART_BYTES, TURNS, CustomAllReduce, _columns, _how
from kernels.ops.norm import add_rms_norm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's: a script shows it on GPUs")
RANKS = 3
PARTS = ((1, 64), (7, 48), (11, 16))
EPS = 1e-5
ENDS_S = 60


def part(rank: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1000 * rank + rows)).to(dtype)


def work(rank: int, memories: list[torch.Tensor], errors: torch.Tensor, lock: Lock) -> None:
    """Both kinds of sums of all parts, again and again, in one shot and in two, with programs that have several rows.
    The largest error of each dtype goes into `errors`, and at last a one."""
    all_reduce._PROGRAMS = 3
    # Atomic operations of the interpreter are so within a process only.
    interpreter = importlib.import_module("triton.runtime.interpreter")._interpreter
    unlocked = interpreter.atomic_rmw

    def atomic_rmw(*arguments: Any) -> Any:
        with lock:
            return unlocked(*arguments)

    interpreter.atomic_rmw = atomic_rmw
    try:
        add_up(rank, memories, errors)
    finally:
        interpreter.atomic_rmw = unlocked


def add_up(rank: int, memories: list[torch.Tensor], errors: torch.Tensor) -> None:
    sums = CustomAllReduce(rank, memories[rank], [memory.data_ptr() for memory in memories])
    sums.patience = 1 << 20  # should another fail
    turn = 0
    for number in range(4):
        all_reduce._MEETING_BYTES = (0, 1 << 60)[number % 2]
        dtype = (torch.float32, torch.float16)[number // 2 % 2]
        for rows, columns in PARTS:
            parts = [part(other, rows, columns, dtype) for other in range(RANKS)]
            total = torch.stack(parts).float().sum(0)
            residual, weight = part(99, rows, columns, dtype), part(98, 1, columns, dtype)[0]
            wanted = residual.clone().float()
            normed = add_rms_norm(total, wanted, weight.float(), EPS)
            for has_norm in (False, True):
                place = sums.place(rows, columns, dtype, turn := (turn + 1) % TURNS)
                assert place is not None and sums.holds(place) and not sums.holds(residual)
                place.copy_(parts[rank])
                got = sums.add_rms_norm(place, residual, weight, EPS) if has_norm else sums.sum(place)
                for value, right in ((got, normed), (residual, wanted)) if has_norm else ((got, total),):
                    error = errors[rank, number // 2 % 2]
                    error.copy_(torch.maximum(error, (value.float() - right).abs().max()))
    errors[rank, 2] = 1


def test_sums_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])  # where the other processes find this module
    context = multiprocessing.get_context("spawn")
    memories = [torch.zeros(MEMORY_BYTES, dtype=torch.uint8).share_memory_() for _ in range(RANKS)]
    errors = torch.zeros(RANKS, 3).share_memory_()
    lock = context.Lock()
    others = [
        context.Process(target=work, args=(rank, memories, errors, lock), daemon=True) for rank in range(1, RANKS)
    ]
    for process in others:
        process.start()
    programs, meeting_bytes = all_reduce._PROGRAMS, all_reduce._MEETING_BYTES
    try:
        work(0, memories, errors, lock)
    finally:
        all_reduce._PROGRAMS, all_reduce._MEETING_BYTES = programs, meeting_bytes
        for process in others:
            process.join(ENDS_S)
            process.kill()
    assert errors[:, 2].tolist() == [1] * RANKS
    assert (errors[:, 0] < 2e-6).all() and (errors[:, 1] < 8e-3).all() and (errors[:, 1] > 0).all(), errors


def test_nobody_waits_for_ever_who_has_no_patience() -> None:
    memories = [torch.zeros(MEMORY_BYTES, dtype=torch.uint8) for _ in range(2)]
    sums = CustomAllReduce(0, memories[0], [memory.data_ptr() for memory in memories])
    sums.patience = 3
    place = sums.place(1, 16, torch.float32, 0)
    assert place is not None
    assert sums.sum(place.fill_(2)).tolist() == [[2.0] * 16]  # the other's are zeros


def test_parts_lie_apart_and_only_if_they_fit() -> None:
    memory = torch.zeros(MEMORY_BYTES, dtype=torch.uint8)
    sums = CustomAllReduce(0, memory, [memory.data_ptr()])
    places = [sums.place(PART_BYTES // 64, 32, torch.bfloat16, turn) for turn in range(TURNS)]
    starts = [place.data_ptr() for place in places if place is not None]
    assert len(starts) == TURNS and all(after - before == PART_BYTES for before, after in pairwise(starts))
    assert memory.data_ptr() < starts[0] and starts[-1] + 2 * PART_BYTES == memory.data_ptr() + MEMORY_BYTES
    assert sums.place(PART_BYTES // 64 + 1, 32, torch.bfloat16, 0) is None
    assert sums.place(4, 33, torch.bfloat16, 0) is None  # 16 bytes at a time


@pytest.mark.parametrize(
    ("size", "rows", "two_shots", "programs"),
    [
        (2, 512, False, 128),
        (4, 1, False, 1),
        (4, 40, False, 40),
        (4, 48, True, 12),
        (4, 512, True, 128),
        (8, 16, True, 2),
    ],
)
def test_what_is_chosen_for_rows_of_8192_in_bfloat16(size: int, rows: int, two_shots: bool, programs: int) -> None:
    how = _how(rows, 8192, rows * 8192 * 2, size)
    assert (how.two_shots, how.programs, how.block) == (two_shots, programs, 8192)


@pytest.mark.parametrize(
    ("rows", "columns", "cut"), [(1, 8192, 1024), (16, 8192, 1024), (128, 8192, 8192), (3, 576, 576)]
)
def test_a_sum_without_a_norm_is_cut_into_more_programs(rows: int, columns: int, cut: int) -> None:
    assert _columns(rows * columns, columns) == cut
