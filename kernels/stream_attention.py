"""Attention of single tokens as streams of keys that are cut evenly among the programs of a GPU, as a Triton kernel.

What blocks of queries see stands one block after the other, in tiles of keys; each program takes an equal share of that
for one KV head (the "stream-K" cut of matrix products: https://arxiv.org/abs/2301.03598). All programs fit the GPU at
once, and none is left with a long context when the others are done. What sequences begin with alike is a stream of its
own, whose blocks are queries of several sequences; the other has a block for each sequence, of whose queries a single
warp makes a row of tensor cores: it waits for nobody but memory.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kernels import handover, ranges
from kernels.attention import AttentionBatch, AttentionShape, SharedPrefixes
from kernels.handover import let_next_start, wait
from kernels.range_attention import with_values
from kernels.transfer import StaticArrays

_LOG2_E = 1.4426950408889634

# Numbers of a program's share, and of a block, as `Stream` lists them.
_SHARE_FIELDS, _BLOCK_FIELDS = 3, 10
_TILE, _END, _PAGE, _KEYS, _FIRST, _LAST, _WHICH, _MEMBER, _SHARED_FIRST, _SHARED_LAST = range(_BLOCK_FIELDS)

# What a kernel reads of a work.
_ARRAYS = "own_shares", "own_blocks", "pages", "shared_shares", "shared_blocks", "members"

# Rows of queries (times heads a KV head) of a warp: what a product of tensor cores has.
_WARP_ROWS = 16
# Warps of a multiprocessor, three for each of its four schedulers, and the registers that a thread may then have.
_WARPS, _REGISTERS = 12, 168


class _Kind(NamedTuple):
    """How a stream's programs are. A tile has `keys`; `stages` of the loop over tiles, more of which keep more tiles on
    their way at once; a block costs what `begin` tiles do beside its own; no share is of fewer than `least` tiles on
    average, since each leaves a part that is to be merged. (Measured on an H200.)"""

    warps: int
    keys: int
    stages: int
    begin: int
    least: int

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.warps * _WARP_ROWS


_OWN = _Kind(warps=1, keys=16, stages=4, begin=3, least=4)
_SHARED = _Kind(warps=4, keys=32, stages=6, begin=2, least=2)


class Stream(NamedTuple):
    """A stream as it was cut, int32. `shares` `[most programs a KV head, 3]`: each program's first tile, its
    end, and the block of the first. `blocks` `[n + 1, 10]`: each one's first tile and its end, the place of
    its first page on the list of pages, its keys, the first and the last program that has some of it; of what is shared
    the place of its first query among the members and how many it has; of a sequence, the block that has what it
    shares, which of that block's queries is its own, and the first and the last program that has some of that block
    (none where there is no such block). The last row is nobody's."""

    shares: np.ndarray
    blocks: np.ndarray


class Work(NamedTuple):
    """A step's work, int32, planned on the host: what each sequence has of its own, what several share (if any do) for
    `members` (indices of sequences), and the `pages` of all blocks, those that are shared first."""

    own: Stream
    shared: Stream | None
    members: np.ndarray
    pages: np.ndarray


def can_run(shape: AttentionShape, dtype: torch.dtype) -> bool:
    """Whether the kernel is made for such a model."""
    plain = shape.softcap is None and all(window is None for window in shape.windows)
    narrow = shape.num_heads <= _WARP_ROWS * shape.num_kv_heads and shape.head_dim in (64, 128)
    return plain and narrow and dtype in (torch.bfloat16, torch.float16)


