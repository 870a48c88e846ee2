"""Attention over pages in plain PyTorch, for any device and any model. Faster backends are tested against it."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention.interface import AttentionBackend, AttentionBatch, AttentionShape, slot_mapping, token_positions
from kernels.host_device import to_device


@dataclass(frozen=True)
class _ChunkView:
    """The keys that a group's queries may see. `rows`: int64 `[batch * num_kv_heads * context]`. `mask`: added to the
    scores, `[batch, 1, length, context]`; None if each query sees the keys up to its own index."""

    rows: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Group:
    """Chunks of one length that are computed as one batch, their contexts padded to the longest. There is one view for
    each window."""

    tokens: torch.Tensor
    batch: int
    views: dict[int | None, _ChunkView]


class TorchAttention(AttentionBackend):
    """Attention over the pages `kv` (see `kernels.attention.interface`), with scaled_dot_product_attention.

    All chunks of one token run as one padded batch; every longer chunk runs alone.
    """

    def __init__(self, kv: torch.Tensor, shape: AttentionShape, sinks: torch.Tensor | None = None) -> None:
        super().__init__(kv, shape, sinks)
        self.dtype = kv.dtype
        # [num_layers, 2, rows, head_dim]
        self.flat = kv.flatten(2, 4)
        self._head_rows = np.arange(shape.num_kv_heads) * self.page_size

    def plan(self, batch: AttentionBatch) -> None:
        chunk_of_token = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        first_heads = self._rows(batch, chunk_of_token, token_positions(batch))
        self.slots = self._tensor(first_heads)
        self._written = self._tensor((first_heads[:, None] + self._head_rows).ravel())
        self._plan_chunks(batch)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.flat[layer]
        keys.index_copy_(0, self._written, k.reshape(-1, self.shape.head_dim))
        values.index_copy_(0, self._written, v.reshape(-1, self.shape.head_dim))
        return self.attend(layer, q)

    def _plan_chunks(self, batch: AttentionBatch) -> None:
        decodes = np.flatnonzero(batch.lengths == 1)
        self._groups = [self._group(batch, np.array([c])) for c in np.flatnonzero(batch.lengths > 1)]
        if len(decodes):
            self._groups.append(self._group(batch, decodes))

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            self._attend_group(layer, group, q, out)
        return out

    def _group(self, batch: AttentionBatch, chunks: np.ndarray) -> _Group:
        length = int(batch.lengths[chunks[0]])
        tokens = (batch.firsts[chunks, None] + np.arange(length)).ravel()
        views = {window: self._view(batch, chunks, length, window) for window in set(self.shape.windows)}
        return _Group(self._tensor(tokens), len(chunks), views)

    def _view(self, batch: AttentionBatch, chunks: np.ndarray, length: int, window: int | None) -> _ChunkView:
        starts = batch.starts[chunks]
        first = 0 if window is None else max(0, int(starts.min()) - window + 1)
        keys = np.arange(first, int(starts.max()) + length)
        queries = starts[:, None, None] + np.arange(length)[:, None]
        seen = keys <= queries if window is None else (keys <= queries) & (keys > queries - window)
        # Padding reads the chunk's own last token again: a stale row could hold a NaN, and 0 * NaN is a NaN.
        positions = np.minimum(keys, starts[:, None] + length - 1)
        first_heads = self._rows(batch, chunks[:, None], positions)
        rows = self._tensor((first_heads[:, None, :] + self._head_rows[:, None]).ravel())
        if len(chunks) == 1 and starts[0] == 0 and (window is None or length <= window):
            return _ChunkView(rows, None)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return _ChunkView(rows, mask.masked_fill_(~self._tensor(seen), float("-inf"))[:, None])

    def _attend_group(self, layer: int, group: _Group, q: torch.Tensor, out: torch.Tensor) -> None:
        view = group.views[self.shape.windows[layer]]
        keys, values = (
            # [batch, num_kv_heads, context, head_dim]
            pages.index_select(0, view.rows).view(group.batch, self.shape.num_kv_heads, -1, self.shape.head_dim)
            for pages in self.flat[layer]
        )
        # [batch, num_heads, length, head_dim]
        queries = q[group.tokens].unflatten(0, (group.batch, -1)).transpose(1, 2)
        sinks = None if self.sinks is None else self.sinks[layer]
        attended = self._attend(queries, keys, values, view.mask, sinks)
        out[group.tokens] = attended.transpose(1, 2).flatten(0, 1).to(out.dtype)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        shape = self.shape
        if shape.softcap is None and sinks is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=shape.scale, enable_gqa=True
            )
        repeat = shape.num_heads // shape.num_kv_heads
        scores = torch.matmul(q, k.repeat_interleave(repeat, 1).transpose(2, 3)) * shape.scale
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        if mask is None:
            mask = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype, device=scores.device).triu_(1)
        scores = (scores + mask).float()
        if sinks is not None:  # the last column, which has no value
            scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]].to(q.dtype)
        return torch.matmul(weights, v.repeat_interleave(repeat, 1))

    def _rows(self, batch: AttentionBatch, chunks: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return slot_mapping(batch, chunks, positions, self.shape.num_kv_heads, self.page_size)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return to_device(np.ascontiguousarray(array), self.device)
