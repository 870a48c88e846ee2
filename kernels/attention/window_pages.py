"""Attention of a model whose layers with a window have pages of their own.

Two backends share the layers: one for those that see all tokens, over its pages and page tables, and one for those with
a window, over theirs. For the latter a step's chunks are cut to what they see: a chunk begins with the first page of
its first token's window. Scores depend on keys as they were rotated, and masks on distances, so positions may be
counted from there.

The window may be a chunk of the text (`AttentionShape.in_chunks`). Then the layers' backend sees all tokens of what it
is given: a step's chunk is cut where the text's chunks end, and each piece is a sequence that begins with its chunk.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from kernels.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    GraphAttention,
    SharedPrefixes,
)


def of_windows(shape: AttentionShape, has_window: bool) -> tuple[AttentionShape, list[int]]:
    """The shape of the layers with a window, or of the others, as their backend has it, and which layers these are."""
    layers = [layer for layer, window in enumerate(shape.windows) if (window is not None) == has_window]
    windows = tuple(None if shape.in_chunks else shape.windows[layer] for layer in layers)
    own = replace(shape, windows=windows, full_heads=None, in_chunks=False)
    if shape.full_heads is not None and not has_window:
        heads, kv_heads, head_dim = shape.full_heads
        own = replace(own, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    return own, layers


def in_window(batch: AttentionBatch, window: int, page_size: int) -> AttentionBatch:
    """The batch as layers with this window see it: tables of `window_tables`, if the batch has them, from each chunk's
    first page on, and positions from there."""
    tables = batch.tables if batch.window_tables is None else batch.window_tables
    first = np.maximum(batch.starts - (window - 1), 0) // page_size
    return _from_pages(tables, batch.rows, first, batch.starts, batch.lengths, page_size)


def in_chunks(batch: AttentionBatch, size: int, page_size: int) -> AttentionBatch:
    """The batch as layers see it that attend within chunks of `size` tokens, whole pages: pieces of the batch's chunks,
    each in one of these, with positions from there. Tables as for `in_window`."""
    tables = batch.tables if batch.window_tables is None else batch.window_tables
    ends = batch.starts + batch.lengths
    counts = (ends - 1) // size - batch.starts // size + 1
    owner = np.repeat(np.arange(len(counts)), counts)
    chunk = batch.starts[owner] // size + np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.maximum(batch.starts[owner], chunk * size)
    lengths = (np.minimum(ends[owner], (chunk + 1) * size) - starts).astype(np.int32)
    return _from_pages(tables, batch.rows[owner], chunk * size // page_size, starts, lengths, page_size)


def _from_pages(
    tables: np.ndarray, rows: np.ndarray, first: np.ndarray, starts: np.ndarray, lengths: np.ndarray, page_size: int
) -> AttentionBatch:
    """The batch of chunks of the sequences in `rows`, each from its page number `first` on."""
    counts = -(-(starts + lengths) // page_size) - first
    columns = first[:, None] + np.arange(counts.max(initial=0))
    own = tables[rows[:, None], np.minimum(columns, tables.shape[1] - 1)]
    starts = (starts - first * page_size).astype(np.int32)
    return AttentionBatch(own, np.arange(len(own), dtype=np.int32), starts, lengths)


class WindowPagesAttention(AttentionBackend):
    """The attention of `full`, for the layers that see all tokens, and of `windowed`, for those with a window. A stage
    of a pipeline may have no layers of one kind; then it is None."""

    def __init__(self, shape: AttentionShape, full: AttentionBackend | None, windowed: AttentionBackend | None) -> None:
        """All windows of `shape` are the same. Raises ValueError if a kind of layers has no backend for all of them, or
        chunks are no whole pages."""
        self.shape, self._full, self._windowed = shape, full, windowed
        for has_window, pool in ((False, full), (True, windowed)):
            if len(of_windows(shape, has_window)[1]) != (0 if pool is None else len(pool.shape.windows)):
                raise ValueError("layers with a window and the others need a backend each")
        self._pools = [pool for pool in (full, windowed) if pool is not None]
        self.page_size, self.device = self._pools[0].page_size, self._pools[0].device
        last = len(self._pools) - 1
        numbers = (itertools.count(), itertools.count())
        kinds = [window is not None for window in shape.windows]
        self._layout = tuple((last if has_window else 0, next(numbers[has_window])) for has_window in kinds)
        self._window = next((window for window in shape.windows if window is not None), self.page_size)
        if shape.in_chunks and self._window % self.page_size:
            raise ValueError(f"page_size {self.page_size} does not divide the model's attention chunk, {self._window}")

    @property
    def pools(self) -> Sequence[AttentionBackend]:
        return self._pools

    @property
    def layout(self) -> Sequence[tuple[int, int]]:
        return self._layout

    def place(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        pool, index = self._layout[layer]
        return self._pools[pool].place(index)

    def plan(self, batch: AttentionBatch) -> None:
        if self._full is not None:
            self._full.plan(batch)
        if self._windowed is not None:
            self._windowed.plan(self._in_window(batch))

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        pool, index = self._layout[layer]
        return self._pools[pool].attend(index, q)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pool, index = self._layout[layer]
        return self._pools[pool].run(index, q, k, v)

    def _in_window(self, batch: AttentionBatch) -> AttentionBatch:
        cut = in_chunks if self.shape.in_chunks else in_window
        return cut(batch, self._window, self.page_size)


class WindowPagesGraphAttention(WindowPagesAttention, GraphAttention):
    """The same for CUDA graphs. Each backend has buffers of its own, the addresses of which graphs hold. Only `full`
    reads shared prefixes once: layers with a window do not see them in a long context."""

    def __init__(self, shape: AttentionShape, full: GraphAttention | None, windowed: GraphAttention | None) -> None:
        super().__init__(shape, full, windowed)
        self._graph_pools = [pool for pool in (full, windowed) if pool is not None]
        self._graph_full, self._graph_windowed = full, windowed
        self.has_plain_graphs = all(pool.has_plain_graphs for pool in self._graph_pools)

    def attend_into(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        pool, index = self._layout[layer]
        self._graph_pools[pool].attend_into(index, q, out)

    def shared_prefixes(self, batch: AttentionBatch) -> SharedPrefixes | None:
        return None if self._graph_full is None else self._graph_full.shared_prefixes(batch)

    def fits_graph(self, batch: AttentionBatch) -> bool:
        return all(pool.fits_graph(batch) for pool in self._graph_pools)

    def plan_graph(
        self, batch: AttentionBatch, size: int, shared: SharedPrefixes | None, *, chunks: bool = False
    ) -> None:
        if self._graph_full is not None:
            self._graph_full.plan_graph(batch, size, shared, chunks=chunks)
        if self._graph_windowed is not None:
            none = None if shared is None else SharedPrefixes.none()
            self._graph_windowed.plan_graph(self._in_window(batch), size, none, chunks=chunks)
