"""The forward pass of one rank: page tables, the rank's part of the model, logits. Sampling and scheduling are
elsewhere."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from kernels.attention import flashinfer_backend
from kernels.attention.interface import AttentionBackend, AttentionBatch, GraphAttention, token_positions
from kernels.attention.torch_backend import TorchAttention
from kernels.host_device import all_to_device, reserve_pinned
from pipeline.padding import MOST_TOKENS, mixed_sizes
from worker.config import WorkerConfig
from worker.executor import kv_cache
from worker.executor.attention_selector import choose_attention
from worker.executor.cuda_graphs import CudaGraphRunner, product_sizes
from worker.executor.executor import Executor, ForwardOutput
from worker.executor.gpu_defaults import resolve_device, with_gpu_defaults
from worker.executor.page_table import PageTable
from worker.executor.piecewise_graphs import PiecewiseGraphs, ProbeBatch
from worker.executor.step_timer import StepTimer
from worker.executor.weight_loader import Progress, load_weights
from worker.models.config import decoder_config, read_config
from worker.models.decoder import Decoder
from worker.models.sharding import Shard
from worker.parallel.pipeline_stage import PipelineStage
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
        do the same.

        - `model`: a Hugging Face folder.
        - `stage`: the rank's place among all ranks of the replica; by default it is the only one.
        - `gemm_folder`: keeps the choice of matrix products for the next start on such a GPU.

        Raises ValueError if the model or the configuration is not supported.
        """
        config = with_gpu_defaults(config, model)
        self.stage = stage or PipelineStage.only()
        self.communicator = self.stage.communicator
        if config.pp != self.stage.count or config.tp != self.communicator.size:
            raise ValueError(
                f"tp={config.tp}, pp={config.pp}: a runner is one rank of {self.communicator.size} "
                f"in one stage of {self.stage.count}"
            )
        if config.cpu_threads is not None:
            torch.set_num_threads(config.cpu_threads)
        self.device, self.dtype = resolve_device(config)
        self._samples = self.stage.is_last and self.communicator.rank == 0
        if self._samples:
            _say_place(config, self.device, self.dtype)
        hf = read_config(model)
        group, own = self.communicator, self.stage
        shard = Shard(decoder_config(hf), group.rank, group.size, own.index, own.count, config.cut)
        self.model_config = shard.config
        self.attention_choice = choose_attention(self.device, self.dtype, self.model_config.attention_shape)
        if self.attention_choice.problem and self.communicator.rank == 0:
            logger.warning("%s", self.attention_choice.problem)
        self.page_size = config.page_size
        self.vocab_size = self.model_config.vocab_size
        self.eos_token_ids = _eos_token_ids(model, hf.eos_token_id)
        self._max_running, self._token_budget = config.max_running, config.token_budget
        if (least := self.stage.rendezvous.all_reduce_min(self._max_running)) < self._max_running:
            raise ValueError(
                f"the GPUs of this replica have different memory: for {least} and for {self._max_running} sequences at "
                "once; set max_running"
            )
        parameters = load_weights(
            model, shard, self.device, self.dtype, config.load_format, progress, config.quantization
        )
        self.stage.rendezvous.barrier()  # a rank may take much longer to load its part
        self.decoder = Decoder(self.model_config, parameters, self.dtype, self.communicator)
        self._step_timer = StepTimer.for_device(self.device)
        # The last entry is for padding of a batch to a graph's size.
        self.last_tokens = torch.zeros(self._max_running + 1, dtype=torch.int64, device=self.device)
        self._piecewise_graphs: PiecewiseGraphs | None = None
        self._logits = torch.empty(0, device=self.device)
        self._has_pending_tokens = False  # whether this step has tokens that only the device knows
        self._working_bytes = 0  # peak memory of the largest step, if `_profile` has run it
        if self.device.type == "cuda":
            self.decoder.build_rope_tables(
                min(self.model_config.context_length, config.context_length or self.model_config.context_length)
            )
            sizes = product_sizes(self._max_running, self._graph_tokens)
            self.decoder.autotune_gemms(sizes, self._token_budget, gemm_folder)
            if self.stage.count > 1:
                self.decoder.warm_up(self._max_running)
            columns = self.vocab_size if self.stage.is_last else 0
            self._logits = torch.empty(self._max_running, columns, dtype=torch.float32, device=self.device)
        self.num_pages = self._num_pages(config)
        self.context_length = self._context_length(config)
        pages_per_row = -(-self.context_length // self.page_size)
        self._tables = PageTable(self._max_running, pages_per_row, self.page_size)
        self._attention = self._backend(self.num_pages, pages_per_row)
        self._graphs: CudaGraphRunner | None = None
        if isinstance(self._attention, GraphAttention):
            shared = self.decoder, self._attention, self.last_tokens, self._logits
            self._graphs = CudaGraphRunner(*shared, self._graph_tokens, self._begin)
            with torch.inference_mode():
                self._graphs.capture(self._tables.rows, _show_capture)
            if self.stage.count == 1:
                self._piecewise_graphs = self._in_pieces(self._attention)
        if self.device.type == "cuda":
            self._reserve(pages_per_row)

    def announce(self, plan: Plan) -> None:
        """See `Executor.announce`. Plans are announced in order, each before its `forward`."""
        if self.stage.before is not None:
            self.stage.expect(plan.num_tokens, self.model_config.hidden_size, self.dtype)
        elif not plan.has_pending_tokens:
            self._step_timer.came(plan.step)
        if self._samples and self.stage.count > 1 and plan.has_pending_tokens:
            self.stage.send_tokens()

    @torch.inference_mode()
    def forward(self, plan: Plan) -> ForwardOutput:
        """See `Executor.forward`. Computes this rank's part of the plan. A CUDA graph writes its greedy tokens to
        `last_tokens` too. A stage before the last one sends its output to the next stage, and returns no rows of
        logits."""
        self._tables.update(plan)
        self._has_pending_tokens = self.model_config.is_first and plan.has_pending_tokens
        out = self._computed(plan)
        if not self._samples:
            self._step_timer.end(plan.step)
        if self.stage.is_last:
            return out
        self.stage.send(out.logits)
        return ForwardOutput(out.logits.new_empty((0, self.vocab_size), dtype=torch.float32))

    def finish_step(self, plan: Plan) -> None:
        """See `Executor.finish_step`. Called only on the rank that samples; for other ranks a step ends with
        `forward`."""
        self._step_timer.end(plan.step)
        self.stage.stash_tokens(self.last_tokens)

    def take_step_times(self) -> list[StepTime]:
        """See `Executor.take_step_times`. Returns the times of this stage alone. `Span.received_s` is when the plan
        arrived, if the plan is all that the step needs on the first stage. Otherwise it is when the stage was ready to
        receive its input."""
        return [StepTime(self.stage.index, step, span) for step, span in self._step_timer.take()]

    @property
    def is_running(self) -> bool:
        """Whether `take_step_times` has something to return, now or later."""
        return self._step_timer.is_running

    def close(self) -> None:
        """Free the CUDA graphs and leave the other ranks. Nothing can run afterwards."""
        if self._graphs is not None:
            self._graphs.close()
        if self._piecewise_graphs is not None:
            self._piecewise_graphs.close()
        self.stage.close()

    def _computed(self, plan: Plan) -> ForwardOutput:
        """Runs a plan with the CUDA graph that fits it, or without one. Returns its logits; a stage before the last one
        returns the hidden states for the next stage instead."""
        if self._graphs is not None and plan.num_tokens == len(plan) and plan.num_logits.all():
            batch = AttentionBatch(self._tables.rows, plan.slots, plan.starts, plan.lengths)
            return ForwardOutput(*self._graphs.run(batch, plan.token_ids))
        # Attention takes chunks of one token first. Rows of logits keep the plan's order.
        order = np.argsort(plan.lengths > 1, kind="stable")
        batch = AttentionBatch(self._tables.rows, plan.slots[order], plan.starts[order], plan.lengths[order])
        firsts = np.cumsum(plan.lengths) - plan.lengths
        token_ids = plan.token_ids[np.repeat(firsts[order] - batch.firsts, batch.lengths) + np.arange(plan.num_tokens)]
        ends = np.empty(len(plan), dtype=np.int64)
        ends[order] = np.cumsum(batch.lengths)
        shares = np.cumsum(plan.num_logits)
        rows = np.repeat(ends - shares, plan.num_logits) + np.arange(plan.num_logits.sum())
        if self._graphs is not None and self._graphs.fits(batch, len(rows)):
            owners = np.full(len(rows), -1)
            gives = plan.num_logits > 0
            owners[shares[gives] - 1] = plan.slots[gives]  # the last row of each chunk may give a token
            return ForwardOutput(*self._graphs.run(batch, token_ids, rows, owners))
        return ForwardOutput(self._step(batch, token_ids.astype(np.int64), rows, self._attention, self._begin))

    def _begin(self) -> torch.Tensor | None:
        """Waits for the input from other stages, and marks the begin of the step. Called when all other input of the
        step is on its way to the device. Returns the previous stage's hidden states, None on the first stage."""
        before = None
        if self.stage.before is not None:
            self._step_timer.ready()
            before = self.stage.receive(self.model_config.hidden_size)
        elif self._has_pending_tokens:
            if self.stage.count > 1:
                self._step_timer.ready()
            self.stage.receive_tokens(self.last_tokens)
        self._step_timer.begin()
        return before

    def _step(
        self,
        batch: AttentionBatch,
        token_ids: np.ndarray,
        rows: np.ndarray,
        attention: AttentionBackend,
        begin: Callable[[], torch.Tensor | None],
    ) -> torch.Tensor:
        """Runs a step without a CUDA graph of the whole step.

        Returns the logits of the tokens at `rows`, int64 indices into the batch's tokens. A stage before the last one
        returns the hidden states of all tokens. `begin` returns the hidden states to start from, or None on the first
        stage.
        """
        attention.plan(batch)
        arrays = [token_ids, token_positions(batch), rows]
        if self._has_pending_tokens:
            arrays.append(np.repeat(batch.rows, batch.lengths).astype(np.int64))
        given, positions, wanted, *slots = all_to_device(arrays, self.device)
        if (before := begin()) is not None:
            given = before
        elif self._has_pending_tokens:
            given = torch.where(given < 0, self.last_tokens[slots[0]], given)
        if not self.stage.is_last:
            return self.decoder.forward(given, positions, attention)
        layers = self.decoder if self._piecewise_graphs is None else self._piecewise_graphs
        return self.decoder.logits(layers.forward(given, positions, attention, wanted))

    @torch.inference_mode()
    def _in_pieces(self, attention: GraphAttention) -> PiecewiseGraphs | None:
        """Captures piecewise CUDA graphs for long steps, if they make steps faster."""
        most = min(self._token_budget, self.num_pages * self.page_size)
        return PiecewiseGraphs.if_faster(self.decoder, attention, mixed_sizes(self._graph_tokens, most), self._trial)

    def _trial(self, tokens: int) -> ProbeBatch:
        """Returns a step of `tokens` tokens, in arbitrary pages."""
        batch = _sequences(tokens, self.context_length, self.page_size)
        batch = replace(batch, tables=batch.tables % self.num_pages)
        given = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        return ProbeBatch(batch, given, torch.from_numpy(token_positions(batch)).to(self.device))

    def _num_pages(self, config: WorkerConfig) -> int:
        """Number of pages that fits on every rank, because all ranks have the same page tables."""
        tokens = config.kv_tokens
        if tokens is None:
            bytes_per_token = kv_cache.token_bytes(self.model_config, self.dtype)
            if self.device.type == "cuda":
                self._profile()
                tokens = kv_cache.gpu_tokens(bytes_per_token, self.device, config.kv_memory_fraction)
            else:
                tokens = kv_cache.cpu_tokens(bytes_per_token, config.kv_memory_fraction)
            tokens = self.stage.rendezvous.all_reduce_min(tokens)
        return kv_cache.num_pages(tokens, self.page_size)

    @torch.inference_mode()
    def _profile(self) -> None:
        """Run the largest step once, with the most logits that a step may have, so that the allocator knows the peak
        memory."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before_bytes = torch.cuda.memory_allocated(self.device)
        length = min(self._token_budget, self.model_config.context_length)
        batch = _sequences(-(-self._token_budget // length) * length, length, self.page_size)
        rows = np.arange(min(PROMPT_LOGIT_ROWS + self._max_running, batch.num_tokens))
        token_ids = np.zeros(batch.num_tokens, dtype=np.int64)
        passed = torch.empty(0, device=self.device)
        if self.stage.count > 1:  # hidden states of that many steps may be in flight
            shape = (self.stage.count + 1, len(token_ids), self.model_config.hidden_size)
            passed = torch.zeros(shape, dtype=self.dtype, device=self.device)
        before = None if self.stage.before is None else passed[0]
        self._step(batch, token_ids, rows, self._backend(batch.tables.size, batch.tables.shape[1]), lambda: before)
        torch.cuda.synchronize(self.device)
        self._working_bytes = torch.cuda.max_memory_allocated(self.device) - before_bytes
        torch.cuda.empty_cache()

    def _reserve(self, pages_per_row: int) -> None:
        """Makes the allocators hold as much memory as the steps in flight need at most. If they had to ask the driver
        for memory between steps, it might wait for all work that was launched, including a send to a stage that is
        behind."""
        steps = self.stage.count + 1
        pages = min(self._max_running * pages_per_row, self.num_pages)
        reserve_pinned(8 * self._token_budget + 4 * pages, COPIES * steps)
        small = [torch.empty(1 << 20, dtype=torch.uint8, device=self.device) for _ in range(COPIES * steps)]
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        large = torch.empty(min(self._working_bytes, free_bytes // 2), dtype=torch.uint8, device=self.device)
        del small, large  # the allocator keeps their memory

    @property
    def _graph_tokens(self) -> int:
        """Tokens of the largest CUDA graph of a mixed step."""
        return min(MOST_TOKENS, self._token_budget)

    def _backend(self, pages: int, pages_per_row: int) -> AttentionBackend:
        shape = self.model_config.attention_shape
        if self.device.type == "cpu":
            kv = kv_cache.allocate(self.model_config, pages, self.page_size, self.device, self.dtype)
            if self.attention_choice.name == "numba":
                # Imported only where it is used: a machine with a GPU needs no numba.
                from kernels.attention.cpu.numba_backend import NumbaAttention

                return NumbaAttention(kv, shape)
            return TorchAttention(kv, shape)
        # The extra page is for padding of a batch to a graph's size.
        kv = kv_cache.allocate(self.model_config, pages + 1, self.page_size, self.device, self.dtype)
        most = self._max_running, self._max_running * pages_per_row, max(self._max_running, self._graph_tokens)
        if self.attention_choice.name == "flashinfer":
            return flashinfer_backend.FlashInferAttention(kv, shape, *most)
        # Imported only on a GPU: a machine without one needs no Triton.
        from kernels.attention.triton_backend import TritonAttention

        return TritonAttention(kv, shape, *most)

    def _context_length(self, config: WorkerConfig) -> int:
        own, held = self.model_config.context_length, self.num_pages * self.page_size
        if config.context_length is None:
            return min(own, held)
        if config.context_length > own:
            raise ValueError(f"context_length {config.context_length} is more than the model's own, {own}")
        if config.context_length > held:
            raise ValueError(
                f"context_length {config.context_length} is more than the KV cache holds, {held} tokens: "
                "lower it, or set kv_tokens"
            )
        return config.context_length


def _sequences(tokens: int, longest: int, page_size: int) -> AttentionBatch:
    """Returns a step of `tokens` tokens in whole sequences of at most `longest` tokens, as few as possible. Each
    sequence has its own pages."""
    count = -(-tokens // longest)
    length = min(tokens, longest)
    pages = -(-length // page_size)
    rows = np.arange(count, dtype=np.int32)
    lengths = np.full_like(rows, length)
    lengths[0] = tokens - (count - 1) * length  # the shortest first: it may have one token
    return AttentionBatch(rows[:, None] * pages + np.arange(pages, dtype=np.int32), rows, np.zeros_like(rows), lengths)


def _show_capture(done: int, total: int) -> None:
    if sys.stderr.isatty() or done == total:
        print(f"\rCUDA graphs: {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _say_place(config: WorkerConfig, device: torch.device, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    in_8_bits = ", layers in fp8" if config.quantization == "fp8" else ""
    if device.type == "cuda":
        ranks = f" and {config.num_ranks - 1} more" if config.num_ranks > 1 else ""
        logger.info("Running on %s%s in %s%s", torch.cuda.get_device_name(), ranks, name, in_8_bits)
    else:
        found = "No GPU found: running" if config.device == "auto" else "Running"
        logger.info("%s on the CPU in %s%s", found, name, in_8_bits)


def _eos_token_ids(model: Path, configured: int | list[int] | None) -> tuple[int, ...]:
    """Returns the tokens that end a text: those in generation_config.json, else the model configuration's. Raises
    ValueError, with the file's name, if the file cannot be decoded."""
    path = model / "generation_config.json"
    if path.exists():
        try:
            said = msgspec.json.decode(path.read_bytes(), type=_EndTokens)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not as it should be: {error}") from None
        configured = configured if said.eos_token_id is msgspec.UNSET else said.eos_token_id
    if configured is None:
        return ()
    return (configured,) if isinstance(configured, int) else tuple(configured)


class _EndTokens(msgspec.Struct):
    """The end tokens in generation_config.json."""

    eos_token_id: int | list[int] | msgspec.UnsetType | None = msgspec.UNSET
