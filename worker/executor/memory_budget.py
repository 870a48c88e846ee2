"""How a rank's memory is divided: weights and activations, CUDA graphs, the groups of the cache, a draft model.

| part | bytes | where |
| --- | --- | --- |
| weights, activations of the largest step | the allocator's peak, or what is in use | `gpu_tokens`, `cpu_tokens` |
| CUDA graphs | `GRAPHS_BYTES` | `gpu_tokens` |
| a draft model | its weights, its keys and values | `DraftBytes` |
| recurrent states of slots, rows of checkpoints | `row_bytes` each | `KVBudget` |
| pages of windows, pages of all other layers | `layer_bytes` a token | `KVBudget` |

The result is the `KVLayout`. Its numbers of pages and rows are the same on all ranks. Weights or pages that lie in the
host's memory would be further lines of `KVBudget`.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from worker.config import WorkerConfig
from worker.kv_layout import Kind, KVGroup, KVLayout
from worker.models.config import DecoderConfig, decoder_config, read_config
from worker.models.layer_specs import roofline_model

GPU_MEMORY_FRACTION = 0.9
CPU_MEMORY_FRACTION = 0.25  # the KV cache shares the memory with everything else
CPU_MAX_TOKENS = 131_072
# CUDA graphs are captured after the KV cache is allocated, because they hold its address. Their activations fit into
# the memory of the largest step. These bytes are for what the driver keeps for each graph.
GRAPHS_BYTES = 1 << 30


# Bytes of checkpoints by default, for each byte of KV. A row of Qwen3.5-35B-A3B (63 MB) takes as much as the KV of
# 3,000 tokens, and a prompt of a few thousand tokens gets one or two.
ROW_BYTES_PER_KV_BYTE = 1.0
# Tokens of KV for each checkpoint, at least, by default. Rows of short convolutions are as small as the KV of 7 tokens
# (LFM2-1.2B), and few prompts are so short that more checkpoints would have a use.
TOKENS_PER_ROW = 64
# Pages of windows, for each page of the other layers: as many as a mix of sequences needs that are this much longer
# than the window, running or cached, each with one window; and a quarter at least, because short sequences have as many
# of one kind as of the other. Tuned on Gemma 3 12B's shape with a window of 1,024 tokens, so a quarter
# (`python -m bench.fleet.checkpoint_hits --windows gemma3-12b --kv-tokens 400000 --count 300`): of short prompts with
# shared prefixes, 0.97 is found of what is found in the same memory without; 0.87 with an eighth, 1.04 with a half.
# Of long sequences the memory holds 2.6 times as many tokens; 3.6 and 1.7 times.
WINDOW_MARGIN_TOKENS, MIN_WINDOW_SHARE = 3072, 1 / 4


class DraftBytes(NamedTuple):
    """Memory of a draft model next to the model that it drafts for.

    | field | meaning |
    | --- | --- |
    | `per_token` | bytes of a token's keys and values |
    | `fixed` | bytes of all else: weights; on a GPU also logits and CUDA graphs |
    """

    per_token: int = 0
    fixed: int = 0

    @classmethod
    def of(cls, model: Path, dtype: torch.dtype, device: torch.device, max_running: int) -> "DraftBytes":
        """Returns the memory of the model in a folder, for as many sequences at once."""
        config = decoder_config(read_config(model))
        sizes = roofline_model("", config)
        parameters = sizes.all_weights + (1 if config.tied_embeddings else 2) * sizes.head_weights
        fixed = int(parameters * dtype.itemsize)
        if device.type == "cuda":
            fixed += 4 * max_running * config.vocab_size + GRAPHS_BYTES
        return cls(token_bytes(config, dtype), fixed)


NO_DRAFT = DraftBytes()


@dataclass(frozen=True)
class KVBudget:
    """The groups of a model's cache, and what they take of a rank's memory.

    | field | meaning |
    | --- | --- |
    | `whole`, `own` | the model without any cut, and the rank's part of it |
    | `dtype` | of keys, values and inputs of convolutions |
    | `config` | page size, slots and what is configured of the groups' sizes |
    | `longest` | the longest sequence, in tokens |
    | `draft` | memory of a draft model, which gets as many pages |
    """

    whole: DecoderConfig
    own: DecoderConfig
    dtype: torch.dtype
    config: WorkerConfig
    longest: int
    draft: DraftBytes = NO_DRAFT

    @property
    def window(self) -> int | None:
        """The window of the layers that get pages of their own; None if there are none, or nothing is gained: the
        window is as long as sequences are."""
        windows = {window for window in self.whole.windows if window is not None}
        if len(windows) != 1 or self.config.window_kv_tokens == 0 or self.whole.latent is not None:
            return None
        (window,) = windows
        return window if window < self.longest else None

    def layout(self, tokens: int) -> KVLayout:
        """Returns the layout in which the first group holds `tokens` tokens. Raises ValueError if that is no page, or
        if fewer window pages are configured than one sequence may need."""
        page, own, window = self.config.page_size, self.own, self.window
        next_to = "" if self.config.draft_model is None else f" next to draft_model {self.config.draft_model}"
        pages = num_pages(tokens, page, next_to)
        windowed = self._windowed(own)
        full = [index for index in own.kv_layers if index not in windowed]
        kind_of_all: Kind = "full" if self.whole.latent is None else "latent"
        groups = [KVGroup(kind_of_all, (*full,), page * self._bytes(own, full), pages)]
        if window is not None:
            kind: Kind = "chunk" if self.whole.in_chunks else "window"
            unit_bytes = page * self._bytes(own, windowed)
            groups.append(KVGroup(kind, (*windowed,), unit_bytes, self._window_pages(window, pages), window))
        if self.whole.recurrent is not None:
            layers = () if own.recurrent is None else own.recurrent.layers
            of_states = tuple(index for index, has_states in enumerate(layers) if has_states)
            groups.append(KVGroup("states", of_states, row_bytes(own, self.dtype), self._rows(pages * page)))
        return KVLayout(page, tuple(groups))

    def probe_layout(self, pages: int) -> KVLayout:
        """Returns the layout with `pages` pages in every group, and no rows, for a step that only shows what it
        needs."""
        layout = self.layout(pages * self.config.page_size)
        groups = [replace(group, num_units=pages if group.is_paged else 0) for group in layout.groups]
        return KVLayout(layout.page_size, tuple(groups))

    def tokens(self, device: torch.device) -> int:
        """Returns the default capacity of the first group on this rank, in tokens. On a GPU, the largest step must have
        run already."""
        fraction = self.config.kv_memory_fraction
        if device.type == "cpu":
            return cpu_tokens(self.bytes_per_token, fraction, self.fixed_bytes)
        return gpu_tokens(self.bytes_per_token, device, fraction, self.fixed_bytes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes on this rank of each token that the first group holds, in all groups whose size follows from it."""
        own = token_bytes(self.own, self.dtype)
        if self.window is not None:
            with_window = self._bytes(self.own, self._windowed(self.own))
            of_windows = 0 if self.config.window_kv_tokens is not None else math.ceil(_share(self.window) * with_window)
            own = max(1, own - with_window + of_windows)
        if self.config.state_checkpoints is None and (row := row_bytes(self.whole, self.dtype)):
            own += math.ceil(self._row_bytes_per_token * row_bytes(self.own, self.dtype) / row)
        return own + self.draft.per_token

    @property
    def fixed_bytes(self) -> int:
        """Bytes on this rank of all else that is allocated with the cache."""
        rows = num_slot_rows(self.config.max_running) + (self.config.state_checkpoints or 0)
        fixed = self.draft.fixed + rows * row_bytes(self.own, self.dtype)
        if self.window is not None:
            page, tokens = self.config.page_size, self.config.window_kv_tokens
            if tokens is None:
                tokens = (_least_pages(self.window, 1 << 30, page) + -(-self.config.token_budget // page)) * page
            fixed += tokens * self._bytes(self.own, self._windowed(self.own))
        return fixed

    def _windowed(self, model: DecoderConfig) -> list[int]:
        """The layers with pages of their own."""
        return [] if self.window is None else [index for index in model.kv_layers if model.windows[index] is not None]

    def _bytes(self, model: DecoderConfig, layers: list[int]) -> int:
        """Bytes of a token in these layers."""
        return sum(layer_bytes(model, index, self.dtype) for index in layers)

    def _window_pages(self, window: int, pages: int) -> int:
        """Window pages next to `pages` pages of the other layers."""
        page = self.config.page_size
        least = _least_pages(window, pages, page)
        if (configured := self.config.window_kv_tokens) is None:
            chunk = -(-self.config.token_budget // page)
            return max(math.ceil(_share(window) * pages), min(least + chunk, 2 * pages))
        if configured < least * page:
            raise ValueError(
                f"window_kv_tokens {configured} does not hold the windows of one sequence: set at least "
                f"{least * page}, or 0 for none"
            )
        return configured // page

    def _rows(self, tokens: int) -> int:
        """Rows of checkpoints next to `tokens` tokens: as many as are configured, or take the bytes of the pages, and
        at most one for `TOKENS_PER_ROW`. By the whole model, so that all ranks have the same number."""
        if self.config.state_checkpoints is not None:
            return self.config.state_checkpoints
        return int(tokens * self._row_bytes_per_token) // row_bytes(self.whole, self.dtype)

    @property
    def _row_bytes_per_token(self) -> float:
        """Bytes of checkpoints of the whole model for each token."""
        of_kv = float(token_bytes(self.whole, self.dtype))
        if self.window is not None:
            of_kv -= (1 - _share(self.window)) * self._bytes(self.whole, self._windowed(self.whole))
        return min(ROW_BYTES_PER_KV_BYTE * of_kv, row_bytes(self.whole, self.dtype) / TOKENS_PER_ROW)


def _share(window: int) -> float:
    return max(MIN_WINDOW_SHARE, window / (window + WINDOW_MARGIN_TOKENS))


def _least_pages(window: int, kv_pages: int, page_size: int) -> int:
    """Pages with which one sequence runs: those that it reads from the tree, as many of its own, and the next ones."""
    return min(2 * (-(-window // page_size) + 1) + 1, 2 * kv_pages)


def row_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one sequence's states in all layers of a rank; 0 without recurrent layers."""
    recurrent = config.recurrent
    return 0 if recurrent is None else recurrent.num_layers * recurrent.states.row_bytes(dtype)


def num_slot_rows(slots: int) -> int:
    """Returns the number of rows of states before the first checkpoint: one a slot, and one for padding."""
    return slots + 1


def token_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one token's keys and values in all layers with attention, or of its latents and rotated
    keys."""
    return sum(layer_bytes(config, index, dtype) for index in config.kv_layers)


def layer_bytes(config: DecoderConfig, index: int, dtype: torch.dtype) -> int:
    """Returns the bytes of one token's keys and values, or of its latent and rotated key, in layer `index`."""
    own = config.of_layer(index)
    return (2 if config.latent is None else 1) * own.num_kv_heads * own.head_dim * dtype.itemsize


def num_pages(tokens: int, page_size: int, next_to: str = "") -> int:
    """Returns the number of whole pages in `tokens` tokens. Raises ValueError if there is none. `next_to`: what else
    the memory holds, for the error."""
    pages = tokens // page_size
    if pages < 1:
        raise ValueError(
            f"a KV cache of {tokens} tokens{next_to} does not hold one page of {page_size}: free memory or set "
            "kv_tokens"
        )
    return pages


def context_length(configured: int | None, model: int, capacity: int) -> int:
    """Returns the longest sequence that a replica serves, in tokens: the configured length, or else the model's own, at
    most the cache's `capacity`. Raises ValueError if the configured length is more than either."""
    if configured is None:
        return min(model, capacity)
    if configured > model:
        raise ValueError(f"context_length {configured} is more than the model's own, {model}")
    if configured > capacity:
        raise ValueError(
            f"context_length {configured} is more than the KV cache holds, {capacity} tokens: "
            "lower it, or set kv_tokens"
        )
    return configured


def cpu_tokens(bytes_per_token: int, fraction: float | None = None, reserved_bytes: int = 0) -> int:
    """Returns the default capacity of the KV cache on a CPU, in tokens. `fraction` is the part of the available memory
    that it may take, by default `CPU_MEMORY_FRACTION`; at most `CPU_MAX_TOKENS`. `reserved_bytes` stay free."""
    fraction = fraction or CPU_MEMORY_FRACTION
    available = max(0, available_memory_bytes() - reserved_bytes)
    return min(CPU_MAX_TOKENS, int(available * fraction) // max(1, bytes_per_token))


def gpu_tokens(
    bytes_per_token: int, device: torch.device, fraction: float | None = None, reserved_bytes: int = 0
) -> int:
    """Returns the default capacity of the KV cache on a GPU, in tokens. `reserved_bytes` stay free.

    Weights, activations, CUDA graphs and KV cache together take `fraction` of the GPU's memory, by default
    `GPU_MEMORY_FRACTION`. The largest step must have run already: the peak memory of weights and activations is read
    from the allocator.
    """
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device)
    others = total - free - torch.cuda.memory_reserved(device)
    usable = int(total * (fraction or GPU_MEMORY_FRACTION)) - others - peak - GRAPHS_BYTES - reserved_bytes
    return max(0, usable) // bytes_per_token


def available_memory_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes that this process could still allocate: the machine's available memory, or less in a container
    (cgroup v2, mounted at `group`). A cgroup counts files that were read, such as a model's weights, as used memory.
    Those that are inactive count as available here: the kernel drops them when memory runs short."""
    available = _meminfo_available_bytes()
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used + int(stat["inactive_file"])))


def _meminfo_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo does not say how much memory is available: set kv_tokens")
