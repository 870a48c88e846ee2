"""Latent attention on GPUs with FlashInfer's kernels.

| chunks | kernel |
| --- | --- |
| absorbed | FlashInfer's attention over latents: FlashAttention 3 on Hopper, its FlashAttention 2 elsewhere |
| plain, on Hopper | FlashAttention 3, over the keys and values that are made of the context's latents |

`kernels.attention.latent` says what the two ways are. All chunks of more than one token of a step go the same way, the
one with fewer operations, so that the tokens of each way are one part of the batch.

The kernels are called without FlashInfer's wrappers, as in `kernels.attention.flashinfer_backend`. Its planner for
latents gives every step of a kind the same grid and the same places of its arrays, so a CUDA graph holds for all
batches of its size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention.flashinfer_backend import CAUSAL, FULL, PlanWorkspace, ends_of, find_ninja
from kernels.attention.interface import (
    AttentionBatch,
    AttentionShape,
    GraphAttention,
    LatentHeads,
    SharedPrefixes,
    flat_pages,
    slot_mapping,
    token_positions,
)
from kernels.attention.latent import LatentProjections, operations
from kernels.host_device import GraphInputs, all_to_device

_NHD = 0
# Rows of queries in a tile of the kernel for latents, a row for each head. With more than this many rows a sequence on
# average, the planner has two tiles at once read the same keys.
_TILE = 64
_MOST_TILES = 16384  # of a step: the planner has room for as many
_MOST_CUTS = 512  # further tiles, for contexts that are cut: no more than run at once
_MOST_HEADS = 2 * _TILE
# Bytes for the keys and values of contexts in the plain way. Steps with longer contexts go the absorbed way.
_EXPANDED_BYTES = 256 << 20
# Most operations that the plain way may save for a graph of chunks to be faster, which is absorbed: 0.2 ms at the rate
# of FlashAttention 3. Not measured.
_MOST_SAVED = 1e11
# Sizes of queries and values for which FlashAttention 3 has kernels.
_PLAIN_SIZES = ((192, 128), (256, 256), (128, 128), (64, 64))


@dataclass(frozen=True)
class _Absorbed:
    """The part of a batch in the absorbed way: its first `tokens` tokens. `plan` is what the planner returned."""

    tokens: int
    plan: Any
    mask: int
    pages: torch.Tensor


@dataclass(frozen=True)
class _Plain:
    """The part of a batch in the plain way: its tokens from `first` on. `rows`: of the pages, for all contexts, one
    after the other; int64."""

    first: int
    plan: Any
    rows: torch.Tensor
    query_ends: torch.Tensor
    context_ends: torch.Tensor


def has_kernel(shape: AttentionShape, dtype: torch.dtype) -> bool:
    """Whether FlashInfer supports the model: 16-bit pages, latents of 512, 256 or 128 elements, rotated keys of a
    multiple of 64, at most 128 heads. `modules` says whether its kernels can be had on this machine."""
    latent = shape.latent
    if latent is None or dtype not in (torch.bfloat16, torch.float16) or shape.num_heads > _MOST_HEADS:
        return False
    return latent.kv_lora_rank in (128, 256, 512) and latent.qk_rope_head_dim % 64 == 0


@cache
def modules(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """FlashInfer's kernels for the absorbed and for the plain way, None if it has none for that; compiled at their
    first use on a machine. Raises what `kernels.attention.flashinfer_backend.modules` raises."""
    from flashinfer.jit.attention import gen_batch_mla_module, gen_batch_prefill_module
    from flashinfer.utils import is_sm90a_supported

    assert shape.latent is not None
    find_ninja()
    latent = shape.latent
    is_hopper = is_sm90a_supported(device)
    sizes = latent.kv_lora_rank, latent.qk_rope_head_dim
    absorbed = gen_batch_mla_module(
        "fa3" if is_hopper else "fa2", dtype, dtype, dtype, torch.int32, *sizes, False
    ).build_and_load()
    if not is_hopper or (latent.query, latent.v_head_dim) not in _PLAIN_SIZES:
        return absorbed, None
    kernel = (dtype, dtype, dtype, torch.int32, latent.query, latent.v_head_dim, 0, False, False, False)
    return absorbed, gen_batch_prefill_module("fa3", *kernel).build_and_load()


class FlashInferLatentAttention(GraphAttention):
    """Latent attention over the pages `kv` (see `kernels.attention.interface`) on a GPU. No sequence uses the last
    page.

    `weights`: as for `LatentProjections`. The other arguments are those of `FlashInferAttention`. Raises what `modules`
    raises.
    """

    has_plain_graphs = False  # no graph reads a shared prefix once

    def __init__(
        self,
        kv: torch.Tensor,
        shape: AttentionShape,
        weights: Sequence[torch.Tensor],
        max_sequences: int,
        max_pages: int,
        max_tokens: int,
    ) -> None:
        from kernels.attention.triton_backend import multiprocessors

        assert shape.latent is not None
        super().__init__(kv, shape)
        self.heads: LatentHeads = shape.latent
        self._projections = LatentProjections(shape.latent, weights)
        self._absorbed_module, self._plain_module = modules(shape, kv.dtype, self.device)
        self._absorbed_workspace, self._plain_workspace = PlanWorkspace(self.device), PlanWorkspace(self.device)
        # The kernel leaves out keys at the ends of tiles unless the heads of a token divide a tile.
        self._padded_heads = 1 << (shape.num_heads - 1).bit_length()
        # The planner cuts contexts into at most two parts for each tile that runs at once.
        partial = 2 * multiprocessors(self.device) * _TILE * (2 * shape.latent.kv_lora_rank + 4)
        self._partial = torch.zeros(partial + 4096, dtype=torch.uint8, device=self.device)
        # Pages without their one KV head.
        self._latents, self._keys = kv[:, 0, :, 0].split((self.heads.kv_lora_rank, self.heads.qk_rope_head_dim), dim=-1)
        self._rows = kv.flatten(1, 4)
        most = max(max_tokens, max_sequences)
        self._static = GraphInputs(
            self.device, {"slots": (torch.int64, most), "pages": (torch.int32, max_pages + most)}
        )
        self._most_context, self._expanded_keys, self._up = self._buffers()
        self._absorbed: _Absorbed | None = None
        self._plain: _Plain | None = None

    def shared_prefixes(self, batch: AttentionBatch) -> SharedPrefixes | None:
        return None

    def fits_graph(self, batch: AttentionBatch) -> bool:
        if self._plain_module is None:
            return True
        absorbed, plain = self._operations(batch.part(batch.num_singles, len(batch.rows)))
        return absorbed - plain <= _MOST_SAVED

    def plan(self, batch: AttentionBatch) -> None:
        slots = slot_mapping(
            batch, np.repeat(np.arange(len(batch.lengths)), batch.lengths), token_positions(batch), 1, self.page_size
        )
        cut = self._absorbed_chunks(batch)
        absorbed, plain = batch.part(0, cut), batch.part(cut, len(batch.rows))
        counts = -(-(absorbed.starts + absorbed.lengths) // self.page_size)
        contexts = plain.starts + plain.lengths
        chunk_of_key = np.repeat(np.arange(len(contexts)), contexts)
        key_ends = ends_of(contexts)
        keys = np.arange(key_ends[-1]) - np.repeat(key_ends[:-1], contexts)
        arrays = [
            slots,
            flat_pages(absorbed.tables, absorbed.rows, counts),
            slot_mapping(plain, chunk_of_key, keys, 1, self.page_size),
            ends_of(plain.lengths),
            key_ends,
        ]
        self.slots, pages, rows, query_ends, context_ends = all_to_device(arrays, self.device)
        self._absorbed = self._plain = None
        if len(absorbed.rows):
            self._absorbed = self._plan_absorbed(absorbed.lengths, absorbed.starts + absorbed.lengths, counts, pages)
        if len(plain.rows):
            plan = self._plan_plain(plain, arrays[3], arrays[4])
            self._plain = _Plain(absorbed.num_tokens, plan, rows, query_ends, context_ends)

    def plan_graph(
        self, batch: AttentionBatch, size: int, shared: SharedPrefixes | None, *, chunks: bool = False
    ) -> None:
        padding, scratch = size - batch.num_tokens, self.kv.shape[2] - 1
        own = slot_mapping(
            batch, np.repeat(np.arange(len(batch.lengths)), batch.lengths), token_positions(batch), 1, self.page_size
        )
        # The batch is padded with sequences of one token, in the last page.
        lengths = np.append(batch.lengths, np.ones(padding, dtype=np.int32))
        contexts = np.append(batch.starts + batch.lengths, np.ones(padding, dtype=np.int32))
        counts = -(-contexts // self.page_size)
        pages = flat_pages(batch.tables, batch.rows, counts[: len(batch.rows)])
        self._static.fill(
            {
                "slots": np.append(own, np.full(padding, scratch * self.page_size)),
                "pages": np.append(pages, np.full(padding, scratch, dtype=np.int32)),
            }
        )
        self.slots, self._plain = self._static["slots"][:size], None
        if chunks and self._padded_heads <= _TILE:
            # Sequences without tokens change nothing but the average rows of a sequence, on which the grid depends.
            empty = np.zeros(max(0, -(-size * self._padded_heads // _TILE) - len(lengths)), dtype=np.int32)
            lengths, contexts, counts = (np.append(each, empty) for each in (lengths, contexts, counts))
        self._absorbed = self._plan_absorbed(lengths, contexts, counts, self._static["pages"], causal=chunks)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], self.heads.v_head_dim)
        self.attend_into(layer, q, out)
        return out

    def attend_into(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        if self._absorbed is not None:
            tokens = self._absorbed.tokens
            self._attend_absorbed(layer, self._absorbed, q[:tokens], out[:tokens])
        if self._plain is not None:
            first = self._plain.first
            self._attend_plain(layer, self._plain, q[first:], out[first:])

    def _attend_absorbed(self, layer: int, part: _Absorbed, q: torch.Tensor, out: torch.Tensor) -> None:
        num_heads, padded = self.shape.num_heads, self._padded_heads
        latent_queries = q.new_empty(padded, len(q), self.heads.kv_lora_rank).transpose(0, 1)
        self._projections.absorb(layer, q, latent_queries[:, :num_heads])
        rotated = q[..., self.heads.qk_nope_head_dim :]
        if padded > num_heads:
            rotated = F.pad(rotated, (0, 0, 0, padded - num_heads))
        attended = torch.empty_like(latent_queries)
        self._absorbed_module.run(
            self._partial,
            self._absorbed_workspace.device_bytes,
            part.plan,
            latent_queries,
            rotated,
            self._latents[layer],
            self._keys[layer],
            part.pages,
            attended,
            None,  # no sums of weights
            part.mask,
            padded,
            self.page_size,
            self.shape.scale,
            False,
            1.0,  # no scales of 8-bit pages
            1.0,
            None,
        )
        self._projections.values(layer, attended[:, :num_heads], out)

    def _attend_plain(self, layer: int, part: _Plain, q: torch.Tensor, out: torch.Tensor) -> None:
        context = len(part.rows)
        keys, values = self._projections.expand(
            layer,
            self._rows[layer].index_select(0, part.rows),
            self._expanded_keys[:context],
            self._up[:context],
        )
        self._plain_module.ragged_run(
            self._partial,
            self._plain_workspace.device_bytes,
            part.plan,
            q,
            keys,
            values,
            part.query_ends,
            part.context_ends,
            out,
            None,  # no sums of weights
            CAUSAL,
            _NHD,
            -1,  # no window
            True,  # may start while the kernel before it ends
            *((None,) * 4),
            0.0,
            self.shape.scale,
            1.0,
            0,
        )

    def _plan_absorbed(
        self,
        lengths: np.ndarray,
        contexts: np.ndarray,
        counts: np.ndarray,
        pages: torch.Tensor,
        *,
        causal: bool | None = None,
    ) -> _Absorbed:
        """Plans the kernel for latents. `causal` is false if all chunks have one token, by default if they have."""
        if causal is None:
            causal = bool((lengths > 1).any())
        tokens = int(lengths.sum())
        rows = lengths.astype(np.int64) * self._padded_heads
        tiles = -(-rows // (_TILE if rows.sum() // len(rows) <= _TILE else 2 * _TILE))
        if int(tiles.sum()) > _MOST_TILES - _MOST_CUTS:
            raise ValueError(f"FlashInfer's planner has no room for a step of {tokens} tokens: lower token_budget")
        plan = self._absorbed_workspace.plan(
            self._absorbed_module.plan,
            self._partial,
            *(torch.from_numpy(each) for each in (ends_of(lengths), ends_of(counts), contexts.astype(np.int32))),
            self._padded_heads,
            self.heads.kv_lora_rank,
            causal,
        )
        return _Absorbed(tokens, plan, CAUSAL if causal else FULL, pages)

    def _plan_plain(self, batch: AttentionBatch, query_ends: np.ndarray, context_ends: np.ndarray) -> Any:
        """Plans FlashAttention 3, over keys and values that stand one after the other."""
        num_heads = self.shape.num_heads
        return self._plain_workspace.plan(
            self._plain_module.plan,
            self._partial,
            torch.from_numpy(query_ends),
            torch.from_numpy(context_ends),
            torch.from_numpy((batch.starts + batch.lengths).astype(np.int32)),
            batch.num_tokens,
            len(batch.rows),
            num_heads,
            num_heads,
            1,  # keys and values are in no pages
            False,  # no CUDA graph
            self.heads.query,
            self.heads.v_head_dim,
            True,  # causal
            -1,  # no window
        )

    def _absorbed_chunks(self, batch: AttentionBatch) -> int:
        """Number of chunks, from the first on, that are absorbed: those of one token, or all."""
        singles, total = batch.num_singles, len(batch.rows)
        chunks = batch.part(singles, total)
        if self._plain_module is None or int((chunks.starts + chunks.lengths).sum()) > self._most_context:
            return total
        absorbed, plain = self._operations(chunks)
        return singles if plain < absorbed else total

    def _operations(self, chunks: AttentionBatch) -> tuple[float, float]:
        """Operations of all layers for chunks in the absorbed and in the plain way."""
        absorbed, plain = (
            float(operations(self.heads, chunks.starts, chunks.lengths, plain=plain).sum()) for plain in (False, True)
        )
        factor = self.shape.num_heads * len(self.shape.windows)
        return absorbed * factor, plain * factor

    def _buffers(self) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Tokens of the longest contexts in the plain way, and the memory for their keys and values."""
        num_heads, heads = self.shape.num_heads, self.heads
        most = 0
        if self._plain_module is not None:
            most = _EXPANDED_BYTES // (num_heads * (heads.query + heads.up) * self.kv.dtype.itemsize)
        keys = self.kv.new_empty(most, num_heads, heads.query)
        return most, keys, self.kv.new_empty(most, num_heads * heads.up)
