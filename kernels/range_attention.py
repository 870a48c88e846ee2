"""Attention over ranges of keys, and the merging of what several ranges leave, as Triton kernels for GPUs.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32; the products of float32 pages too.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention import AttentionShape
from kernels.ranges import FIELDS

# Programs for each multiprocessor that work is cut into. More of them end closer together, and leave more parts.
PROGRAMS = 4
# Heads that one program of `merge` merges.
_MERGED_HEADS = 8
# Bytes of a tile of keys, or of values: with some of them on their way, three programs fit a multiprocessor.
_TILE_BYTES = 8 << 10


class Tile(NamedTuple):
    """What one program computes at a time: `rows` queries (times heads a KV head; 16 or more, a power of 2) over `keys`
    keys, with `stages` tiles of keys on their way at once."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile_for(shape: AttentionShape, dtype: torch.dtype, queries: int) -> Tile:
    """For items of about so many queries. A tile has those of one token at least."""
    group = shape.num_heads // shape.num_kv_heads
    block = triton.next_power_of_2(shape.head_dim)
    keys = min(max(_TILE_BYTES // (block * dtype.itemsize), 16), 64)
    # Products of float32 are not for tensor cores, and take many registers.
    most, warps, stages = (32, 4 if block <= 64 else 8, 2) if dtype == torch.float32 else (64, 4, 5)
    rows = max(16, triton.next_power_of_2(group), min(most, triton.next_power_of_2(queries * group)))
    return Tile(rows, keys, warps, stages)


class Parts(NamedTuple):
    """What ranges leave to be merged: float32 `[parts, num_heads, head_dim]`, and the logarithms to base 2 of the sums
    of their weights, `[parts, num_heads]`. Token t's are `counts[t]` from `slots[t]` on (int32); with none it has its
    output already."""

    out: torch.Tensor
    lse: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    parts: Parts,
    items: torch.Tensor,
    pages: torch.Tensor,
    shape: AttentionShape,
    tile: Tile,
    *,
    members: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
) -> None:
    """Each of `items` (`kernels.ranges.items`; those without queries do nothing) over keys that `pages` list.

    q, out: `[n, num_heads, head_dim]`, each token's heads contiguous; `kv` is one layer's pages. What is a whole query
    goes to `out`, else to `parts`. The queries of an item are tokens one after the other, or, with `members`, places in
    that list of tokens: at most `tile.rows // (num_heads // num_kv_heads)`. With `causal` each sees keys up to its own
    position, and no further back than `window`; without, all of the range.
    """
    block = max(16, triton.next_power_of_2(shape.head_dim))
    _attend[(shape.num_kv_heads * len(items),)](
        q,
        kv[0],
        kv[1],
        out,
        parts.out,
        parts.lse,
        parts.slots,
        items,
        items if members is None else members,
        pages,
        q.stride(0),
        out.stride(0),
        shape.scale,
        shape.softcap or 0.0,
        window or 0,
        shape.num_heads,
        shape.num_kv_heads,
        kv.shape[3],
        shape.head_dim,
        block,
        tile.rows,
        tile.keys,
        FIELDS,
        members is not None,
        causal,
        window is not None,
        shape.softcap is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def merge(out: torch.Tensor, parts: Parts, lse: torch.Tensor | None = None) -> None:
    """The parts of every token that has any into `out` `[n, num_heads, head_dim]`. With `lse`, float32
    `[n, num_heads]`, `out` holds one part more, which that belongs to."""
    n, num_heads, head_dim = out.shape
    _merge[(n, triton.cdiv(num_heads, _MERGED_HEADS))](
        out,
        parts.out if lse is None else lse,
        parts.out,
        parts.lse,
        parts.slots,
        parts.counts,
        out.stride(0),
        num_heads,
        head_dim,
        min(_MERGED_HEADS, triton.next_power_of_2(num_heads)),
        triton.next_power_of_2(head_dim),
        lse is not None,
        num_warps=4,
    )


@triton.jit
def _attend(
    q,
    keys,
    values,
    out,
    part_out,
    part_lse,
    slots,
    items,
    members,
    pages,
    q_stride,
    out_stride,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FIELDS: tl.constexpr,
    LISTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    LOG2_E: tl.constexpr = 1.4426950408889634
    # Heads of an item are neighbours in memory too.
    head = tl.program_id(0) % KV_HEADS
    item = items + tl.program_id(0) // KV_HEADS * FIELDS
    count = tl.load(item + 1)
    if count == 0:
        return
    first_query = tl.load(item)
    pages += tl.load(item + 2)
    first_key, last_key = tl.load(item + 3), tl.load(item + 4)
    part = tl.load(item + 6)
    row = tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK_DIM)
    is_query, in_head = row < count * GROUP, at < HEAD_DIM
    token = first_query + row // GROUP
    if LISTED:
        token = tl.load(members + token, mask=is_query, other=0)
    token = token.to(tl.int64)
    query_head = head * GROUP + row % GROUP
    both = is_query[:, None] & in_head[None, :]
    query = tl.load(q + (token * q_stride + query_head * HEAD_DIM)[:, None] + at[None, :], mask=both, other=0.0)
    position = tl.load(item + 5) + row // GROUP
    # Not infinite: a row may see no key of the first tiles.
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for start in range(first_key, last_key, KEYS):
        key = start + tl.arange(0, KEYS)
        # What lies beyond the range reads its last key again: a stale one could hold a NaN, which a weight of 0 keeps.
        place = tl.minimum(key, last_key - 1)
        page = tl.load(pages + place // PAGE_SIZE).to(tl.int64)
        where = ((page * KV_HEADS + head) * PAGE_SIZE + place % PAGE_SIZE) * HEAD_DIM
        if HEAD_DIM == BLOCK_DIM:
            k = tl.load(keys + where[None, :] + at[:, None])
            v = tl.load(values + where[:, None] + at[None, :])
        else:
            k = tl.load(keys + where[None, :] + at[:, None], mask=in_head[:, None], other=0.0)
            v = tl.load(values + where[:, None] + at[None, :], mask=in_head[None, :], other=0.0)
        scores = tl.dot(query, k, input_precision="ieee") * scale
        if CAPPED:
            shrunk = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / softcap))
            scores = tl.where(scores < 0, -softcap, softcap) * ((1.0 - shrunk) / (1.0 + shrunk))
        seen = key[None, :] < last_key
        if CAUSAL:
            seen &= key[None, :] <= position[:, None]
        if WINDOW:
            seen &= key[None, :] > position[:, None] - window
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        top = new_top
    # 0 for a query that sees none of the range's keys; one that sees any has a total of 1 or more.
    result = sums / tl.maximum(total, 1.0)[:, None]
    if part < 0:
        target = out + (token * out_stride + query_head * HEAD_DIM)[:, None] + at[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=both)
    else:
        slot = (tl.load(slots + token, mask=is_query, other=0) + part).to(tl.int64) * HEADS + query_head
        tl.store(part_out + slot[:, None] * HEAD_DIM + at[None, :], result, mask=both)
        tl.store(part_lse + slot, top + tl.log2(total), mask=is_query)


@triton.jit
def _merge(
    out,
    out_lse,
    part_out,
    part_lse,
    slots,
    counts,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_OUT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + token)
    if count == 0:
        return
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    at = tl.arange(0, BLOCK_DIM)
    is_head = head < HEADS
    both = is_head[:, None] & (at < HEAD_DIM)[None, :]
    target = out + token * out_stride + head[:, None] * HEAD_DIM + at[None, :]
    if HAS_OUT:
        top = tl.load(out_lse + token * HEADS + head, mask=is_head, other=0.0)
        total = tl.full([BLOCK_HEADS], 1.0, tl.float32)
        sums = tl.load(target, mask=both, other=0.0).to(tl.float32)
    else:
        top = tl.full([BLOCK_HEADS], -1e30, tl.float32)
        total = tl.zeros([BLOCK_HEADS], tl.float32)
        sums = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
    first = tl.load(slots + token).to(tl.int64)
    for index in range(count):
        place = (first + index) * HEADS + head
        lse = tl.load(part_lse + place, mask=is_head, other=0.0)
        part = tl.load(part_out + place[:, None] * HEAD_DIM + at[None, :], mask=both, other=0.0)
        new_top = tl.maximum(top, lse)
        shrink, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
        sums = sums * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        top = new_top
    tl.store(target, (sums / total[:, None]).to(out.dtype.element_ty), mask=both)
