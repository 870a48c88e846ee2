"""Sums over ranks that have each other's memory: GPUs (`-m gpu`), or processes that share it, in the interpreter."""

import importlib
from itertools import pairwise
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.kernels.device import DEVICE

pytest.importorskip("triton")

from kernels.comm import all_reduce
from kernels.comm.all_reduce import MEMORY_BYTES, PART_BYTES, TURNS, CustomAllReduce, _columns, _how
from kernels.ops.norm import add_rms_norm
from tests.interpreter import hasten
from worker.parallel.custom_all_reduce import find
from worker.parallel.rendezvous import Rendezvous

PARTS = ((1, 64), (7, 48), (11, 16))
EPS = 1e-5
ENDS_S = 120
ENDED, APART = 1, 2  # how a rank has ended: with all sums, or for want of the others' memory


def part(rank: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1000 * rank + rows)).to(dtype)


def interpreted(rank: int, memories: list[torch.Tensor], errors: torch.Tensor, lock: Lock) -> None:
    """A rank's sums in the interpreter. Memory is shared by processes, and a lock makes up for what is missing: atomic
    operations of the interpreter are atomic within a process only."""
    hasten()
    all_reduce._PROGRAMS = 3
    interpreter = importlib.import_module("triton.runtime.interpreter")._interpreter
    unlocked = interpreter.atomic_rmw

    def atomic_rmw(*arguments: Any) -> Any:
        with lock:
            return unlocked(*arguments)

    interpreter.atomic_rmw = atomic_rmw
    try:
        sums = CustomAllReduce(rank, memories[rank], [memory.data_ptr() for memory in memories])
        sums.patience = 1 << 20  # should another fail
        add_up(sums, rank, errors)
    finally:
        interpreter.atomic_rmw = unlocked


