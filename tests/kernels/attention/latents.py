"""Latent attention written as its definition, and shapes and random weights of its layers."""

import numpy as np
import torch

from kernels.attention.interface import AttentionBatch, AttentionShape, LatentHeads

LAYERS = 2


def latent_shape(heads: LatentHeads, num_heads: int) -> AttentionShape:
    return AttentionShape(num_heads, 1, heads.row, heads.query**-0.5, (None,) * LAYERS, latent=heads)


def random_weights(heads: LatentHeads, num_heads: int) -> list[torch.Tensor]:
    return [torch.randn(num_heads, heads.up, heads.kv_lora_rank) * heads.kv_lora_rank**-0.5 for _ in range(LAYERS)]


class Definition:
    """Slow and obvious, one query at a time, in float64."""

    def __init__(self, kv: torch.Tensor, shape: AttentionShape, weights: list[torch.Tensor]) -> None:
        assert shape.latent is not None
        self.kv, self.shape, self.heads, self.weights = kv.double(), shape, shape.latent, weights

    def attend(self, layer: int, batch: AttentionBatch, q: torch.Tensor) -> torch.Tensor:
        out, token = [], 0
        for row, start, length in zip(batch.rows, batch.starts, batch.lengths, strict=True):
            keys, values = self._keys_and_values(layer, batch.tables[row], start + length)
            for position in range(start, start + length):
                scores = torch.einsum("hd,thd->ht", q[token].double(), keys[: position + 1])
                weights = (self.shape.scale * scores).softmax(1)
                out.append(torch.einsum("ht,thd->hd", weights, values[: position + 1]))
                token += 1
        return torch.stack(out)

    def _keys_and_values(self, layer: int, table: np.ndarray, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Those that the latents of a sequence stand for: `[length, heads, size]`."""
        size, positions = self.kv.shape[4], torch.arange(length)
        rows = self.kv[layer, 0, torch.from_numpy(table)[positions // size], 0, positions % size]
        latents, rotated = rows.split((self.heads.kv_lora_rank, self.heads.qk_rope_head_dim), dim=1)
        made = torch.einsum("tr,hur->thu", latents, self.weights[layer].double())
        keys, values = made.split((self.heads.qk_nope_head_dim, self.heads.v_head_dim), dim=2)
        return torch.cat((keys, rotated[:, None].expand(-1, keys.shape[1], -1)), dim=2), values
