"""Steps as CUDA graphs: one for each of a ladder of sizes, replayed with the batch padded to the next."""

import logging
import time
from collections.abc import Callable
from enum import Enum, auto

import numpy as np
import torch

from kernels.attention import AttentionBatch, GraphAttention, SharedPrefixes, token_positions
from kernels.transfer import StaticArrays
from pipeline.rows import ladder, token_ladder
from worker.models.decoder import Decoder

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (graphs captured, graphs in all) after each one."""

_ROWS_APART = 64


class Kind(Enum):
    """What a graph computes, to the likeliest tokens. `PLAIN`: decodes. `ALIKE`: the same, where attention has another
    kind of graph for what sequences begin with alike. `MIXED`: chunks of any length."""

    PLAIN = auto()
    ALIKE = auto()
    MIXED = auto()


def product_sizes(max_running: int, max_tokens: int) -> list[int]:
    """Steps for which it pays to look for the fastest products: where each token costs as much as any other the sizes
    between these are served as well."""
    return sorted({*ladder(max_running), *(size for size in (320, 384, 448) if size <= max_tokens)})


def logit_rows(size: int, most: int) -> list[int]:
    """Numbers of tokens whose logits may be wanted, up to `most`, of a step of `size` tokens with chunks: a graph for
    each. The head is the largest matrix of all, and costs more with every `_ROWS_APART` rows."""
    size = min(size, most)
    return [*range(_ROWS_APART, size, _ROWS_APART), size]


class StepGraphs:
    """Decodes, one token a sequence and logits of each, and steps of some decodes and some chunks of prompts. All
    graphs share their inputs, their memory and the tensors that they leave their results in. A stage of a pipeline that
    is not the last has no logits, but what it passes on: that is its result."""

    def __init__(
        self,
        decoder: Decoder,
        attention: GraphAttention,
        last_tokens: torch.Tensor,
        logits: torch.Tensor,
        max_tokens: int,
        begin: Callable[[], torch.Tensor | None],
    ) -> None:
        """`last_tokens`: int64 `[slots + 1]`, what a token below 0 stands for; the last one is nobody's. `logits`:
        float32 `[max_running, vocab_size]`, or without columns where there are none. Steps that are not only decodes
        have up to `max_tokens` tokens. `begin` is called when all else of a step is on its way to the device, and gives
        what the stage before made of its tokens, if there is one, `[n, hidden_size]`."""
        self._decoder, self._attention, self._last_tokens = decoder, attention, last_tokens
        self._logits, self._begin = logits, begin
        self._likeliest = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        most = max(len(logits), max_tokens)
        config = decoder.config
        self._is_last = config.is_last
        # Of every token, what the stage before made of it, and then what this one makes of that.
        rows = 0 if config.is_first and config.is_last else most
        self._passed = logits.new_zeros(rows, config.hidden_size, dtype=decoder.dtype)
        names = ("wanted", "owners", "token_ids", "positions", "slots")
        self._inputs = StaticArrays(logits.device, dict.fromkeys(names, (torch.int64, most)))
        decodes = np.array(ladder(len(logits)))
        self._sizes = {Kind.PLAIN: decodes, Kind.MIXED: np.array(token_ladder(max_tokens))}
        if attention.has_plain_graphs:
            self._sizes[Kind.ALIKE] = decodes[decodes > 1]
        # By kind, tokens, and of a step with chunks as many of these as may be wanted.
        self._graphs: dict[tuple[Kind, int, int], torch.cuda.CUDAGraph] = {}

    @property
    def shapes(self) -> list[tuple[Kind, int, int]]:
        """Of all graphs, the largest first."""
        shapes = [
            (kind, size, rows)
            for kind, sizes in self._sizes.items()
            for size in sizes.tolist()
            for rows in self._rows(kind, size)
        ]
        return sorted(shapes, key=lambda shape: -shape[1])

    def capture(self, tables: np.ndarray, progress: Progress | None = None) -> None:
        """Make all graphs, the largest first, whose memory the others fit into. `tables` are the runner's."""
        began_s = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        shapes = self.shapes
        for index, (kind, size, rows) in enumerate(shapes):
            chunks = np.zeros(1, dtype=np.int32)
            batch = AttentionBatch(tables, chunks, chunks, chunks + 1)
            self._fill(kind, batch, np.zeros(1, dtype=np.int64), size, None)
            # Whatever is compiled, loaded or allocated at first use is so before the capture.
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
        """Give them up. A communicator of NCCL's that is used in one does not end before it is gone."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def fits(self, batch: AttentionBatch, num_logits: int) -> bool:
        """Whether `run` takes such a step, and it is the best way."""
        fits = batch.num_tokens <= self._sizes[Kind.MIXED][-1] and num_logits <= len(self._logits)
        return fits and self._attention.fits_graph(batch)

    def run(
        self,
        batch: AttentionBatch,
        token_ids: np.ndarray,
        wanted: np.ndarray | None = None,
        owners: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits after the tokens at `wanted` (int64 `[m]`) of the batch, `[m, vocab_size]`, and the likeliest
        tokens, as `kernels.likeliest` has them, which the last tokens of the slots `owners` (int64 `[m]`, -1 for
        nobody's) become. Without those the batch is of chunks of one token, and it is all of them. From a stage that is
        not the last, what is passed on of all tokens, `[n, hidden_size]`, and None. These are parts of tensors that the
        next run writes into. token_ids: int64 `[n]`, below 0 where the device has the token."""
        self._replay(Kind.PLAIN if wanted is None else Kind.MIXED, batch, token_ids, wanted, owners)
        if not self._is_last:
            return self._passed[: len(token_ids)], None
        rows = len(token_ids) if wanted is None else len(wanted)
        return self._logits[:rows], self._likeliest[:rows]

    def _replay(
        self,
        kind: Kind,
        batch: AttentionBatch,
        token_ids: np.ndarray,
        wanted: np.ndarray | None,
        owners: np.ndarray | None,
    ) -> None:
        sizes = self._sizes[kind]
        size = int(sizes[np.searchsorted(sizes, len(token_ids))])
        shared = self._attention.shared_prefixes(batch) if size > 1 else None
        if kind is Kind.PLAIN and shared is not None and Kind.ALIKE in self._sizes:
            kind = Kind.ALIKE
        self._fill(kind, batch, token_ids, size, shared, wanted, owners)
        if (passed := self._begin()) is not None:
            self._passed[: len(passed)].copy_(passed)
            self._passed[len(passed) : size].zero_()
        rows = size if wanted is None else next(rows for rows in self._rows(kind, size) if rows >= len(wanted))
        self._graphs[kind, size, rows].replay()

    def _rows(self, kind: Kind, size: int) -> list[int]:
        """Those of logits in graphs of so many tokens, growing."""
        return logit_rows(size, len(self._logits)) if kind is Kind.MIXED and self._is_last else [size]

    def _fill(
        self,
        kind: Kind,
        batch: AttentionBatch,
        token_ids: np.ndarray,
        size: int,
        shared: SharedPrefixes | None,
        wanted: np.ndarray | None = None,
        owners: np.ndarray | None = None,
    ) -> None:
        if shared is None and not (kind is Kind.PLAIN and self._attention.has_plain_graphs):
            # The graph is one that reads together what is shared, be that nothing.
            shared = SharedPrefixes.none()
        self._attention.plan_graph(batch, size, shared, chunks=kind is Kind.MIXED)
        # All that comes of what is beyond the batch goes into the last page, into rows that nobody reads, and becomes
        # the last token of nobody.
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

    def _forward(self, kind: Kind, size: int, rows: int) -> None:
        # Imported only on a GPU: a machine without one does without Triton.
        from kernels.likeliest import take_likeliest

        inputs = self._inputs
        given, slots = inputs["token_ids"][:size], inputs["slots"][:size]
        positions, passed = inputs["positions"][:size], self._passed[:size]
        is_first = self._decoder.config.is_first
        given = torch.where(given < 0, self._last_tokens[slots], given) if is_first else passed
        if not self._is_last:
            hidden = self._decoder.hidden(given, positions, self._attention)
            if hidden.data_ptr() != passed.data_ptr():
                passed.copy_(hidden)
            return
        wanted = None
        if kind is Kind.MIXED:
            wanted, slots = inputs["wanted"][:rows], inputs["owners"][:rows]
        hidden = self._decoder.hidden(given, positions, self._attention, wanted)
        logits = self._decoder.logits(hidden, self._logits[:rows])
        take_likeliest(logits, self._likeliest[:rows], slots, self._last_tokens)
