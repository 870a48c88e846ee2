"""Attention of a model whose layers with a window have pages of their own, which hold the window alone.

Two backends share the layers: one for those that see all tokens, over its pages and page tables, and one for those with
a window, over theirs. For the latter a step's chunks are cut to what they see: a chunk begins with the first page of
its first token's window. Scores depend on keys as they were rotated, and masks on distances, so positions may be
counted from there.
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
    """The shape of the layers with a window, or of the others, and which layers these are."""
    layers = [layer for layer, window in enumerate(shape.windows) if (window is not None) == has_window]
    own = replace(shape, windows=tuple(shape.windows[layer] for layer in layers), full_heads=None)
    if shape.full_heads is not None and not has_window:
        heads, kv_heads, head_dim = shape.full_heads
        own = replace(own, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    return own, layers


def in_window(batch: AttentionBatch, window: int, page_size: int) -> AttentionBatch:
    """The batch as layers with this window see it: tables of `window_tables`, if the batch has them, from each chunk's
    first page on, and positions from there."""
    tables = batch.tables if batch.window_tables is None else batch.window_tables
    first = np.maximum(batch.starts - (window - 1), 0) // page_size
    counts = -(-(batch.starts + batch.lengths) // page_size) - first
    columns = first[:, None] + np.arange(counts.max(initial=0))
    own = tables[batch.rows[:, None], np.minimum(columns, tables.shape[1] - 1)]
    starts = (batch.starts - first * page_size).astype(np.int32)
    return AttentionBatch(own, np.arange(len(own), dtype=np.int32), starts, batch.lengths)


class WindowPagesAttention(AttentionBackend):
    """The attention of `full`, for the layers that see all tokens, and of `windowed`, for those with a window. A stage
    of a pipeline may have no layers of one kind; then it is None."""

    def __init__(self, shape: AttentionShape, full: AttentionBackend | None, windowed: AttentionBackend | None) -> None:
        """All windows of `shape` are the same. Raises ValueError if a kind of layers has no backend for all of them."""
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
        self._window = next((window for window in shape.windows if window is not None), 1)

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
        return in_window(batch, self._window, self.page_size)


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
