"""Decoding as CUDA graphs: one for each of a ladder of batch sizes, replayed with the batch padded to the next."""

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from kernels.attention import AttentionBatch, GraphAttention, SharedPrefixes
from kernels.transfer import StaticArrays
from worker.models.decoder import Decoder

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (graphs captured, graphs in all) after each one."""


def ladder(most: int) -> list[int]:
    """Batch sizes up to `most`, closer together where a step is short and padding costs more of it."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32)]
    return [size for size in sizes if size < most] + [most]


class DecodeGraphs:
    """Steps of one token a sequence, from the tokens to the logits. All graphs share their inputs, their memory and
    the tensor that they leave the logits in. Where attention has two kinds of graphs there are two of each size but 1,
    one for sequences that begin alike."""

    def __init__(
        self, decoder: Decoder, attention: GraphAttention, last_tokens: torch.Tensor, logits: torch.Tensor
    ) -> None:
        """`last_tokens`: int64 `[slots]`, what a token below 0 stands for. `logits`: float32 `[most, vocab_size]`."""
        self._decoder, self._attention, self._last_tokens = decoder, attention, last_tokens
        self._logits = logits
        most = len(logits)
        self._inputs = StaticArrays(
            logits.device,
            {"token_ids": (torch.int64, most), "positions": (torch.int64, most), "slots": (torch.int64, most)},
        )
        self._sizes = np.array(ladder(most))
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def capture(self, tables: np.ndarray, progress: Progress | None = None) -> None:
        """Make all graphs, the largest first, whose memory the others fit into. `tables` are the runner's."""
        began_s = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        kinds = [(size, of_ranges) for size in self._sizes[::-1].tolist() for of_ranges in self._kinds(size)]
        for index, (size, of_ranges) in enumerate(kinds):
            chunks = np.zeros(1, dtype=np.int32)
            batch = AttentionBatch(tables, chunks, chunks, chunks + 1)
            self._fill(batch, np.zeros(1, dtype=np.int64), size, SharedPrefixes.none() if of_ranges else None)
            # Whatever is compiled, loaded or allocated at first use is so before the capture.
            self._forward(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._forward(size)
            self._graphs[size, of_ranges] = graph
            if progress is not None:
                progress(index + 1, len(kinds))
        torch.cuda.synchronize()
        logger.info("Captured %d CUDA graphs in %.1f s", len(kinds), time.monotonic() - began_s)

    def can_run(self, num_sequences: int) -> bool:
        return num_sequences <= len(self._logits)

    def run(self, batch: AttentionBatch, token_ids: np.ndarray) -> torch.Tensor:
        """The logits of the batch, `[n, vocab_size]`: a part of the tensor that the next run writes into. token_ids:
        int64 `[n]`, below 0 where the device has the token."""
        size = int(self._sizes[np.searchsorted(self._sizes, len(token_ids))])
        shared = self._attention.shared_prefixes(batch) if size > 1 else None
        if shared is None and not self._attention.has_plain_graphs:
            shared = SharedPrefixes.none()
        self._fill(batch, token_ids, size, shared)
        self._graphs[size, shared is not None].replay()
        return self._logits[: len(token_ids)]

    def _kinds(self, size: int) -> tuple[bool, ...]:
        """Whether graphs of this size are of ranges."""
        if not self._attention.has_plain_graphs:
            return (True,)
        return (False, True) if size > 1 else (False,)

    def _fill(self, batch: AttentionBatch, token_ids: np.ndarray, size: int, shared: SharedPrefixes | None) -> None:
        self._attention.plan_graph(batch, size, shared)
        # Beyond the batch stand zeros, or slots of earlier steps: all that comes of it goes into the last page.
        self._inputs.fill({"token_ids": token_ids, "positions": batch.starts, "slots": batch.rows})

    def _forward(self, size: int) -> None:
        inputs = self._inputs
        given, slots = inputs["token_ids"][:size], inputs["slots"][:size]
        token_ids = torch.where(given < 0, self._last_tokens[slots], given)
        hidden = self._decoder.hidden(token_ids, inputs["positions"][:size], self._attention)
        self._decoder.logits(hidden, self._logits[:size])