class StreamAttention:
    """`kv` is the pages (see `kernels.attention`), on a GPU. A step has up to `max_sequences` sequences, whose newest
    token attends to the whole context; graphs read up to `max_pages` pages."""

    def __init__(
        self, kv: torch.Tensor, shape: AttentionShape, max_sequences: int, max_pages: int, multiprocessors: int
    ) -> None:
        self._kv, self._shape = kv, shape
        self._page_size, self._scratch = kv.shape[4], kv.shape[2] - 1
        self._group = shape.num_heads // shape.num_kv_heads
        self._members = _SHARED.rows // self._group  # of a block, at most
        self._programs = {
            kind: max(_WARPS // kind.warps * multiprocessors // shape.num_kv_heads, 1) for kind in (_OWN, _SHARED)
        }
        # What is shared is so by two at least, and by as many as a block has room for.
        self._own_parts = self._parts(self._programs[_OWN] + max_sequences, self._group)
        self._shared_parts = self._parts(self._programs[_SHARED] + max_sequences // 2, _SHARED.rows)
        self._arrived = torch.zeros(max_sequences, shape.num_kv_heads, dtype=torch.int32, device=kv.device)
        layout = {
            "rows": max_sequences,
            "own_shares": self._programs[_OWN] * _SHARE_FIELDS,
            "own_blocks": (max_sequences + 1) * _BLOCK_FIELDS,
            "shared_shares": self._programs[_SHARED] * _SHARE_FIELDS,
            "shared_blocks": (max_sequences // 2 + 1) * _BLOCK_FIELDS,
            "members": max_sequences,
            "pages": max_pages + max_sequences,
        }
        self._static = StaticArrays(
            kv.device, {name: (torch.int64 if name == "rows" else torch.int32, size) for name, size in layout.items()}
        )

    def _parts(self, count: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = count * self._shape.num_kv_heads, rows
        out = torch.empty(*shape, self._shape.head_dim, dtype=torch.float32, device=self._kv.device)
        return out, torch.empty(shape, dtype=torch.float32, device=self._kv.device)

    def work(self, batch: AttentionBatch, shared: SharedPrefixes | None, padding: int = 0) -> Work:
        """Of chunks of one token, and of `padding` more that see one token of the last page."""
        together, n = shared or SharedPrefixes.none(), len(batch.rows)
        tables = ranges.tables(batch, together, self._page_size, repeat=False)
        own = _columns(n + padding)
        own[:n, _KEYS], own[:n, _PAGE] = batch.starts + 1, tables.chunks
        own[n:, _KEYS], own[n:, _PAGE] = 1, len(tables.pages) + np.arange(padding)
        own[:, _SHARED_LAST] = -1
        cut_groups = None
        if shared is not None:
            skipped = shared.pages_of(n)
            own[:n, _KEYS] -= skipped * self._page_size
            own[:n, _PAGE] += skipped
            blocks = ranges.of_groups(shared, tables.groups, self._page_size, self._members)
            groups = _columns(len(blocks.counts))
            groups[:, _PAGE], groups[:, _KEYS] = blocks.pages, blocks.last_keys
            groups[:, _WHICH], groups[:, _MEMBER] = ~blocks.firsts, blocks.counts
            cut_groups = _cut(groups, _SHARED, self._programs[_SHARED])
            block = np.repeat(np.arange(len(groups)), blocks.counts)
            own[shared.members, _WHICH] = block
            own[shared.members, _MEMBER] = np.arange(len(block)) - groups[block, _WHICH]
            own[shared.members, _SHARED_FIRST] = groups[block, _FIRST]
            own[shared.members, _SHARED_LAST] = groups[block, _LAST]
        pages = np.append(tables.pages, np.full(padding, self._scratch, dtype=np.int32)) if padding else tables.pages
        return Work(_cut(own, _OWN, self._programs[_OWN]), cut_groups, together.members, pages)

    def fill(self, work: Work, rows: np.ndarray) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`rows` and the `arrays` of the work on the device, where graphs read them."""
        arrays = dict(zip(_ARRAYS, (array.ravel() for array in self.arrays(work)), strict=False))
        self._static.fill({"rows": rows, **dict.fromkeys(_ARRAYS, work.members[:0]), **arrays})
        return self._static["rows"][: len(rows)], [self._static[name] for name in arrays]

    @staticmethod
    def arrays(work: Work) -> list[np.ndarray]:
        """What `attend_into` takes of it, on the device: those of `_ARRAYS`, the first three if nothing is shared."""
        own = [*work.own, work.pages]
        return own if work.shared is None else [*own, *work.shared, work.members]

    def attend_into(self, arrays: list[torch.Tensor], layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """The work of these `arrays`. q, out: `[n, num_heads, head_dim]`, contiguous, of its sequences in their order,
        which others may follow."""
        shares, blocks, pages, *shared = arrays
        if shared:
            self._launch(layer, _SHARED, q, out, shared[0], shared[1], pages, shared[2], True)
        self._launch(layer, _OWN, q, out, shares, blocks, pages, pages, bool(shared))

    def _launch(
        self,
        layer: int,
        kind: _Kind,
        q: torch.Tensor,
        out: torch.Tensor,
        shares: torch.Tensor,
        blocks: torch.Tensor,
        pages: torch.Tensor,
        members: torch.Tensor,
        has_shared: bool,
    ) -> None:
        shape = self._shape
        keys, values = self._kv[layer]
        _attend[(shape.num_kv_heads * self._programs[kind],)](
            q,
            keys,
            values,
            out,
            *self._own_parts,
            *self._shared_parts,
            self._arrived,
            shares,
            blocks,
            members,
            pages,
            shape.scale * _LOG2_E,
            shape.num_heads,
            shape.num_kv_heads,
            self._page_size,
            shape.head_dim,
            kind.rows,
            _SHARED.rows,
            triton.next_power_of_2(self._group),
            kind.keys,
            kind.stages,
            _SHARE_FIELDS,
            _BLOCK_FIELDS,
            kind is _SHARED,
            has_shared,
            num_warps=kind.warps,
            maxnreg=_REGISTERS,
            **handover.OPTIONS,
        )


def _columns(count: int) -> np.ndarray:
    """For so many blocks: the fields that `_cut` does not fill are the caller's."""
    return np.zeros((count, _BLOCK_FIELDS), dtype=np.int32)


def _cut(blocks: np.ndarray, kind: _Kind, most: int) -> Stream:
    """Fills in which tiles the blocks are and who has them, and cuts them for up to `most` programs a KV head."""
    n = len(blocks)
    shares = np.zeros((most, _SHARE_FIELDS), dtype=np.int32)
    listed = np.zeros((n + 1, _BLOCK_FIELDS), dtype=np.int32)
    if n == 0:
        return Stream(shares, listed)
    ends = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(-(-blocks[:, _KEYS] // kind.keys), out=ends[1:])
    total = int(ends[-1])
    costs = ends + kind.begin * np.arange(n + 1)
    programs = min(most, max(total // kind.least, 1))
    wanted = np.arange(programs + 1) * (costs[-1] / programs)
    block = costs.searchsorted(wanted[:-1], side="right") - 1
    bounds = np.full(programs + 1, total)
    np.minimum(ends[block] + np.rint(wanted[:-1] - costs[block]).astype(np.int64), ends[block + 1], out=bounds[:-1])
    has_tiles = bounds[:-1] < bounds[1:]
    if not has_tiles.all():  # a program that has none would leave no part: there is none
        bounds = np.append(bounds[:-1][has_tiles], total)
    shares[:] = total, total, n
    used = shares[: len(bounds) - 1]
    used[:, 0], used[:, 1] = bounds[:-1], bounds[1:]
    used[:, 2] = ends.searchsorted(bounds[:-1], side="right") - 1
    blocks[:, _TILE], blocks[:, _END] = ends[:-1], ends[1:]
    blocks[:, _FIRST] = bounds.searchsorted(ends[:-1], side="right") - 1
    blocks[:, _LAST] = bounds.searchsorted(ends[1:], side="left") - 1
    listed[:n] = blocks
    return Stream(shares, listed)


@triton.jit
def _attend(
    q,
    keys,
    values,
    out,
    part_out,
    part_lse,
    shared_out,
    shared_lse,
    arrived,
    shares,
    blocks,
    members,
    pages,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    SHARE_FIELDS: tl.constexpr,
    BLOCK_FIELDS: tl.constexpr,
    IS_SHARED: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    let_next_start()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head, program = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    share = shares + program * SHARE_FIELDS
    tile, last_tile, block = tl.load(share), tl.load(share + 1), tl.load(share + 2)
    begin, end, place, context, first, last, which, member = _block(blocks, block, BLOCK_FIELDS)
    row, at = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    wait()
    while tile < last_tile:
        # What the next block is, is there when this one has been read.
        next_begin, next_end, next_place, next_context, next_first, next_last, next_which, next_member = _block(
            blocks, block + 1, BLOCK_FIELDS
        )
        stop = tl.minimum(end, last_tile)
        if IS_SHARED:
            is_query = row < member * GROUP
            token = tl.load(members + which + row // GROUP, mask=is_query, other=0)
        else:
            is_query = row < GROUP
            token = block + tl.zeros([ROWS], tl.int32)
        target = ((token * HEADS + head * GROUP + row % GROUP) * HEAD_DIM)[:, None] + at[None, :]
        mask = is_query[:, None]
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
            top, total, sums = with_values(scores, v, top, total, sums)
        slot = _slot(program, block, head, KV_HEADS)
        if IS_SHARED:
            place_out = slot * ROWS + row
            tl.store(shared_out + place_out[:, None] * HEAD_DIM + at[None, :], sums / total[:, None], mask=mask)
            tl.store(shared_lse + place_out, top + tl.log2(total), mask=is_query)
        elif first == last:
            if HAS_SHARED:
                shared_first, shared_last = _shared(blocks, block, BLOCK_FIELDS)
                top, total, sums = _with_parts(
                    top, total, sums, shared_out, shared_lse, which, head, shared_first, shared_last, member * GROUP,
                    SHARED_ROWS, GROUP, KV_HEADS, HEAD_DIM, ROWS,
                )  # fmt: skip
            tl.store(out + target, (sums / total[:, None]).to(out.dtype.element_ty), mask=mask)
        else:
            place_out = slot * GROUP + row
            tl.store(part_out + place_out[:, None] * HEAD_DIM + at[None, :], sums / total[:, None], mask=mask)
            tl.store(part_lse + place_out, top + tl.log2(total), mask=is_query)
            tl.debug_barrier()
            count = arrived + block * KV_HEADS + head
            before = tl.atomic_add(count, 1, sem="acq_rel")
            # All parts are there: whoever comes last merges them, in their own order.
            if before == last - first:
                tl.store(count, 0)
                _merge(
                    out, part_out, part_lse, shared_out, shared_lse, blocks, block, head, first, last, which, member,
                    HEADS, KV_HEADS, HEAD_DIM, SHARED_ROWS, MERGE_ROWS, BLOCK_FIELDS, HAS_SHARED,
                )  # fmt: skip
        tile = stop
        block += 1
        begin, end, place, context, first, last, which, member = (
            next_begin, next_end, next_place, next_context, next_first, next_last, next_which, next_member,
        )  # fmt: skip


@triton.jit
def _block(blocks, index, FIELDS: tl.constexpr):
    at = blocks + index * FIELDS
    begin, end, place, keys = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return begin, end, place, keys, tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)


@triton.jit
def _shared(blocks, index, FIELDS: tl.constexpr):
    """The programs that have some of what a sequence shares."""
    return tl.load(blocks + index * FIELDS + 8), tl.load(blocks + index * FIELDS + 9)


@triton.jit
def _slot(program, block, head, KV_HEADS: tl.constexpr):
    """Of the part that a program leaves of a block: along a stream either the one or the other is the next."""
    return (program + block) * KV_HEADS + head


@triton.jit
def _merge(
    out,
    part_out,
    part_lse,
    shared_out,
    shared_lse,
    blocks,
    block,
    head,
    first,
    last,
    shared_block,
    member,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_FIELDS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    """The parts of one sequence: what it shares, if it does, and its own."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, at = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    if HAS_SHARED:
        shared_first, shared_last = _shared(blocks, block, BLOCK_FIELDS)
        top, total, sums = _with_parts(
            top, total, sums, shared_out, shared_lse, shared_block, head, shared_first, shared_last, member * GROUP,
            SHARED_ROWS, GROUP, KV_HEADS, HEAD_DIM, ROWS,
        )  # fmt: skip
    top, total, sums = _with_parts(
        top, total, sums, part_out, part_lse, block, head, first, last, 0, GROUP, GROUP, KV_HEADS, HEAD_DIM, ROWS
    )
    target = ((block * HEADS + head * GROUP + row) * HEAD_DIM)[:, None] + at[None, :]
    tl.store(out + target, (sums / total[:, None]).to(out.dtype.element_ty), mask=(row < GROUP)[:, None])


@triton.jit
def _with_parts(
    top,
    total,
    sums,
    part_out,
    part_lse,
    block,
    head,
    first,
    last,
    first_row,
    PART_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Added what the programs `first` to `last` left of a block, of its rows from `first_row` on, several programs at a
    time. Others wrote it: it does not come from the cache of a multiprocessor."""
    PARTS: tl.constexpr = 16 // ROWS
    row, at = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    is_row = row < GROUP
    for start in range(first, last + 1, PARTS):
        program = start + tl.arange(0, PARTS)
        place = (_slot(program, block, head, KV_HEADS) * PART_ROWS + first_row)[:, None] + row[None, :]
        there = (program <= last)[:, None] & is_row[None, :]
        lse = tl.load(part_lse + place, mask=there, other=-1e30, cache_modifier=".cg")
        where = part_out + place[:, :, None] * HEAD_DIM + at[None, None, :]
        part = tl.load(where, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(lse, 0))
        shrink, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top[None, :])
        sums = sums * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        top = new_top
    return top, total, sums
