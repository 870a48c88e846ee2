"""Triton kernels of adapters: shrink, `x @ A`, then expand, `@ B`, for tiles of tokens that have one adapter.

The grid is as large as the number of tiles can be, and a tile without tokens ends at once: the launches of a CUDA graph
fit every step of its size. For tokens without an adapter nothing is computed. The inner dimension of the first product
is cut into parts, because a step of few tokens has few tiles; the second kernel sums the parts in a fixed order, so
results do not differ from run to run.

In a step of few tokens both are bound by reading A and B, and read them before they wait for the kernel before. What
they read so early keeps the rule of `kernels.pdl`, that it was on the device when the step's first plain kernel began:

- The tiles: `Segments.fill` sends them for the step.
- A, B and `used`: they change only as an adapter gets a slot (`AdaptedLayers.write`), by copies and kernels on the
  stream of the steps. Plain kernels and copies, these have ended when the next plain kernel begins.

Both happen before `Decoder.forward`, which begins with a plain kernel, the look-up of embeddings. A CUDA graph begins
like one, and so does each graph of a step in pieces. A later stage of a pipeline has no look-up; without a graph its
first kernel follows the copy of the tiles, and no kernel starts before a copy in front of it has ended. Results of
other kernels, x, y and the parts of the first product, are read after the wait, and nothing is written before it.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.lora.segments import BLOCK_COLUMNS, TILE, Segments
from kernels.pdl import launch_dependents, wait_for_previous

# A program of the first product reads this many numbers of A at once, of at most an eighth of the inputs. With half and
# twice as many a layer of Llama-3.1-8B takes 2 and 3% longer (64 tokens of 32 adapters of rank 16, one H200).
_NUMBERS, _LEAST_BLOCKS = 16384, 8
_PROGRAMS = 640  # programs of the first product, about: with more tiles each takes several blocks of inputs
_MOST_ROWS = 64  # rows of A that a program of the first product takes, and ranks that one of the second takes at once
_SPLITS_AT_ONCE = tl.constexpr(8)  # parts of the first product that are read together


class SlotMatrices(Protocol):
    """The tensors that the kernels read of `kernels.lora.lora_weights.LoraWeights`. `blocks`: int32 [blocks, 3], the
    part of each block of columns, its first column and its end, in units of `column_unit` columns."""

    a: torch.Tensor
    b: torch.Tensor
    used: torch.Tensor
    blocks: torch.Tensor
    column_unit: int
    rank: int
    num_parts: int


def add_segmented(
    weights: SlotMatrices, x: torch.Tensor, y: torch.Tensor, segments: Segments, replaces: bool = False
) -> None:
    """`LoraWeights.add` on a GPU. x and y: rows with contiguous columns."""
    if segments.num_tiles and len(weights.blocks):
        expand(weights, shrink(weights, x, segments), y, segments, replaces)


def shrink(weights: SlotMatrices, x: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The products of x `[n, in]` with A: float32 `[splits, n, parts * rank]`, to be summed over the splits, in the
    order of `Tiles.order`."""
    n, in_size = x.shape
    rows = weights.num_parts * weights.rank
    own_rows = _padded(rows)
    block = max(64, min(_NUMBERS // own_rows, triton.next_power_of_2(triton.cdiv(in_size, _LEAST_BLOCKS))))
    blocks = triton.cdiv(in_size, block)
    turns = triton.cdiv(blocks, max(1, min(blocks, _PROGRAMS // segments.num_tiles)))
    splits = triton.cdiv(blocks, turns)
    low = torch.empty(splits, n, rows, dtype=torch.float32, device=x.device)
    _shrink[(segments.num_tiles, splits, triton.cdiv(rows, own_rows))](
        x,
        weights.a,
        low,
        *_tiles(weights, segments),
        n,
        in_size,
        x.stride(0),
        rows,
        own_rows,
        TILE,
        block,
        turns,
        _precision(x),
        num_warps=4,
        **pdl.OPTIONS,
    )
    return low


def expand(
    weights: SlotMatrices, low: torch.Tensor, y: torch.Tensor, segments: Segments, replaces: bool = False
) -> None:
    """Adds the products of `shrink` with B to y `[n, out]`, or replaces y by them."""
    splits, n, rows = low.shape
    _expand[(segments.num_tiles, len(weights.blocks))](
        low,
        weights.b,
        y,
        *_tiles(weights, segments),
        weights.blocks,
        n,
        weights.b.shape[1],
        y.stride(0),
        rows,
        weights.rank,
        _padded(weights.rank),
        TILE,
        BLOCK_COLUMNS,
        weights.column_unit,
        splits,
        replaces,
        _precision(weights.b),
        num_warps=4,
        **pdl.OPTIONS,
    )


def _tiles(weights: SlotMatrices, segments: Segments) -> tuple[torch.Tensor, ...]:
    return segments["order"], segments["slots"], segments["firsts"], segments["counts"], weights.used


def _padded(rows: int) -> int:
    """Rows of a matrix that are multiplied at once: a power of two, at least the least that tensor cores take."""
    return min(max(16, triton.next_power_of_2(rows)), _MOST_ROWS)


def _precision(matrix: torch.Tensor) -> str:
    """How float32 is multiplied: not rounded to 10 bits."""
    return "ieee" if matrix.dtype == torch.float32 else "tf32"


@triton.jit
def _has_adapter(slot, count, used):
    """Whether a tile has tokens, and they have an adapter that changes the layer."""
    is_any = (count > 0) & (slot >= 0)
    return is_any & (tl.load(used + slot, mask=is_any, other=0) != 0)


@triton.jit
def _summed(sources, stride, mask, SPLITS: tl.constexpr):
    """The sums over splits of the numbers at `sources`, which are those of the first split, and `stride` apart."""
    total = tl.zeros(sources.shape, dtype=tl.float32)
    for begin in tl.static_range(0, SPLITS, _SPLITS_AT_ONCE):
        split = begin + tl.arange(0, _SPLITS_AT_ONCE)
        some = sources[None, :, :] + split.to(tl.int64)[:, None, None] * stride
        total += tl.sum(tl.load(some, mask=mask[None, :, :] & (split < SPLITS)[:, None, None], other=0.0), 0)
    return total


@triton.jit
def _shrink(
    x,
    a,
    low,
    order,
    slots,
    firsts,
    counts,
    used,
    n,
    in_size,
    x_stride,
    ROWS: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    TURNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    count, slot, first = tl.load(counts + tile), tl.load(slots + tile), tl.load(firsts + tile)
    changes, slot = _has_adapter(slot, count, used), slot.to(tl.int64)
    places = first + tl.arange(0, TILE)
    is_there = (tl.arange(0, TILE) < count) & changes
    tokens = tl.load(order + places, mask=is_there, other=0).to(tl.int64)
    rows = tl.program_id(2) * OWN_ROWS + tl.arange(0, OWN_ROWS)
    lines = a + slot * ROWS * in_size + rows[:, None] * in_size
    is_row = (rows < ROWS)[:, None] & changes
    inputs = x + tokens[:, None] * x_stride
    columns = split * TURNS * BLOCK_IN + tl.arange(0, BLOCK_IN)
    some_a = tl.load(lines + columns[None, :], mask=is_row & (columns < in_size)[None, :], other=0.0)
    wait_for_previous()
    if changes == 0:
        return
    some_x = tl.load(inputs + columns[None, :], mask=is_there[:, None] & (columns < in_size)[None, :], other=0.0)
    total = tl.dot(some_x, tl.trans(some_a), input_precision=PRECISION)
    for _ in range(1, TURNS):
        columns += BLOCK_IN
        is_in = (columns < in_size)[None, :]
        some_x = tl.load(inputs + columns[None, :], mask=is_there[:, None] & is_in, other=0.0)
        some_a = tl.load(lines + columns[None, :], mask=is_row & is_in, other=0.0)
        total = tl.dot(some_x, tl.trans(some_a), total, input_precision=PRECISION)
    target = low + (split * n + places[:, None]).to(tl.int64) * ROWS + rows[None, :]
    tl.store(target, total, mask=is_there[:, None] & (rows < ROWS)[None, :])


@triton.jit
def _expand(
    low,
    b,
    y,
    order,
    slots,
    firsts,
    counts,
    used,
    blocks,
    n,
    out_size,
    y_stride,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    SPLITS: tl.constexpr,
    REPLACES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    launch_dependents()
    tile, block = tl.program_id(0), tl.program_id(1)
    count, slot, first = tl.load(counts + tile), tl.load(slots + tile), tl.load(firsts + tile)
    part = tl.load(blocks + 3 * block)
    columns = tl.load(blocks + 3 * block + 1) * UNIT + tl.arange(0, BLOCK_COLUMNS)
    is_in = columns < tl.load(blocks + 3 * block + 2) * UNIT
    changes, slot = _has_adapter(slot, count, used), slot.to(tl.int64)
    places = first + tl.arange(0, TILE)
    is_there = tl.arange(0, TILE) < count
    tokens = tl.load(order + places, mask=is_there, other=0).to(tl.int64)
    ranks = tl.arange(0, RANKS)[None, :]
    lines = b + slot * out_size * RANK + columns[:, None] * RANK
    matrix = tl.load(lines + ranks, mask=is_in[:, None] & (ranks < RANK) & changes, other=0.0)
    target = y + tokens[:, None] * y_stride + columns[None, :]
    mask = is_there[:, None] & is_in[None, :]
    wait_for_previous()
    if changes == 0:
        if REPLACES:
            tl.store(target, tl.zeros((TILE, BLOCK_COLUMNS), dtype=y.dtype.element_ty), mask=mask)
        return
    if not REPLACES:
        known = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    sources = low + places.to(tl.int64)[:, None] * ROWS + part * RANK
    some = _summed(sources + ranks, n * ROWS, is_there[:, None] & (ranks < RANK), SPLITS)
    product = tl.dot(some.to(matrix.dtype), tl.trans(matrix), input_precision=PRECISION)
    for _ in range(RANKS, RANK, RANKS):
        ranks += RANKS
        matrix = tl.load(lines + ranks, mask=is_in[:, None] & (ranks < RANK), other=0.0)
        some = _summed(sources + ranks, n * ROWS, is_there[:, None] & (ranks < RANK), SPLITS)
        product = tl.dot(some.to(matrix.dtype), tl.trans(matrix), product, input_precision=PRECISION)
    if not REPLACES:
        product += known
    tl.store(target, product.to(y.dtype.element_ty), mask=mask)