def on_gpu(rank: int, store: Path, errors: torch.Tensor) -> None:
    """A rank's sums on a GPU of its own, which reaches the others' memory as in a replica."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = Rendezvous(dist.FileStore(str(store), len(errors)), rank, len(errors))
    assert group._room is not None
    sums = find(group, group._room, device)
    if sums is None:
        errors[rank, 2] = APART
        return
    sums.patience = 1 << 24
    add_up(sums, rank, errors)
    group.barrier()  # memory stays until all have read it


def add_up(sums: CustomAllReduce, rank: int, errors: torch.Tensor) -> None:
    """Both kinds of sums of all parts, again and again, in one shot and in two, with programs that have several rows.
    The largest error of each dtype goes into `errors`, `[ranks, 3]`, and at last a one."""
    device = sums._memory.device
    turn = 0
    for number in range(4):
        all_reduce._MEETING_BYTES = (0, 1 << 60)[number % 2]
        dtype = (torch.float32, torch.float16)[number // 2 % 2]
        for rows, columns in PARTS:
            parts = [part(other, rows, columns, dtype).to(device) for other in range(len(errors))]
            total = torch.stack(parts).float().sum(0)
            residual, weight = (part(seed, n, columns, dtype).to(device) for seed, n in ((99, rows), (98, 1)))
            wanted = residual.clone().float()
            normed = add_rms_norm(total, wanted, weight[0].float(), EPS)
            for has_norm in (False, True):
                place = sums.buffer(rows, columns, dtype, turn := (turn + 1) % TURNS)
                assert place is not None and sums.holds(place) and not sums.holds(residual)
                place.copy_(parts[rank])
                got = sums.add_rms_norm(place, residual, weight[0], EPS) if has_norm else sums.sum(place)
                for value, right in ((got, normed), (residual, wanted)) if has_norm else ((got, total),):
                    error = errors[rank, number // 2 % 2]
                    error.copy_(torch.maximum(error, (value.float() - right).abs().max().cpu()))
    errors[rank, 2] = ENDED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "device"),
    [
        pytest.param(3, "cpu", marks=pytest.mark.interpreter),
        pytest.param(2, "cuda", marks=pytest.mark.gpu),
    ],
)
def test_sums_of_processes(ranks: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    monkeypatch.syspath_prepend(Path(__file__).parents[3])  # where the other processes find this module
    context = multiprocessing.get_context("spawn" if device == "cuda" else "forkserver")
    context.set_forkserver_preload([__name__])  # the processes import all once
    errors = torch.zeros(ranks, 3).share_memory_()
    if device == "cuda":
        work, shared = on_gpu, (tmp_path / "store", errors)
    else:
        memories = [torch.zeros(MEMORY_BYTES, dtype=torch.uint8).share_memory_() for _ in range(ranks)]
        work, shared = interpreted, (memories, errors, context.Lock())
    for name in ("_PROGRAMS", "_MEETING_BYTES"):
        monkeypatch.setattr(all_reduce, name, getattr(all_reduce, name))  # this process's are as before, afterwards
    others = [context.Process(target=work, args=(rank, *shared), daemon=True) for rank in range(1, ranks)]
    for process in others:
        process.start()
    try:
        work(0, *shared)
    finally:
        for process in others:
            process.join(ENDS_S)
            process.kill()
    if (errors[:, 2] == APART).all():
        pytest.skip("the GPUs do not reach each other's memory")
    assert errors[:, 2].tolist() == [ENDED] * ranks
    assert (errors[:, 0] < 2e-6).all() and (errors[:, 1] < 8e-3).all() and (errors[:, 1] > 0).all(), errors


def test_nobody_waits_for_ever_who_has_no_patience() -> None:
    memories = [torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    sums = CustomAllReduce(0, memories[0], [memory.data_ptr() for memory in memories])
    sums.patience = 3
    place = sums.buffer(1, 16, torch.float32, 0)
    assert place is not None
    assert sums.sum(place.fill_(2)).tolist() == [[2.0] * 16]  # the other's are zeros


def test_parts_lie_apart_and_only_if_they_fit() -> None:
    memory = torch.zeros(MEMORY_BYTES, dtype=torch.uint8)
    sums = CustomAllReduce(0, memory, [memory.data_ptr()])
    places = [sums.buffer(PART_BYTES // 64, 32, torch.bfloat16, turn) for turn in range(TURNS)]
    starts = [place.data_ptr() for place in places if place is not None]
    assert len(starts) == TURNS and all(after - before == PART_BYTES for before, after in pairwise(starts))
    assert memory.data_ptr() < starts[0] and starts[-1] + 2 * PART_BYTES == memory.data_ptr() + MEMORY_BYTES
    assert sums.buffer(PART_BYTES // 64 + 1, 32, torch.bfloat16, 0) is None
    assert sums.buffer(4, 33, torch.bfloat16, 0) is None  # 16 bytes at a time


@pytest.mark.parametrize("size", [2, 4, 8])
def test_two_shots_are_for_long_parts_of_many_ranks(size: int) -> None:
    """Two shots have one more barrier and transfer less, but no less between two ranks."""
    launches = [_how(1 << power, 8192, (1 << power) * 16384, size) for power in range(10)]
    ways = [launch.two_shots for launch in launches]
    assert ways == sorted(ways) and ways[0] is False and ways[-1] == (size > 2)
    assert all(launch.block == 8192 for launch in launches)


@pytest.mark.parametrize(("total", "columns"), [(8192, 8192), (16 * 8192, 8192), (128 * 8192, 8192), (3 * 576, 576)])
def test_a_sum_without_a_norm_is_cut_into_more_programs(total: int, columns: int) -> None:
    cut = _columns(total, columns)
    assert columns % cut == 0
    # What stays whole is short, has programs enough, or cannot be halved.
    assert cut == columns or cut >= 512
    assert cut <= 1024 or cut % 16 or total // cut >= all_reduce._PROGRAMS
