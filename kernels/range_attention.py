"""Attention over ranges of keys, and the merging of what several ranges leave, as Triton kernels for GPUs.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32; the products of float32 pages too.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import handover
from kernels.attention import AttentionShape
from kernels.handover import let_next_start, wait
from kernels.ranges import FIELDS

# Programs for each multiprocessor that work is cut into: as many as there is room for. With more of them they end
# closer together, but leave more parts.
PROGRAMS = 2
# Heads that one program of `merge` merges.
_MERGED_HEADS = 8
# Bytes of a tile of keys, or of values.
_TILE_BYTES = 8 << 10
# Tiles of keys on their way at once, beside narrow and wide tiles of queries: as many as keep memory busy beside the
# registers that these take.
_NARROW_STAGES, _WIDE_STAGES, _FLOAT32_STAGES = 7, 5, 2


class Tiles(NamedTuple):
    """What one program computes at a time: `narrow` or `wide` rows of queries (times heads a KV head; powers of 2),
    whichever its item needs, over `keys` keys, with so many tiles of keys on their way at once."""

    narrow: int
    wide: int
    keys: int
    warps: int
    narrow_stages: int
    wide_stages: int


def tiles_for(shape: AttentionShape, dtype: torch.dtype) -> Tiles:
    """Measured on an H200; each has the queries of one token at least."""
    group = triton.next_power_of_2(shape.num_heads // shape.num_kv_heads)
    block = triton.next_power_of_2(shape.head_dim)
    if dtype == torch.float32:
        # Its products are not for tensor cores, and take many registers.
        keys = min(max(2 * _TILE_BYTES // (block * dtype.itemsize), 16), 64)
        warps = 4 if block <= 64 else 8
        return Tiles(max(4, group), max(32, group), keys, warps, _FLOAT32_STAGES, _FLOAT32_STAGES)
    keys = min(max(_TILE_BYTES // (block * dtype.itemsize), 16), 64)
    return Tiles(max(16, group), max(64, group), keys, 4, _NARROW_STAGES, _WIDE_STAGES)


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
    members: torch.Tensor,
    pages: torch.Tensor,
    shape: AttentionShape,
    tiles: Tiles,
    window: int | None = None,
) -> None:
    """Each of `items` (`kernels.ranges.Work`; those without queries do nothing) over keys that `pages` list.

    q, out: `[n, num_heads, head_dim]`, each token's heads contiguous; `kv` is one layer's pages. What is a whole query
    goes to `out`, else to `parts`. An item has at most `tiles.wide // (num_heads // num_kv_heads)` queries, tokens one
    after the other or `members` (int32) of groups. Each sees keys up to its own position, and no further back than
    `window`.
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
        members,
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
        tiles.narrow,
        tiles.wide,
        tiles.keys,
        tiles.narrow_stages,
        tiles.wide_stages,
        FIELDS,
        window is not None,
        shape.softcap is not None,
        num_warps=tiles.warps,
        **handover.OPTIONS,
    )


