"""Inputs of a forward pass."""

from dataclasses import dataclass

import torch

from kernels.attention.interface import AttentionBackend
from kernels.ops.rotary import Rope
from kernels.recurrent.states import RecurrentStates


@dataclass(frozen=True)
class ForwardContext:
    """The inputs of a forward pass that all layers share.

    - `positions`: int64 `[n]`.
    - `attention`: the attention over the KV cache, which has planned the batch.
    - `angles`: on a CPU, cosines and sines of the positions for each rotary embedding of the model. None on a GPU:
      there the layers have tables.
    - `states`: of recurrent layers, which have planned the batch; None for a model without.
    """

    positions: torch.Tensor
    attention: AttentionBackend
    angles: dict[Rope, tuple[torch.Tensor, torch.Tensor]] | None
    states: RecurrentStates | None = None
