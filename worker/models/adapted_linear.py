"""A linear layer that adds the products of adapters (LoRA)."""

from functools import cache

import torch

from kernels.linear.any_linear import AnyLinear
from kernels.linear.linear import Linear
from kernels.lora.lora_weights import LoraWeights
from kernels.lora.segments import Segments


class AdaptedLinear:
    """A linear layer and its adapters. Takes the place of an `AnyLinear`, and shares its weight.

    The kernels that take a `Linear` apart (`OneTokenStream`) do not know this class, and leave it to its calls. On a
    GPU the products of the adapters are computed on a stream of their own, next to that of the base weight, and the
    operator that reads the sum next may add them (`apart`, `add_to`).
    """

    def __init__(self, base: AnyLinear, weights: LoraWeights, segments: Segments) -> None:
        self._base, self.weights, self._segments = base, weights, segments
        self.adds = isinstance(base, Linear) and base.adds
        self._beside: torch.cuda.Stream | None = None
        if weights.a.is_cuda and weights.is_complete:
            self._beside = _stream_beside(weights.a.device)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """As `Linear.__call__`, for the tokens that the segments have taken."""
        y, added = self.apart(x, out)
        return y if added is None else y.add_(added)

    def apart(self, x: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[n, out]` twice: the result is the sum of both, or the first alone where the second is None."""
        if self._beside is None:
            y = self._base(x, out)
            self.weights.add(x, y, self._segments)
            return y, None
        added = self._products_beside(x)
        y = self._base(x, out)
        torch.cuda.current_stream().wait_stream(self._beside)
        return y, added

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """As `Linear.add_to`; only if `adds`. Returns what the caller has to add still, `[n, out]`, if anything."""
        assert isinstance(self._base, Linear)
        if self._beside is None:
            self._base.add_to(residual, x)
            self.weights.add(x, residual, self._segments)
            return None
        added = self._products_beside(x)
        self._base.add_to(residual, x)
        torch.cuda.current_stream().wait_stream(self._beside)
        return added

    def _products_beside(self, x: torch.Tensor) -> torch.Tensor:
        """Launches the products of the adapters. What they allocate is the other stream's memory, which it writes again
        only after a later fork, and so after what reads it."""
        assert self._beside is not None
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            added = x.new_empty(len(x), self.weights.b.shape[1])
            self.weights.add(x, added, self._segments, replaces=True)
        return added


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