def merge(out: torch.Tensor, parts: Parts) -> None:
    """The parts of every token that has any into `out` `[n, num_heads, head_dim]`."""
    n, num_heads, head_dim = out.shape
    _merge[(n, triton.cdiv(num_heads, _MERGED_HEADS))](
        out,
        parts.out,
        parts.lse,
        parts.slots,
        parts.counts,
        out.stride(0),
        num_heads,
        head_dim,
        min(_MERGED_HEADS, triton.next_power_of_2(num_heads)),
        triton.next_power_of_2(head_dim),
        num_warps=4,
        **handover.OPTIONS,
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
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    KEYS: tl.constexpr,
    NARROW_STAGES: tl.constexpr,
    WIDE_STAGES: tl.constexpr,
    FIELDS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
):
    let_next_start()
    # Heads of an item are neighbours in memory too.
    head = tl.program_id(0) % KV_HEADS
    item = items + tl.program_id(0) // KV_HEADS * FIELDS
    count = tl.load(item + 1)
    wait()
    if count == 0:
        return
    if count * (HEADS // KV_HEADS) <= NARROW:
        _attend_rows(
            q, keys, values, out, part_out, part_lse, slots, item, members, pages, q_stride, out_stride, scale,
            softcap, window, head, count, HEADS, KV_HEADS, PAGE_SIZE, HEAD_DIM, BLOCK_DIM, NARROW, KEYS,
            NARROW_STAGES, WINDOW, CAPPED,
        )  # fmt: skip
    else:
        _attend_rows(
            q, keys, values, out, part_out, part_lse, slots, item, members, pages, q_stride, out_stride, scale,
            softcap, window, head, count, HEADS, KV_HEADS, PAGE_SIZE, HEAD_DIM, BLOCK_DIM, WIDE, KEYS,
            WIDE_STAGES, WINDOW, CAPPED,
        )  # fmt: skip


@triton.jit
def _attend_rows(
    q,
    keys,
    values,
    out,
    part_out,
    part_lse,
    slots,
    item,
    members,
    pages,
    q_stride,
    out_stride,
    scale,
    softcap,
    window,
    head,
    count,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One item of up to ROWS rows."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    first_query = tl.load(item)
    pages += tl.load(item + 2)
    first_key, last_key = tl.load(item + 3), tl.load(item + 4)
    first_position = tl.load(item + 5)
    part = tl.load(item + 6)
    row = tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK_DIM)
    is_query, in_head = row < count * GROUP, at < HEAD_DIM
    token = _tokens(first_query, row // GROUP, members, is_query)
    query_head = head * GROUP + row % GROUP
    both = is_query[:, None] & in_head[None, :]
    query = tl.load(q + (token * q_stride + query_head * HEAD_DIM)[:, None] + at[None, :], mask=both, other=0.0)
    position = first_position + row // GROUP
    limit = tl.minimum(position, last_key - 1)
    # Not infinite: a row may see no key of the first tiles.
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for start in tl.range(first_key, last_key, KEYS, num_stages=STAGES):
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
        scores = _seen_scores(scores, key, position, limit, softcap, window, WINDOW, CAPPED)
        top, total, sums = with_values(scores, v, top, total, sums)
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
def with_values(scores, v, top, total, sums):
    """What rows have attended to, and the values `v` of keys with these scores (to base 2) besides: the largest score
    of each row, the sum of its weights, and of what they weigh."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    return new_top, total, tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")


@triton.jit
def _tokens(first_query, index, members, mask):
    """Those at `index` of an item's: from `first_query` on, or of the members from -1 - `first_query` on."""
    token = first_query + index
    if first_query < 0:
        token = tl.load(members + (index - first_query - 1), mask=mask, other=0)
    return token.to(tl.int64)


@triton.jit
def _seen_scores(scores, key, position, limit, softcap, window, WINDOW: tl.constexpr, CAPPED: tl.constexpr):
    """To base 2, of rows at `position` that see keys up to `limit`; minus infinity for keys that they do not see."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    if CAPPED:
        shrunk = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / softcap))
        scores = tl.where(scores < 0, -softcap, softcap) * ((1.0 - shrunk) / (1.0 + shrunk))
    seen = key[None, :] <= limit[:, None]
    if WINDOW:
        seen &= key[None, :] > position[:, None] - window
    return tl.where(seen, scores * LOG2_E, float("-inf"))


@triton.jit
def _merge(
    out,
    part_out,
    part_lse,
    slots,
    counts,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + token)
    wait()
    if count == 0:
        return
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    at = tl.arange(0, BLOCK_DIM)
    is_head = head < HEADS
    both = is_head[:, None] & (at < HEAD_DIM)[None, :]
    target = out + token * out_stride + head[:, None] * HEAD_DIM + at[None, :]
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
