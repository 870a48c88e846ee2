"""The weights of a layer's experts, as the kernels of GPUs read them."""

from typing import NamedTuple

import torch

from kernels.experts import mxfp4_weight
from kernels.experts.mxfp4_weight import Mxfp4Weight
from kernels.linear.fp8_format import GROUP
from kernels.linear.fp8_linear import Fp8Weight
from kernels.ops.activation import ClampedSwiGLU

ExpertWeight = torch.Tensor | Fp8Weight | Mxfp4Weight
"""The weights of a layer's experts for one of their products."""

_ALL_COLUMNS = 1 << 30
_DECODED = 256.0  # factor by which `kernels.experts.fp8_numbers` makes numbers too small


class ExpertScales(NamedTuple):
    """The scales of a weight in 8 bits: `factors`, float32 `[experts, groups, out]`, for groups of `columns` columns.
    The factor of `kernels.experts.fp8_numbers` is in them. Those of a weight in MXFP4: `Mxfp4Weight.scales`."""

    factors: torch.Tensor
    columns: int


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts: `[experts, 2 * size, hidden]`, gates first, and `[experts, hidden, size]`, both
    contiguous. `first` is the number of the first expert, `is_gelu` whether gates are activated by gelu. `clamped` is
    the activation in place of silu or gelu. The biases are `[experts, 2 * size]` and `[experts, hidden]`, contiguous,
    both or neither. Weights with scales are the bytes of e4m3, uint8, or both in MXFP4:
    `Mxfp4Weight.words`, int32.

    Experts that have no gate, by `is_gated`, have `[experts, size, hidden]` and `[experts, size]` in place of `gate_up`
    and its bias; their activation is the square of the relu, or gelu."""

    gate_up: torch.Tensor
    down: torch.Tensor
    first: int
    is_gelu: bool
    clamped: ClampedSwiGLU | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_scales: ExpertScales | None = None
    down_scales: ExpertScales | None = None
    is_gated: bool = True

    @property
    def clamp(self) -> tuple[float, float]:
        """LIMIT and ALPHA of `kernels.ops.fused.gated`."""
        return (0.0, 0.0) if self.clamped is None else (self.clamped.limit, self.clamped.alpha)

    @property
    def is_mxfp4(self) -> bool:
        """Whether both weights are in MXFP4."""
        return self.down.dtype == torch.int32

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of experts, hidden size, and intermediate size of an expert."""
        if self.is_mxfp4:
            return len(self.down), self.down.shape[2], self.gate_up.shape[2] // 2
        count, hidden, size = self.down.shape
        return count, hidden, size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations; bfloat16 if all weights are in 4 or 8 bits."""
        return next((x.dtype for x in (self.gate_up, self.down) if x.is_floating_point()), torch.bfloat16)


def in_memory(weight: ExpertWeight) -> tuple[torch.Tensor, ExpertScales | None]:
    """The weight `[experts, out, in]` as kernels read it, and its scales if it is in 4 or 8 bits."""
    if isinstance(weight, torch.Tensor):
        return weight.contiguous(), None
    if isinstance(weight, Mxfp4Weight):
        return weight.words, ExpertScales(weight.scales, mxfp4_weight.GROUP)
    columns = GROUP if weight.scales.shape[2] > 1 else _ALL_COLUMNS
    factors = weight.scales.transpose(1, 2).contiguous().mul_(_DECODED)
    return weight.values.view(torch.uint8).contiguous(), ExpertScales(factors, columns)


def precision(dtype: torch.dtype) -> str:
    """How Triton multiplies states of this dtype: float32 in full, as everywhere in a float32 model."""
    return "ieee" if dtype == torch.float32 else "tf32"
