"""Storage for keys and values: how many pages there are, and the tensor that holds them."""

from pathlib import Path

import torch

from worker.models.config import DecoderConfig

# On a CPU the cache shares the memory with everything else, and with the other replicas of the machine.
CPU_MEMORY_FRACTION = 0.25
CPU_MAX_TOKENS = 131_072
# CUDA graphs are captured after the cache is allocated, since they hold its address. Their activations fit what the
# largest step took; this is for what the driver keeps of each.
GRAPHS_BYTES = 1 << 30


def token_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes that one token's keys and values take in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def num_pages(tokens: int, page_size: int) -> int:
    """Whole pages in so many tokens. Raises ValueError if there is none."""
    pages = tokens // page_size
    if pages < 1:
        raise ValueError(
            f"a KV cache of {tokens} tokens does not hold one page of {page_size}: free memory or set kv_tokens"
        )
    return pages


def cpu_tokens(bytes_per_token: int) -> int:
    """Tokens that the KV cache may hold on a CPU when nobody says how many."""
    return min(CPU_MAX_TOKENS, int(available_memory_bytes() * CPU_MEMORY_FRACTION) // bytes_per_token)


def gpu_tokens(bytes_per_token: int, device: torch.device, fraction: float) -> int:
    """Tokens that fit beside the weights and the activations of the largest step, which must have run already: its
    peak is read from the allocator. Weights, activations, graphs and cache together take `fraction` of its memory."""
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return max(0, int(total * fraction - others - peak - GRAPHS_BYTES)) // bytes_per_token


def allocate(
    config: DecoderConfig, pages: int, page_size: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Pages as `kernels.attention` lays them out. Not filled: on a CPU, memory is taken as pages are first written."""
    shape = (config.num_layers, 2, pages, config.num_kv_heads, page_size, config.head_dim)
    return torch.empty(shape, device=device, dtype=dtype)


def available_memory_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process could still take: the machine's available memory, or less in a container (cgroup v2, mounted
    at `group`). Files that were read, such as a model's weights, count as used there: the kernel drops those that
    nobody uses before it lets anybody go short."""
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
