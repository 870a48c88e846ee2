"""A linear layer that adds the products of adapters (LoRA)."""

import torch

from kernels.linear.any_linear import AnyLinear
from kernels.linear.linear import Linear
from kernels.lora.lora_weights import LoraWeights
from kernels.lora.segments import Segments


class AdaptedLinear:
    """A linear layer and its adapters. Takes the place of an `AnyLinear`, and shares its weight.

    The kernels that take a `Linear` apart (`OneTokenStream`) do not know this class, and leave it to its calls.
    """

    def __init__(self, base: AnyLinear, weights: LoraWeights, segments: Segments) -> None:
        self._base, self.weights, self._segments = base, weights, segments
        self.adds = isinstance(base, Linear) and base.adds

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """As `Linear.__call__`, for the tokens that the segments have taken."""
        y = self._base(x, out)
        self.weights.add(x, y, self._segments)
        return y

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """As `Linear.add_to`; only if `adds`."""
        assert isinstance(self._base, Linear)
        self._base.add_to(residual, x)
        self.weights.add(x, residual, self._segments)
