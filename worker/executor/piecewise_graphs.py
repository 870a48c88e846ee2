"""Piecewise CUDA graphs for long steps: one graph for everything between the attention of two layers.

Up to some number of tokens, a host takes longer to launch a layer's kernels one by one than the GPU takes to run them.
The number depends on the model: some hundreds for an 8B model, some thousands for a 0.6B model. A graph launches all
kernels at once. Attention stays outside the graphs, because its kernels depend on the batch. The gain is measured at
start, and the graphs are used only where there is one. With them, the first token of Qwen3-0.6B takes 3.1 ms after a
prompt of 300 tokens and 4.4 ms after one of 1,024 on an H200 (bench/RESULTS.md: gpu.qwen3_06b.beside_8b).
"""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.attention.interface import AttentionBackend, AttentionBatch, GraphAttention
from worker.models.adapted_layers import AdaptedLayers
from worker.models.decoder import Decoder, PieceBuffers

log = logging.getLogger(__name__)

MIN_GAIN = 0.1
"""Fraction of a step's time without graphs that the graphs must save to be used."""


class ProbeBatch(NamedTuple):
    """A step to measure: a batch with the token ids and positions of its tokens, int64 `[n]` on the device."""

    batch: AttentionBatch
    token_ids: torch.Tensor
    positions: torch.Tensor


