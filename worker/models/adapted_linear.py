"""A linear layer that adds the products of adapters (LoRA)."""

import torch

from kernels.linear.any_linear import AnyLinear
from kernels.linear.linear import Linear
from kernels.lora.lora_weights import LoraWeights
from kernels.lora.segments import Segments


class AdaptedLinear:
    """A linear layer and its adapters. Takes the place of an `AnyLinear`, and shares its weight.

    The kernels that take a `Linear` apart (`OneTokenStream`) do not know this class, and leave it to its calls. On a
    GPU the base weight's product is added to those of the adapters, where it can be: their kernels then follow the
    kernel that gives x, and read A and B while that one still runs, which they could not behind cuBLAS's.
    """

    def __init__(self, base: AnyLinear, weights: LoraWeights, segments: Segments) -> None:
        self._base, self.weights, self._segments = base, weights, segments
        self.adds = isinstance(base, Linear) and base.adds
        self._adapters_first = self.adds and weights.a.is_cuda and weights.is_complete

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """As `Linear.__call__`, for the tokens that the segments have taken."""
        if not self._adapters_first:
            y = self._base(x, out)
            self.weights.add(x, y, self._segments)
            return y
        y = x.new_empty(len(x), self.weights.b.shape[1]) if out is None else out
        self.weights.add(x, y, self._segments, replaces=True)
        self._add_base(y, x)
        return y

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """As `Linear.add_to`; only if `adds`."""
        self.weights.add(x, residual, self._segments)
        self._add_base(residual, x)

    def _add_base(self, y: torch.Tensor, x: torch.Tensor) -> None:
        assert isinstance(self._base, Linear)
        self._base.add_to(y, x)
