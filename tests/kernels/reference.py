"""Attention written as its definition, one query at a time in float64. Tests hold every backend to it."""

from collections.abc import Iterator

import torch

from kernels.attention.interface import AttentionBackend, AttentionBatch, AttentionShape

# How far from it a backend may be, absolutely and relatively.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class ReferenceAttention(AttentionBackend):
    """Slow and obvious. `kv` is the pages (see `kernels.attention.interface`)."""

    def __init__(self, kv: torch.Tensor, shape: AttentionShape, sinks: torch.Tensor | None = None) -> None:
        self.kv = kv
        self.shape = shape
        self.sinks = sinks

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = batch

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for token, (row, position) in enumerate(self._tokens()):
            page, offset = self._locate(row, position)
            self.kv[layer, 0, page, :, offset] = k[token]
            self.kv[layer, 1, page, :, offset] = v[token]
        return self.attend(layer, q)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for token, (row, position) in enumerate(self._tokens()):
            out[token] = self._attend(layer, q[token], row, position)
        return out

    def _tokens(self) -> Iterator[tuple[int, int]]:
        batch = self.batch
        for row, start, length in zip(batch.rows, batch.starts, batch.lengths, strict=True):
            for position in range(start, start + length):
                yield int(row), position

    def _locate(self, row: int, position: int) -> tuple[int, int]:
        page_size = self.kv.shape[4]
        return int(self.batch.tables[row, position // page_size]), position % page_size

    def _attend(self, layer: int, q: torch.Tensor, row: int, position: int) -> torch.Tensor:
        shape, window = self.shape, self.shape.windows[layer]
        first = 0 if window is None else max(0, position - window + 1)
        group, page_size = shape.num_heads // shape.num_kv_heads, self.kv.shape[4]
        positions = torch.arange(first, position + 1)
        pages = torch.from_numpy(self.batch.tables[row])[positions // page_size]
        seen = self.kv[layer, :, pages, :, positions % page_size].double()  # [positions, keys and values, heads, dim]
        keys, values = seen.repeat_interleave(group, dim=2).unbind(1)
        scores = shape.scale * torch.einsum("hd,thd->ht", q.double(), keys)
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks[layer, :, None].cpu().double()), dim=1)
        weights = torch.softmax(scores, dim=1)[:, : len(keys)]
        return torch.einsum("ht,thd->hd", weights, values).to(q.dtype)
