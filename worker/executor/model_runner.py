"""The forward pass of one rank: page tables, the rank's part of the model, logits. Sampling and scheduling are
elsewhere."""

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from kernels.attention.interface import AttentionBatch
from kernels.recurrent.states import NO_COPIES as NO_STATE_COPIES
from worker.config import WorkerConfig
from worker.executor.adapter_store import AdapterStore
from worker.executor.executor import Executor, ForwardOutput
from worker.executor.expert_balance import ExpertBalance
from worker.executor.loading import LoadedModel, load_model
from worker.executor.memory_budget import num_slot_rows
from worker.executor.weight_loader import Progress
from worker.kv_layout import DEVICE
from worker.parallel.pipeline_stage import PipelineStage
from worker.progress import NewestSteps
from worker.step import Copy, Plan, StepTime


class ModelRunner(Executor):
    """Runs plans on one rank: the whole executor of a replica with one rank. With several ranks, each rank has one.

    Besides the KV pages, its only state is one page table per slot, updated as `worker.step` says. `Executor` lists the
    attributes.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._forward_pass = forward_pass = loaded.forward_pass
        self.stage, self.device, self.decoder = forward_pass.stage, forward_pass.device, forward_pass.decoder
        self.last_tokens, self._step_timer = forward_pass.last_tokens, forward_pass.step_timer
        self.model_config, self.vocab_size, self.dtype = loaded.config, loaded.config.vocab_size, loaded.dtype
        self.eos_token_ids, self.attention_choice = loaded.eos_token_ids, loaded.attention_choice
        self.layout, self.context_length = loaded.layout, loaded.context_length
        self._tables, self._pools, self._graphs = loaded.tables, loaded.pools, loaded.graphs
        self._first_checkpoint = num_slot_rows(loaded.max_running)
        self._begun = 0  # the newest step
        if self.stage.samples and self.decoder.expert_load is not None:
            self.expert_balance = ExpertBalance(self.decoder.expert_load, self.stage.communicator.size)

    @classmethod
    def load(
        cls,
        model: Path,
        config: WorkerConfig,
        progress: Progress | None = None,
        stage: PipelineStage | None = None,
        gemm_folder: Path | None = None,
    ) -> "ModelRunner":
        """The rank of a model's folder: see `load_model`."""
        return cls(load_model(model, config, progress, stage, gemm_folder))

    def announce(self, plan: Plan) -> None:
        """See `Executor.announce`. Plans are announced in order, each before its `forward`."""
        if self.stage.before is not None:
            self.stage.expect(plan.num_tokens, self.model_config.received_size, self.dtype)
        elif not plan.has_pending_tokens:
            self._step_timer.came(plan.step)
        if self.stage.samples and self.stage.count > 1 and plan.has_pending_tokens:
            self.stage.send_tokens()

    @torch.inference_mode()
    def forward(self, plan: Plan) -> ForwardOutput:
        """See `Executor.forward`. Computes this rank's part of the plan. A CUDA graph writes its greedy tokens to
        `last_tokens` too. A stage before the last one sends its output to the next stage, and returns no
        logits."""
        self._begun = plan.step
        self._tables.update(plan)
        self._forward_pass.has_pending_tokens = self.model_config.is_first and plan.has_pending_tokens
        if self.expert_balance is not None:
            self.expert_balance.begin_step()
        out = self._run(plan)
        if self.expert_balance is not None:
            self.expert_balance.end_step()
        if not self.stage.samples:
            self._step_timer.end(plan.step)
        if self.stage.is_last:
            return out
        self.stage.send(out.logits)
        return ForwardOutput(out.logits.new_empty((0, self.vocab_size), dtype=torch.float32))

    def prepare_adapter(self, number: int, folder: Path) -> Future[None]:
        """See `Executor.prepare_adapter`. Reads this rank's part."""
        return self._adapters.prepare(number, folder)

    def forget_adapter(self, number: int) -> None:
        """See `Executor.forget_adapter`."""
        self._adapters.forget(number)

    def finish_step(self, plan: Plan) -> None:
        """See `Executor.finish_step`. Called only on the rank that samples; for other ranks a step ends with
        `forward`."""
        self._step_timer.end(plan.step)
        self.stage.stash_tokens(self.last_tokens)

    def take_step_times(self) -> list[StepTime]:
        """See `Executor.take_step_times`. Returns the times of this stage alone. `Span.received_s` is when the plan
        arrived, if the plan is all that the step needs on the first stage. Otherwise it is when the stage was ready to
        receive its input."""
        return [StepTime(self.stage.index, step, span) for step, span in self._step_timer.take_spans()]

    @property
    def newest_steps(self) -> NewestSteps:
        """See `Executor.newest_steps`."""
        return NewestSteps(self._begun, self._step_timer.ended)

    @property
    def is_running(self) -> bool:
        """Whether `take_step_times` has something to return, now or later."""
        return self._step_timer.is_running

    def close(self) -> None:
        """Free the CUDA graphs and leave the other ranks. Nothing can run afterwards."""
        if self._graphs is not None:
            self._graphs.close()
        for pieces in (self._forward_pass.pieces, self._forward_pass.adapted_pieces):
            if pieces is not None:
                pieces.close()
        if self._forward_pass.adapters is not None:
            self._forward_pass.adapters.close()
        self.stage.close()

    def _run(self, plan: Plan) -> ForwardOutput:
        """Runs a plan with the CUDA graph that fits it, or without one. Returns its logits; a stage before the last one
        returns the hidden states for the next stage instead."""
        adapters = self._place_adapters(plan)
        if self._graphs is not None and plan.num_tokens == len(plan) and plan.num_logits.all():
            batch = self._batch(plan.slots, plan.starts, plan.lengths)
            found = self._graphs.run(batch, plan.token_ids, copies=self._copies(plan), adapters=adapters)
            return ForwardOutput(*found)
        # Attention takes chunks of one token first. Logits keep the plan's order.
        order = np.argsort(plan.lengths > 1, kind="stable")
        batch = self._batch(plan.slots[order], plan.starts[order], plan.lengths[order])
        firsts = np.cumsum(plan.lengths) - plan.lengths
        token_ids = plan.token_ids[np.repeat(firsts[order] - batch.firsts, batch.lengths) + np.arange(plan.num_tokens)]
        ends = np.empty(len(plan), dtype=np.int64)
        ends[order] = np.cumsum(batch.lengths)
        logit_ends = np.cumsum(plan.num_logits)
        # Logits are of the last tokens of each chunk.
        logit_indices = np.repeat(ends - logit_ends, plan.num_logits) + np.arange(plan.num_logits.sum())
        by_token = None if adapters is None else np.repeat(adapters[order], batch.lengths)
        hidden_indices = None
        if self.stage.is_last and len(plan.hidden):
            chunks, counts = plan.hidden.T
            hidden_indices = np.repeat(ends[chunks] - np.cumsum(counts), counts) + np.arange(counts.sum())
        elif self._graphs is not None and self._graphs.fits(batch, len(logit_indices)):
            logit_slots = np.full(len(logit_indices), -1)
            has_logits = plan.num_logits > 0
            logit_slots[logit_ends[has_logits] - 1] = plan.slots[has_logits]  # a chunk's last logits may give a token
            return ForwardOutput(*self._graphs.run(batch, token_ids, logit_indices, logit_slots, adapters=by_token))
        token_ids, copies = token_ids.astype(np.int64), self._copies(plan, order)
        return self._forward_pass.run(batch, token_ids, logit_indices, self._pools, copies, hidden_indices, by_token)

    @property
    def _adapters(self) -> AdapterStore:
        assert self._forward_pass.adapters is not None, "max_loras is 0"
        return self._forward_pass.adapters

    def _place_adapters(self, plan: Plan) -> np.ndarray | None:
        """Copies a plan's adapters to their slots. Returns the slot of each chunk, -1 for the base model; None if no
        chunk has an adapter."""
        if not len(plan.adapters):
            return None
        self._adapters.place(plan.adapters)
        return plan.adapter_slots

    def _batch(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> AttentionBatch:
        """The batch of chunks of the sequences in these slots."""
        tables = self._tables.rows
        return AttentionBatch(tables[0], slots, starts, lengths, tables[-1])

    def _copies(self, plan: Plan, order: np.ndarray | None = None) -> np.ndarray:
        """`StateBatch.copies` of a plan whose chunks are computed in the given order, the plan's by default."""
        if not len(plan.copies):
            return NO_STATE_COPIES
        planned = Copy(*plan.copies.T)
        copies = np.empty((len(plan.copies), 3), dtype=np.int32)
        copies[:, 0] = planned.chunk
        copies[:, 1] = planned.position - plan.starts[planned.chunk]
        copies[:, 2] = np.where(planned.from_tier == DEVICE, planned.from_unit, planned.to_unit)
        copies[:, 2] += self._first_checkpoint
        if order is not None:
            index = np.empty(len(plan), dtype=np.int32)
            index[order] = np.arange(len(plan), dtype=np.int32)
            copies[:, 0] = index[planned.chunk]
        return copies
