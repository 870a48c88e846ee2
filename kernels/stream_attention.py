"""Attention of single tokens as one stream of keys that is cut evenly among the warps of a GPU, as a Triton kernel.

The contexts of all sequences stand one after the other, in tiles of keys; each program is one warp that takes an equal
share of them for one KV head (the "stream-K" cut of matrix products: https://arxiv.org/abs/2301.03598). Warps wait for
nobody but memory, all of them fit the GPU at once, and none is left with a long context when the others are done.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kernels import handover
from kernels.attention import AttentionShape
from kernels.handover import let_next_start, wait

# Keys of a tile: the fewest that a product of tensor cores takes. More keep more registers, of fewer programs.
TILE_KEYS = 16
# Rows of queries (heads of one KV head) in such a product.
_ROWS = 16
# Programs of a multiprocessor, three for each of its four schedulers, and the registers that each may then have.
_PROGRAMS, _REGISTERS = 12, 168
# What beginning with another sequence costs a program, in tiles that it could read meanwhile. (H200.)
_BEGIN_TILES = 3
# The fewest tiles that are worth a program of their own: each leaves a part that is to be merged.
_LEAST_TILES = 4
# Stages of the loop over tiles: more of them keep more tiles of one program on their way, and leave room for fewer.
_STAGES = 4

# Numbers of a program's share and of a sequence, as `Work` lists them.
SHARE_FIELDS, SEQUENCE_FIELDS = 3, 6


class Work(NamedTuple):
    """A step's work, int32, planned on the host. `shares` `[most programs a KV head, 3]`: each program's first tile of
    the stream, its end, and the sequence of the first. `sequences` `[n + 1, 6]`: each one's first tile and its end, the
    place of its first page on the list of pages, its context in keys, and the first and the last program that has some
    of it; the last row is nobody's."""

    shares: np.ndarray
    sequences: np.ndarray


def can_run(shape: AttentionShape, dtype: torch.dtype) -> bool:
    """Whether the kernel is made for such a model."""
    plain = shape.softcap is None and all(window is None for window in shape.windows)
    narrow = shape.num_heads <= _ROWS * shape.num_kv_heads and shape.head_dim in (64, 128)
    return plain and narrow and dtype in (torch.bfloat16, torch.float16)


