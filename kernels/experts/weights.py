"""The weights of a layer's experts, as the kernels of GPUs read them."""

from typing import NamedTuple

import torch

from kernels.ops.activation import ClampedSwiGLU


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts: `[experts, 2 * size, hidden]`, gates first, and `[experts, hidden, size]`, both
    contiguous. `first` is the number of the first expert, `is_gelu` whether gates are activated by gelu. `clamped` is
    the activation in place of silu or gelu. The biases are `[experts, 2 * size]` and `[experts, hidden]`, contiguous,
    both or neither."""

    gate_up: torch.Tensor
    down: torch.Tensor
    first: int
    is_gelu: bool
    clamped: ClampedSwiGLU | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def clamp(self) -> tuple[float, float]:
        """LIMIT and ALPHA of `kernels.ops.fused.gated`."""
        return (0.0, 0.0) if self.clamped is None else (self.clamped.limit, self.clamped.alpha)
