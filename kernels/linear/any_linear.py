"""The kinds of linear layers, by how they keep their weight."""

import torch

from kernels.linear.block_linear import BlockLinear
from kernels.linear.block_weight import BlockMatrix
from kernels.linear.fp8_linear import Fp8Linear, Fp8Weight
from kernels.linear.linear import Linear

AnyWeight = torch.Tensor | Fp8Weight | BlockMatrix
AnyLinear = Linear | Fp8Linear | BlockLinear


def make_linear(weight: AnyWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> AnyLinear:
    """The linear layer of a weight, `[out, in]`, and a bias, `[out]` or None. `dtype` is that of the activations."""
    if isinstance(weight, Fp8Weight):
        return Fp8Linear(weight, bias, dtype)
    return BlockLinear(weight, bias) if isinstance(weight, BlockMatrix) else Linear(weight, bias)