class StreamAttention:
    """`kv` is the pages (see `kernels.attention`), on a GPU. A step has up to `max_sequences` sequences, whose newest
    token attends to the whole context."""

    def __init__(self, kv: torch.Tensor, shape: AttentionShape, max_sequences: int, multiprocessors: int) -> None:
        self._kv, self._shape = kv, shape
        self._page_size = kv.shape[4]
        self.programs = max(_PROGRAMS * multiprocessors // shape.num_kv_heads, 1)
        # Of each program what belongs to the sequence that it begins in, and to the one that it ends in.
        parts, rows = 2 * self.programs * shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        self._part_out = torch.empty(parts, rows, shape.head_dim, dtype=torch.float32, device=kv.device)
        self._part_lse = torch.empty(parts, rows, dtype=torch.float32, device=kv.device)
        self._arrived = torch.zeros(max_sequences, shape.num_kv_heads, dtype=torch.int32, device=kv.device)

    def work(self, contexts: np.ndarray) -> Work:
        """`contexts`: keys of each sequence, 1 at least."""
        n = len(contexts)
        tiles = -(-contexts.astype(np.int64) // TILE_KEYS)
        ends = np.zeros(n + 1, dtype=np.int64)
        np.cumsum(tiles, out=ends[1:])
        pages = -(-contexts // self._page_size)
        costs = ends + _BEGIN_TILES * np.arange(n + 1)
        programs = min(self.programs, max(int(ends[-1]) // _LEAST_TILES, 1))
        wanted = np.arange(programs) * (costs[-1] / programs)
        sequence = np.searchsorted(costs, wanted, side="right") - 1
        bounds = np.minimum(ends[sequence] + np.rint(wanted - costs[sequence]).astype(np.int64), ends[sequence + 1])
        # A program without tiles would leave no part: there is none.
        bounds = np.append(bounds[np.diff(bounds, append=ends[-1]) > 0], ends[-1])
        shares = np.full((self.programs, SHARE_FIELDS), ends[-1], dtype=np.int32)
        used = shares[: len(bounds) - 1]
        used[:, 0], used[:, 1] = bounds[:-1], bounds[1:]
        used[:, 2] = np.searchsorted(ends, bounds[:-1], side="right") - 1
        shares[len(used) :, 2] = n
        sequences = np.zeros((n + 1, SEQUENCE_FIELDS), dtype=np.int32)
        own = sequences[:n]
        own[:, 0], own[:, 1] = ends[:-1], ends[1:]
        own[:, 2], own[:, 3] = np.cumsum(pages) - pages, contexts
        own[:, 4] = np.searchsorted(bounds, ends[:-1], side="right") - 1
        own[:, 5] = np.searchsorted(bounds, ends[1:], side="left") - 1
        return Work(shares, sequences)

    def attend_into(
        self,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        shares: torch.Tensor,
        sequences: torch.Tensor,
        pages: torch.Tensor,
    ) -> None:
        """Of the sequences of a `Work`, on the device, in their order. q, out: `[n, num_heads, head_dim]`, contiguous.
        pages: those of each sequence, one after the other, int32."""
        shape = self._shape
        group = shape.num_heads // shape.num_kv_heads
        keys, values = self._kv[layer]
        _attend[(shape.num_kv_heads * self.programs,)](
            q,
            keys,
            values,
            out,
            self._part_out,
            self._part_lse,
            self._arrived,
            shares,
            sequences,
            pages,
            shape.scale * 1.4426950408889634,
            shape.num_heads,
            shape.num_kv_heads,
            self._page_size,
            shape.head_dim,
            _ROWS,
            triton.next_power_of_2(group),
            TILE_KEYS,
            _STAGES,
            SHARE_FIELDS,
            SEQUENCE_FIELDS,
            num_warps=1,
            maxnreg=_REGISTERS,
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
    arrived,
    shares,
    sequences,
    pages,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    SHARE_FIELDS: tl.constexpr,
    SEQUENCE_FIELDS: tl.constexpr,
):
    let_next_start()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head, program = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    share = shares + program * SHARE_FIELDS
    tile, last_tile, token = tl.load(share), tl.load(share + 1), tl.load(share + 2)
    begin, end, place, context, first, last = _sequence(sequences, token, SEQUENCE_FIELDS)
    row, at = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    is_query = row < GROUP
    wait()
    while tile < last_tile:
        # What the next sequence is, is there when this one has been read.
        next_begin, next_end, next_place, next_context, next_first, next_last = _sequence(
            sequences, token + 1, SEQUENCE_FIELDS
        )
        stop = tl.minimum(end, last_tile)
        target = ((token * HEADS + head * GROUP + row) * HEAD_DIM)[:, None] + at[None, :]
        mask = is_query[:, None] & (at < HEAD_DIM)[None, :]
        query = tl.load(q + target, mask=mask, other=0.0)
        first_key, last_key = (tile - begin) * KEYS, tl.minimum((stop - begin) * KEYS, context)
        # Not infinite: two of them would have no difference.
        top = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        for start in tl.range(first_key, last_key, KEYS, num_stages=STAGES):
            key = start + tl.arange(0, KEYS)
            # What lies beyond the context reads its last key again: a stale one could hold a NaN.
            seen = tl.minimum(key, last_key - 1)
            page = tl.load(pages + place + seen // PAGE_SIZE).to(tl.int64)
            where = ((page * KV_HEADS + head) * PAGE_SIZE + seen % PAGE_SIZE) * HEAD_DIM
            k = tl.load(keys + where[None, :] + at[:, None])
            v = tl.load(values + where[:, None] + at[None, :])
            scores = tl.where((key < last_key)[None, :], tl.dot(query, k) * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights, shrink = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None])
            top = new_top
        result = sums / total[:, None]
        if first == last:
            tl.store(out + target, result.to(out.dtype.element_ty), mask=mask)
        else:
            slot = _slot(program, first, head, KV_HEADS) * GROUP + row
            tl.store(part_out + slot[:, None] * HEAD_DIM + at[None, :], result, mask=mask)
            tl.store(part_lse + slot, top + tl.log2(total), mask=is_query)
            tl.debug_barrier()
            place_arrived = arrived + token * KV_HEADS + head
            before = tl.atomic_add(place_arrived, 1, sem="acq_rel")
            # All parts are there: whoever comes last merges them, in their own order.
            if before == last - first:
                tl.store(place_arrived, 0)
                _merge(out, part_out, part_lse, token, head, first, last, HEADS, KV_HEADS, HEAD_DIM, ROWS, MERGE_ROWS)
        tile = stop
        token += 1
        begin, end, place, context, first, last = (
            next_begin, next_end, next_place, next_context, next_first, next_last,
        )  # fmt: skip


@triton.jit
def _sequence(sequences, token, FIELDS: tl.constexpr):
    at = sequences + token * FIELDS
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def _slot(program, first, head, KV_HEADS: tl.constexpr):
    """Of the part that a program has of a sequence whose first program is `first`. A program has at most two: of the
    sequence that others began, and of the one that it begins and does not end."""
    return 2 * (program * KV_HEADS + head) + (program == first).to(tl.int32)


@triton.jit
def _merge(
    out,
    part_out,
    part_lse,
    token,
    head,
    first,
    last,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
):
    """The parts of the programs `first` to `last`, several at a time. Other programs wrote them: they do not come from
    the cache of a multiprocessor."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PARTS: tl.constexpr = ROWS // MERGE_ROWS
    row, at = tl.arange(0, MERGE_ROWS), tl.arange(0, HEAD_DIM)
    is_row = row < GROUP
    top = tl.full([MERGE_ROWS], -1e30, tl.float32)
    total = tl.zeros([MERGE_ROWS], tl.float32)
    sums = tl.zeros([MERGE_ROWS, HEAD_DIM], tl.float32)
    for start in range(first, last + 1, PARTS):
        program = start + tl.arange(0, PARTS)
        slot = _slot(program, first, head, KV_HEADS)[:, None] * GROUP + row[None, :]
        there = (program <= last)[:, None] & is_row[None, :]
        lse = tl.load(part_lse + slot, mask=there, other=-1e30, cache_modifier=".cg")
        where = part_out + slot[:, :, None] * HEAD_DIM + at[None, None, :]
        part = tl.load(where, mask=there[:, :, None] & (at < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(lse, 0))
        shrink, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top[None, :])
        sums = sums * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        top = new_top
    target = ((token * HEADS + head * GROUP + row) * HEAD_DIM)[:, None] + at[None, :]
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + target, result, mask=is_row[:, None] & (at < HEAD_DIM)[None, :])
