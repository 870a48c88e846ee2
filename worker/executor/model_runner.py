"""The forward pass of one rank: page tables, the rank's part of the model, logits. Sampling and scheduling are
elsewhere."""

import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from kernels.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    GraphAttention,
    token_positions,
)
from kernels.host_device import all_to_device, reserve_pinned
from kernels.recurrent.states import RecurrentStates, StateBatch
from pipeline.padding import MOST_TOKENS, mixed_sizes
from worker.config import WorkerConfig
from worker.executor import kv_pools
from worker.executor.adapter_store import AdapterStore
from worker.executor.attention_selector import AttentionChoice, AttentionLimits, build_attention, choose_attention
from worker.executor.cuda_graphs import CudaGraphRunner, product_sizes
from worker.executor.executor import Executor, ForwardOutput
from worker.executor.expert_balance import ExpertBalance
from worker.executor.gpu_defaults import resolve_device, with_gpu_defaults
from worker.executor.kv_cache import DraftBytes, KVBudget, context_length, num_slot_rows
from worker.executor.page_table import PageTable
from worker.executor.piecewise_graphs import PiecewiseGraphs, ProbeBatch
from worker.executor.step_timer import StepTimer
from worker.executor.weight_loader import Progress, load_weights
from worker.kv_layout import KVLayout
from worker.models.adapted_layers import AdaptedLayers
from worker.models.config import DecoderConfig, HfConfig, decoder_config, eos_token_ids, read_config
from worker.models.decoder import Decoder
from worker.models.sharding import Shard
from worker.parallel.pipeline_stage import PipelineStage
from worker.progress import NewestSteps
from worker.step import PROMPT_LOGIT_ROWS, Plan, StepTime

logger = logging.getLogger(__name__)

COPIES = 4  # copies to the device or back in a step without a CUDA graph


