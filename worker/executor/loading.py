"""The start of a rank: its weights, the memory of its cache, its CUDA graphs."""

import logging
import sys
from dataclasses import dataclass, replace
from functools import partial
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
from kernels.host_device import reserve_pinned
from pipeline.padding import MAX_GRAPH_TOKENS, mixed_sizes
from worker.config import WorkerConfig
from worker.executor import kv_pools
from worker.executor.adapter_store import AdapterStore
from worker.executor.attention_selector import AttentionChoice, AttentionLimits, build_attention, choose_attention
from worker.executor.cuda_graphs import CudaGraphRunner, product_sizes
from worker.executor.forward_pass import ForwardPass
from worker.executor.gpu_defaults import resolve_device, with_gpu_defaults
from worker.executor.memory_budget import DraftBytes, KVBudget, context_length
from worker.executor.page_table import PageTable
from worker.executor.piecewise_graphs import PiecewiseGraphs, ProbeBatch
from worker.executor.weight_loader import Progress, load_weights
from worker.kv_layout import KVLayout
from worker.models.adapted_layers import AdaptedLayers
from worker.models.config import DecoderConfig, HfConfig, decoder_config, eos_token_ids, read_config
from worker.models.decoder import Decoder
from worker.models.sharding import Shard
from worker.parallel.pipeline_stage import PipelineStage
from worker.step import PROMPT_LOGIT_ROWS

logger = logging.getLogger(__name__)

COPIES_A_STEP = 4  # copies to the device or back in a step without a CUDA graph


@dataclass
class LoadedModel:
    """A rank that has all that its steps need.

    | field | meaning |
    | --- | --- |
    | `forward_pass` | steps without a CUDA graph, with the rank's part of the model and its adapters |
    | `config`, `dtype` | of this rank's part; of activations |
    | `eos_token_ids` | tokens that end an output |
    | `attention_choice` | the attention backend, and why it is not the fastest |
    | `max_running` | slots |
    | `layout`, `pools`, `tables` | the cache: its groups, its tensors, the pages of each slot |
    | `context_length` | tokens of the longest sequence |
    | `graphs` | CUDA graphs of short steps; None where there are none |
    """

    forward_pass: ForwardPass
    config: DecoderConfig
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    attention_choice: AttentionChoice
    max_running: int
    layout: KVLayout
    pools: kv_pools.Pools
    tables: PageTable
    context_length: int
    graphs: CudaGraphRunner | None


def load_model(
    model: Path,
    config: WorkerConfig,
    progress: Progress | None = None,
    stage: PipelineStage | None = None,
    gemm_folder: Path | None = None,
) -> LoadedModel:
    """Loads this rank's weights, allocates its cache and captures its CUDA graphs. Waits for the other ranks, which do
    the same.

    - `model`: a Hugging Face folder.
    - `stage`: the rank's place among all ranks of the replica; by default it is the only one.
    - `gemm_folder`: keeps the choice of matrix products, and of experts' tiles, for the next start on such a GPU.

    Raises ValueError if the model or the configuration is not supported.
    """
    return ModelLoader(model, with_gpu_defaults(config, model), stage or PipelineStage.only()).run(
        progress, gemm_folder
    )


