"""Pages of windows: memory for the layers that see a window of the last tokens only, and attention over both kinds of
pages.

A sequence holds the window's pages, whatever its length, and a cached prefix those before the positions from which it
can be continued. So these layers need fewer pages than the others, and the memory that this frees holds more tokens.
"""

import math
from collections.abc import Callable

import torch

from kernels.attention.interface import AttentionBackend, AttentionShape, GraphAttention
from kernels.attention.window_pages import WindowPagesAttention, WindowPagesGraphAttention, of_windows
from worker.config import WorkerConfig
from worker.executor import kv_cache
from worker.models.config import DecoderConfig

# Pages of windows, for each page of the other layers: as many as a mix of sequences needs that are `MORE_TOKENS` longer
# than the window, running or cached, each with one window; and a quarter at least, because short sequences have as many
# of one kind as of the other. Tuned on Gemma 3 12B's shape with a window of 1,024 tokens, so a quarter
# (`python -m bench.fleet.checkpoint_hits --windows gemma3-12b --kv-tokens 400000 --count 300`): of short prompts with
# shared prefixes, 0.97 is found of what is found in the same memory without; 0.87 with an eighth, 1.04 with a half.
# Of long sequences the memory holds 2.6 times as many tokens; 3.6 and 1.7 times.
MORE_TOKENS, LEAST_SHARE = 3072, 1 / 4


def window_tokens(whole: DecoderConfig, longest: int, config: WorkerConfig) -> int | None:
    """Returns the window of the layers that get pages of their own; None if there are none, or nothing is gained: the
    window is as long as sequences are. `whole`: the model without any cut. `longest`: the longest sequence."""
    windows = {window for window in whole.windows if window is not None}
    if len(windows) != 1 or config.window_kv_tokens == 0 or whole.latent is not None or whole.recurrent is not None:
        return None
    (window,) = windows
    return window if window < longest else None


def num_pages(window: int, kv_pages: int, config: WorkerConfig) -> int:
    """Returns the number of window pages next to `kv_pages` pages of the other layers. Raises ValueError if fewer are
    configured than one sequence may need."""
    least = _least_pages(window, kv_pages, config.page_size)
    if (configured := config.window_kv_tokens) is None:
        chunk = -(-config.token_budget // config.page_size)
        return max(math.ceil(_share(window) * kv_pages), min(least + chunk, 2 * kv_pages))
    if configured < least * config.page_size:
        raise ValueError(
            f"window_kv_tokens {configured} does not hold the windows of one sequence: set at least "
            f"{least * config.page_size}, or 0 for none"
        )
    return configured // config.page_size


def bytes_of(window: int, own: DecoderConfig, dtype: torch.dtype, config: WorkerConfig) -> tuple[int, int]:
    """Returns a rank's bytes for each token of KV, with a part of the window pages, and the bytes of further window
    pages. `own`: the rank's part of the model."""
    windowed = [index for index in own.kv_layers if own.windows[index] is not None]
    with_window = sum(kv_cache.layer_bytes(own, index, dtype) for index in windowed)
    full = kv_cache.token_bytes(own, dtype) - with_window
    if config.window_kv_tokens is not None:
        return max(1, full), config.window_kv_tokens * with_window
    page = config.page_size
    least = (_least_pages(window, 1 << 30, page) + -(-config.token_budget // page)) * page
    return full + math.ceil(_share(window) * with_window), least * with_window


def build(
    shape: AttentionShape,
    sinks: torch.Tensor | None,
    make: Callable[[AttentionShape, bool, torch.Tensor | None], AttentionBackend],
) -> AttentionBackend:
    """Builds the attention over both kinds of pages. `make`: allocates the pages of layers with a window (True) or of
    the others, of a shape and sinks, and builds the attention over them."""
    pools = list[AttentionBackend | None]()
    for has_window in (False, True):
        own, layers = of_windows(shape, has_window)
        pools.append(make(own, has_window, None if sinks is None else sinks[layers]) if layers else None)
    full, windowed = pools
    graphs = [pool if isinstance(pool, GraphAttention) else None for pool in pools]
    if any(graphs):
        return WindowPagesGraphAttention(shape, *graphs)
    return WindowPagesAttention(shape, full, windowed)


def _share(window: int) -> float:
    return max(LEAST_SHARE, window / (window + MORE_TOKENS))


def _least_pages(window: int, kv_pages: int, page_size: int) -> int:
    """Pages with which one sequence runs: those that it reads from the tree, as many of its own, and the next ones."""
    return min(2 * (-(-window // page_size) + 1) + 1, 2 * kv_pages)
