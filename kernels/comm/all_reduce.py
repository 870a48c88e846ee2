"""All-reduce over GPUs that read each other's memory, as a Triton kernel, fused with the residual and norm that follow.

It is for the short messages of decoding, two a layer. NCCL takes 19 us to begin what takes 5 us to send, 161 times in a
decode step of a 70B model.

Every rank computes its part directly into memory that the other ranks have open. Then all ranks launch this kernel:

| way | steps of every rank |
| --- | --- |
| one shot | barrier; add up all parts, row by row |
| two shots | barrier; add up its share of the rows; barrier; read all rows from the ranks that added them up |

Two shots transfer less, one shot waits less.

At a barrier (`_meet`) each rank writes a number, which grows with every barrier, into the memory of every other rank,
and waits until all other ranks' numbers have arrived. Program i of a rank waits for the programs i of other ranks only.

Why a part may be overwritten:

1. A rank that has passed a kernel's barrier knows that all ranks have finished every kernel before that one.
2. Hence the part of a sum may be overwritten after the barrier of the next sum.
3. Consecutive sums put their parts in different places (`turn`), so no rank overwrites a part earlier than that.

All ranks add in the same order, so they get the same bits. Imported only where there is a GPU (or Triton's
interpreter).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TURNS = 3
PART_BYTES = 8 << 20  # bytes of the largest part that is summed here
MOST_RANKS = 16
# Most programs of one kernel. All must fit the GPU at once, since programs of other ranks wait for them.
_PROGRAMS = 128
# Bytes that a link transfers in the time of one barrier (2.5 microseconds at 400 GB/s).
_MEETING_BYTES = 1 << 20
_FLAG_BYTES = _PROGRAMS * MOST_RANKS * 8
_FOR_EVER = 1 << 62

MEMORY_BYTES = _FLAG_BYTES + (TURNS + 1) * PART_BYTES
"""Bytes of the memory that each rank shares. They must be zeros before the first sum."""


@dataclass(frozen=True)
class _AllReduceLaunch:
    """The way in which a sum is computed, and the shape of its launch: `block` columns at a time, a power of 2."""

    two_shots: bool
    programs: int
    block: int


class CustomAllReduce:
    """The all-reduce of one rank. All ranks must call the same methods in the same order, with parts of the same
    shapes."""

    def __init__(self, rank: int, memory: torch.Tensor, addresses: Sequence[int]) -> None:
        """`memory`: this rank's shared memory, uint8 `[MEMORY_BYTES]`. `addresses`: the addresses by which this GPU
        reaches every rank's shared memory, its own included."""
        self._rank, self._memory = rank, memory
        self._table = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        # Barriers that each program has passed so far.
        self._meetings = torch.zeros(_PROGRAMS, dtype=torch.int64, device=memory.device)
        self._size = len(addresses)
        self.patience = _FOR_EVER
        """How often a program polls for the other ranks before it gives up. Then it goes on, and the sum is wrong."""

    def buffer(self, rows: int, columns: int, dtype: torch.dtype, turn: int) -> torch.Tensor | None:
        """The memory in which to compute a part `[rows, columns]`. None if the part is empty, too large, or its rows
        are no multiple of 16 bytes. `turn`, below TURNS, must differ from the turns of the sums before and after."""
        size = rows * columns * dtype.itemsize
        if not 0 < size <= PART_BYTES or columns * dtype.itemsize % 16:
            return None
        start = _FLAG_BYTES + turn * PART_BYTES
        return self._memory[start : start + size].view(dtype).view(rows, columns)

    def holds(self, x: torch.Tensor) -> bool:
        """Whether x is in the shared memory, as parts from `buffer` are."""
        return self._memory.data_ptr() <= x.data_ptr() < self._memory.data_ptr() + MEMORY_BYTES

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in a new tensor. x must be a part from `buffer`."""
        out = torch.empty_like(x)
        columns = _columns(x.numel(), x.shape[1])
        self._launch(x.view(-1, columns), out, None, None, 0.0)
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds the sum of all ranks' x to `residual`, in place, and returns the `kernels.ops.norm.rms_norm` of that. x
        must be a part from `buffer`; all tensors are contiguous."""
        out = torch.empty_like(residual)
        self._launch(x, out, residual, weight, eps)
        return out

    def _launch(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
    ) -> None:
        rows, columns = x.shape
        how = _how(rows, columns, x.nbytes, self._size)
        start = x.data_ptr() - self._memory.data_ptr()
        _sum[(how.programs,)](
            self._table,
            self._meetings,
            out,
            out if residual is None else residual,
            out if weight is None else weight,
            start // x.itemsize,
            (_FLAG_BYTES + TURNS * PART_BYTES) // x.itemsize,
            self._rank,
            rows,
            columns,
            eps,
            self.patience,
            self._size,
            triton.next_power_of_2(self._size),
            how.two_shots,
            residual is not None,
            how.block,
            num_warps=min(max(how.block // 512, 1), 16),
        )


def _columns(total: int, columns: int) -> int:
    """A row length that keeps the GPU busy, for a sum without a norm, which may take the elements in rows of any
    length."""
    while columns > 1024 and columns % 16 == 0 and total // columns < _PROGRAMS:
        columns //= 2
    return columns


def _how(rows: int, columns: int, bytes_: int, size: int) -> _AllReduceLaunch:
    """Chooses the way with less time. One shot reads the parts of all other ranks; two shots read 2 / size of that, and
    have one more barrier."""
    two_shots = (size - 1) * (1 - 2 / size) * bytes_ > _MEETING_BYTES
    programs = -(-rows // size) if two_shots else rows
    return _AllReduceLaunch(two_shots, min(programs, _PROGRAMS), triton.next_power_of_2(columns))


@triton.jit
def _meet(table, meeting, rank, patience, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr):
    """The barrier: afterwards this program, i, sees all that programs i of all ranks wrote before. Returns the number
    of the next barrier."""
    program = tl.program_id(0)
    other = tl.arange(0, SIZE_BLOCK)
    real = other < SIZE
    theirs = tl.load(table + other, mask=real, other=0).to(tl.pointer_type(tl.int64))
    own = tl.load(table + rank).to(tl.pointer_type(tl.int64)) + program * SIZE + other
    tl.debug_barrier()  # orders the writes of this program's other threads before the flags
    number = meeting + tl.zeros([SIZE_BLOCK], tl.int64)
    tl.atomic_xchg(theirs + program * SIZE + rank, number, mask=real, sem="release", scope="sys")
    slowest = meeting - 1
    while (slowest < meeting) & (patience > 0):
        # Adding zero is a load with acquire order.
        seen = tl.atomic_add(own, tl.zeros([SIZE_BLOCK], tl.int64), mask=real, sem="acquire", scope="sys")
        slowest = tl.min(tl.where(real, seen, meeting))
        patience -= 1
    tl.debug_barrier()
    return meeting + 1


@triton.jit
def _of(table, peer, at, out):
    """The pointer to `at` elements of out's dtype from the beginning of the shared memory of rank `peer`."""
    base = tl.load(table + peer).to(tl.pointer_type(out.dtype.element_ty))
    return tl.multiple_of(base, 16) + at


@triton.jit
def _total(table, out, part_at, place, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        part = _of(table, peer, part_at, out)
        total += tl.load(part + place, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def _finish(total, out, residual, weight, place, column, mask, size, eps, NORM: tl.constexpr):
    """Writes a row of the result, with NORM also the residual. total: float32; with NORM the residual is in it."""
    if NORM:
        rounded = total.to(residual.dtype.element_ty)
        tl.store(residual + place, rounded, mask=mask)
        total = rounded.to(tl.float32)
        total *= tl.math.rsqrt(tl.sum(total * total) / size + eps)
        total *= tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rank", "rows"])
def _sum(
    table,
    meetings,
    out,
    residual,
    weight,
    part_at,
    scratch_at,
    rank,
    rows,
    size,
    eps,
    patience,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < size
    meeting = _meet(table, tl.load(meetings + program) + 1, rank, patience, SIZE, SIZE_BLOCK)
    if TWO_SHOTS:
        # Rank r adds up every SIZE-th row, from row r on.
        for row in range(program * SIZE + rank, rows, programs * SIZE):
            place = row * size + column
            total = _total(table, out, part_at, place, inside, SIZE, BLOCK)
            if NORM:
                total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            scratch = _of(table, rank, scratch_at, out)
            tl.store(scratch + place, total.to(out.dtype.element_ty), mask=inside)
        meeting = _meet(table, meeting, rank, patience, SIZE, SIZE_BLOCK)
        for first in range(program * SIZE, rows, programs * SIZE):
            # All rows are requested before the first is finished.
            taken = ()
            for step in tl.static_range(SIZE):
                peer = (rank + step) % SIZE  # ranks start with different peers, to spread the load over links
                place = (first + peer) * size + column
                mask = column < tl.where(first + peer < rows, size, 0)
                scratch = _of(table, peer, scratch_at, out)
                value = tl.load(scratch + place, mask=mask, other=0.0, cache_modifier=".cg")
                taken = taken + (value,)  # type: ignore[assignment]  # noqa: RUF005
            for step in tl.static_range(SIZE):
                peer = (rank + step) % SIZE
                place = (first + peer) * size + column
                mask = column < tl.where(first + peer < rows, size, 0)
                _finish(taken[step].to(tl.float32), out, residual, weight, place, column, mask, size, eps, NORM)
    else:
        for row in range(program, rows, programs):
            place = row * size + column
            total = _total(table, out, part_at, place, inside, SIZE, BLOCK)
            if NORM:
                total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            _finish(total, out, residual, weight, place, column, inside, size, eps, NORM)
    tl.store(meetings + program, meeting - 1)
