"""One rank's half of a step: page tables, the forward pass, logits. Sampling and scheduling are elsewhere."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from kernels import flashinfer_attention
from kernels.attention import AttentionBackend, AttentionBatch, GraphAttention, token_positions
from kernels.torch_attention import TorchAttention
from kernels.transfer import all_to_device, reserve_pinned
from pipeline.meter import Span
from pipeline.rows import MOST_TOKENS, quarters
from worker import kv_cache
from worker.batch import PROMPT_LOGIT_ROWS
from worker.config import WorkerConfig
from worker.graphs import StepGraphs, product_sizes
from worker.models.config import decoder_config, read_config
from worker.models.decoder import Decoder
from worker.models.shard import Shard
from worker.pieces import Pieces, Trial
from worker.plan import Plan
from worker.stage import Stage
from worker.stopwatch import Stopwatch
from worker.tables import PageTables
from worker.weights import Progress, load_weights

logger = logging.getLogger(__name__)

# What keeps a GPU busy: prefill is bound by its arithmetic, and decoding reads the weights for many sequences at once.
GPU_MAX_RUNNING = 256
GPU_TOKEN_BUDGET = 8192
COPIES = 4  # to the device or back, of a step that is not a graph

FP8_CAPABILITY = (8, 9)  # the first with matrix products in 8-bit floating point


class Ran(NamedTuple):
    """When a stage computed a step."""

    stage: int
    step: int
    span: Span


class Runner:
    """Runs plans. Its only state besides the KV pages is a page table a slot, kept as `worker.plan` says.

    `model` is a Hugging Face folder. `context_length` is the longest sequence that may run: the configured one, or else
    the model's, but never more than the KV cache holds.
    """

    def __init__(
        self, model: Path, config: WorkerConfig, progress: Progress | None = None, stage: Stage | None = None
    ) -> None:
        """Load this rank's weights, allocate its KV pages. `stage`: its place among all ranks of the replica, which do
        the same.

        Raises ValueError if the model or the configuration will not do.
        """
        config = settled(config)
        self.stage = stage or Stage.only()
        self.group = self.stage.group
        if config.pp != self.stage.count or config.tp != self.group.size:
            raise ValueError(
                f"tp={config.tp}, pp={config.pp}: a runner is one rank of {self.group.size} in one stage of "
                f"{self.stage.count}"
            )
        if config.cpu_threads is not None:
            torch.set_num_threads(config.cpu_threads)
        self.device, self.dtype = place(config)
        self._samples = self.stage.is_last and self.group.rank == 0
        if self._samples:
            _say_place(config, self.device, self.dtype)
        hf = read_config(model)
        group, own = self.group, self.stage
        shard = Shard(decoder_config(hf), group.rank, group.size, own.index, own.count, config.cut)
        self.config = shard.config
        self.page_size = config.page_size
        self.vocab_size = self.config.vocab_size
        self.eos_token_ids = _eos_token_ids(model, hf.eos_token_id)
        self._max_running, self._token_budget = config.max_running, config.token_budget
        parameters = load_weights(
            model, shard, self.device, self.dtype, config.load_format, progress, config.quantization
        )
        self.stage.replica.meet()  # one may be long behind with its part
        self.decoder = Decoder(self.config, parameters, self.dtype, self.group)
        self._stopwatch = Stopwatch.of(self.device)
        # The last one is for what fills a batch up to a graph's size.
        self.last_tokens = torch.zeros(self._max_running + 1, dtype=torch.int64, device=self.device)
        self.likeliest: torch.Tensor | None = None
        self._pieces: Pieces | None = None
        self._logits = torch.empty(0, device=self.device)
        self._waits = False  # whether the step has tokens that only devices know
        self._working_bytes = 0  # what the largest step takes, if it was tried
        if self.device.type == "cuda":
            self.decoder.prepare(min(self.config.context_length, config.context_length or self.config.context_length))
            self.decoder.choose_products(product_sizes(self._max_running, self._graph_tokens), self._token_budget)
            if self.stage.count > 1:
                self.decoder.warm(self._max_running)
            columns = self.vocab_size if self.stage.is_last else 0
            self._logits = torch.empty(self._max_running, columns, dtype=torch.float32, device=self.device)
        self.num_pages = self._num_pages(config)
        self.context_length = self._context_length(config)
        pages_per_row = -(-self.context_length // self.page_size)
        self._tables = PageTables(self._max_running, pages_per_row, self.page_size)
        self._attention = self._backend(self.num_pages, pages_per_row)
        self._graphs: StepGraphs | None = None
        if isinstance(self._attention, GraphAttention):
            shared = self.decoder, self._attention, self.last_tokens, self._logits
            self._graphs = StepGraphs(*shared, self._graph_tokens, self._begin)
            with torch.inference_mode():
                self._graphs.capture(self._tables.rows, _show_capture)
            if self.stage.count == 1:
                self._pieces = self._in_pieces(self._attention)
        if self.device.type == "cuda":
            self._reserve(pages_per_row)

    def expect(self, plan: Plan) -> None:
        """Get ready for a plan that the stages before have been sent, ahead of its `forward`, in the plans' order."""
        if self.stage.before is not None:
            self.stage.expect(plan.num_tokens, self.config.hidden_size, self.dtype)
        elif not plan.waits:
            self._stopwatch.came(plan.step)
        if self._samples and self.stage.count > 1 and plan.waits:
            self.stage.hand_back()

    @torch.inference_mode()
    def forward(self, plan: Plan) -> torch.Tensor:
        """Compute the plan's chunks. Returns float32 `[sum of num_logits, vocab_size]` on `device`, chunk after chunk,
        which holds until the next call. On a GPU the work is begun, not waited for; where it is a graph it leaves in
        `likeliest` the tokens that have the largest of these logits (`kernels.likeliest`), and those are `last_tokens`
        of their slots. A stage that is not the last sends its output to the next one and returns no rows.

        Raises ValueError if a chunk lies outside its slot's pages, which no right scheduler asks for.
        """
        self._tables.update(plan)
        self._waits = self.config.is_first and plan.waits
        out = self._computed(plan)
        if not self._samples:
            self._stopwatch.end(plan.step)
        if self.stage.is_last:
            return out
        self.stage.send(out)
        return out.new_empty((0, self.vocab_size), dtype=torch.float32)

    def sampled(self, plan: Plan) -> None:
        """To be called on the rank beside the sampler, where a plan's part ends with the choice of its tokens, which
        are `last_tokens` then. Plans that are expected from now on may have them as pending."""
        self._stopwatch.end(plan.step)
        self.stage.keep(self.last_tokens)

    def ran(self) -> list[Ran]:
        """The steps that are over and were not told yet, in order. Waits for nothing. When a step's input came is known
        of the first stage, whose input is the plan; in its place stands, of the others, when they were ready for it."""
        return [Ran(self.stage.index, step, span) for step, span in self._stopwatch.take()]

    @property
    def is_running(self) -> bool:
        """Whether `ran` has something to tell, now or later."""
        return self._stopwatch.is_running

    def close(self) -> None:
        """Leave the other ranks. Nothing can be run afterwards."""
        if self._graphs is not None:
            self._graphs.close()
        if self._pieces is not None:
            self._pieces.close()
        self.stage.close()

    def _computed(self, plan: Plan) -> torch.Tensor:
        """The plan's logits, or what is to be passed on."""
        if self._graphs is not None and plan.num_tokens == len(plan) and plan.num_logits.all():
            batch = AttentionBatch(self._tables.rows, plan.slots, plan.starts, plan.lengths)
            out, self.likeliest = self._graphs.run(batch, plan.token_ids)
            return out
        self.likeliest = None
        # Chunks of one token first, for the attention; their logits come out in the plan's order all the same.
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
            out, self.likeliest = self._graphs.run(batch, token_ids, rows, owners)
            return out
        return self._step(batch, token_ids.astype(np.int64), rows, self._attention, self._begin)

    def _begin(self) -> torch.Tensor | None:
        """To be called when all else of a step is on its way to the device: gives what the stage before made of its
        tokens, if there is one."""
        before = None
        if self.stage.before is not None:
            self._stopwatch.ready()
            before = self.stage.receive(self.config.hidden_size)
        elif self._waits:
            if self.stage.count > 1:
                self._stopwatch.ready()
            self.stage.take_back(self.last_tokens)
        self._stopwatch.begin()
        return before

    def _step(
        self,
        batch: AttentionBatch,
        token_ids: np.ndarray,
        rows: np.ndarray,
        attention: AttentionBackend,
        begin: Callable[[], torch.Tensor | None],
    ) -> torch.Tensor:
        """The logits after the tokens at `rows` (int64) of the batch; from a stage that is not the last, what it made
        of all tokens. One that is not the first goes on from what `begin` gives."""
        attention.plan(batch)
        arrays = [token_ids, token_positions(batch), rows]
        if self._waits:
            arrays.append(np.repeat(batch.rows, batch.lengths).astype(np.int64))
        given, positions, wanted, *slots = all_to_device(arrays, self.device)
        if (before := begin()) is not None:
            given = before
        elif self._waits:
            given = torch.where(given < 0, self.last_tokens[slots[0]], given)
        if not self.stage.is_last:
            return self.decoder.hidden(given, positions, attention)
        layers = self.decoder if self._pieces is None else self._pieces
        return self.decoder.logits(layers.hidden(given, positions, attention, wanted))

    @torch.inference_mode()
    def _in_pieces(self, attention: GraphAttention) -> Pieces | None:
        """Long steps in pieces, if that gains something."""
        most = min(self._token_budget, self.num_pages * self.page_size)
        return Pieces.where_they_gain(self.decoder, attention, quarters(self._graph_tokens, most), self._trial)

    def _trial(self, tokens: int) -> Trial:
        """A step of so many, wherever in the pages."""
        batch = _sequences(tokens, self.context_length, self.page_size)
        batch = replace(batch, tables=batch.tables % self.num_pages)
        given = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        return Trial(batch, given, torch.from_numpy(token_positions(batch)).to(self.device))

    def _num_pages(self, config: WorkerConfig) -> int:
        """What fits every rank: all have the same page tables."""
        tokens = config.kv_tokens
        if tokens is None:
            bytes_per_token = kv_cache.token_bytes(self.config, self.dtype)
            if self.device.type == "cuda":
                self._profile()
                tokens = kv_cache.gpu_tokens(bytes_per_token, self.device, config.kv_memory_fraction)
            else:
                tokens = kv_cache.cpu_tokens(bytes_per_token)
            tokens = self.stage.replica.least(tokens)
        return kv_cache.num_pages(tokens, self.page_size)

    @torch.inference_mode()
    def _profile(self) -> None:
        """Run the largest step once, with as many logits as a step may have, so that the allocator knows its peak."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before_bytes = torch.cuda.memory_allocated(self.device)
        length = min(self._token_budget, self.config.context_length)
        batch = _sequences(-(-self._token_budget // length) * length, length, self.page_size)
        rows = np.arange(min(PROMPT_LOGIT_ROWS + self._max_running, batch.num_tokens))
        token_ids = np.zeros(batch.num_tokens, dtype=np.int64)
        passed = torch.empty(0, device=self.device)
        if self.stage.count > 1:  # as much may be on its way
            shape = (self.stage.count + 1, len(token_ids), self.config.hidden_size)
            passed = torch.zeros(shape, dtype=self.dtype, device=self.device)
        before = None if self.stage.before is None else passed[0]
        self._step(batch, token_ids, rows, self._backend(batch.tables.size, batch.tables.shape[1]), lambda: before)
        torch.cuda.synchronize(self.device)
        self._working_bytes = torch.cuda.max_memory_allocated(self.device) - before_bytes
        torch.cuda.empty_cache()

    def _reserve(self, pages_per_row: int) -> None:
        """Has the allocators keep what the steps under way take at most. Where they have to ask the driver in the midst
        of steps, that may first wait for all that was launched: for what is sent to a stage that is behind, too."""
        steps = self.stage.count + 1
        pages = min(self._max_running * pages_per_row, self.num_pages)
        reserve_pinned(8 * self._token_budget + 4 * pages, COPIES * steps)
        small = [torch.empty(1 << 20, dtype=torch.uint8, device=self.device) for _ in range(COPIES * steps)]
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        large = torch.empty(min(self._working_bytes, free_bytes // 2), dtype=torch.uint8, device=self.device)
        del small, large  # nobody gives them back to the driver

    @property
    def _graph_tokens(self) -> int:
        """Tokens of the largest graph that is not of decodes."""
        return min(MOST_TOKENS, self._token_budget)

    def _backend(self, pages: int, pages_per_row: int) -> AttentionBackend:
        shape = self.config.attention_shape
        if self.device.type == "cpu":
            kv = kv_cache.allocate(self.config, pages, self.page_size, self.device, self.dtype)
            if self.dtype in (torch.float32, torch.bfloat16):
                # Imported only where it is used: a machine with a GPU does without numba.
                from kernels.numba_attention import NumbaAttention

                return NumbaAttention(kv, shape)
            return TorchAttention(kv, shape)
        # One page more, for whatever fills a batch up to a graph's size.
        kv = kv_cache.allocate(self.config, pages + 1, self.page_size, self.device, self.dtype)
        most = self._max_running, self._max_running * pages_per_row, max(self._max_running, self._graph_tokens)
        if flashinfer_attention.can_run(shape, self.dtype):
            return flashinfer_attention.FlashInferAttention(kv, shape, *most)
        # Imported only on a GPU: a machine without one does without Triton.
        from kernels.triton_attention import TritonAttention

        logger.info("FlashInfer has no attention for this model in %s: running Triton's", self.dtype)
        return TritonAttention(kv, shape, *most)

    def _context_length(self, config: WorkerConfig) -> int:
        own, held = self.config.context_length, self.num_pages * self.page_size
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
    """A step of so many tokens: sequences from their beginning, as long as may be, each in pages of its own."""
    count = -(-tokens // longest)
    length = min(tokens, longest)
    pages = -(-length // page_size)
    rows = np.arange(count, dtype=np.int32)
    lengths = np.full_like(rows, length)
    lengths[0] = tokens - (count - 1) * length  # the shortest first: it may be one token
    return AttentionBatch(rows[:, None] * pages + np.arange(pages, dtype=np.int32), rows, np.zeros_like(rows), lengths)


def _show_capture(done: int, total: int) -> None:
    if sys.stderr.isatty() or done == total:
        print(f"\rCUDA graphs: {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def place(config: WorkerConfig) -> tuple[torch.device, torch.dtype]:
    """Device and dtype, chosen where the configuration leaves it open. Raises ValueError if there is no such GPU, or
    none that can do what is asked."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ValueError("device is cuda, but PyTorch finds no GPU: set device to cpu or auto")
    on_gpu = config.device == "cuda" or (config.device == "auto" and has_gpu)
    name = config.dtype if config.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
    if config.quantization == "fp8" and on_gpu:
        if (capability := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
            own = ".".join(map(str, capability))
            raise ValueError(f"quantization is fp8, for GPUs from compute capability 8.9 on; this one has {own}")
        if name == "float32":
            raise ValueError(
                "quantization is fp8, beside which a GPU does not compute in float32: set dtype to bfloat16"
            )
    return torch.device("cuda" if on_gpu else "cpu"), getattr(torch, name)


def settled(config: WorkerConfig) -> WorkerConfig:
    """With the step of a GPU, if it runs on one, where nobody said how large a step should be."""
    if place(config)[0].type == "cpu":
        return config
    on_gpu = {"max_running": GPU_MAX_RUNNING, "token_budget": GPU_TOKEN_BUDGET}
    return config.model_copy(
        update={name: value for name, value in on_gpu.items() if name not in config.model_fields_set}
    )


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
    """Tokens that end a text: generation_config.json's, or else the configuration's. Raises ValueError, with the
    file's name, where that says something else."""
    path = model / "generation_config.json"
    if path.exists():
        try:
            said = msgspec.json.decode(path.read_bytes(), type=_Ends)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not as it should be: {error}") from None
        configured = configured if said.eos_token_id is msgspec.UNSET else said.eos_token_id
    if configured is None:
        return ()
    return (configured,) if isinstance(configured, int) else tuple(configured)


class _Ends(msgspec.Struct):
    """Of generation_config.json."""

    eos_token_id: int | list[int] | msgspec.UnsetType | None = msgspec.UNSET
