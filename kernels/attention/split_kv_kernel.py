"""Split-KV attention as Triton kernels: one runs the items of a `kernels.attention.split_kv_plan`, one merges their
parts. That module's docstring has the measured gain.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32; the products of float32 pages too.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.attention.interface import AttentionShape
from kernels.attention.split_kv_plan import FIELDS
from kernels.pdl import launch_dependents, wait_for_previous

# Programs a multiprocessor that work is cut for: as many as fit at once. More programs would end closer together, but
# leave more parts.
PROGRAMS = 2
# Heads that one program of `merge` merges.
_MERGED_HEADS = 8
# Bytes of a tile of keys; a tile of values has as many.
_TILE_BYTES = 8 << 10
# Tiles of keys in flight with narrow tiles of queries, with wide ones, and with float32: enough to keep memory busy, as
# far as the registers that queries leave allow.
_NARROW_STAGES, _WIDE_STAGES, _FLOAT32_STAGES = 7, 5, 2


class TileSizes(NamedTuple):
    """The tiles of one program. A query has a row for each head that reads the KV head.

    | field | meaning |
    | --- | --- |
    | `narrow`, `wide` | rows of queries, powers of 2: narrow if the item fits, else wide |
    | `keys` | keys of a tile |
    | `warps` | warps of a program |
    | `narrow_stages`, `wide_stages` | tiles of keys in flight, for narrow and wide tiles of queries |
    """

    narrow: int
    wide: int
    keys: int
    warps: int
    narrow_stages: int
    wide_stages: int


def tiles_for(shape: AttentionShape, dtype: torch.dtype) -> TileSizes:
    """The tiles that were fastest on an H200. Each has room for all heads of one token that read a KV head."""
    group = triton.next_power_of_2(shape.num_heads // shape.num_kv_heads)
    block = triton.next_power_of_2(shape.head_dim)
    if block > 256:
        # By calculation, not measured: so that outputs fit the registers, and tiles the memory of two programs.
        if dtype == torch.float32:
            return TileSizes(max(4, group), max(32, group), 16, 8, 1, 1)
        return TileSizes(max(16, group), max(32, group), 16, 8, 4, 3)
    if dtype == torch.float32:
        # Float32 products do not run on tensor cores, and take many registers.
        keys = min(max(2 * _TILE_BYTES // (block * dtype.itemsize), 16), 64)
        warps = 4 if block <= 64 else 8
        return TileSizes(max(4, group), max(32, group), keys, warps, _FLOAT32_STAGES, _FLOAT32_STAGES)
    keys = min(max(_TILE_BYTES // (block * dtype.itemsize), 16), 64)
    return TileSizes(max(16, group), max(64, group), keys, 4, _NARROW_STAGES, _WIDE_STAGES)


class PartialOutputs(NamedTuple):
    """The parts that items leave, to be merged.

    | field | shape and dtype | meaning |
    | --- | --- | --- |
    | `out` | float32 `[parts, num_heads, head_dim]` | a query's output over one range |
    | `lse` | float32 `[parts, num_heads]` | logarithm to base 2 of the sum of its weights |
    | `slots` | int32 `[num_tokens]` | each token's first part |
    | `counts` | int32 `[num_tokens]` | each token's number of parts; 0 if its output is already complete |
    """

    out: torch.Tensor
    lse: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    parts: PartialOutputs,
    items: torch.Tensor,
    members: torch.Tensor,
    pages: torch.Tensor,
    shape: AttentionShape,
    tiles: TileSizes,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Runs all of `items` in one layer (see `kernels.attention.split_kv_plan.SplitKVPlan`).

    q, out: `[n, num_heads, head_dim]`, each token's heads contiguous. kv: one layer's pages. pages, members: int32, the
    lists that items refer to.

    A query that one item covers goes to `out`, any other to `parts`. An item has at most
    `tiles.wide // (num_heads // num_kv_heads)` queries; one without queries does nothing. A query sees keys up to its
    own position, and with a `window` the last `window` of these. sinks: the layer's, float32 `[num_heads]`; `parts`
    lack them.
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
        parts.lse if sinks is None else sinks,
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
        sinks is not None,
        num_warps=tiles.warps,
        **pdl.OPTIONS,
    )


def merge(out: torch.Tensor, parts: PartialOutputs, sinks: torch.Tensor | None = None) -> None:
    """Merges the parts of every token that has some, and the layer's sinks, into `out`, `[n, num_heads, head_dim]`."""
    n, num_heads, head_dim = out.shape
    _merge[(n, triton.cdiv(num_heads, _MERGED_HEADS))](
        out,
        parts.out,
        parts.lse,
        parts.slots,
        parts.counts,
        parts.lse if sinks is None else sinks,
        out.stride(0),
        num_heads,
        head_dim,
        min(_MERGED_HEADS, triton.next_power_of_2(num_heads)),
        triton.next_power_of_2(head_dim),
        sinks is not None,
        num_warps=4,
        **pdl.OPTIONS,
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
    sinks,
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
    SINKS: tl.constexpr,
):
    launch_dependents()
    # The KV heads of one item run next to each other, as they lie in memory.
    head = tl.program_id(0) % KV_HEADS
    item = items + tl.program_id(0) // KV_HEADS * FIELDS
    count = tl.load(item + 1)
    wait_for_previous()
    if count == 0:
        return
    if count * (HEADS // KV_HEADS) <= NARROW:
        _attend_rows(
            q, keys, values, out, part_out, part_lse, slots, item, members, pages, sinks, q_stride, out_stride, scale,
            softcap, window, head, count, HEADS, KV_HEADS, PAGE_SIZE, HEAD_DIM, BLOCK_DIM, NARROW, KEYS,
            NARROW_STAGES, WINDOW, CAPPED, SINKS,
        )  # fmt: skip
    else:
        _attend_rows(
            q, keys, values, out, part_out, part_lse, slots, item, members, pages, sinks, q_stride, out_stride, scale,
            softcap, window, head, count, HEADS, KV_HEADS, PAGE_SIZE, HEAD_DIM, BLOCK_DIM, WIDE, KEYS,
            WIDE_STAGES, WINDOW, CAPPED, SINKS,
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
    sinks,
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
    SINKS: tl.constexpr,
):
    """Computes one item of up to ROWS rows, for one KV head."""
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
    # Finite: a row may see no key of the first tiles, and the difference of two infinities would be a NaN.
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for start in tl.range(first_key, last_key, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        # Places beyond the range read its last key again: a stale value could be a NaN, and 0 * NaN is a NaN.
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
        scores = seen_scores(scores, key, position, limit, softcap, window, WINDOW, CAPPED)
        top, total, sums = with_values(scores, v, top, total, sums)
    if SINKS:
        with_it = with_sink(top, total, tl.load(sinks + query_head))
        total = tl.where(part < 0, with_it, total)
    # The total is 0 for a query that sees none of the range's keys, and at least 1 for any other.
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
    """A step of online softmax: adds the values `v` of keys with these `scores` (to base 2) to each row's state.

    The state is the largest score so far (`top`), the sum of weights (`total`) and the weighted sum of values (`sums`).
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    return new_top, total, tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")


@triton.jit
def with_sink(top, total, sink):
    """The sum of weights of online softmax, with that of a sink. A sink so far above all scores that float32 cannot
    hold its weight gets a smaller one: the output is 0 all the same."""
    return total + tl.exp2(tl.minimum(sink * 1.4426950408889634 - top, 126.0))


@triton.jit
def _tokens(first_query, index, members, mask):
    """The tokens of an item's queries `index`: from `first_query` on or, if that is negative, those that `members`
    lists from `-1 - first_query` on."""
    token = first_query + index
    if first_query < 0:
        token = tl.load(members + (index - first_query - 1), mask=mask, other=0)
    return token.to(tl.int64)


@triton.jit
def seen_scores(scores, key, position, limit, softcap, window, WINDOW: tl.constexpr, CAPPED: tl.constexpr):
    """Scores to base 2, capped if the model caps them, of rows at `position` that see keys up to `limit`; minus
    infinity where a row does not see a key."""
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
    sinks,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SINKS: tl.constexpr,
):
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + token)
    wait_for_previous()
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
    if SINKS:
        total = with_sink(top, total, tl.load(sinks + head, mask=is_head, other=0.0))
    tl.store(target, (sums / total[:, None]).to(out.dtype.element_ty), mask=both)
