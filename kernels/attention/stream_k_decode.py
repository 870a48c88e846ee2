"""Decode attention as a Triton kernel that cuts the keys of a batch evenly among the programs of a GPU.

The cut is the "stream-K" cut of matrix products (https://arxiv.org/abs/2301.03598). A block is some queries with the
keys that all of them see, in tiles. A stream is the tiles of all blocks, one block after the other. Every program takes
an equal share of the stream for one KV head. All programs fit the GPU at once, so none still has a long context to read
when the others are done. A block that several programs share leaves one part for each of them; parts are merged.

There are two streams:

| stream | a block | run by |
| --- | --- | --- |
| own | one sequence and the keys that it alone has; its query heads of a KV head fit one tensor core tile | 1 warp |
| shared | up to 64 rows of queries of several sequences, and the prefix that these share | 4 warps |

A program of the own stream is a single warp, so that it waits for memory only, never for other warps.

Measured on one H200, us a layer, attention with rotation and the products around it:

- Plain decodes, FlashInfer's kernel and ours, 16 query and 8 KV heads, contexts of a benchmark run: 181.3 and 174.4
  with 256 sequences, 108.5 and 104.3 with 64, 47.7 and 44.5 with 16. With 8 query heads a KV head there is no gain:
  those stay FlashInfer's.
- Shared prefixes, the ranges of `kernels.attention.split_kv_plan` and ours, an 8B model's heads: 294 and 235 with 64
  groups of 8 sequences, 134 and 105 with 4 groups of 32, 197 and 153 with one group of 256.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.attention import split_kv_plan
from kernels.attention.interface import AttentionBatch, AttentionShape, SharedPrefixes
from kernels.attention.split_kv_kernel import with_values
from kernels.host_device import GraphInputs
from kernels.pdl import launch_dependents, wait_for_previous

_LOG2_E = 1.4426950408889634

# Columns of a share and of a block: see `StreamKPlan`.
_SHARE_FIELDS, _BLOCK_FIELDS = 3, 10
_TILE, _END, _PAGE, _KEYS, _FIRST, _LAST, _WHICH, _MEMBER, _SHARED_FIRST, _SHARED_LAST = range(_BLOCK_FIELDS)

# The arrays of a `StreamKWork` that kernels read, by the names of their tensors on the device.
_ARRAYS = "own_shares", "own_blocks", "pages", "shared_shares", "shared_blocks", "members"

# Rows of queries that one warp computes: the height of a tensor core product. A query has a row for each of its heads
# that read the KV head.
_WARP_ROWS = 16
# Warps on a multiprocessor, three for each of its four schedulers, and the registers that a thread may have with these.
_WARPS, _REGISTERS = 12, 168


class _StreamConfig(NamedTuple):
    """How the programs of a stream compute. The values were measured on an H200.

    | field | meaning |
    | --- | --- |
    | `warps` | warps of a program, each with `_WARP_ROWS` rows of queries |
    | `keys` | keys of a tile |
    | `stages` | pipeline stages of the loop over tiles: more stages keep more tiles in flight from memory |
    | `begin` | fixed cost of a block, in tiles, on top of its own tiles |
    | `least` | tiles of a program on average, at least: every program leaves a part that has to be merged |
    """

    warps: int
    keys: int
    stages: int
    begin: int
    least: int

    @property
    def rows(self) -> int:
        """Rows of queries of a block."""
        return self.warps * _WARP_ROWS


_OWN = _StreamConfig(warps=1, keys=16, stages=4, begin=3, least=4)
_SHARED = _StreamConfig(warps=4, keys=32, stages=6, begin=2, least=2)


class StreamKPlan(NamedTuple):
    """A stream after the cut. Tiles, pages and programs are given by their indices; ends are exclusive.

    `shares`, int32 `[most programs a KV head, 3]`, one row per program: its first tile, its end, and the block of its
    first tile. A program without work has the stream's end as both, and the last row of `blocks`.

    `blocks`, int32 `[n + 1, 10]`, one row per block. In the own stream, block i is sequence i of the batch:

    | column | own stream | shared stream |
    | --- | --- | --- |
    | `_TILE`, `_END` | the block's first tile and its end | the same |
    | `_PAGE` | where the block's first page stands in `StreamKWork.pages` | the same |
    | `_KEYS` | number of keys | the same |
    | `_FIRST`, `_LAST` | first and last program with tiles of the block | the same |
    | `_WHICH` | the shared block that has the sequence's prefix | where its first query stands in `members` |
    | `_MEMBER` | which of that block's queries is the sequence's | number of queries |
    | `_SHARED_FIRST`, `_SHARED_LAST` | first and last program with tiles of that block; 0 and -1 for none | unused |

    The last row is padding: a program reads the row after its block ahead of time.
    """

    shares: np.ndarray
    blocks: np.ndarray


class StreamKWork(NamedTuple):
    """The plan of one step, made on the host. All arrays are int32.

    | field | meaning |
    | --- | --- |
    | `own` | the stream of the keys that each sequence has alone |
    | `shared` | the stream of shared prefixes; None if nothing is shared |
    | `members` | sequences of the batch, by index, in the order of the shared blocks' queries |
    | `pages` | pages of all blocks, shared ones first |
    """

    own: StreamKPlan
    shared: StreamKPlan | None
    members: np.ndarray
    pages: np.ndarray


def can_run(shape: AttentionShape, dtype: torch.dtype) -> bool:
    """Whether the kernel supports the model: 16-bit pages, head dimension 64 or 128, up to 16 query heads a KV head,
    no windows, no softcap and no sinks."""
    plain = shape.softcap is None and not shape.has_sinks and all(window is None for window in shape.windows)
    narrow = shape.num_heads <= _WARP_ROWS * shape.num_kv_heads and shape.head_dim in (64, 128)
    return plain and narrow and dtype in (torch.bfloat16, torch.float16)


class StreamKAttention:
    """Decode attention over the pages `kv` (see `kernels.attention.interface`), on a GPU.

    A step has up to `max_sequences` sequences; the newest token of each attends to its whole context. A graph reads up
    to `max_pages` pages.
    """

    def __init__(
        self, kv: torch.Tensor, shape: AttentionShape, max_sequences: int, max_pages: int, multiprocessors: int
    ) -> None:
        self._kv, self._shape = kv, shape
        self._page_size, self._scratch = kv.shape[4], kv.shape[2] - 1
        self._group = shape.num_heads // shape.num_kv_heads
        self._members = _SHARED.rows // self._group  # most queries of a shared block
        self._programs = {
            kind: max(_WARPS // kind.warps * multiprocessors // shape.num_kv_heads, 1) for kind in (_OWN, _SHARED)
        }
        # A stream leaves fewer parts than it has programs and blocks together (see `_slot`). There are at most half as
        # many shared blocks as sequences: a group has at least two, and more than one block only if one would overflow.
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
        self._static = GraphInputs(
            kv.device, {name: (torch.int64 if name == "rows" else torch.int32, size) for name, size in layout.items()}
        )
        self._is_empty = False  # whether the tensors that graphs read hold a plan without sequences

    def _parts(self, count: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = count * self._shape.num_kv_heads, rows
        out = torch.empty(*shape, self._shape.head_dim, dtype=torch.float32, device=self._kv.device)
        return out, torch.empty(shape, dtype=torch.float32, device=self._kv.device)

    def work(self, batch: AttentionBatch, shared: SharedPrefixes | None, padding: int = 0) -> StreamKWork:
        """Plans the attention of `batch`, chunks of one token each.

        `padding` more sequences follow the batch, which fill a graph's size up. Each sees one token of the last page.
        """
        together, n = shared or SharedPrefixes.none(), len(batch.rows)
        tables = split_kv_plan.tables(batch, together, self._page_size, repeat=False)
        own = _columns(n + padding)
        own[:n, _KEYS], own[:n, _PAGE] = batch.starts + 1, tables.chunks
        own[n:, _KEYS], own[n:, _PAGE] = 1, len(tables.pages) + np.arange(padding)
        own[:, _SHARED_LAST] = -1
        cut_groups = None
        if shared is not None:
            skipped = shared.pages_of(n)
            own[:n, _KEYS] -= skipped * self._page_size
            own[:n, _PAGE] += skipped
            blocks = split_kv_plan.of_groups(shared, tables.groups, self._page_size, self._members)
            counts = blocks[:, split_kv_plan.COUNT]
            groups = _columns(len(blocks))
            groups[:, _PAGE], groups[:, _KEYS] = blocks[:, split_kv_plan.PAGE], blocks[:, split_kv_plan.LAST_KEY]
            groups[:, _WHICH], groups[:, _MEMBER] = ~blocks[:, split_kv_plan.FIRST], counts
            cut_groups = _cut(groups, _SHARED, self._programs[_SHARED])
            block = np.repeat(np.arange(len(groups)), counts)
            own[shared.members, _WHICH] = block
            own[shared.members, _MEMBER] = np.arange(len(block)) - groups[block, _WHICH]
            own[shared.members, _SHARED_FIRST] = groups[block, _FIRST]
            own[shared.members, _SHARED_LAST] = groups[block, _LAST]
        pages = np.append(tables.pages, np.full(padding, self._scratch, dtype=np.int32)) if padding else tables.pages
        return StreamKWork(_cut(own, _OWN, self._programs[_OWN]), cut_groups, together.members, pages)

    def fill(self, work: StreamKWork, rows: np.ndarray) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copies `rows` and the arrays of `work` to the tensors that graphs read, and returns these tensors."""
        self._is_empty = False
        arrays = dict(zip(_ARRAYS, (array.ravel() for array in self.arrays(work)), strict=False))
        self._static.fill({"rows": rows, **dict.fromkeys(_ARRAYS, work.members[:0]), **arrays})
        return self._static["rows"][: len(rows)], [self._static[name] for name in arrays]

    def fill_empty(self) -> list[torch.Tensor]:
        """As `fill` for a step whose tokens all have another kernel. Copies nothing if the last call did the same."""
        if not self._is_empty:
            nothing = np.zeros(0, dtype=np.int32)
            plan = _cut(_columns(0), _OWN, self._programs[_OWN])
            self.fill(StreamKWork(plan, None, nothing, nothing), np.zeros(0, dtype=np.int64))
            self._is_empty = True
        return [self._static[name] for name in _ARRAYS[:3]]

    @staticmethod
    def arrays(work: StreamKWork) -> list[np.ndarray]:
        """The arrays that `attend_into` takes once they are on the device: those of `_ARRAYS`, in that order, or only
        the first three if nothing is shared."""
        own = [*work.own, work.pages]
        return own if work.shared is None else [*own, *work.shared, work.members]

    def attend_into(self, arrays: list[torch.Tensor], layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attends in one layer, by a plan whose arrays are on the device (see the method `arrays`).

        q, out: `[n, num_heads, head_dim]`, contiguous. The plan's sequences come first, in their order; tokens after
        them are left alone.
        """
        shares, blocks, pages, *shared = arrays
        if shared:
            self._launch(layer, _SHARED, q, out, shared[0], shared[1], pages, shared[2], True)
        self._launch(layer, _OWN, q, out, shares, blocks, pages, pages, bool(shared))

    def _launch(
        self,
        layer: int,
        kind: _StreamConfig,
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
            **pdl.OPTIONS,
        )


def _columns(count: int) -> np.ndarray:
    """Rows for `count` blocks. The caller fills the columns that `_cut` does not fill."""
    return np.zeros((count, _BLOCK_FIELDS), dtype=np.int32)


def _cut(blocks: np.ndarray, kind: _StreamConfig, most: int) -> StreamKPlan:
    """Cuts blocks into shares for up to `most` programs a KV head, and sets the columns of tiles and programs."""
    n = len(blocks)
    shares = np.zeros((most, _SHARE_FIELDS), dtype=np.int32)
    listed = np.zeros((n + 1, _BLOCK_FIELDS), dtype=np.int32)
    if n == 0:
        return StreamKPlan(shares, listed)
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
    if not has_tiles.all():  # programs without tiles leave no part, so they must not stand between others
        bounds = np.append(bounds[:-1][has_tiles], total)
    shares[:] = total, total, n
    used = shares[: len(bounds) - 1]
    used[:, 0], used[:, 1] = bounds[:-1], bounds[1:]
    used[:, 2] = ends.searchsorted(bounds[:-1], side="right") - 1
    blocks[:, _TILE], blocks[:, _END] = ends[:-1], ends[1:]
    blocks[:, _FIRST] = bounds.searchsorted(ends[:-1], side="right") - 1
    blocks[:, _LAST] = bounds.searchsorted(ends[1:], side="left") - 1
    listed[:n] = blocks
    return StreamKPlan(shares, listed)


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
    launch_dependents()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head, program = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    share = shares + program * SHARE_FIELDS
    tile, last_tile, block = tl.load(share), tl.load(share + 1), tl.load(share + 2)
    begin, end, place, context, first, last, which, member = _block(blocks, block, BLOCK_FIELDS)
    row, at = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    wait_for_previous()
    while tile < last_tile:
        # Loaded ahead: the next block's row arrives while this block is computed.
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
        # Finite: the difference of two infinities would be a NaN.
        top = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        for start in tl.range(first_key, last_key, KEYS, num_stages=STAGES):
            key = start + tl.arange(0, KEYS)
            # Places beyond the context read its last key again: a stale key there could hold a NaN.
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
            # The program that finishes last finds all parts there, and merges them in their own order.
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
    """The first and the last program with tiles of the prefix that the sequence `index` shares."""
    return tl.load(blocks + index * FIELDS + 8), tl.load(blocks + index * FIELDS + 9)


@triton.jit
def _slot(program, block, head, KV_HEADS: tl.constexpr):
    """Where `program` leaves its part of `block`. No two parts collide: from one part of a stream to the next, either
    the program or the block goes up by one."""
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
    """Merges the parts of one sequence, those of its shared prefix included, into `out`."""
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
    """Adds the parts of a block that programs `first` to `last` left, rows `first_row` on, several programs at a time.

    Loads bypass the L1 cache, since programs on other multiprocessors wrote the parts.
    """
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