class ModelLoader:
    """The steps of loading. Their order matters: each finds the device as the steps before have left it."""

    def __init__(self, model: Path, config: WorkerConfig, stage: PipelineStage) -> None:
        """Checks what can be checked before weights are read."""
        self._model, self._config, self.stage = model, config, stage
        self._samples = stage.samples
        self._check_ranks(config)
        self.device, self.dtype = self._resolve_device(config)
        hf = read_config(model)
        self._shard = self._own_shard(hf, config)
        _check_speculation(config, self._shard.whole)
        self.model_config = self._shard.config
        self._attention_choice = self._choose_attention()
        self._eos_token_ids = eos_token_ids(model, hf.eos_token_id)
        self._max_running, self._token_budget = config.max_running, config.token_budget
        self._check_max_running()

    def run(self, progress: Progress | None, gemm_folder: Path | None) -> LoadedModel:
        """All that takes time or memory."""
        config, is_gpu = self._config, self.device.type == "cuda"
        self._decoder = self._load_decoder(self._model, self._shard, config, progress)
        forward_pass = self._forward_pass = ForwardPass(self._decoder, self.stage, self.device, self._max_running)
        if is_gpu:
            self._decoder.build_rope_tables(self._longest(config))
            self._autotune(gemm_folder)
            self._warm_up()
        forward_pass.adapters = self._allocate_adapters(self._shard, config)
        self._logits = self._allocate_logits()
        self._working_bytes = 0  # peak memory of the largest step, if `_profile` has run it
        layout = self._divide_memory(self._shard.whole, config)
        longest = context_length(
            config.context_length, self.model_config.context_length, layout.num_pages * layout.page_size
        )
        pages_per_sequence = -(-longest // layout.page_size)
        tables = PageTable(self._max_running, pages_per_sequence, layout.page_size, len(layout.paged))
        pools, graphs = self._allocate_pools(layout, pages_per_sequence), None
        if isinstance(attention := pools.attention, GraphAttention):
            graphs = self._capture_graphs(pools, attention, tables)
            if self._decoder.has_pieces:
                forward_pass.pieces = self._capture_pieces(attention, layout, longest)
                if (adapters := forward_pass.adapters) is not None:
                    forward_pass.adapted_pieces = self._capture_pieces(attention, layout, longest, adapters.adapted)
        if is_gpu:
            self._reserve(min(self._max_running * pages_per_sequence, layout.num_pages))
        return LoadedModel(
            forward_pass,
            self.model_config,
            self.dtype,
            self._eos_token_ids,
            self._attention_choice,
            self._max_running,
            layout,
            pools,
            tables,
            longest,
            graphs,
        )

    def _check_ranks(self, config: WorkerConfig) -> None:
        """Raises ValueError unless the configuration has the ranks and stages that there are."""
        if config.pp != self.stage.count or config.tp != self.stage.communicator.size:
            raise ValueError(
                f"tp={config.tp}, pp={config.pp}: a runner is one rank of {self.stage.communicator.size} "
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
        group, stage = self.stage.communicator, self.stage
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
        if choice.problem and self.stage.communicator.rank == 0:
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
        return Decoder(shard.config, parameters, self.dtype, self.stage.communicator)

    def _longest(self, config: WorkerConfig) -> int:
        """The longest sequence, in tokens, if the KV cache holds it: configured, or the model's."""
        return min(self.model_config.context_length, config.context_length or self.model_config.context_length)

    def _autotune(self, gemm_folder: Path | None) -> None:
        """Chooses the algorithms of matrix products. Before CUDA graphs are captured, which hold the choice."""
        sizes = product_sizes(self._max_running, self._max_graph_tokens)
        self._decoder.autotune_gemms(sizes, self._token_budget, gemm_folder)
        self._decoder.autotune_experts(self._token_budget, gemm_folder)

    def _warm_up(self) -> None:
        """Loads kernels that a step of a pipeline would otherwise load (`Decoder.warm_up`)."""
        if self.stage.count > 1:
            self._decoder.warm_up(self._max_running)

    def _allocate_adapters(self, shard: Shard, config: WorkerConfig) -> AdapterStore | None:
        """Allocates the slots of adapters; None for a replica without."""
        if not config.lora_slots:
            return None
        most_tokens = max(self._token_budget, self._max_running, self._max_graph_tokens)
        return AdapterStore(self._decoder, shard, config.lora_slots, config.max_lora_rank, most_tokens)

    def _allocate_logits(self) -> torch.Tensor:
        """Returns the output of CUDA graphs, float32 `[max_running, vocab_size]`. It is empty on a CPU, and has no
        columns on a stage before the last one."""
        if self.device.type == "cpu":
            return torch.empty(0)
        columns = self.model_config.vocab_size if self.stage.is_last else 0
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
        pools = self._allocate_pools(layout, batch.tables.shape[1])
        self._forward_pass.run(batch, token_ids, logit_indices, pools, begin=lambda: received)
        torch.cuda.synchronize(self.device)
        working_bytes = torch.cuda.max_memory_allocated(self.device) - before_bytes
        torch.cuda.empty_cache()
        return working_bytes

    def _allocate_pools(self, layout: KVLayout, pages_per_sequence: int) -> kv_pools.Pools:
        """Allocates all groups of a cache, with rows for the recurrent states of all slots."""
        states = kv_pools.allocate_states(self.model_config, layout, self._max_running, self.device, self.dtype)
        return kv_pools.Pools(self._allocate_attention(layout, pages_per_sequence), states)

    def _allocate_attention(self, layout: KVLayout, pages_per_sequence: int) -> AttentionBackend:
        """Allocates the pages of all groups, and returns the attention over them."""

        def make(shape: AttentionShape, pages: int, window: int | None, sinks: torch.Tensor | None) -> AttentionBackend:
            seen = pages_per_sequence
            if window is not None:
                seen = min(seen, -(-(window + self._max_graph_tokens) // layout.page_size) + 1)
            return self._allocate_pages(shape, pages, layout.page_size, seen, sinks)

        return kv_pools.build_attention(self.model_config.attention_shape, layout, self._decoder.sinks, make)

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
        return build_attention(self._attention_choice, kv, shape, limits, sinks, self._decoder.latent_weights)

    def _capture_graphs(self, pools: kv_pools.Pools, attention: GraphAttention, tables: PageTable) -> CudaGraphRunner:
        """Captures the CUDA graphs of short steps."""
        forward_pass = self._forward_pass
        shared = self._decoder, attention, forward_pass.last_tokens, self._logits
        adapted = None if forward_pass.adapters is None else forward_pass.adapters.adapted
        graphs = CudaGraphRunner(*shared, self._max_graph_tokens, forward_pass.begin, pools.states, adapted)
        with torch.inference_mode():
            graphs.capture(tables.rows[0], _show_capture)
        return graphs

    @torch.inference_mode()
    def _capture_pieces(
        self, attention: GraphAttention, layout: KVLayout, longest: int, adapted: AdaptedLayers | None = None
    ) -> PiecewiseGraphs | None:
        """Captures piecewise CUDA graphs for long steps, if they make steps faster. None in a pipeline. `longest`:
        tokens of a sequence. `adapted`: the layers of steps with adapters."""
        if self.stage.count > 1:
            return None
        max_tokens = min(self._token_budget, layout.num_pages * layout.page_size)
        sizes = mixed_sizes(self._max_graph_tokens, max_tokens)
        probe = partial(probe_step, layout=layout, longest=longest, device=self.device)
        return PiecewiseGraphs.if_faster(self._decoder, attention, sizes, probe, adapted)

    def _reserve(self, pages: int) -> None:
        """Makes the allocators hold as much memory as the steps in flight need at most. If they had to ask the driver
        for memory between steps, it might wait for all work that was launched, including a send to a stage that is
        behind. `pages`: most pages of a step."""
        steps = self.stage.count + 1
        reserve_pinned(8 * self._token_budget + 4 * pages, COPIES_A_STEP * steps)
        small = [torch.empty(1 << 20, dtype=torch.uint8, device=self.device) for _ in range(COPIES_A_STEP * steps)]
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        large = torch.empty(min(self._working_bytes, free_bytes // 2), dtype=torch.uint8, device=self.device)
        del small, large  # the allocator keeps their memory

    @property
    def _max_graph_tokens(self) -> int:
        """Tokens of the largest CUDA graph of a mixed step."""
        return min(MAX_GRAPH_TOKENS, self._token_budget)


def _check_speculation(config: WorkerConfig, model: DecoderConfig) -> None:
    """Raises ValueError if drafts are to be verified by a model with recurrent states."""
    if config.speculates and model.recurrent is not None:
        raise ValueError(
            f"speculation is {config.speculation}, which a {model.model_type} model does not support: drafts that turn "
            "out wrong would stay in its recurrent states. Set speculation to off, and no draft_model"
        )


def probe_step(tokens: int, *, layout: KVLayout, longest: int, device: torch.device) -> ProbeBatch:
    """Returns a step of `tokens` tokens in arbitrary pages, of sequences of at most `longest` tokens."""
    batch = _probe_batch(tokens, longest, layout.page_size)
    batch = replace(batch, tables=batch.tables % min(group.num_units for group in layout.paged))
    token_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    return ProbeBatch(batch, token_ids, torch.from_numpy(token_positions(batch)).to(device))


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