class PiecewiseGraphs:
    """Runs `Decoder.forward` with graphs, without pipeline parallelism. Graphs of all sizes share their input and
    output tensors."""

    def __init__(
        self, decoder: Decoder, attention: GraphAttention, max_tokens: int, adapted: AdaptedLayers | None = None
    ) -> None:
        """Allocate the shared tensors for up to `max_tokens` tokens. Until graphs are captured, `forward` calls the
        decoder's. `adapted`: the layers of steps with adapters, in place of the decoder's own."""
        self.max_tokens = max_tokens
        self._decoder, self._attention, self._adapted = decoder, attention, adapted
        config, device = decoder.config, decoder.device
        pools = attention.pools
        self._padding_slots = [math.prod(pool.kv.shape[2:5]) - math.prod(pool.kv.shape[3:5]) for pool in pools]
        heads, gate = (max_tokens, config.num_heads), config.output_gate
        gates = 0 if gate is None else gate.size(config.num_heads, config.head_dim)
        self._buffers = PieceBuffers(
            token_ids=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            slots=[torch.full((max_tokens,), slot, dtype=torch.int64, device=device) for slot in self._padding_slots],
            kv=[pool.kv for pool in pools],
            layout=attention.layout,
            hidden=torch.zeros(max_tokens, config.hidden_size, dtype=decoder.dtype, device=device),
            queries=torch.zeros(*heads, config.query_size, dtype=decoder.dtype, device=device),
            attended=torch.zeros(*heads, config.output_size, dtype=decoder.dtype, device=device),
            gates=torch.zeros(max_tokens, gates, dtype=decoder.dtype, device=device),
        )
        self._graphs: dict[int, list[Callable[[], None]]] = {}

    @classmethod
    def if_faster(
        cls,
        decoder: Decoder,
        attention: GraphAttention,
        sizes: list[int],
        make_probe: Callable[[int], ProbeBatch],
        adapted: AdaptedLayers | None = None,
    ) -> "PiecewiseGraphs | None":
        """Capture the graphs of those sizes, in tokens, with which steps are measured to be faster; None if there are
        none.

        `sizes` ascend. Every fourth one and the last are measured, until one is not faster on every rank. Sizes above
        the last faster one are left out. `make_probe` returns a step of a given number of tokens; measuring it
        overwrites the pages of its batch.
        """
        began_s = time.monotonic()
        max_tokens = 0
        for size in (*sizes[3:-1:4], *sizes[-1:]):
            pieces = cls(decoder, attention, size, adapted)
            if not decoder.communicator.all_reduce_min(int(pieces.is_faster(make_probe(size)))):
                break  # at least one rank is not faster
            max_tokens = size
        if not max_tokens:
            return None
        pieces = cls(decoder, attention, max_tokens, adapted)
        pieces.capture([size for size in sizes if size <= max_tokens])
        log.info("Captured steps of up to %d tokens in pieces in %.1f s", max_tokens, time.monotonic() - began_s)
        return pieces

    def is_faster(self, probe: ProbeBatch) -> bool:
        """Whether graphs make a step of `max_tokens` tokens faster, by `MIN_GAIN` at least."""
        batch, token_ids, positions = probe
        self._attention.plan(batch)
        step = token_ids, positions, self._attention, token_ids[:1]
        adapters = None if self._adapted is None else np.zeros(len(token_ids), dtype=np.int64)
        without_s = self._seconds(lambda: self._without_graphs(*step, adapters))
        self.capture([self.max_tokens])
        with_s = self._seconds(lambda: self.forward(*step, adapters))
        return with_s < (1 - MIN_GAIN) * without_s

    def capture(self, sizes: list[int]) -> None:
        """Capture the graphs of these sizes, in ascending order."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(sizes):  # the largest first, so that the others fit into its memory
            self._graphs[size] = self._captured(size, pool)

    def close(self) -> None:
        """Drop the graphs."""
        self._graphs.clear()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        logit_indices: torch.Tensor | None = None,
        adapters: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Like `Decoder.forward`. `attention` must be the backend that was given to `__init__`, and have planned the
        batch. Steps longer than the largest graph run without graphs. `adapters`: integers `[n]`, the slot of each
        token's adapter, -1 for none; for adapted layers only."""
        n = len(token_ids)
        size = min((size for size in self._graphs if size >= n), default=0)
        if not size:
            return self._without_graphs(token_ids, positions, attention, logit_indices, adapters)
        if self._adapted is not None and adapters is not None:
            self._adapted.fill(adapters, size)
        buffers = self._buffers
        buffers.token_ids[:n].copy_(token_ids)
        buffers.positions[:n].copy_(positions)
        for slots, pool, padding in zip(buffers.slots, attention.pools, self._padding_slots, strict=True):
            slots[:n].copy_(pool.slots)
            slots[n:size].fill_(padding)  # in the last page, which no sequence uses
        replays = iter(self._graphs[size])
        for layer in range(self._decoder.config.num_layers):
            next(replays)()
            self._attention.attend_into(layer, buffers.queries[:n], buffers.attended[:n])
        if self._adapted is None:
            return self._decoder.finish(buffers.hidden[:n], self._decoder.gated(buffers.first(n)), logit_indices)
        # Which adapter is whose has been said for all tokens, so the last piece computes all of them.
        next(replays)()
        return buffers.hidden[:n] if logit_indices is None else buffers.hidden[logit_indices]

    def _without_graphs(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        logit_indices: torch.Tensor | None,
        adapters: np.ndarray | None,
    ) -> torch.Tensor:
        adapted = None if self._adapted is None or adapters is None else self._adapted.filled(adapters)
        return self._decoder.forward(token_ids, positions, attention, logit_indices, adapted=adapted)

    def _pieces(self, size: int) -> list[Callable[[], None]]:
        """The work of each graph of a size."""
        count, adapted = self._decoder.config.num_layers, None
        if self._adapted is not None:
            self._adapted.fill(np.full(1, -1), size)
            count, adapted = count + 1, self._adapted.layers
        return [partial(self._decoder.piece, index, self._buffers.first(size), adapted) for index in range(count)]

    def _captured(self, size: int, pool: Any) -> list[Callable[[], None]]:
        replays, pieces = [], self._pieces(size)
        if self._adapted is not None:
            for piece in pieces:
                piece()  # what adapters' kernels compile and load is not to happen in a capture
        for piece in pieces:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                piece()
            replays.append(graph.replay)
        return replays

    def _seconds(self, step: Callable[[], object]) -> float:
        """Seconds that a step takes, measured at its second run."""
        for _ in range(2):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            step()
            torch.cuda.synchronize()
        return time.perf_counter() - began_s
