"""Products with a weight that never changes."""

import torch
import torch.nn.functional as F

from kernels.cublaslt import Product
from kernels.products import Choices, Use

# Rows of x for which oneDNN chooses the layout; measured, it serves 1 to 512 rows as well as their own layouts would.
_PACKED_FOR_ROWS = 64


class Linear:
    """`x @ weight.T + bias`. weight: `[out, in]`; bias: `[out]` or None.

    On a CPU the weight is kept only in the blocked layout of oneDNN, which makes products of few rows 1.3 to 2 times as
    fast as `torch.nn.functional.linear` does on the plain one (float32 and bfloat16, AVX-512).
    """

    scales: torch.Tensor | None = None  # those of `kernels.fp8_linear`
    choices: Choices | None = None  # set by `kernels.products.choose`

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self.is_packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        if self.is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self.weight = weight
        # What stays in 32 bits is rounded after the product as well, as the reference does it.
        self.adds = bias is None and (not weight.is_cuda or weight.itemsize < 4)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: `[n, in]`, contiguous; returns `[n, out]` of the same dtype, in `out` if that is given."""
        if self.is_packed:
            product = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return product if out is None else out.copy_(product)
        if (chosen := self._chosen(Use.PLAIN, x)) is not None:
            out = x.new_empty(len(x), len(self.weight)) if out is None else out
            chosen(x, self.weight, out)
            return out
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """`residual += self(x)`, residual contiguous `[n, out]`. On a GPU the product adds it, in float32, and rounds
        once. Where `adds` is false it is faster to leave the sum to what reads it next."""
        if (chosen := self._chosen(Use.ADDED, x)) is not None:
            chosen(x, self.weight, residual)
        elif self.adds and residual.is_cuda:
            residual.addmm_(x, self.weight.t())
        else:
            residual += self(x)

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product in float32, whatever the dtype of x, in `out` if that is given. For a weight without bias."""
        if x.dtype == torch.float32 or not x.is_cuda:
            product = self(x).float()
            return product if out is None else out.copy_(product)
        if out is None:
            out = x.new_empty(len(x), len(self.weight), dtype=torch.float32)
        if (chosen := self._chosen(Use.FLOAT32, x)) is not None:
            chosen(x, self.weight, out)
            return out
        return torch.ops.aten.mm.dtype_out(x, self.weight.t(), torch.float32, out=out)

    def _chosen(self, use: Use, x: torch.Tensor) -> Product | None:
        """What is faster than PyTorch's own product here, if something is known to be."""
        choices = self.choices
        return choices.find(len(x)) if choices is not None and choices.use is use else None
