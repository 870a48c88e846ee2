"""The tensors of a cache, one pool for each group of its layout, and what reads and writes them.

Layers that see all tokens have one tensor of pages, and those with a window another, where the layout has such a group.
Layers with heads of another size need a tensor of their own as well; it then has the pages of the first group. Row s of
the recurrent states is the state of the running sequence in slot s. The row after those of the slots is for padding of
a batch to a CUDA graph's size. The rows after it are checkpoints: copies of states that later sequences go on from.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from kernels.attention.interface import AttentionBackend, AttentionBatch, AttentionShape, GraphAttention
from kernels.attention.window_pages import WindowPagesAttention, WindowPagesGraphAttention, of_windows
from kernels.recurrent.states import RecurrentStates, StateBatch
from kernels.recurrent.torch_states import TorchStates
from worker.executor.memory_budget import num_slot_rows
from worker.kv_layout import KVLayout
from worker.models.config import DecoderConfig


class Pools(NamedTuple):
    """The tensors of a cache. `attention`: the pages of all groups, and what reads and writes them. `states`: the rows
    of recurrent layers, if the model has any."""

    attention: AttentionBackend
    states: RecurrentStates | None

    def plan(self, batch: AttentionBatch, copies: np.ndarray | None = None) -> None:
        """Prepares the next step. `copies`: as `StateBatch.copies`, none by default."""
        self.attention.plan(batch)
        if self.states is not None:
            own = () if copies is None else (copies,)
            self.states.plan(StateBatch(batch.rows, batch.starts, batch.lengths, *own))


def allocate(
    shape: AttentionShape, pages: int, page_size: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Allocates pages of the layers of `shape` in the layout of `kernels.attention.interface`, uninitialized. On a CPU,
    a page takes memory only once it is written."""
    tensors = 2 if shape.latent is None else 1  # keys and values, or latents alone
    sizes = (len(shape.windows), tensors, pages, shape.num_kv_heads, page_size, shape.head_dim)
    return torch.empty(sizes, device=device, dtype=dtype)


def build_attention(
    shape: AttentionShape,
    layout: KVLayout,
    sinks: torch.Tensor | None,
    make: Callable[[AttentionShape, int, int | None, torch.Tensor | None], AttentionBackend],
) -> AttentionBackend:
    """Builds the attention of all layers. `make`: allocates pages of layers, and builds the attention over them, from
    their shape, the number of pages, their window if the group has one, and their sinks."""
    first, last = layout.paged[0], layout.paged[-1]
    if first is last and shape.full_heads is None and not shape.in_chunks:
        return make(shape, first.num_units, None, sinks)
    pools = list[AttentionBackend | None]()
    for has_window, group in ((False, first), (True, last)):
        own, layers = of_windows(shape, has_window)
        own_sinks = None if sinks is None else sinks[layers]
        pools.append(make(own, group.num_units, group.window_tokens or None, own_sinks) if layers else None)
    full, windowed = pools
    graphs = [pool if isinstance(pool, GraphAttention) else None for pool in pools]
    if any(graphs):
        return WindowPagesGraphAttention(shape, *graphs)
    return WindowPagesAttention(shape, full, windowed)


def allocate_states(
    config: DecoderConfig, layout: KVLayout, slots: int, device: torch.device, dtype: torch.dtype
) -> RecurrentStates | None:
    """Allocates the rows of slots, of padding and of checkpoints; None without recurrent layers. On a CPU, a row takes
    memory only once it is written."""
    if config.recurrent is None or not config.recurrent.num_layers:
        return None
    states, layers = config.recurrent.states, config.recurrent.num_layers
    heads = (states.value_heads, states.value_dim, states.key_dim)
    rows = num_slot_rows(slots) + sum(group.num_units for group in layout.of_kind("states"))
    recurrent = torch.empty(layers, rows, *heads, dtype=torch.float32, device=device)
    inputs = torch.empty(layers, rows, states.channels, states.width - 1, dtype=dtype, device=device)
    if device.type != "cuda":
        return TorchStates(recurrent, inputs, states)
    from kernels.recurrent.triton_states import TritonStates

    recurrent[:, slots].zero_()  # padding has numbers, whatever it does to them
    inputs[:, slots].zero_()
    return TritonStates(recurrent, inputs, states)
