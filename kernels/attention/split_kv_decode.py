"""Decode attention of few sequences as Triton kernels, for CUDA graphs: bound by latency, not by reading.

The keys of each sequence are cut into ranges (`kernels.attention.split_kv_plan`), and each program attends to one range
for one KV head. A second kernel merges the parts of each head.

A program reads its first tile before the kernel before it has ended (`kernels.pdl`): all keys and values but those of
the newest token were written in earlier steps. That token's are read over them afterwards. With the reads after the
wait instead, a layer took about 1 us longer.

Measured on one H200 (`python -m bench.replica.decode_attention` at f4147ef2), us that attention adds to a layer, with
FlashInfer's kernels and with these, for sequences x tokens and 32 query heads of dimension 128:

| | 4 KV heads | 8 KV heads |
| --- | --- | --- |
| 1 x 300 | 7.9 and 4.1 | 8.4 and 4.1 |
| 1 x 1,300 | 9.8 and 4.5 | 10.5 and 5.2 |
| 1 x 8,000 | 13.7 and 8.6 | 17.0 and 13.0 |
| 1 x 32,000 | 26.1 and 24.2 | 39.6 and 43.2 |
| 4 x 1,300 | 13.1 and 9.2 | 15.9 and 12.9 |
| 4 x 8,000 | 26.8 and 27.3 | 40.9 and 65.5 |
| 8 x 1,300 | 16.0 and 13.3 | 21.3 and 19.4 |

With the merge in the program of a KV head that ends last, by a counter, 1 x 1,300 took 18.2: one multiprocessor read
all parts. With a loop over further tiles through shared memory it took 6.9.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.attention import split_kv_plan
from kernels.attention.interface import AttentionBatch, AttentionShape, SharedPrefixes
from kernels.attention.split_kv_kernel import seen_scores, with_sink, with_values
from kernels.attention.split_kv_plan import FIELDS
from kernels.host_device import GraphInputs
from kernels.pdl import launch_dependents, wait_for_previous

# Rows of queries: the height of a tensor core product. A query has a row for each of its heads that read the KV head.
_ROWS = 16
# Bytes of a tile of keys; a tile of values has as many. Registers hold the tile and the next one.
_TILE_BYTES = 16 << 10
# Programs a multiprocessor that the keys are cut for: as many as fit at once. With one, 8,000 tokens take 13.0 us
# instead of 9.4, and 1,300 as long as with two.
_PROGRAMS = 2
_WARPS = 4
# Parts that a program of the merge reads at a time.
_MERGED = 64


def can_run(shape: AttentionShape, dtype: torch.dtype) -> bool:
    """Whether the kernel supports the model: 16-bit pages, a head dimension of 64, 128 or 256, up to 16 query heads a
    KV head."""
    narrow = shape.num_heads <= _ROWS * shape.num_kv_heads and shape.head_dim in (64, 128, 256)
    return narrow and dtype in (torch.bfloat16, torch.float16)


class SplitKVDecode:
    """Decode attention over the pages `kv` (see `kernels.attention.interface`) in CUDA graphs of up to `max_sequences`
    sequences, which read up to `max_pages` pages. sinks: as for `AttentionBackend`."""

    def __init__(
        self,
        kv: torch.Tensor,
        shape: AttentionShape,
        max_sequences: int,
        max_pages: int,
        multiprocessors: int,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self._kv, self._shape, self._sinks = kv, shape, sinks
        self._page_size, self._scratch = kv.shape[4], kv.shape[2] - 1
        self._keys = _TILE_BYTES // (shape.head_dim * kv.element_size())
        self._most = max(_PROGRAMS * multiprocessors // shape.num_kv_heads, 1)
        self._windows = list(dict.fromkeys(shape.windows))
        parts, device = 2 * self._most, kv.device
        self._part_out = torch.empty(parts, shape.num_heads, shape.head_dim, dtype=torch.float32, device=device)
        self._part_lse = torch.empty(parts, shape.num_heads, dtype=torch.float32, device=device)
        layout = {"rows": (torch.int64, max_sequences)}
        for window in self._windows:
            sizes = FIELDS * (self._most + max_sequences), max_sequences, max_sequences
            layout |= {name: (torch.int32, size) for name, size in zip(_names(window), sizes, strict=True)}
        self._static = GraphInputs(device, layout | {"pages": (torch.int32, max_pages + 1)})
        self.slots = self._static["rows"]
        self._size = 0

    def plan_graph(self, batch: AttentionBatch, size: int) -> None:
        """As `GraphAttention.plan_graph` for the plain graph of `size` tokens."""
        padding, none = size - len(batch.rows), SharedPrefixes.none()
        tables = split_kv_plan.tables(batch, none, self._page_size, repeat=True, spare=1)
        tables.pages[-1] = self._scratch  # what padding tokens see
        heads, page_size = self._shape.num_kv_heads, self._page_size
        arrays = {"rows": split_kv_plan.token_rows(batch, heads, page_size, padding, self._scratch)}
        seen, groups = np.zeros(len(batch.rows), dtype=np.int64), split_kv_plan.of_groups(none, tables.groups, 1, 1)
        for window in self._windows:
            work = split_kv_plan.work(
                batch,
                none,
                groups,
                tables.chunks,
                seen,
                window,
                tile_tokens=1,
                most=self._most,
                step=self._keys,
                padding=padding,
                scratch=len(tables.pages) - 1,
            )
            arrays |= zip(_names(window), (work.items.ravel(), work.slots, work.counts), strict=True)
        self._static.fill(arrays | {"pages": tables.pages})
        self.slots, self._size = self._static["rows"][:size], size

    def attend_into(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """As `GraphAttention.attend_into`."""
        shape, (keys, values) = self._shape, self._kv[layer]
        items, slots, counts = (self._static[name] for name in _names(shape.windows[layer]))
        sinks = self._part_lse if self._sinks is None else self._sinks[layer]
        # The grid has room for every plan. Unused items have no queries.
        _attend[(shape.num_kv_heads * (self._most + self._size),)](
            q,
            keys,
            values,
            out,
            self._part_out,
            self._part_lse,
            items,
            slots,
            self._static["pages"],
            sinks,
            shape.scale,
            shape.softcap or 0.0,
            q.stride(0),
            shape.num_heads,
            shape.num_kv_heads,
            self._page_size,
            shape.head_dim,
            _ROWS,
            self._keys,
            FIELDS,
            shape.softcap is not None,
            self._sinks is not None,
            num_warps=_WARPS,
            num_stages=1,
            **pdl.OPTIONS,
        )
        _merge[(self._size, shape.num_heads)](
            out,
            self._part_out,
            self._part_lse,
            slots,
            counts,
            sinks,
            shape.num_heads,
            shape.head_dim,
            _MERGED,
            self._sinks is not None,
            num_warps=_WARPS,
            num_stages=1,
            **pdl.OPTIONS,
        )


def _names(window: int | None) -> tuple[str, str, str]:
    """Names of the tensors that hold the items, slots and counts of the layers of a window."""
    return f"items {window}", f"slots {window}", f"counts {window}"


@triton.jit
def _attend(
    q,
    keys,
    values,
    out,
    part_out,
    part_lse,
    items,
    slots,
    pages,
    sinks,
    scale,
    softcap,
    q_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FIELDS: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    launch_dependents()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    item = items + tl.program_id(0) // KV_HEADS * FIELDS
    token, is_used = tl.load(item).to(tl.int64), tl.load(item + 1)
    pages += tl.load(item + 2)
    first_key, last_key = tl.load(item + 3), tl.load(item + 4)
    part = tl.load(item + 6)
    if is_used == 0:
        wait_for_previous()
        return
    slot = tl.load(slots + token)
    at = tl.arange(0, HEAD_DIM)
    # The range's last key may be of this step: it is read after the wait.
    key = first_key + tl.arange(0, KEYS)
    where = _places(pages, key, last_key, head, KV_HEADS, PAGE_SIZE)[:, None] * HEAD_DIM + at[None, :]
    is_old, is_last = (key < last_key - 1)[:, None], (key == last_key - 1)[:, None]
    k = tl.load(keys + where, mask=is_old, other=0.0)
    v = tl.load(values + where, mask=is_old, other=0.0)
    wait_for_previous()
    row = tl.arange(0, ROWS)
    is_row = row < GROUP
    query_head = head * GROUP + row
    target = (token * HEADS + query_head)[:, None] * HEAD_DIM + at[None, :]
    source = (token * q_stride + query_head * HEAD_DIM)[:, None] + at[None, :]
    query = tl.load(q + source, mask=is_row[:, None], other=0.0)
    k = tl.load(keys + where, mask=is_last, other=k)
    v = tl.load(values + where, mask=is_last, other=v)
    limit = tl.zeros([ROWS], tl.int32) + (last_key - 1)
    # Finite: the difference of two infinities would be a NaN.
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in tl.range(first_key, last_key, KEYS, num_stages=1):
        next_k, next_v = k, v
        if start + KEYS < last_key:
            next_key = start + KEYS + tl.arange(0, KEYS)
            next_where = _places(pages, next_key, last_key, head, KV_HEADS, PAGE_SIZE)[:, None] * HEAD_DIM + at[None, :]
            next_k, next_v = tl.load(keys + next_where), tl.load(values + next_where)
        scores = tl.dot(query, tl.trans(k)) * scale
        scores = seen_scores(scores, start + tl.arange(0, KEYS), limit, limit, softcap, 0, False, CAPPED)
        top, total, sums = with_values(scores, v, top, total, sums)
        k, v = next_k, next_v
    if part < 0:
        if SINKS:
            total = with_sink(top, total, tl.load(sinks + query_head, mask=is_row, other=0.0))
        tl.store(out + target, (sums / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        place = (slot + part) * HEADS + query_head
        tl.store(part_out + place[:, None] * HEAD_DIM + at[None, :], sums / total[:, None], mask=is_row[:, None])
        tl.store(part_lse + place, top + tl.log2(total), mask=is_row)


@triton.jit
def _places(pages, key, last_key, head, KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The rows of a layer's keys that have these positions. Positions beyond the range have that of its last key: a
    stale key there could hold a NaN."""
    key = tl.minimum(key, last_key - 1)
    page = tl.load(pages + key // PAGE_SIZE).to(tl.int64)
    return (page * KV_HEADS + head) * PAGE_SIZE + key % PAGE_SIZE


@triton.jit
def _merge(
    out,
    part_out,
    part_lse,
    slots,
    counts,
    sinks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merges the parts of one head of one token, if it has any, into `out`."""
    launch_dependents()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, count = tl.load(slots + token), tl.load(counts + token)
    wait_for_previous()
    if count == 0:
        return
    at = tl.arange(0, HEAD_DIM)
    head += tl.arange(0, 1)
    top = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([1, HEAD_DIM], tl.float32)
    for start in tl.range(0, count, PARTS, num_stages=1):
        index = start + tl.arange(0, PARTS)
        there = (index < count)[:, None]
        place = (slot + index)[:, None] * HEADS + head[None, :]
        lse = tl.load(part_lse + place, mask=there, other=-1e30, cache_modifier=".cg")
        where = part_out + place[:, :, None] * HEAD_DIM + at[None, None, :]
        part = tl.load(where, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(lse, 0))
        shrink, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top[None, :])
        sums = sums * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        top = new_top
    if SINKS:
        total = with_sink(top, total, tl.load(sinks + head))
    target = (token * HEADS + head)[:, None] * HEAD_DIM + at[None, :]
    tl.store(out + target, (sums / total[:, None]).to(out.dtype.element_ty))
