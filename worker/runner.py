"""One rank's half of a step: page tables, the forward pass, logits. Sampling and scheduling are elsewhere."""

import json
import logging
from pathlib import Path

import numpy as np
import torch

from kernels.attention import AttentionBackend, AttentionBatch, token_positions
from kernels.torch_attention import TorchAttention
from worker import kv_cache
from worker.config import WorkerConfig
from worker.models.config import decoder_config, read_config
from worker.models.decoder import Decoder
from worker.models.shard import Shard
from worker.parallel import Group
from worker.plan import Chunk, Plan
from worker.weights import Progress, load_weights

logger = logging.getLogger(__name__)


class Runner:
    """Runs plans. Its only state besides the KV pages is a page table a slot, kept as `worker.plan` says.

    `model` is a Hugging Face folder or a `.gguf` file. `context_length` is the longest sequence that may run: the
    configured one, or else the model's, but never more than the KV cache holds.
    """

    def __init__(
        self, model: Path, config: WorkerConfig, progress: Progress | None = None, group: Group | None = None
    ) -> None:
        """Load this rank's weights, allocate its KV pages. `group` are all ranks of the replica, which do the same.

        Raises ValueError if the model or the configuration will not do.
        """
        self.group = group or Group.single()
        if config.pp > 1 or config.tp != self.group.size:
            raise ValueError(f"tp={config.tp}, pp={config.pp}: a runner is one rank of {self.group.size}")
        if config.cpu_threads is not None:
            torch.set_num_threads(config.cpu_threads)
        self.device, self.dtype = _place(config)
        hf = read_config(model)
        shard = Shard(decoder_config(hf), self.group.rank, self.group.size)
        self.config = shard.config
        self.page_size = config.page_size
        self.vocab_size = self.config.vocab_size
        self.eos_token_ids = _eos_token_ids(model, hf.eos_token_id)
        parameters = load_weights(model, shard, self.device, self.dtype, config.load_format, progress)
        self.decoder = Decoder(self.config, parameters, self.group)
        self.num_pages = self._num_pages(config)
        self.context_length = self._context_length(config)
        self._attention = self._backend(self.num_pages)
        pages_per_row = -(-self.context_length // self.page_size)
        self._tables = np.zeros((config.max_running, pages_per_row), dtype=np.int32)
        self._num_table_pages = np.zeros(config.max_running, dtype=np.int64)

    @torch.inference_mode()
    def forward(self, plan: Plan) -> torch.Tensor:
        """Compute the plan's chunks. Returns float32 `[sum of num_logits, vocab_size]` on `device`, chunk after chunk.

        Raises ValueError if a chunk lies outside its slot's pages, which no right scheduler asks for.
        """
        for chunk in plan.chunks:
            self._update_table(chunk)
        return self._step(plan.chunks, self._tables, self._attention)

    def _step(self, chunks: list[Chunk], tables: np.ndarray, attention: AttentionBackend) -> torch.Tensor:
        batch = AttentionBatch(
            tables=tables,
            rows=np.array([c.slot for c in chunks], dtype=np.int32),
            starts=np.array([c.start for c in chunks], dtype=np.int32),
            lengths=np.array([len(c.token_ids) for c in chunks], dtype=np.int32),
        )
        attention.plan(batch)
        token_ids = np.concatenate([np.array(c.token_ids, dtype=np.int64) for c in chunks])
        hidden = self.decoder.hidden(self._tensor(token_ids), self._tensor(token_positions(batch)), attention)
        ends = np.cumsum(batch.lengths)
        rows = np.concatenate([np.arange(e - c.num_logits, e) for c, e in zip(chunks, ends, strict=True)])
        return self.decoder.logits(hidden[self._tensor(rows)])

    def _update_table(self, chunk: Chunk) -> None:
        slot = chunk.slot
        if chunk.reset:
            self._num_table_pages[slot] = 0
        first = int(self._num_table_pages[slot])
        last = first + len(chunk.pages)
        end = chunk.start + len(chunk.token_ids)
        if not end <= last * self.page_size or last > self._tables.shape[1]:
            raise ValueError(
                f"slot {slot}: a chunk to position {end} does not fit {last} pages of {self.page_size} tokens "
                f"in a table of {self._tables.shape[1]}"
            )
        self._tables[slot, first:last] = chunk.pages
        self._num_table_pages[slot] = last

    def _num_pages(self, config: WorkerConfig) -> int:
        tokens = config.kv_tokens
        if tokens is None:
            bytes_per_token = kv_cache.token_bytes(self.config, self.dtype)
            if self.device.type == "cuda":
                self._profile(config.token_budget)
                tokens = kv_cache.gpu_tokens(bytes_per_token, self.device, config.kv_memory_fraction)
            else:
                tokens = kv_cache.cpu_tokens(bytes_per_token)
            tokens = self.group.least(tokens)
        return kv_cache.num_pages(tokens, self.page_size)

    def _profile(self, num_tokens: int) -> None:
        """Run the largest step once, every token with logits, so that the allocator knows its peak."""
        num_tokens = min(num_tokens, self.config.context_length)
        pages = -(-num_tokens // self.page_size)
        chunk = Chunk(0, 0, [0] * num_tokens, list(range(pages)), True, num_tokens)
        with torch.inference_mode():
            self._step([chunk], np.arange(pages, dtype=np.int32)[None], self._backend(pages))
        torch.cuda.synchronize(self.device)

    def _backend(self, pages: int) -> AttentionBackend:
        kv = kv_cache.allocate(self.config, pages, self.page_size, self.device, self.dtype)
        if self.device.type == "cpu" and self.dtype in (torch.float32, torch.bfloat16):
            # Imported only where it is used: a machine with a GPU does without numba.
            from kernels.numba_attention import NumbaAttention

            return NumbaAttention(kv, self.config.attention_shape)
        return TorchAttention(kv, self.config.attention_shape)

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

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _place(config: WorkerConfig) -> tuple[torch.device, torch.dtype]:
    """Device and dtype, chosen where the configuration leaves it open; says in the log what was chosen."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ValueError("device is cuda, but PyTorch finds no GPU: set device to cpu or auto")
    on_gpu = config.device == "cuda" or (config.device == "auto" and has_gpu)
    name = config.dtype if config.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
    if on_gpu:
        logger.info("Running on %s in %s", torch.cuda.get_device_name(), name)
    else:
        found = "No GPU found: running" if config.device == "auto" else "Running"
        logger.info("%s on the CPU in %s", found, name)
    return torch.device("cuda" if on_gpu else "cpu"), getattr(torch, name)


def _eos_token_ids(model: Path, configured: int | list[int] | None) -> tuple[int, ...]:
    """Tokens that end a text: generation_config.json's, or else the configuration's."""
    path = model / "generation_config.json"
    if path.exists():
        configured = json.loads(path.read_text()).get("eos_token_id", configured)
    if configured is None:
        return ()
    return (configured,) if isinstance(configured, int) else tuple(configured)
