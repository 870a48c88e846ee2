"""Attention with our own kernels, on GPUs: float32, sliding windows, softcaps and head dimensions of any size, which
FlashInfer's kernels lack. Contexts are cut into ranges that fill the GPU; what sequences share is read together.

Imported only where there is a GPU (or Triton's interpreter).
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels import range_attention, ranges
from kernels.attention import (
    AttentionBatch,
    AttentionShape,
    GraphAttention,
    SharedPrefixes,
    flat_pages,
    token_positions,
    token_rows,
)
from kernels.prefixes import PrefixFinder
from kernels.range_attention import PROGRAMS, Parts
from kernels.ranges import Blocks
from kernels.shared_attention import SharedAttention, multiprocessors
from kernels.transfer import StaticArrays, all_to_device


@dataclass(frozen=True)
class _View:
    """What the layers of one window compute: items of single tokens and of longer chunks, the parts that they leave,
    and which pages the chunks have, all on the device."""

    is_shared: bool
    has_parts: bool
    pages: torch.Tensor
    singles: torch.Tensor
    chunks: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor


class TritonAttention(GraphAttention):
    """`kv` is the pages (see `kernels.attention`); the last page is nobody's. A graph holds up to `max_graph`
    sequences, whose tables have up to `max_pages` pages together."""

    def __init__(self, kv: torch.Tensor, shape: AttentionShape, max_graph: int, max_pages: int) -> None:
        self.kv, self.shape = kv, shape
        self.page_size = kv.shape[4]
        self.device = kv.device
        self._most = -(-PROGRAMS * multiprocessors(self.device) // shape.num_kv_heads)
        self._single_tile = range_attention.tile_for(shape, kv.dtype, 1)
        self._chunk_tile = range_attention.tile_for(shape, kv.dtype, 64)
        self._tile_tokens = self._chunk_tile.rows * shape.num_kv_heads // shape.num_heads
        self._finder = PrefixFinder(self.page_size, shape, kv.dtype.itemsize)
        self._shared = SharedAttention(self.device, kv.dtype, shape, max_graph, max_pages)
        # Tiles of a chunk are cut into two at least if at all: see `ranges.cut`.
        most_parts = self._shared.most_parts + self._most + max_graph + 2 * self._tile_tokens * self._most
        self._part_out = torch.empty(
            most_parts, shape.num_heads, shape.head_dim, dtype=torch.float32, device=self.device
        )
        self._part_lse = torch.empty(most_parts, shape.num_heads, dtype=torch.float32, device=self.device)
        self._windows = set(shape.windows)
        # What a window leaves of a context is not what it begins with.
        self.shares_prefixes = None in self._windows
        self._static = StaticArrays(
            self.device, {"rows": (torch.int64, max_graph), "pages": (torch.int32, max_pages + max_graph)}
        )
        self._static_views = {
            window: StaticArrays(
                self.device,
                {
                    "items": (torch.int32, ranges.FIELDS * (self._most + max_graph)),
                    "slots": (torch.int32, max_graph),
                    "counts": (torch.int32, max_graph),
                },
            )
            for window in self._windows
        }
        self._views: dict[int | None, _View] = {}
        self._graph_size: int | None = None

    def shared_prefixes(self, batch: AttentionBatch) -> SharedPrefixes | None:
        return self._finder.find(batch) if self.shares_prefixes else None

    def plan(self, batch: AttentionBatch) -> None:
        singles = int((batch.lengths == 1).sum())
        if not (batch.lengths[:singles] == 1).all():
            raise ValueError("chunks of one token must come first")
        decodes = AttentionBatch(batch.tables, batch.rows[:singles], batch.starts[:singles], batch.lengths[:singles])
        shared = self.shared_prefixes(decodes) if singles > 1 else None
        if shared is not None:
            self._shared.plan(decodes, shared, self.page_size)
        chunk_of_token = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        counts = -(-(batch.starts + batch.lengths) // self.page_size)
        page_starts = np.cumsum(counts) - counts
        arrays = [
            token_rows(batch, chunk_of_token, token_positions(batch), self.shape.num_kv_heads, self.page_size),
            flat_pages(batch, 0, counts),
        ]
        for window in self._windows:
            made, parts = self._singles(decodes.starts, page_starts[:singles], window, shared)
            longer, its_parts = self._chunks(batch, singles, page_starts, window)
            parts = np.concatenate((parts, its_parts))
            arrays += [made, longer, ranges.slots(parts), parts.astype(np.int32)]
        self.rows, pages, *tensors = all_to_device(arrays, self.device)
        for index, window in enumerate(self._windows):
            of_window = tensors[4 * index : 4 * index + 4]
            has_parts = bool(arrays[2 + 4 * index + 3].any())
            self._views[window] = _View(window is None and shared is not None, has_parts, pages, *of_window)
        self._graph_size = None

    def plan_graph(self, batch: AttentionBatch, size: int, shared: SharedPrefixes | None) -> None:
        n = len(batch.rows)
        if shared is not None:
            self._shared.plan(batch, shared, self.page_size)
        scratch = self.kv.shape[2] - 1
        rows = np.full(size, scratch * self.shape.num_kv_heads * self.page_size)
        rows[:n] = token_rows(batch, np.arange(n), batch.starts, self.shape.num_kv_heads, self.page_size)
        counts = batch.starts // self.page_size + 1
        page_starts = np.cumsum(counts) - counts
        # Beyond the batch each sees one token of the last page.
        page_starts = np.concatenate((page_starts, np.full(size - n, counts.sum())))
        starts = np.concatenate((batch.starts, np.zeros(size - n, dtype=np.int32)))
        pages = np.append(flat_pages(batch, 0, counts), np.int32(scratch))
        self._static.fill({"rows": rows, "pages": pages})
        self.rows = self._static["rows"][:size]
        for window, static in self._static_views.items():
            made, parts = self._singles(starts, page_starts, window, shared)
            static.fill({"items": made.ravel(), "slots": ranges.slots(parts), "counts": parts})
            items = static["items"].view(-1, ranges.FIELDS)[: self._most + size]
            of_window = items, items[:0], static["slots"][:size], static["counts"][:size]
            self._views[window] = _View(window is None and shared is not None, True, self._static["pages"], *of_window)
        self._graph_size = size

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        window = self.shape.windows[layer]
        view, kv = self._views[window], self.kv[layer]
        parts = Parts(self._part_out, self._part_lse, view.slots, view.counts)
        if view.is_shared:
            self._shared.attend(q, kv, out, parts, self._graph_size)
        if len(view.singles):
            range_attention.attend(q, kv, out, parts, view.singles, view.pages, self.shape, self._single_tile)
        if len(view.chunks):
            range_attention.attend(
                q, kv, out, parts, view.chunks, view.pages, self.shape, self._chunk_tile, causal=True, window=window
            )
        if view.has_parts:
            range_attention.merge(out, parts)
        return out

    def _singles(
        self, starts: np.ndarray, page_starts: np.ndarray, window: int | None, shared: SharedPrefixes | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Items of chunks of one token at these positions, without what they share, and how many parts each of the
        chunks will have with that: none if it is one item alone."""
        n = len(starts)
        first_keys, before = np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int64)
        if window is not None:
            first_keys = np.maximum(starts - window + 1, 0)
        elif shared is not None:
            pages = shared.pages_of(n)
            first_keys, before[: len(self._shared.counts)] = pages * self.page_size, self._shared.counts
        tokens = np.arange(n, dtype=np.int32)
        blocks = Blocks(tokens, np.ones(n, dtype=np.int32), page_starts, first_keys, starts + 1, starts)
        counts, sizes = ranges.cut(blocks, self._most, self._single_tile.keys)
        parts = before + counts
        parts[parts == 1] = 0
        return ranges.items(blocks, counts, sizes, before, parts == 0), parts

    def _chunks(
        self, batch: AttentionBatch, first: int, page_starts: np.ndarray, window: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Items of the chunks from `first` on, and how many parts each of their tokens will have."""
        starts, lengths = batch.starts[first:], batch.lengths[first:]
        tiles = -(-lengths // self._tile_tokens)
        chunk = np.repeat(np.arange(len(tiles)), tiles)
        before = (np.arange(len(chunk)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * self._tile_tokens
        queries, positions = np.minimum(lengths[chunk] - before, self._tile_tokens), starts[chunk] + before
        first_keys = np.zeros(len(chunk), dtype=np.int32)
        if window is not None:
            first_keys = np.maximum(positions - window + 1, 0)
        tokens = batch.firsts[first:][chunk] + before
        blocks = Blocks(tokens, queries, page_starts[first:][chunk], first_keys, positions + queries, positions)
        counts, sizes = ranges.cut(blocks, self._most, self._chunk_tile.keys)
        made = ranges.items(blocks, counts, sizes, np.zeros(len(chunk), dtype=np.int64), counts == 1)
        return made, np.repeat(np.where(counts == 1, 0, counts), queries)
