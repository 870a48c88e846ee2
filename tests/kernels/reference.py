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
        places = [self._locate(row, p) for p in range(first, position + 1)]
        keys = torch.stack([self.kv[layer, 0, page, :, offset] for page, offset in places]).double()
        values = torch.stack([self.kv[layer, 1, page, :, offset] for page, offset in places]).double()
        group = shape.num_heads // shape.num_kv_heads
        heads = []
        for h in range(shape.num_heads):
            scores = shape.scale * (keys[:, h // group] @ q[h].double())
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks[layer, h : h + 1].cpu().double()))
            heads.append(torch.softmax(scores, dim=0)[: len(keys)] @ values[:, h // group])
        return torch.stack(heads).to(q.dtype)