class ModelRunner(Executor):
    """Runs plans on one rank: the whole executor of a replica with one rank. With several ranks, each rank has one.

    Besides the KV pages, its only state is one page table per slot, updated as `worker.step` says. `Executor` lists the
    attributes.
    """

    def __init__(
        self,
        model: Path,
        config: WorkerConfig,
        progress: Progress | None = None,
        stage: PipelineStage | None = None,
        gemm_folder: Path | None = None,
    ) -> None:
        """Load this rank's weights, allocate its KV pages and capture its CUDA graphs. Waits for the other ranks, which
        do the same. The order of the steps matters: each finds the device as the steps before have left it.

        - `model`: a Hugging Face folder.
        - `stage`: the rank's place among all ranks of the replica; by default it is the only one.
        - `gemm_folder`: keeps the choice of matrix products, and of experts' tiles, for the next start on such a GPU.

        Raises ValueError if the model or the configuration is not supported.
        """
        config = with_gpu_defaults(config, model)
        self.stage = stage or PipelineStage.only()
        self.communicator = self.stage.communicator
        self._samples = self.stage.is_last and self.communicator.rank == 0
        self._check_ranks(config)
        self.device, self.dtype = self._resolve_device(config)
        hf = read_config(model)
        shard = self._own_shard(hf, config)
        _check_speculation(config, shard.whole)
        self.model_config, self.vocab_size = shard.config, shard.config.vocab_size
        self.attention_choice = self._choose_attention()
        self.eos_token_ids = eos_token_ids(model, hf.eos_token_id)
        self._max_running, self._token_budget = config.max_running, config.token_budget
        self._check_max_running()

        self.decoder = self._load_decoder(model, shard, config, progress)
        self._step_timer = StepTimer.for_device(self.device)
        self._begun = 0  # the newest step
        # The last entry is for padding of a batch to a graph's size.
        self.last_tokens = torch.zeros(self._max_running + 1, dtype=torch.int64, device=self.device)
        self._has_pending_tokens = False  # whether this step has tokens that only the device knows
        self._piecewise_graphs: PiecewiseGraphs | None = None
        self._adapted_pieces: PiecewiseGraphs | None = None  # of steps with adapters
        self._graphs: CudaGraphRunner | None = None

        if self.device.type == "cuda":
            self.decoder.build_rope_tables(self._longest(config))
            self._autotune(gemm_folder)
            self._warm_up()
        self._adapters = self._allocate_adapters(shard, config)
        self._logits = self._allocate_logits()
        self._working_bytes = 0  # peak memory of the largest step, if `_profile` has run it
        self.layout = self._divide_memory(shard.whole, config)
        self.context_length = context_length(
            config.context_length, self.model_config.context_length, self.num_pages * self.page_size
        )
        pages_per_sequence = -(-self.context_length // self.page_size)
        self._tables = PageTable(self._max_running, pages_per_sequence, self.page_size, len(self.layout.paged))
        self._attention = self._allocate_kv_cache(self.layout, pages_per_sequence)
        self._states = self._allocate_states(self.layout)
        if isinstance(self._attention, GraphAttention):
            self._graphs = self._capture_graphs(self._attention)
            if self.decoder.has_pieces:
                self._piecewise_graphs = self._capture_pieces(self._attention)
                if self._adapters is not None:
                    self._adapted_pieces = self._capture_pieces(self._attention, self._adapters.adapted)
        if self.device.type == "cuda":
            self._reserve(pages_per_sequence)
        if self._samples and self.decoder.expert_load is not None:
            self.expert_balance = ExpertBalance(self.decoder.expert_load, self.communicator.size)

    def announce(self, plan: Plan) -> None:
        """See `Executor.announce`. Plans are announced in order, each before its `forward`."""
        if self.stage.before is not None:
            self.stage.expect(plan.num_tokens, self.model_config.received_size, self.dtype)
        elif not plan.has_pending_tokens:
            self._step_timer.came(plan.step)
        if self._samples and self.stage.count > 1 and plan.has_pending_tokens:
            self.stage.send_tokens()

    @torch.inference_mode()
    def forward(self, plan: Plan) -> ForwardOutput:
        """See `Executor.forward`. Computes this rank's part of the plan. A CUDA graph writes its greedy tokens to
        `last_tokens` too. A stage before the last one sends its output to the next stage, and returns no
        logits."""
        self._begun = plan.step
        self._tables.update(plan)
        self._has_pending_tokens = self.model_config.is_first and plan.has_pending_tokens
        if self.expert_balance is not None:
            self.expert_balance.begin_step()
        out = self._run(plan)
        if self.expert_balance is not None:
            self.expert_balance.end_step()
        if not self._samples:
            self._step_timer.end(plan.step)
        if self.stage.is_last:
            return out
        self.stage.send(out.logits)
        return ForwardOutput(out.logits.new_empty((0, self.vocab_size), dtype=torch.float32))

    def prepare_adapter(self, number: int, folder: Path) -> Future[None]:
        """See `Executor.prepare_adapter`. Reads this rank's part."""
        assert self._adapters is not None, "max_loras is 0"
        return self._adapters.prepare(number, folder)

    def forget_adapter(self, number: int) -> None:
        """See `Executor.forget_adapter`."""
        assert self._adapters is not None, "max_loras is 0"
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
        for pieces in (self._piecewise_graphs, self._adapted_pieces):
            if pieces is not None:
                pieces.close()
        if self._adapters is not None:
            self._adapters.close()
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
        hidden_indices = None
        if self.stage.is_last and len(plan.hidden):
            chunks, counts = plan.hidden.T
            hidden_indices = np.repeat(ends[chunks] - np.cumsum(counts), counts) + np.arange(counts.sum())
        elif self._graphs is not None and self._graphs.fits(batch, len(logit_indices)):
            logit_slots = np.full(len(logit_indices), -1)
            has_logits = plan.num_logits > 0
            logit_slots[logit_ends[has_logits] - 1] = plan.slots[has_logits]  # a chunk's last logits may give a token
            own = None if adapters is None else np.repeat(adapters[order], batch.lengths)
            return ForwardOutput(*self._graphs.run(batch, token_ids, logit_indices, logit_slots, adapters=own))
        if self._states is not None:
            self._states.plan(StateBatch(batch.rows, batch.starts, batch.lengths, self._copies(plan, order)))
        own = None if adapters is None else np.repeat(adapters[order], batch.lengths)
        token_ids, begin = token_ids.astype(np.int64), self._begin
        return self._step(batch, token_ids, logit_indices, self._attention, begin, hidden_indices, self._states, own)

    def _place_adapters(self, plan: Plan) -> np.ndarray | None:
        """Copies a plan's adapters to their slots. Returns the slot of each chunk, -1 for the base model; None if no
        chunk has an adapter."""
        if not len(plan.adapters):
            return None
        assert self._adapters is not None, "max_loras is 0"
        self._adapters.place(plan.adapters)
        return plan.adapter_slots

    def _batch(self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> AttentionBatch:
        """The batch of chunks of the sequences in these slots."""
        tables = self._tables.rows
        return AttentionBatch(tables[0], slots, starts, lengths, tables[-1])

    def _copies(self, plan: Plan, order: np.ndarray | None = None) -> np.ndarray:
        """`StateBatch.copies` of a plan whose chunks are computed in the given order, the plan's by default."""
        copies = plan.copies.copy()
        if len(copies):
            order = np.arange(len(plan)) if order is None else order
            place = np.empty(len(plan), dtype=np.int32)
            place[order] = np.arange(len(plan), dtype=np.int32)
            copies[:, 0] = place[plan.copies[:, 0]]
            copies[:, 1] -= plan.starts[plan.copies[:, 0]]
            copies[:, 2] += num_slot_rows(self._max_running)
        return copies

    def _begin(self) -> torch.Tensor | None:
        """Waits for the input from other stages, and marks the begin of the step. Called when all other input of the
        step is on its way to the device. Returns the previous stage's hidden states, None on the first stage."""
        received = None
        if self.stage.before is not None:
            self._step_timer.ready()
            received = self.stage.receive(self.model_config.received_size)
        elif self._has_pending_tokens:
            if self.stage.count > 1:
                self._step_timer.ready()
            self.stage.receive_tokens(self.last_tokens)
        self._step_timer.begin()
        return received

    def _step(
        self,
        batch: AttentionBatch,
        token_ids: np.ndarray,
        logit_indices: np.ndarray,
        attention: AttentionBackend,
        begin: Callable[[], torch.Tensor | None],
        hidden_indices: np.ndarray | None = None,
        states: RecurrentStates | None = None,
        adapters: np.ndarray | None = None,
    ) -> ForwardOutput:
        """Runs a step without a CUDA graph of the whole step.

        Returns the logits of the tokens at `logit_indices`, int64 indices into the batch's tokens, and the hidden
        states of those at `hidden_indices`. A stage before the last one returns the hidden states of all tokens in
        place of logits. `begin` returns the hidden states to start from, or None on the first stage. `states` have
        planned the step. `adapters`: integers `[n]`, the slot of each token's adapter, -1 for none; None: no token has
        one.
        """
        attention.plan(batch)
        num_logits = len(logit_indices)
        rows = logit_indices if hidden_indices is None else np.concatenate((logit_indices, hidden_indices))
        arrays = [token_ids, token_positions(batch), rows]
        if self._has_pending_tokens:
            arrays.append(np.repeat(batch.rows, batch.lengths).astype(np.int64))
        inputs, positions, indices, *slots = all_to_device(arrays, self.device)
        if (received := begin()) is not None:
            inputs = received
        elif self._has_pending_tokens:
            inputs = torch.where(inputs < 0, self.last_tokens[slots[0]], inputs)
        pieces = self._piecewise_graphs if adapters is None else self._adapted_pieces
        if pieces is not None:
            out = pieces.forward(inputs, positions, attention, indices, adapters)
        else:
            store = self._adapters
            adapted = None if adapters is None or store is None else store.adapted.filled(adapters)
            if not self.stage.is_last:
                return ForwardOutput(self.decoder.forward(inputs, positions, attention, states=states, adapted=adapted))
            out = self.decoder.forward(inputs, positions, attention, indices, states, adapted)
        if hidden_indices is None:
            return ForwardOutput(self.decoder.logits(out))
        hidden = self.decoder.normalised(out[num_logits:])
        return ForwardOutput(self.decoder.logits(out[:num_logits]), hidden=hidden)

    # ------------------------------------------------------------ steps of loading, in their order

    def _check_ranks(self, config: WorkerConfig) -> None:
        """Raises ValueError unless the configuration has the ranks and stages that there are."""
        if config.pp != self.stage.count or config.tp != self.communicator.size:
            raise ValueError(
                f"tp={config.tp}, pp={config.pp}: a runner is one rank of {self.communicator.size} "
                f"in one stage of {self.stage.count}"
            )

    def _resolve_device(self, config: WorkerConfig) -> tuple[torch.device, torch.dtype]:
        """Returns the device and the dtype of the activations, and says so once per replica."""
        if config.cpu_threads is not None:
            torch.set_num_threads(config.cpu_threads)
        device, dtype = resolve_device(config)
        if self._samples:
            _log_device(config, device, dtype)
        return device, dtype

    def _own_shard(self, hf: HfConfig, config: WorkerConfig) -> Shard:
        """Returns the part of the model that this rank holds."""
        group, stage = self.communicator, self.stage
        whole = decoder_config(hf)
        return Shard(
            whole.up_to(min(whole.context_length, config.context_length or whole.context_length)),
            group.rank,
            group.size,
            stage.index,
            stage.count,
            config.cut,
            config.enable_expert_parallel,
        )

    def _choose_attention(self) -> AttentionChoice:
        """Chooses the attention backend, and warns once per stage if a faster one is missing."""
        choice = choose_attention(self.device, self.dtype, self.model_config.attention_shape)
        if choice.problem and self.communicator.rank == 0:
            logger.warning("%s", choice.problem)
        return choice

    def _check_max_running(self) -> None:
        """Raises ValueError unless all ranks have the same number of slots."""
        if (least := self.stage.rendezvous.all_reduce_min(self._max_running)) < self._max_running:
            raise ValueError(
                f"the GPUs of this replica have different memory: for {least} and for {self._max_running} sequences at "
                "once; set max_running"
            )

    def _load_decoder(self, model: Path, shard: Shard, config: WorkerConfig, progress: Progress | None) -> Decoder:
        """Loads this rank's weights, and builds its decoder of them when all ranks have theirs."""
        parameters = load_weights(
            model,
            shard,
            self.device,
            self.dtype,
            config.load_format,
            progress,
            config.quantization,
            config.dequantize,
        )
        self.stage.rendezvous.barrier()  # a rank may take much longer to load its part
        return Decoder(shard.config, parameters, self.dtype, self.communicator)

    def _longest(self, config: WorkerConfig) -> int:
        """The longest sequence, in tokens, if the KV cache holds it: configured, or the model's."""
        return min(self.model_config.context_length, config.context_length or self.model_config.context_length)

    def _autotune(self, gemm_folder: Path | None) -> None:
        """Chooses the algorithms of matrix products. Before CUDA graphs are captured, which hold the choice."""
        sizes = product_sizes(self._max_running, self._max_graph_tokens)
        self.decoder.autotune_gemms(sizes, self._token_budget, gemm_folder)
        self.decoder.autotune_experts(self._token_budget, gemm_folder)

    def _warm_up(self) -> None:
        """Loads kernels that a step of a pipeline would otherwise load (`Decoder.warm_up`)."""
        if self.stage.count > 1:
            self.decoder.warm_up(self._max_running)

    def _allocate_adapters(self, shard: Shard, config: WorkerConfig) -> AdapterStore | None:
        """Allocates the slots of adapters; None for a replica without."""
        if not config.lora_slots:
            return None
        most_tokens = max(self._token_budget, self._max_running, self._max_graph_tokens)
        return AdapterStore(self.decoder, shard, config.lora_slots, config.max_lora_rank, most_tokens)

    def _allocate_logits(self) -> torch.Tensor:
        """Returns the output of CUDA graphs, float32 `[max_running, vocab_size]`. It is empty on a CPU, and has no
        columns on a stage before the last one."""
        if self.device.type == "cpu":
            return torch.empty(0)
        columns = self.vocab_size if self.stage.is_last else 0
        return torch.empty(self._max_running, columns, dtype=torch.float32, device=self.device)

    def _divide_memory(self, whole: DecoderConfig, config: WorkerConfig) -> KVLayout:
        """Returns the layout of the cache that fits on every rank, because all ranks have the same page tables.
        `whole`: the model without any cut."""
        draft = DraftBytes()
        if config.draft_model is not None:
            draft = DraftBytes.of(Path(config.draft_model), self.dtype, self.device, self._max_running)
        budget = KVBudget(whole, self.model_config, self.dtype, config, self._longest(config), draft)
        tokens = config.kv_tokens
        if tokens is None:
            if self.device.type == "cuda":
                batch = self._largest_step(config)
                self._working_bytes = self._profile(batch, budget.probe_layout(batch.tables.size))
            tokens = self.stage.rendezvous.all_reduce_min(budget.tokens(self.device))
        return budget.layout(tokens)

    def _largest_step(self, config: WorkerConfig) -> AttentionBatch:
        """The largest step, in sequences as long as they may be."""
        length = min(self._token_budget, self._longest(config))
        return _probe_batch(-(-self._token_budget // length) * length, length, config.page_size)

    @torch.inference_mode()
    def _profile(self, batch: AttentionBatch, layout: KVLayout) -> int:
        """Run the largest step once, with the most logits that a step may have, so that the allocator knows the peak
        memory. `layout`: with the pages of the step. Returns the bytes that the step needs."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before_bytes = torch.cuda.memory_allocated(self.device)
        logit_indices = np.arange(min(PROMPT_LOGIT_ROWS + self._max_running, batch.num_tokens))
        token_ids = np.zeros(batch.num_tokens, dtype=np.int64)
        in_flight = torch.empty(0, device=self.device)
        if self.stage.count > 1:  # hidden states of that many steps may be in flight
            shape = (self.stage.count + 1, len(token_ids), self.model_config.received_size)
            in_flight = torch.zeros(shape, dtype=self.dtype, device=self.device)
        received = None if self.stage.before is None else in_flight[0]
        attention = self._allocate_kv_cache(layout, batch.tables.shape[1])
        states = self._allocate_states(layout)
        if states is not None:
            states.plan(StateBatch(batch.rows, batch.starts, batch.lengths))
        self._step(batch, token_ids, logit_indices, attention, lambda: received, states=states)
        torch.cuda.synchronize(self.device)
        working_bytes = torch.cuda.max_memory_allocated(self.device) - before_bytes
        torch.cuda.empty_cache()
        return working_bytes

    def _allocate_states(self, layout: KVLayout) -> RecurrentStates | None:
        """Allocates the recurrent states of all slots, and rows for checkpoints; None for layers without any."""
        return kv_pools.allocate_states(self.model_config, layout, self._max_running, self.device, self.dtype)

    def _allocate_kv_cache(self, layout: KVLayout, pages_per_sequence: int) -> AttentionBackend:
        """Allocates the pages of all groups, and returns the attention over them."""

        def make(shape: AttentionShape, pages: int, window: int | None, sinks: torch.Tensor | None) -> AttentionBackend:
            seen = pages_per_sequence
            if window is not None:
                seen = min(seen, -(-(window + self._max_graph_tokens) // layout.page_size) + 1)
            return self._allocate_pages(shape, pages, layout.page_size, seen, sinks)

        return kv_pools.build_attention(self.model_config.attention_shape, layout, self.decoder.sinks, make)

    def _allocate_pages(
        self, shape: AttentionShape, pages: int, page_size: int, pages_per_sequence: int, sinks: torch.Tensor | None
    ) -> AttentionBackend:
        """Allocates pages of the layers of `shape`, and returns the attention over them."""
        # On a GPU, an extra page is for padding of a batch to a graph's size.
        allocated = pages if self.device.type == "cpu" else pages + 1
        kv = kv_pools.allocate(shape, allocated, page_size, self.device, self.dtype)
        limits = AttentionLimits(
            self._max_running,
            self._max_running * pages_per_sequence,
            max(self._max_running, self._max_graph_tokens),
        )
        return build_attention(self.attention_choice, kv, shape, limits, sinks, self.decoder.latent_weights)

    def _capture_graphs(self, attention: GraphAttention) -> CudaGraphRunner:
        """Captures the CUDA graphs of short steps."""
        shared = self.decoder, attention, self.last_tokens, self._logits
        adapted = None if self._adapters is None else self._adapters.adapted
        graphs = CudaGraphRunner(*shared, self._max_graph_tokens, self._begin, self._states, adapted)
        with torch.inference_mode():
            graphs.capture(self._tables.rows[0], _show_capture)
        return graphs

    @torch.inference_mode()
    def _capture_pieces(
        self, attention: GraphAttention, adapted: AdaptedLayers | None = None
    ) -> PiecewiseGraphs | None:
        """Captures piecewise CUDA graphs for long steps, if they make steps faster. None in a pipeline. `adapted`: the
        layers of steps with adapters."""
        if self.stage.count > 1:
            return None
        max_tokens = min(self._token_budget, self.num_pages * self.page_size)
        sizes = mixed_sizes(self._max_graph_tokens, max_tokens)
        return PiecewiseGraphs.if_faster(self.decoder, attention, sizes, self._probe, adapted)

    def _probe(self, tokens: int) -> ProbeBatch:
        """Returns a step of `tokens` tokens, in arbitrary pages."""
        batch = _probe_batch(tokens, self.context_length, self.page_size)
        batch = replace(batch, tables=batch.tables % min(group.num_units for group in self.layout.paged))
        token_ids = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        return ProbeBatch(batch, token_ids, torch.from_numpy(token_positions(batch)).to(self.device))

    def _reserve(self, pages_per_sequence: int) -> None:
        """Makes the allocators hold as much memory as the steps in flight need at most. If they had to ask the driver
        for memory between steps, it might wait for all work that was launched, including a send to a stage that is
        behind."""
        steps = self.stage.count + 1
        pages = min(self._max_running * pages_per_sequence, self.num_pages)
        reserve_pinned(8 * self._token_budget + 4 * pages, COPIES * steps)
        small = [torch.empty(1 << 20, dtype=torch.uint8, device=self.device) for _ in range(COPIES * steps)]
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        large = torch.empty(min(self._working_bytes, free_bytes // 2), dtype=torch.uint8, device=self.device)
        del small, large  # the allocator keeps their memory

    @property
    def _max_graph_tokens(self) -> int:
        """Tokens of the largest CUDA graph of a mixed step."""
        return min(MOST_TOKENS, self._token_budget)


def _check_speculation(config: WorkerConfig, model: DecoderConfig) -> None:
    """Raises ValueError if drafts are to be verified by a model with recurrent states."""
    if config.speculates and model.recurrent is not None:
        raise ValueError(
            f"speculation is {config.speculation}, which a {model.model_type} model does not support: drafts that turn "
            "out wrong would stay in its recurrent states. Set speculation to off, and no draft_model"
        )


def _probe_batch(tokens: int, longest: int, page_size: int) -> AttentionBatch:
    """Returns a step of `tokens` tokens in whole sequences of at most `longest` tokens, as few as possible. Each
    sequence has its own pages."""
    count = -(-tokens // longest)
    length = min(tokens, longest)
    pages = -(-length // page_size)
    slots = np.arange(count, dtype=np.int32)
    lengths = np.full_like(slots, length)
    lengths[0] = tokens - (count - 1) * length  # the shortest first: it may have one token
    tables = slots[:, None] * pages + np.arange(pages, dtype=np.int32)
    return AttentionBatch(tables, slots, np.zeros_like(slots), lengths)


def _show_capture(done: int, total: int) -> None:
    if sys.stderr.isatty() or done == total:
        print(f"\rCUDA graphs: {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _log_device(config: WorkerConfig, device: torch.device, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    in_8_bits = ", layers in fp8" if config.quantization == "fp8" else ""
    if device.type == "cuda":
        ranks = f" and {config.num_ranks - 1} more" if config.num_ranks > 1 else ""
        logger.info("Running on %s%s in %s%s", torch.cuda.get_device_name(), ranks, name, in_8_bits)
    else:
        found = "No GPU found: running" if config.device == "auto" else "Running"
        logger.info("%s on the CPU in %s%s", found, name, in_8_bits)
