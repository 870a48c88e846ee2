"""Sums over GPUs that read each other's memory, as Triton kernels, together with the norm that follows: for the short
messages of decoding, of which a step has two a layer and which take NCCL longer to begin than to send.

Every rank computes its part straight into memory that the others have open, then all of them launch the same kernel:

    one shot    meet; every rank adds up all parts, row by row
    two shots   meet; every rank adds up its share of the rows; meet; every rank takes all rows where they are

Two shots send less, one shot waits less. To meet is to write a number that grows with every meeting into the memory of
each other rank and to wait for theirs; program i of a kernel meets programs i of the other ranks only. A rank that has
met the others knows that they are done with all kernels before: so a part may be overwritten after one more meeting,
and consecutive sums take turns with the places where parts lie.

All ranks add in the same order, so they get the same bits. Imported only where there is a GPU (or Triton's
interpreter).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TURNS = 3
PART_BYTES = 8 << 20  # largest part that is summed here
MOST_RANKS = 16
# Programs of one kernel, all of which must be on the GPU at once: those of other ranks wait for them.
_PROGRAMS = 128
# A meeting takes as long as a link takes for so many bytes (2.5 microseconds at 400 GB/s).
_MEETING_BYTES = 1 << 20
_FLAG_BYTES = _PROGRAMS * MOST_RANKS * 8
_FOR_EVER = 1 << 62

MEMORY_BYTES = _FLAG_BYTES + (TURNS + 1) * PART_BYTES
"""What each rank shares. Zeros before anybody meets."""


@dataclass(frozen=True)
class _Launch:
    """How a part is summed."""

    two_shots: bool
    programs: int
    block: int


class PeerSums:
    """One rank's end. All ranks call the same methods in the same order with parts of the same shapes."""

    def __init__(self, rank: int, memory: torch.Tensor, addresses: Sequence[int]) -> None:
        """`memory`: uint8 `[MEMORY_BYTES]`, this rank's; `addresses`: every rank's, by which this GPU reaches them."""
        self._rank, self._memory = rank, memory
        self._table = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        # Of each program: the meetings so far.
        self._meetings = torch.zeros(_PROGRAMS, dtype=torch.int64, device=memory.device)
        self._size = len(addresses)
        self.patience = _FOR_EVER
        """How often a program looks for the others before it goes on without them, and the sum is wrong."""

    def place(self, rows: int, columns: int, dtype: torch.dtype, turn: int) -> torch.Tensor | None:
        """Where to compute a part `[rows, columns]`, or None if it is too large to be summed here, or nothing. `turn`,
        below TURNS, must not be that of the sum before or after."""
        size = rows * columns * dtype.itemsize
        if not 0 < size <= PART_BYTES or columns * dtype.itemsize % 16:
            return None
        start = _FLAG_BYTES + turn * PART_BYTES
        return self._memory[start : start + size].view(dtype).view(rows, columns)

    def holds(self, x: torch.Tensor) -> bool:
        """Whether x is a part that lies where `place` says."""
        return self._memory.data_ptr() <= x.data_ptr() < self._memory.data_ptr() + MEMORY_BYTES

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in a new tensor."""
        out = torch.empty_like(x)
        columns = _columns(x.numel(), x.shape[1])
        self._launch(x.view(-1, columns), out, None, None, 0.0)
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`residual` += the sum of all ranks' x, in place; returns its `kernels.norm.rms_norm`. Contiguous."""
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
    """Row length in which a sum without a norm, to which rows mean nothing, keeps the GPU busy."""
    while columns > 1024 and columns % 16 == 0 and total // columns < _PROGRAMS:
        columns //= 2
    return columns


def _how(rows: int, columns: int, bytes_: int, size: int) -> _Launch:
    """One shot gets the parts of all other ranks, two shots get 2 / size of that and meet once more."""
    two_shots = (size - 1) * (1 - 2 / size) * bytes_ > _MEETING_BYTES
    programs = -(-rows // size) if two_shots else rows
    return _Launch(two_shots, min(programs, _PROGRAMS), triton.next_power_of_2(columns))


@triton.jit
def _meet(table, meeting, rank, patience, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr):
    """All that program i of any rank wrote before, this program sees after. Returns the number of the next meeting."""
    program = tl.program_id(0)
    other = tl.arange(0, SIZE_BLOCK)
    real = other < SIZE
    theirs = tl.load(table + other, mask=real, other=0).to(tl.pointer_type(tl.int64))
    own = tl.load(table + rank).to(tl.pointer_type(tl.int64)) + program * SIZE + other
    tl.debug_barrier()  # what other threads of this program wrote comes first
    number = meeting + tl.zeros([SIZE_BLOCK], tl.int64)
    tl.atomic_xchg(theirs + program * SIZE + rank, number, mask=real, sem="release", scope="sys")
    slowest = meeting - 1
    while (slowest < meeting) & (patience > 0):
        # Adds nothing: a load that acquires.
        seen = tl.atomic_add(own, tl.zeros([SIZE_BLOCK], tl.int64), mask=real, sem="acquire", scope="sys")
        slowest = tl.min(tl.where(real, seen, meeting))
        patience -= 1
    tl.debug_barrier()
    return meeting + 1


@triton.jit
def _of(table, peer, at, out):
    """Where a part lies in a rank's memory, `at` elements of out's dtype from its beginning."""
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
    """total: float32, the residual in it."""
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
        # Rows go round: rank r has every SIZE-th from r on.
        for row in range(program * SIZE + rank, rows, programs * SIZE):
            place = row * size + column
            total = _total(table, out, part_at, place, inside, SIZE, BLOCK)
            if NORM:
                total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            scratch = _of(table, rank, scratch_at, out)
            tl.store(scratch + place, total.to(out.dtype.element_ty), mask=inside)
        meeting = _meet(table, meeting, rank, patience, SIZE, SIZE_BLOCK)
        for first in range(program * SIZE, rows, programs * SIZE):
            # All rows are on their way before the first is finished.
            taken = ()
            for step in tl.static_range(SIZE):
                peer = (rank + step) % SIZE  # not all ask the same rank at the same time
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
