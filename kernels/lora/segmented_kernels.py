"""Triton kernels of adapters: shrink, `x @ A`, then expand, `@ B`, for tiles of tokens that have one adapter.

The grid is as large as the number of tiles can be, and a tile without tokens ends at once: the launches of a CUDA graph
fit every step of its size. Tokens without an adapter are in no tile and cost nothing. The inner dimension of the first
product is cut into parts, because a step of few tokens has few tiles; the second kernel sums the parts in a fixed
order, so results do not differ from run to run.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl

from kernels.lora.segments import BLOCK_COLUMNS, TILE, Segments

_BLOCK_IN = 128  # inputs that a turn of the first product's loop takes
_FEW_TILES = 64  # up to this number of tiles, the inner dimension is cut into `_SPLITS` parts
# Tried on the linear layers of Llama-3.1-8B, 64 tokens of 32 adapters of rank 16, one H200: a layer takes 212 us with 4
# parts, 219 with 8 and 244 with 16, and 125 without adapters. Other shapes were not tried.
_SPLITS = 4


class SlotMatrices(Protocol):
    """The tensors that the kernels read of `kernels.lora.lora_weights.LoraWeights`. `blocks`: int32 [blocks, 3], the
    part of each block of columns, its first column and its end."""

    a: torch.Tensor
    b: torch.Tensor
    used: torch.Tensor
    blocks: torch.Tensor
    rank: int
    num_parts: int


def add_segmented(weights: SlotMatrices, x: torch.Tensor, y: torch.Tensor, segments: Segments) -> None:
    """`LoraWeights.add` on a GPU. x and y: rows with contiguous columns."""
    if (low := shrink(weights, x, segments)) is not None:
        expand(weights, low, y, segments)


def shrink(weights: SlotMatrices, x: torch.Tensor, segments: Segments) -> torch.Tensor | None:
    """The products of x `[n, in]` with A: float32 `[splits, n, parts * rank]`, to be summed over the splits, in the
    order of `Tiles.order`. None if there are no tiles."""
    num_tiles, n, in_size = segments.num_tiles, len(x), x.shape[1]
    if not num_tiles or not len(weights.blocks):
        return None
    rows = weights.num_parts * weights.rank
    splits = _SPLITS if num_tiles <= _FEW_TILES else 1
    low = torch.empty(splits, n, rows, dtype=torch.float32, device=x.device)
    _shrink[(num_tiles, splits)](
        x,
        weights.a,
        low,
        *_tiles(weights, segments),
        n,
        in_size,
        x.stride(0),
        ROWS=rows,
        PADDED_ROWS=max(16, triton.next_power_of_2(rows)),
        TILE=TILE,
        BLOCK_IN=_BLOCK_IN,
        SPLITS=splits,
        PRECISION=_precision(x),
        num_warps=4,
    )
    return low


def expand(weights: SlotMatrices, low: torch.Tensor, y: torch.Tensor, segments: Segments) -> None:
    """Adds the products of `shrink` with B to y `[n, out]`."""
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
        ROWS=rows,
        RANK=weights.rank,
        PADDED_RANK=max(16, triton.next_power_of_2(weights.rank)),
        TILE=TILE,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        SPLITS=splits,
        PRECISION=_precision(weights.b),
        num_warps=4,
    )


def _tiles(weights: SlotMatrices, segments: Segments) -> tuple[torch.Tensor, ...]:
    return segments["order"], segments["slots"], segments["firsts"], segments["counts"], weights.used


def _precision(matrix: torch.Tensor) -> str:
    """How float32 is multiplied: not rounded to 10 bits."""
    return "ieee" if matrix.dtype == torch.float32 else "tf32"


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
    PADDED_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + tile)
    if count == 0:
        return
    slot = tl.load(slots + tile)
    if tl.load(used + slot) == 0:
        return
    places = tl.load(firsts + tile) + tl.arange(0, TILE)
    is_there = tl.arange(0, TILE) < count
    tokens = tl.load(order + places, mask=is_there, other=0).to(tl.int64)
    rows = tl.arange(0, PADDED_ROWS)
    own_a = a + slot.to(tl.int64) * ROWS * in_size
    total = tl.zeros((TILE, PADDED_ROWS), dtype=tl.float32)
    share = tl.cdiv(tl.cdiv(in_size, SPLITS), BLOCK_IN) * BLOCK_IN
    begin = split * share
    for first in range(begin, tl.minimum(begin + share, in_size), BLOCK_IN):
        columns = first + tl.arange(0, BLOCK_IN)
        is_in = columns < in_size
        some_x = tl.load(
            x + tokens[:, None] * x_stride + columns[None, :], mask=is_there[:, None] & is_in[None, :], other=0.0
        )
        some_a = tl.load(
            own_a + rows[None, :] * in_size + columns[:, None], mask=(rows < ROWS)[None, :] & is_in[:, None], other=0.0
        )
        total = tl.dot(some_x, some_a, total, input_precision=PRECISION)
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
    PADDED_RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + tile)
    if count == 0:
        return
    slot = tl.load(slots + tile)
    if tl.load(used + slot) == 0:
        return
    places = tl.load(firsts + tile) + tl.arange(0, TILE)
    is_there = tl.arange(0, TILE) < count
    tokens = tl.load(order + places, mask=is_there, other=0).to(tl.int64)
    part = tl.load(blocks + 3 * block)
    columns = tl.load(blocks + 3 * block + 1) + tl.arange(0, BLOCK_COLUMNS)
    is_in = columns < tl.load(blocks + 3 * block + 2)
    ranks = tl.arange(0, PADDED_RANK)
    is_rank = ranks < RANK
    some = tl.zeros((TILE, PADDED_RANK), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        source = low + (split * n + places[:, None]).to(tl.int64) * ROWS + part * RANK + ranks[None, :]
        some += tl.load(source, mask=is_there[:, None] & is_rank[None, :], other=0.0)
    own_b = b + slot.to(tl.int64) * out_size * RANK
    matrix = tl.load(
        own_b + columns[None, :] * RANK + ranks[:, None], mask=is_in[None, :] & is_rank[:, None], other=0.0
    )
    product = tl.dot(some.to(matrix.dtype), matrix, input_precision=PRECISION)
    target = y + tokens[:, None] * y_stride + columns[None, :]
    mask = is_there[:, None] & is_in[None, :]
    known = tl.load(target, mask=mask, other=0.0)
    tl.store(target, (known.to(tl.float32) + product).to(known.dtype), mask=mask)
