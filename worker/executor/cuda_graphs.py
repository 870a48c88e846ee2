"""Steps as CUDA graphs: one graph for each of several sizes. A batch is padded to the next size."""

import logging
import time
from collections.abc import Callable
from enum import Enum, auto

import numpy as np
import torch

from kernels.attention.interface import AttentionBatch, GraphAttention, SharedPrefixes, token_positions
from kernels.host_device import GraphInputs
from pipeline.padding import decode_sizes, token_sizes
from worker.models.decoder import Decoder

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (graphs captured so far, number of graphs) after each capture."""

_ROWS_APART = 64  # logits rows between two graphs of the same size


class GraphKind(Enum):
    """The steps that a graph can run. All graphs of the last stage end with the argmax of the logits.

    - `DECODE`: one token per sequence, with logits of each.
    - `DECODE_SHARED_PREFIX`: the same, with attention that reads a shared prefix once. Exists only if the attention
      backend has plain graphs as well (`has_plain_graphs`); otherwise `DECODE` reads shared prefixes once.
    - `MIXED`: chunks of any length, with logits of some tokens.
    """

    DECODE = auto()
    DECODE_SHARED_PREFIX = auto()
    MIXED = auto()


def product_sizes(max_running: int, max_tokens: int) -> list[int]:
    """Step sizes, in tokens, for which the matrix products are autotuned: those of the decode graphs, and a few larger
    ones. Where time grows evenly with tokens, these results serve the sizes in between too."""
    return sorted({*decode_sizes(max_running), *(size for size in (320, 384, 448) if size <= max_tokens)})


def logit_rows(size: int, most: int) -> list[int]:
    """Numbers of logits rows, up to `most`, for which a mixed step of `size` tokens gets a graph each, ascending. The
    LM head is the largest matrix of all, and its cost grows with every `_ROWS_APART` rows."""
    size = min(size, most)
    return [*range(_ROWS_APART, size, _ROWS_APART), size]


class CudaGraphRunner:
    """Captures the CUDA graphs of one rank and replays them. `GraphKind` lists the steps that they can run.

    All graphs share their input tensors, their memory pool and their output tensors. The output is logits and their
    argmax; with pipeline parallelism, a stage before the last one has hidden states for the next stage instead.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: GraphAttention,
        last_tokens: torch.Tensor,
        logits: torch.Tensor,
        max_tokens: int,
        begin: Callable[[], torch.Tensor | None],
    ) -> None:
        """Allocate the shared tensors. `capture` makes the graphs.

        - `last_tokens`: int64 `[slots + 1]`, the newest token of each slot, read for token ids below 0. The last entry
          belongs to no slot.
        - `logits`: float32 `[max_running, vocab_size]`, the output; `[max_running, 0]` on a stage before the last one.
        - `max_tokens`: most tokens of a mixed step.
        - `begin`: called when all other input of a step is on its way to the device. Returns the hidden states from the
          previous stage, `[n, hidden_size]`, or None on the first stage.
        """
        self._decoder, self._attention, self._last_tokens = decoder, attention, last_tokens
        self._logits, self._begin = logits, begin
        self._likeliest = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        most = max(len(logits), max_tokens)
        config = decoder.config
        self._is_last = config.is_last
        # Hidden states of every token: first the previous stage's output, then this stage's own.
        rows = 0 if config.is_first and config.is_last else most
        self._passed = logits.new_zeros(rows, config.hidden_size, dtype=decoder.dtype)
        names = ("wanted", "owners", "token_ids", "positions", "slots")
        self._inputs = GraphInputs(logits.device, dict.fromkeys(names, (torch.int64, most)))
        decodes = np.array(decode_sizes(len(logits)))
        self._sizes = {GraphKind.DECODE: decodes, GraphKind.MIXED: np.array(token_sizes(max_tokens))}
        if attention.has_plain_graphs:
            self._sizes[GraphKind.DECODE_SHARED_PREFIX] = decodes[decodes > 1]
        # By kind, tokens and rows of logits, see `shapes`.
        self._graphs: dict[tuple[GraphKind, int, int], torch.cuda.CUDAGraph] = {}

    @property
    def shapes(self) -> list[tuple[GraphKind, int, int]]:
        """Kind, tokens and rows of logits of every graph, the largest first. Rows are fewer than tokens only for
        `MIXED` graphs of the last stage."""
        shapes = [
            (kind, size, rows)
            for kind, sizes in self._sizes.items()
            for size in sizes.tolist()
            for rows in self._rows(kind, size)
        ]
        return sorted(shapes, key=lambda shape: -shape[1])

    def capture(self, tables: np.ndarray, progress: Progress | None = None) -> None:
        """Capture all graphs, the largest first, so that the others fit into its memory. `tables`: the runner's page
        tables, int32 `[slots, pages]`."""
        began_s = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        shapes = self.shapes
        for index, (kind, size, rows) in enumerate(shapes):
            chunks = np.zeros(1, dtype=np.int32)
            batch = AttentionBatch(tables, chunks, chunks, chunks + 1)
            self._fill(kind, batch, np.zeros(1, dtype=np.int64), size, None)
            # A run before the capture compiles, loads and allocates what the first use needs.
            self._forward(kind, size, rows)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._forward(kind, size, rows)
            self._graphs[kind, size, rows] = graph
            if progress is not None:
                progress(index + 1, len(shapes))
        torch.cuda.synchronize()
        logger.info("Captured %d CUDA graphs in %.1f s", len(shapes), time.monotonic() - began_s)

    def close(self) -> None:
        """Destroy the graphs. An NCCL communicator that a graph uses cannot end before the graph is destroyed."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def fits(self, batch: AttentionBatch, num_logits: int) -> bool:
        """Whether a graph exists for a mixed step with `num_logits` rows of logits, and is the fastest way to run
        it."""
        fits = batch.num_tokens <= self._sizes[GraphKind.MIXED][-1] and num_logits <= len(self._logits)
        return fits and self._attention.fits_graph(batch)

    def run(
        self,
        batch: AttentionBatch,
        token_ids: np.ndarray,
        wanted: np.ndarray | None = None,
        owners: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a step, and write the argmax of its logits to `last_tokens` as well.

        - `token_ids`: integers `[n]`; below 0 for a token that only the device has.
        - `wanted`: indices of the tokens whose logits are returned, int64 `[m]`. None for a step of decodes: logits of
          all tokens.
        - `owners`: int64 `[m]`, the slots whose last tokens the argmax of each row becomes; -1 for none.

        Returns logits, `[m, vocab_size]`, and their argmax, int64 `[m]` (see `kernels.ops.argmax`). On a stage before
        the last one, returns the hidden states of all tokens, `[n, hidden_size]`, and None. The next run overwrites the
        returned tensors.
        """
        self._replay(GraphKind.DECODE if wanted is None else GraphKind.MIXED, batch, token_ids, wanted, owners)
        if not self._is_last:
            return self._passed[: len(token_ids)], None
        rows = len(token_ids) if wanted is None else len(wanted)
        return self._logits[:rows], self._likeliest[:rows]

    def _replay(
        self,
        kind: GraphKind,
        batch: AttentionBatch,
        token_ids: np.ndarray,
        wanted: np.ndarray | None,
        owners: np.ndarray | None,
    ) -> None:
        sizes = self._sizes[kind]
        size = int(sizes[np.searchsorted(sizes, len(token_ids))])
        shared = self._attention.shared_prefixes(batch) if size > 1 else None
        if kind is GraphKind.DECODE and shared is not None and GraphKind.DECODE_SHARED_PREFIX in self._sizes:
            kind = GraphKind.DECODE_SHARED_PREFIX
        self._fill(kind, batch, token_ids, size, shared, wanted, owners)
        if (passed := self._begin()) is not None:
            self._passed[: len(passed)].copy_(passed)
            self._passed[len(passed) : size].zero_()
        rows = size if wanted is None else next(rows for rows in self._rows(kind, size) if rows >= len(wanted))
        self._graphs[kind, size, rows].replay()

    def _rows(self, kind: GraphKind, size: int) -> list[int]:
        """Numbers of logits rows of the graphs of `size` tokens, ascending."""
        return logit_rows(size, len(self._logits)) if kind is GraphKind.MIXED and self._is_last else [size]

    def _fill(
        self,
        kind: GraphKind,
        batch: AttentionBatch,
        token_ids: np.ndarray,
        size: int,
        shared: SharedPrefixes | None,
        wanted: np.ndarray | None = None,
        owners: np.ndarray | None = None,
    ) -> None:
        if shared is None and not (kind is GraphKind.DECODE and self._attention.has_plain_graphs):
            # This kind of graph always reads shared prefixes once, even if there are none.
            shared = SharedPrefixes.none()
        self._attention.plan_graph(batch, size, shared, chunks=kind is GraphKind.MIXED)
        # Padding writes its keys and values to the last page and its token to the last entry of `last_tokens`, which no
        # sequence uses. Its rows of logits are not read.
        nobody = len(self._last_tokens) - 1
        slots, takers = np.full(size, nobody), np.full(size, nobody)
        slots[: len(token_ids)] = np.repeat(batch.rows, batch.lengths)
        if owners is not None:
            takers[: len(owners)] = np.where(owners < 0, nobody, owners)
        self._inputs.fill(
            {
                "wanted": np.zeros(0, dtype=np.int64) if wanted is None else wanted,
                "owners": takers,
                "token_ids": token_ids,
                "positions": token_positions(batch),
                "slots": slots,
            }
        )

    def _forward(self, kind: GraphKind, size: int, rows: int) -> None:
        # Imported only on a GPU: a machine without one needs no Triton.
        from kernels.ops.argmax import greedy_argmax_into

        inputs = self._inputs
        given, slots = inputs["token_ids"][:size], inputs["slots"][:size]
        positions, passed = inputs["positions"][:size], self._passed[:size]
        is_first = self._decoder.config.is_first
        given = torch.where(given < 0, self._last_tokens[slots], given) if is_first else passed
        if not self._is_last:
            hidden = self._decoder.forward(given, positions, self._attention)
            if hidden.data_ptr() != passed.data_ptr():
                passed.copy_(hidden)
            return
        wanted = None
        if kind is GraphKind.MIXED:
            wanted, slots = inputs["wanted"][:rows], inputs["owners"][:rows]
        hidden = self._decoder.forward(given, positions, self._attention, wanted)
        logits = self._decoder.logits(hidden, self._logits[:rows])
        greedy_argmax_into(logits, self._likeliest[:rows], slots, self._last_tokens)
