"""A step without a CUDA graph of the whole step. Loading runs one to find out how much memory the largest needs, and
`ModelRunner` runs those that no graph fits."""

from collections.abc import Callable

import numpy as np
import torch

from kernels.attention.interface import AttentionBatch, token_positions
from kernels.host_device import all_to_device
from worker.executor.adapter_store import AdapterStore
from worker.executor.executor import ForwardOutput
from worker.executor.kv_pools import Pools
from worker.executor.piecewise_graphs import PiecewiseGraphs
from worker.executor.step_timer import StepTimer
from worker.models.decoder import Decoder
from worker.parallel.pipeline_stage import PipelineStage


class ForwardPass:
    """The steps of one rank's part of a model.

    | attribute | meaning |
    | --- | --- |
    | `decoder`, `stage`, `device` | the rank's part of the model, its place among all ranks, its device |
    | `last_tokens` | int64 `[slots + 1]`, the newest token of each slot; the last entry is for padding of a batch to a graph's size |
    | `step_timer` | the times of the steps |
    | `has_pending_tokens` | whether the step that is run has tokens that only the device knows |
    | `adapters` | the slots of adapters; None for a replica without |
    | `pieces`, `adapted_pieces` | piecewise CUDA graphs of steps without and with adapters, once they are captured |
    """  # noqa: E501

    def __init__(self, decoder: Decoder, stage: PipelineStage, device: torch.device, slots: int) -> None:
        self.decoder, self.stage, self.device = decoder, stage, device
        self.last_tokens = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.step_timer = StepTimer.for_device(device)
        self.has_pending_tokens = False
        self.adapters: AdapterStore | None = None
        self.pieces: PiecewiseGraphs | None = None
        self.adapted_pieces: PiecewiseGraphs | None = None

    def begin(self) -> torch.Tensor | None:
        """Waits for the input from other stages, and marks the begin of the step. Called when all other input of the
        step is on its way to the device. Returns the previous stage's hidden states, None on the first stage."""
        received = None
        if self.stage.before is not None:
            self.step_timer.ready()
            received = self.stage.receive(self.decoder.config.received_size)
        elif self.has_pending_tokens:
            if self.stage.count > 1:
                self.step_timer.ready()
            self.stage.receive_tokens(self.last_tokens)
        self.step_timer.begin()
        return received

    def run(
        self,
        batch: AttentionBatch,
        token_ids: np.ndarray,
        logit_indices: np.ndarray,
        pools: Pools,
        copies: np.ndarray | None = None,
        hidden_indices: np.ndarray | None = None,
        adapters: np.ndarray | None = None,
        begin: Callable[[], torch.Tensor | None] | None = None,
    ) -> ForwardOutput:
        """Runs a step over the cache in `pools`.

        Returns the logits of the tokens at `logit_indices`, int64 indices into the batch's tokens, and the hidden
        states of those at `hidden_indices`. A stage before the last one returns the hidden states of all tokens in
        place of logits. `copies`: as `StateBatch.copies`. `adapters`: integers `[n]`, the slot of each token's adapter,
        -1 for none; None: no token has one. `begin`: in place of this object's.
        """
        pools.plan(batch, copies)
        num_logits = len(logit_indices)
        rows = logit_indices if hidden_indices is None else np.concatenate((logit_indices, hidden_indices))
        arrays = [token_ids, token_positions(batch), rows]
        if self.has_pending_tokens:
            arrays.append(np.repeat(batch.rows, batch.lengths).astype(np.int64))
        inputs, positions, indices, *slots = all_to_device(arrays, self.device)
        if (received := (begin or self.begin)()) is not None:
            inputs = received
        elif self.has_pending_tokens:
            inputs = torch.where(inputs < 0, self.last_tokens[slots[0]], inputs)
        attention, states = pools.attention, pools.states
        pieces = self.pieces if adapters is None else self.adapted_pieces
        if pieces is not None:
            out = pieces.forward(inputs, positions, attention, indices, adapters)
        else:
            store = self.adapters
            adapted = None if adapters is None or store is None else store.adapted.filled(adapters)
            if not self.stage.is_last:
                return ForwardOutput(self.decoder.forward(inputs, positions, attention, states=states, adapted=adapted))
            out = self.decoder.forward(inputs, positions, attention, indices, states, adapted)
        if hidden_indices is None:
            return ForwardOutput(self.decoder.logits(out))
        hidden = self.decoder.normalised(out[num_logits:])
        return ForwardOutput(self.decoder.logits(out[:num_logits]), hidden=hidden)
