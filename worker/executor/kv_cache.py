"""Memory of the KV cache: the number of pages, and the tensor that holds them."""

from pathlib import Path

import torch

from kernels.attention.interface import AttentionShape
from worker.models.config import DecoderConfig

GPU_MEMORY_FRACTION = 0.9
CPU_MEMORY_FRACTION = 0.25  # the KV cache shares the memory with everything else
CPU_MAX_TOKENS = 131_072
# CUDA graphs are captured after the KV cache is allocated, because they hold its address. Their activations fit into
# the memory of the largest step. These bytes are for what the driver keeps for each graph.
GRAPHS_BYTES = 1 << 30


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


def allocate(
    shape: AttentionShape, pages: int, page_size: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Allocates pages of the layers of `shape` in the layout of `kernels.attention.interface`, uninitialized. On a CPU,
    a page takes memory only once it is written."""
    tensors = 2 if shape.latent is None else 1  # keys and values, or latents alone
    sizes = (len(shape.windows), tensors, pages, shape.num_kv_heads, page_size, shape.head_dim)
    return torch.empty(sizes, device=device, dtype=dtype)


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
