"""A linear layer that adds the products of adapters (LoRA)."""

from functools import cache

import torch

from kernels.linear.any_linear import AnyLinear
from kernels.linear.linear import Linear
from kernels.lora.lora_weights import LoraWeights
from kernels.lora.segments import Segments

_MAX_SIDE_TOKENS = 256
"""Most tokens whose products with A and B are computed at the same time as that of the base weight."""


class AdaptedLinear:
    """A linear layer and its adapters. Takes the place of an `AnyLinear`, and shares its weight.

    The kernels that take a `Linear` apart (`OneTokenStream`) do not know this class, and leave it to its calls. On a
    GPU there are two orders. Microseconds of a layer of Llama-3.1-8B without attention, with 32 adapters of rank 16 in
    all its linear layers, on one H200:

    | tokens | without adapters | at the same time | one after the other |
    | --- | --- | --- | --- |
    | 64 | 129 | 173 | 180 |
    | 256 | 195 | 260 | 270 |
    | 1,024 | 668 | 819 | 791 |

    - Few tokens: the products of the adapters run on a stream of their own, at the same time as that of the base
      weight. The operator that reads the result next adds them (`apart`, `add_to`).
    - Many tokens: they come first, and the product of the base weight is added to them. Their kernels follow the one
      that gives x, and read A and B while that one still runs, which behind a kernel of cuBLAS they could not.
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
        """Two parts of the result, `[n, out]`, which is their sum; or all of it, and None."""
        if self._beside is None or (len(x) > _MAX_SIDE_TOKENS and not self.adds):
            y = self._base(x, out)
            self.weights.add(x, y, self._segments)
            return y, None
        if len(x) > _MAX_SIDE_TOKENS:
            y = x.new_empty(len(x), self.weights.b.shape[1]) if out is None else out
            self.weights.add(x, y, self._segments, replaces=True)
            self._add_base(y, x)
            return y, None
        added = self._products(x, self._beside)
        y = self._base(x, out)
        torch.cuda.current_stream().wait_stream(self._beside)
        return y, added

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """As `Linear.add_to`; only if `adds`. Returns what the caller has to add too, `[n, out]`, or None."""
        if self._beside is None or len(x) > _MAX_SIDE_TOKENS:
            self.weights.add(x, residual, self._segments)
            self._add_base(residual, x)
            return None
        added = self._products(x, self._beside)
        self._add_base(residual, x)
        torch.cuda.current_stream().wait_stream(self._beside)
        return added

    def _add_base(self, y: torch.Tensor, x: torch.Tensor) -> None:
        assert isinstance(self._base, Linear)
        self._base.add_to(y, x)

    def _products(self, x: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
        """The products of the adapters, launched on the stream given. The memory is that stream's, which writes it
        again only after another call has made it wait, and thus after all that reads the result."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            added = x.new_empty(len(x), self.weights.b.shape[1])
            self.weights.add(x, added, self._segments, replaces=True)
        return added


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
