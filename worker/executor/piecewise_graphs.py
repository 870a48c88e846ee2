"""Piecewise CUDA graphs for long steps: one graph for everything between the attention of two layers.

Up to some number of tokens, a host takes longer to launch a layer's kernels one by one than the GPU takes to run them.
The number depends on the model: some hundreds for an 8B model, some thousands for a 0.6B model. A graph launches all
kernels at once. Attention stays outside the graphs, because its kernels depend on the batch. The gain is measured at
start, and the graphs are used only where there is one.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kernels.attention.interface import AttentionBackend, AttentionBatch, GraphAttention
from worker.models.decoder import Decoder

log = logging.getLogger(__name__)

LEAST_GAIN = 0.1
"""Fraction of a step's time without graphs that the graphs must save to be used."""


class ProbeBatch(NamedTuple):
    """A step to measure. `given`: token ids. `positions`: positions of the tokens. Both are int64 `[n]` on the
    device."""

    batch: AttentionBatch
    given: torch.Tensor
    positions: torch.Tensor


@dataclass
class _PieceSlots:
    """Implements `kernels.attention.interface.KVSlots` for a graph."""

    kv: torch.Tensor
    slots: torch.Tensor


class PiecewiseGraphs:
    """Runs `Decoder.hidden` with graphs, without pipeline parallelism. Graphs of all sizes share their input and output
    tensors."""

    def __init__(self, decoder: Decoder, attention: GraphAttention, most: int) -> None:
        """Allocate the shared tensors for up to `most` tokens. Until graphs are captured, `hidden` calls the
        decoder's."""
        self.most = most
        self._decoder, self._attention = decoder, attention
        config, device = decoder.config, decoder.device
        heads = most, config.num_heads, config.head_dim
        self._given, self._positions = (torch.zeros(most, dtype=torch.int64, device=device) for _ in range(2))
        num_pages, num_kv_heads, page_size = attention.kv.shape[2:5]
        self._scratch = (num_pages - 1) * num_kv_heads * page_size
        self._rows = torch.full((most,), self._scratch, dtype=torch.int64, device=device)
        self._x = torch.zeros(most, config.hidden_size, dtype=decoder.dtype, device=device)
        self._queries, self._attended = (torch.zeros(heads, dtype=decoder.dtype, device=device) for _ in range(2))
        self._graphs: dict[int, list[Callable[[], None]]] = {}

    @classmethod
    def if_faster(
        cls, decoder: Decoder, attention: GraphAttention, sizes: list[int], make: Callable[[int], ProbeBatch]
    ) -> "PiecewiseGraphs | None":
        """Capture the graphs of those sizes, in tokens, with which steps are measured to be faster; None if there are
        none.

        `sizes` ascend. Every fourth one and the last are measured, until one is not faster on every rank. Sizes above
        the last faster one are left out. `make` returns a step of a given number of tokens; measuring it overwrites the
        pages of its batch.
        """
        began_s = time.monotonic()
        most = 0
        for size in (*sizes[3:-1:4], *sizes[-1:]):
            if not decoder.communicator.all_reduce_min(int(cls(decoder, attention, size).is_faster(make(size)))):
                break  # at least one rank is not faster
            most = size
        if not most:
            return None
        pieces = cls(decoder, attention, most)
        pieces.capture([size for size in sizes if size <= most])
        log.info("Captured steps of up to %d tokens in pieces in %.1f s", most, time.monotonic() - began_s)
        return pieces

    def is_faster(self, trial: ProbeBatch) -> bool:
        """Whether graphs make a step of `most` tokens faster, by `LEAST_GAIN` at least."""
        batch, given, positions = trial
        self._attention.plan(batch)
        tokens = given, positions, self._attention, given[:1]
        without_s = self._seconds(lambda: self._decoder.hidden(*tokens))
        self.capture([self.most])
        with_s = self._seconds(lambda: self.hidden(*tokens))
        return with_s < (1 - LEAST_GAIN) * without_s

    def capture(self, sizes: list[int]) -> None:
        """Capture the graphs of these sizes, in ascending order."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(sizes):  # the largest first, so that the others fit into its memory
            self._graphs[size] = self._captured(size, pool)

    def close(self) -> None:
        """Drop the graphs."""
        self._graphs.clear()

    def hidden(
        self,
        given: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Like `Decoder.hidden`. `attention` must be the backend that was given to `__init__`, and have planned the
        batch. Steps longer than the largest graph run without graphs."""
        tokens = len(given)
        size = min((size for size in self._graphs if size >= tokens), default=0)
        if not size:
            return self._decoder.hidden(given, positions, attention, wanted)
        self._given[:tokens].copy_(given)
        self._positions[:tokens].copy_(positions)
        self._rows[:tokens].copy_(attention.slots)
        self._rows[tokens:size].fill_(self._scratch)  # padding goes into the last page, which no sequence uses
        for layer, replay in enumerate(self._graphs[size]):
            replay()
            self._attention.attend_into(layer, self._queries[:tokens], self._attended[:tokens])
        return self._decoder.finish(self._x[:tokens], self._attended[:tokens].flatten(1), wanted)

    def _piece(self, index: int, size: int) -> None:
        places = _PieceSlots(self._attention.kv, self._rows[:size])
        of_tokens = self._given[:size], self._x[:size], self._attended[:size].flatten(1), self._positions[:size]
        self._decoder.piece(index, *of_tokens, places, self._queries[:size])

    def _captured(self, size: int, pool: Any) -> list[Callable[[], None]]:
        replays = []
        for index in range(self._decoder.config.num_layers):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._piece(index, size)
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
