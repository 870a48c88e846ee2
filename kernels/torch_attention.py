"""Attention over pages in plain PyTorch: on any device, for any model; the path that faster backends are held to."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention import AttentionBackend, AttentionBatch, AttentionShape, token_slots


@dataclass(frozen=True)
class _Group:
    """Chunks of one length that attend together, their KV gathered and padded to the longest.

    `tokens` slices q; `slots` int64 `[batch, context]`; `masks`: by window, bool `[batch, 1, length, context]`.
    """

    tokens: torch.Tensor
    batch: int
    slots: torch.Tensor
    masks: dict[int | None, torch.Tensor]


class TorchAttention(AttentionBackend):
    """`kv` is the pages (see `kernels.attention`).

    All decodes of a step run as one padded batch, every longer chunk alone, both with scaled_dot_product_attention.
    """

    def __init__(self, kv: torch.Tensor, shape: AttentionShape) -> None:
        self.shape = shape
        self.page_size = kv.shape[3]
        self.device = kv.device
        # [num_layers, 2, num_slots, num_kv_heads, head_dim]: a view, one row a token.
        self.flat = kv.flatten(2, 3)
        self._windows = sorted(set(shape.windows), key=lambda w: w or 0)

    def plan(self, batch: AttentionBatch) -> None:
        self._slots = self._tensor(token_slots(batch, self.page_size))
        firsts = np.cumsum(batch.lengths) - batch.lengths
        decodes = np.flatnonzero(batch.lengths == 1)
        self._groups = [self._group(batch, firsts, np.array([c])) for c in np.flatnonzero(batch.lengths > 1)]
        if len(decodes):
            self._groups.append(self._group(batch, firsts, decodes))

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.flat[layer]
        keys.index_copy_(0, self._slots, k)
        values.index_copy_(0, self._slots, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            # [batch, length, heads, head_dim] -> heads before tokens
            queries = q[group.tokens].unflatten(0, (group.batch, -1)).transpose(1, 2)
            attended = self._attend(
                queries,
                keys[group.slots].transpose(1, 2),
                values[group.slots].transpose(1, 2),
                group.masks[self.shape.windows[layer]],
            )
            out[group.tokens] = attended.transpose(1, 2).flatten(0, 1)
        return out

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        if shape.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=shape.scale, enable_gqa=True)
        repeat = shape.num_heads // shape.num_kv_heads
        scores = torch.matmul(q, k.repeat_interleave(repeat, 1).transpose(2, 3)) * shape.scale
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
        weights = torch.softmax(scores.float().masked_fill(~mask, float("-inf")), dim=-1).to(q.dtype)
        return torch.matmul(weights, v.repeat_interleave(repeat, 1))

    def _group(self, batch: AttentionBatch, firsts: np.ndarray, chunks: np.ndarray) -> _Group:
        length = int(batch.lengths[chunks[0]])
        tokens = (firsts[chunks, None] + np.arange(length)).ravel()
        context = int((batch.starts[chunks] + length).max())
        keys = np.arange(context)
        pages = batch.tables[batch.rows[chunks]][:, keys // self.page_size]
        slots = pages.astype(np.int64) * self.page_size + keys % self.page_size
        queries = batch.starts[chunks, None, None] + np.arange(length)[:, None]
        causal = keys <= queries
        # Padding reads a slot of the same sequence again: a stale one could hold a NaN, which a weight of 0 keeps.
        slots = np.where(causal[:, -1], slots, slots[:, :1])
        masks = {
            window: self._tensor((causal if window is None else causal & (keys > queries - window))[:, None])
            for window in self._windows
        }
        return _Group(self._tensor(tokens), len(chunks), self._tensor(slots), masks)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)
