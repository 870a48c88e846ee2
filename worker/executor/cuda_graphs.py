"""Steps as CUDA graphs: one graph for each of several sizes. A batch is padded to the next size."""

import logging
import time
from collections.abc import Callable
from enum import Enum, auto

import numpy as np
import torch

from kernels.attention.interface import AttentionBatch, GraphAttention, SharedPrefixes, token_positions
from kernels.host_device import GraphInputs
from kernels.recurrent.states import NO_COPIES, RecurrentStates, StateBatch
from pipeline.padding import decode_sizes, token_sizes
from worker.models.adapted_layers import AdaptedLayers
from worker.models.decoder import Decoder

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (graphs captured so far, number of graphs) after each capture."""

_LOGITS_STRIDE = 64  # logits between two graphs of the same size
_NONE = np.empty(0, dtype=np.int64)


class GraphKind(Enum):
    """The steps that a graph can run. All graphs of the last stage end with the argmax of the logits.

    - `DECODE`: one token per sequence, with logits of each.
    - `DECODE_SHARED_PREFIX`: the same, with attention that reads a shared prefix once. Exists only if the attention
      backend has plain graphs as well (`has_plain_graphs`); otherwise `DECODE` reads shared prefixes once.
    - `MIXED`: chunks of any length, with logits of some tokens. Models with recurrent states have none.
    """

    DECODE = auto()
    DECODE_SHARED_PREFIX = auto()
    MIXED = auto()


def product_sizes(max_running: int, max_tokens: int) -> list[int]:
    """Step sizes, in tokens, for which the matrix products are autotuned: those of the decode graphs, and a few larger
    ones. Where time grows evenly with tokens, these results serve the sizes in between too."""
    return sorted({*decode_sizes(max_running), *(size for size in (320, 384, 448) if size <= max_tokens)})


def logit_counts(size: int, max_logits: int) -> list[int]:
    """Numbers of logits, up to `max_logits`, for which a mixed step of `size` tokens gets a graph each, ascending. The
    LM head is the largest matrix of all, and its cost grows with every `_LOGITS_STRIDE` logits."""
    size = min(size, max_logits)
    return [*range(_LOGITS_STRIDE, size, _LOGITS_STRIDE), size]


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
        states: RecurrentStates | None = None,
        adapted: AdaptedLayers | None = None,
    ) -> None:
        """Allocate the shared tensors. `capture` makes the graphs.

        - `last_tokens`: int64 `[slots + 1]`, the newest token of each slot, read for token ids below 0. The last entry
          belongs to no slot.
        - `logits`: float32 `[max_running, vocab_size]`, the output; `[max_running, 0]` on a stage before the last one.
        - `max_tokens`: most tokens of a mixed step.
        - `begin`: called when all other input of a step is on its way to the device. Returns the hidden states from the
          previous stage, `[n, hidden_size]`, or None on the first stage.
        - `states`: the recurrent states, on the device; those of padding are in the row after all slots.
        - `adapted`: the layers with adapters. Steps that have any run with graphs of their own.
        """
        self._states, self._adapted = states, adapted
        self._decoder, self._attention, self._last_tokens = decoder, attention, last_tokens
        self._logits, self._begin = logits, begin
        self._greedy_tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        max_size = max(len(logits), max_tokens)
        config = decoder.config
        self._is_last = config.is_last
        # Hidden states of every token: first the previous stage's output, then this stage's own. For one stage, none.
        num_hidden = 0 if config.is_first and config.is_last else max_size
        columns = max(config.received_size, config.sent_size)
        self._hidden = logits.new_zeros(num_hidden, columns, dtype=decoder.dtype)
        names = ["logit_indices", "logit_slots", "token_ids", "positions", "slots"]
        if states is not None:
            names.insert(0, "copies")
        self._inputs = GraphInputs(logits.device, dict.fromkeys(names, (torch.int64, max_size)))
        decodes = np.array(decode_sizes(len(logits)))
        self._numbers = torch.arange(max_size, device=logits.device)
        mixed = token_sizes(max_tokens) if states is None else []
        self._sizes = {GraphKind.DECODE: decodes, GraphKind.MIXED: np.array(mixed, dtype=np.int64)}
        if attention.has_plain_graphs:
            self._sizes[GraphKind.DECODE_SHARED_PREFIX] = decodes[decodes > 1]
        # By kind, tokens, number of logits and adapters, see `shapes`.
        self._graphs: dict[tuple[GraphKind, int, int, bool], torch.cuda.CUDAGraph] = {}

    @property
    def shapes(self) -> list[tuple[GraphKind, int, int, bool]]:
        """Kind, tokens and number of logits of every graph, and whether it has adapters; the largest first. There are
        fewer logits than tokens only in `MIXED` graphs of the last stage. With adapters there are no graphs for shared
        prefixes: sequences of one adapter are few."""
        shapes = [
            (kind, size, num_logits, has_adapters)
            for kind, sizes in self._sizes.items()
            for size in sizes.tolist()
            for num_logits in self._logit_counts(kind, size)
            for has_adapters in (False, True)
            if not has_adapters or (self._adapted is not None and kind is not GraphKind.DECODE_SHARED_PREFIX)
        ]
        return sorted(shapes, key=lambda shape: -shape[1])

    def capture(self, tables: np.ndarray, progress: Progress | None = None) -> None:
        """Capture all graphs, the largest first, so that the others fit into its memory. `tables`: the runner's page
        tables, int32 `[slots, pages]`."""
        began_s = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        shapes = self.shapes
        for index, (kind, size, num_logits, has_adapters) in enumerate(shapes):
            chunks = np.zeros(1, dtype=np.int32)
            batch = AttentionBatch(tables, chunks, chunks, chunks + 1)
            self._fill(kind, batch, np.zeros(1, dtype=np.int64), size, None)
            if has_adapters and self._adapted is not None:
                self._adapted.fill(chunks, size)
            # A run before the capture compiles, loads and allocates what the first use needs.
            self._forward(kind, size, num_logits, has_adapters)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._forward(kind, size, num_logits, has_adapters)
            self._graphs[kind, size, num_logits, has_adapters] = graph
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
        """Whether a graph exists for a mixed step with `num_logits` logits, and is the fastest way to run it."""
        largest = max(self._sizes[GraphKind.MIXED], default=0)
        fits = batch.num_tokens <= largest and num_logits <= len(self._logits)
        return fits and self._attention.fits_graph(batch)

    def run(
        self,
        batch: AttentionBatch,
        token_ids: np.ndarray,
        logit_indices: np.ndarray | None = None,
        logit_slots: np.ndarray | None = None,
        copies: np.ndarray = NO_COPIES,
        adapters: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a step, and write the argmax of its logits to `last_tokens` as well.

        - `token_ids`: integers `[n]`; below 0 for a token that only the device has.
        - `logit_indices`: indices of the tokens whose logits are returned, int64 `[m]`. None for a step of decodes:
          logits of all tokens.
        - `logit_slots`: int64 `[m]`, the slots whose newest token the argmax of each of these logits becomes; -1 for
          none.
        - `copies`: of recurrent states, as `kernels.recurrent.states.StateBatch` has them.
        - `adapters`: integers `[n]`, the slot of each token's adapter, -1 for none. None: no token has one.

        Returns logits, `[m, vocab_size]`, and their argmax, int64 `[m]` (see `kernels.ops.argmax`). On a stage before
        the last one, returns the hidden states of all tokens, `[n, hidden_size]`, and None. The next run overwrites the
        returned tensors.
        """
        kind = GraphKind.DECODE if logit_indices is None else GraphKind.MIXED
        self._replay(kind, batch, token_ids, logit_indices, logit_slots, copies, adapters)
        if not self._is_last:
            return self._hidden[: len(token_ids), : self._decoder.config.sent_size], None
        num_logits = len(token_ids) if logit_indices is None else len(logit_indices)
        return self._logits[:num_logits], self._greedy_tokens[:num_logits]

    def _replay(
        self,
        kind: GraphKind,
        batch: AttentionBatch,
        token_ids: np.ndarray,
        logit_indices: np.ndarray | None,
        logit_slots: np.ndarray | None,
        copies: np.ndarray,
        adapters: np.ndarray | None,
    ) -> None:
        sizes = self._sizes[kind]
        size = int(sizes[np.searchsorted(sizes, len(token_ids))])
        shared = self._attention.shared_prefixes(batch) if size > 1 and adapters is None else None
        if kind is GraphKind.DECODE and shared is not None and GraphKind.DECODE_SHARED_PREFIX in self._sizes:
            kind = GraphKind.DECODE_SHARED_PREFIX
        self._fill(kind, batch, token_ids, size, shared, logit_indices, logit_slots, copies)
        if adapters is not None and self._adapted is not None:
            self._adapted.fill(adapters, size)
        if (received := self._begin()) is not None:
            self._hidden[: len(received), : received.shape[1]].copy_(received)
            self._hidden[len(received) : size].zero_()
        least = size if logit_indices is None else len(logit_indices)
        num_logits = next(count for count in self._logit_counts(kind, size) if count >= least)
        self._graphs[kind, size, num_logits, adapters is not None].replay()

    def _logit_counts(self, kind: GraphKind, size: int) -> list[int]:
        """Numbers of logits of the graphs of `size` tokens, ascending."""
        return logit_counts(size, len(self._logits)) if kind is GraphKind.MIXED and self._is_last else [size]

    def _fill(
        self,
        kind: GraphKind,
        batch: AttentionBatch,
        token_ids: np.ndarray,
        size: int,
        shared: SharedPrefixes | None,
        logit_indices: np.ndarray | None = None,
        logit_slots: np.ndarray | None = None,
        copies: np.ndarray = NO_COPIES,
    ) -> None:
        if shared is None and not (kind is GraphKind.DECODE and self._attention.has_plain_graphs):
            # This kind of graph always reads shared prefixes once, even if there are none.
            shared = SharedPrefixes.none()
        self._attention.plan_graph(batch, size, shared, chunks=kind is GraphKind.MIXED)
        # Padding writes its keys and values to the last page and its token to the last entry of `last_tokens`, which no
        # sequence uses. Its logits are not read.
        padding_slot = len(self._last_tokens) - 1
        slots = np.full(size, padding_slot)
        if kind is GraphKind.MIXED:
            slots[: len(token_ids)] = np.repeat(batch.rows, batch.lengths)
            positions, greedy_slots = token_positions(batch), np.full(size, padding_slot)
            if logit_slots is not None:
                greedy_slots[: len(logit_slots)] = np.where(logit_slots < 0, padding_slot, logit_slots)
        else:  # of one token each; its graph reads no `logit_slots`
            slots[: len(token_ids)] = batch.rows
            positions, greedy_slots = batch.starts, _NONE
        self._inputs.fill(
            {
                "logit_indices": _NONE if logit_indices is None else logit_indices,
                "logit_slots": greedy_slots,
                "copies": self._begin_states(batch, size, copies),
                "token_ids": token_ids,
                "positions": positions,
                "slots": slots,
            }
        )

    def _begin_states(self, batch: AttentionBatch, size: int, copies: np.ndarray) -> np.ndarray:
        """Sets the states with which sequences begin. Returns the row that gets a copy of each token's, -1 for none."""
        if self._states is None:
            return _NONE
        from kernels.recurrent.triton_states import copies_of_singles

        own = StateBatch(batch.rows, batch.starts, batch.lengths, copies)
        self._states.begin(own)
        return np.append(copies_of_singles(own), np.full(size - len(batch.rows), -1))

    def _plan_states(self, slots: torch.Tensor) -> None:
        """Plans a step of decodes in these slots, with the copies that the inputs say."""
        from kernels.recurrent.triton_states import TritonStates

        if self._states is not None:
            assert isinstance(self._states, TritonStates), "graphs are for states on a GPU"
            size = len(slots)
            self._states.plan_decodes(self._numbers[:size], slots, self._inputs["copies"][:size])

    def _forward(self, kind: GraphKind, size: int, num_logits: int, has_adapters: bool) -> None:
        # Imported only on a GPU: a machine without one needs no Triton.
        from kernels.ops.argmax import greedy_argmax_into

        buffers = self._inputs
        token_ids, slots = buffers["token_ids"][:size], buffers["slots"][:size]
        config = self._decoder.config
        positions, hidden = buffers["positions"][:size], self._hidden[:size, : config.received_size]
        inputs = torch.where(token_ids < 0, self._last_tokens[slots], token_ids) if config.is_first else hidden
        self._plan_states(slots)
        adapted = self._adapted.layers if has_adapters and self._adapted is not None else None
        if not self._is_last:
            out = self._decoder.forward(inputs, positions, self._attention, states=self._states, adapted=adapted)
            if out.data_ptr() != hidden.data_ptr():
                self._hidden[:size, : config.sent_size].copy_(out)
            return
        logit_indices = None
        if kind is GraphKind.MIXED:
            logit_indices, slots = buffers["logit_indices"][:num_logits], buffers["logit_slots"][:num_logits]
        out = self._decoder.forward(inputs, positions, self._attention, logit_indices, self._states, adapted)
        logits = self._decoder.logits(out, self._logits[:num_logits])
        greedy_argmax_into(logits, self._greedy_tokens[:num_logits], slots, self._last_tokens)
