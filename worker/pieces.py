"""Long steps as CUDA graphs of what lies between one layer's attention and the next one's.

A host that starts a layer's kernels one by one takes longer for them than a GPU does, up to a number of tokens that
depends on the model: some hundreds of an 8B one, some thousands of a 0.6B one. A graph starts them at once. Attention,
whose kernels depend on the batch, stays outside. What such graphs gain is measured before they are used.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kernels.attention import AttentionBackend, AttentionBatch, GraphAttention
from worker.models.decoder import Decoder

log = logging.getLogger(__name__)

LEAST_GAIN = 0.1
"""So much less time than without them a step must take."""


class Trial(NamedTuple):
    """A batch, its tokens' ids and their positions, int64 `[n]` on the device."""

    batch: AttentionBatch
    given: torch.Tensor
    positions: torch.Tensor


@dataclass
class _Places:
    """`kernels.attention.Places` for a graph."""

    kv: torch.Tensor
    rows: torch.Tensor


class Pieces:
    """`Decoder.hidden` by graphs, for a stage that is the only one. All sizes share what they read and leave."""

    def __init__(self, decoder: Decoder, attention: GraphAttention, most: int) -> None:
        """For up to `most` tokens. Until some sizes are captured, `hidden` is the decoder's own."""
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
    def where_they_gain(
        cls, decoder: Decoder, attention: GraphAttention, sizes: list[int], make: Callable[[int], Trial]
    ) -> "Pieces | None":
        """Those of the `sizes`, growing, with which steps are measured to take less time, if there are any; one in four
        is tried. `make` gives a batch of so many tokens, whose pages are written to."""
        began_s = time.monotonic()
        most = 0
        for size in (*sizes[3:-1:4], *sizes[-1:]):
            if not decoder.group.least(int(cls(decoder, attention, size).gains(make(size)))):
                break  # on one rank at least
            most = size
        if not most:
            return None
        pieces = cls(decoder, attention, most)
        pieces.capture([size for size in sizes if size <= most])
        log.info("Captured steps of up to %d tokens in pieces in %.1f s", most, time.monotonic() - began_s)
        return pieces

    def gains(self, trial: Trial) -> bool:
        """Whether a step of the most tokens takes less time so."""
        batch, given, positions = trial
        self._attention.plan(batch)
        tokens = given, positions, self._attention, given[:1]
        without_s = self._seconds(lambda: self._decoder.hidden(*tokens))
        self.capture([self.most])
        with_s = self._seconds(lambda: self.hidden(*tokens))
        return with_s < (1 - LEAST_GAIN) * without_s

    def capture(self, sizes: list[int]) -> None:
        """Make the graphs of steps of these sizes, growing."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(sizes):  # the largest first, whose memory the others fit into
            self._graphs[size] = self._captured(size, pool)

    def close(self) -> None:
        """Give the graphs up."""
        self._graphs.clear()

    def hidden(
        self,
        given: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Decoder.hidden`, of tokens that `attention`, the one that this was made for, has planned."""
        tokens = len(given)
        size = min((size for size in self._graphs if size >= tokens), default=0)
        if not size:
            return self._decoder.hidden(given, positions, attention, wanted)
        self._given[:tokens].copy_(given)
        self._positions[:tokens].copy_(positions)
        self._rows[:tokens].copy_(attention.rows)
        self._rows[tokens:size].fill_(self._scratch)  # what is beyond goes into the last page, which is nobody's
        for layer, replay in enumerate(self._graphs[size]):
            replay()
            self._attention.attend_into(layer, self._queries[:tokens], self._attended[:tokens])
        return self._decoder.finish(self._x[:tokens], self._attended[:tokens].flatten(1), wanted)

    def _piece(self, index: int, size: int) -> None:
        places = _Places(self._attention.kv, self._rows[:size])
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
        """What a step takes when it has run before."""
        for _ in range(2):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            step()
            torch.cuda.synchronize()
        return time.perf_counter() - began_s
