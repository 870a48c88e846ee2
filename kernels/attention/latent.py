"""Multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1) on any device, by PyTorch's operators.

The keys and values of all heads are products of a token's latent, which is all that the pages hold. So attention can be
computed in two ways, with the same result:

- *absorbed*: queries are multiplied with the matrix of the keys, and outputs with that of the values. Between the two,
  attention is that of many query heads and one KV head, whose keys are the rows of the pages, and whose values are the
  latents in them. The context is only read.
- *plain*: the keys and values of the context are made, and attention is that of as many KV heads as query heads.

`is_plain` says which has fewer operations: decodes and short chunks are absorbed, long prompts are plain.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    LatentHeads,
    slot_mapping,
    token_positions,
)
from kernels.host_device import to_device

Absorbed = Callable[[torch.Tensor, AttentionShape], AttentionBackend]
"""Makes a backend for the absorbed way, from pages with one KV head whose values are its keys."""


class LatentProjections:
    """The matrices that make keys and values of latents: for each layer `[num_heads, latent.up, kv_lora_rank]`, a
    head's key before its value."""

    def __init__(self, heads: LatentHeads, weights: Sequence[torch.Tensor]) -> None:
        self.heads, self._weights = heads, weights

    def absorb(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the queries that latents are multiplied with, `[n, num_heads, kv_lora_rank]`, to `out`. q: `[n,
        num_heads, latent.query]`, of which the rotated part is not read."""
        nope = self.heads.qk_nope_head_dim
        torch.bmm(q[..., :nope].transpose(0, 1), self._weights[layer][:, :nope], out=out.transpose(0, 1))

    def values(self, layer: int, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the heads' outputs, `[n, num_heads, v_head_dim]`, to `out`. attended: weighted sums of latents, `[n,
        num_heads, kv_lora_rank]`."""
        to_value = self._weights[layer][:, self.heads.qk_nope_head_dim :]
        torch.bmm(attended.transpose(0, 1), to_value.transpose(1, 2), out=out.transpose(0, 1))

    def expand(
        self, layer: int, rows: torch.Tensor, keys: torch.Tensor | None = None, up: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys, `[n, num_heads, latent.query]`, in `keys` if given, and values, `[n, num_heads, v_head_dim]`, a
        part of `up` if given, `[n, num_heads * latent.up]`. rows: `[n, latent.row]`, of the pages."""
        weight, heads = self._weights[layer], self.heads
        latents, rotated = rows.split((heads.kv_lora_rank, heads.qk_rope_head_dim), dim=1)
        made = torch.mm(latents, weight.flatten(0, 1).t(), out=up).unflatten(1, (len(weight), heads.up))
        parts, values = made.split((heads.qk_nope_head_dim, heads.v_head_dim), dim=2)
        if keys is None:
            keys = rows.new_empty(len(rows), len(weight), heads.query)
        keys[..., : heads.qk_nope_head_dim] = parts
        keys[..., heads.qk_nope_head_dim :] = rotated[:, None]
        return keys, values


def is_plain(heads: LatentHeads, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Whether chunks have fewer operations in the plain way: bool `[num_chunks]`. Arguments: those of `AttentionBatch`.

    A chunk of one token is always absorbed, so that decodes are one batch.
    """
    fewer = operations(heads, starts, lengths, plain=True) < operations(heads, starts, lengths, plain=False)
    return np.asarray(fewer & (lengths > 1))


def operations(heads: LatentHeads, starts: np.ndarray, lengths: np.ndarray, *, plain: bool) -> np.ndarray:
    """Operations of one head for each chunk in one of the two ways: float64 `[num_chunks]`.

    The matrices of keys and values are multiplied with the queries and outputs of the chunk's tokens, or with the
    latents of its context. A pair of a query and a key costs as much as their dimensions, and those of the value.
    """
    new, context = lengths.astype(np.float64), (starts + lengths).astype(np.float64)
    pairs = new * (context - (new - 1) / 2)
    matrices = 2 * heads.kv_lora_rank * heads.up
    if plain:
        return context * matrices + pairs * 2 * (heads.query + heads.v_head_dim)
    return new * matrices + pairs * 2 * (heads.row + heads.kv_lora_rank)


@dataclass(frozen=True)
class _PlainChunk:
    """A chunk in the plain way: its tokens of the batch; the rows of its context, int64 `[context]`; and what is added
    to its scores, `[length, context]`, None if it begins its sequence."""

    tokens: slice
    rows: torch.Tensor
    mask: torch.Tensor | None


class TorchLatentAttention(AttentionBackend):
    """Latent attention over the pages `kv` (see `kernels.attention.interface`).

    `weights`: as for `LatentProjections`. `absorbed` makes the backend for the absorbed way.
    """

    def __init__(
        self, kv: torch.Tensor, shape: AttentionShape, weights: Sequence[torch.Tensor], absorbed: Absorbed
    ) -> None:
        assert shape.latent is not None
        super().__init__(kv, shape)
        self.heads = shape.latent
        self._projections = LatentProjections(shape.latent, weights)
        # Values are the same memory as keys, and the rotated key at the end of each row is left out of the result.
        self._absorbed = absorbed(kv.expand(-1, 2, -1, -1, -1, -1), replace(shape, latent=None))
        self._rows = kv.flatten(1, 4)

    def plan(self, batch: AttentionBatch) -> None:
        chunk_of_token = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        self.slots = self._tensor(slot_mapping(batch, chunk_of_token, token_positions(batch), 1, self.page_size))
        plain = is_plain(self.heads, batch.starts, batch.lengths)
        self._plain = [self._plain_chunk(batch, int(chunk)) for chunk in np.flatnonzero(plain)]
        self._rest: torch.Tensor | None = None  # indices of the tokens in the absorbed way; None for all
        if len(self._plain):
            self._rest = self._tensor(np.flatnonzero(~plain[chunk_of_token]))
        self._has_rest = not plain.all()
        if self._has_rest:
            self._absorbed.plan(
                AttentionBatch(batch.tables, batch.rows[~plain], batch.starts[~plain], batch.lengths[~plain])
            )

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], self.heads.v_head_dim)
        for chunk in self._plain:
            out[chunk.tokens] = self._attend_plain(layer, chunk, q[chunk.tokens])
        if not self._has_rest:
            return out
        if self._rest is None:
            self._attend_absorbed(layer, q, out)
        else:
            rest = out.new_empty(len(self._rest), *out.shape[1:])
            self._attend_absorbed(layer, q[self._rest], rest)
            out[self._rest] = rest
        return out

    def _attend_absorbed(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        rank = self.heads.kv_lora_rank
        absorbed = q.new_empty(*q.shape[:2], self.heads.row)
        self._projections.absorb(layer, q, absorbed[..., :rank])
        absorbed[..., rank:] = q[..., self.heads.qk_nope_head_dim :]
        self._projections.values(layer, self._absorbed.attend(layer, absorbed)[..., :rank], out)

    def _attend_plain(self, layer: int, chunk: _PlainChunk, q: torch.Tensor) -> torch.Tensor:
        keys, values = self._projections.expand(layer, self._rows[layer].index_select(0, chunk.rows))
        # PyTorch computes tile by tile only if keys and values have the same size.
        padded = F.pad(values, (0, self.heads.query - self.heads.v_head_dim))
        q, keys, padded = (each.transpose(0, 1)[None] for each in (q, keys, padded))
        out = F.scaled_dot_product_attention(
            q,
            keys,
            padded,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self.shape.scale,
        )
        return out[0, ..., : self.heads.v_head_dim].transpose(0, 1)

    def _plain_chunk(self, batch: AttentionBatch, chunk: int) -> _PlainChunk:
        start, length = int(batch.starts[chunk]), int(batch.lengths[chunk])
        first = int(batch.firsts[chunk])
        keys = np.arange(start + length)
        rows = self._tensor(slot_mapping(batch, np.array(chunk), keys, 1, self.page_size))
        if not start:
            return _PlainChunk(slice(first, first + length), rows, None)
        hidden = torch.zeros(length, start + length, dtype=self.kv.dtype, device=self.device)
        hidden.masked_fill_(self._tensor(keys > start + np.arange(length)[:, None]), float("-inf"))
        return _PlainChunk(slice(first, first + length), rows, hidden)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return to_device(np.ascontiguousarray(array), self.device)
