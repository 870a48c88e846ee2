"""The weights of a layer's experts, as the kernels of GPUs read them."""

from typing import NamedTuple

import torch


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts: `[experts, 2 * size, hidden]`, gates first, and `[experts, hidden, size]`, both
    contiguous. `first` is the number of the first expert, `is_gelu` whether gates are activated by gelu."""

    gate_up: torch.Tensor
    down: torch.Tensor
    first: int
    is_gelu: bool
