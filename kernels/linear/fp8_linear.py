"""Matrix products in 8-bit floating point (e4m3, https://arxiv.org/abs/2209.05433).

Weights have a scale for each output. Activations are quantized dynamically, with a scale for each token.
"""

from typing import NamedTuple

import torch

from kernels.linear.fp8_format import LARGEST, LEAST_SCALE
from kernels.linear.linear import Linear


class Fp8Weight(NamedTuple):
    """A weight `values * scales`. values: float8_e4m3fn `[out, in]`; scales: float32 `[out, 1]`."""

    values: torch.Tensor
    scales: torch.Tensor


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each row of x, float `[n, size]`. Returns float8_e4m3fn `[n, size]` and scales, float32 `[n, 1]`, such
    that the largest element of a row becomes `LARGEST`."""
    if x.is_cuda:
        from kernels.linear import fp8_quantize

        return fp8_quantize.quantize(x)
    x = x.float()
    scales = (x.abs().amax(1, keepdim=True) / LARGEST).clamp_(min=LEAST_SCALE)
    return (x / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


class Fp8Linear:
    """A linear layer, `x @ weight.T + bias`, with x and weight in 8 bits and sums in float32.

    `weight` `[out, in]` and `scales` `[out, 1]` are the two parts of the weight. CPUs have no fp8 products: there the
    same values are multiplied in the model's dtype.
    """

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """`dtype` is the dtype of the result; bias: `[out]` in that dtype, or None. Raises ValueError for sizes that a
        GPU does not support: all must be multiples of 16."""
        self.bias, self.scales = bias, weight.scales
        self.weight = weight.values
        self._plain: Linear | None = None
        if not self.weight.is_cuda:
            self._plain = Linear(weight.values.to(dtype))
        elif any(size % 16 for size in weight.values.shape):
            sizes = " by ".join(map(str, weight.values.shape))
            raise ValueError(
                f"fp8 needs weights whose sizes are multiples of 16, and one is {sizes}: leave quantization out"
            )

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns `[n, out]` in x's dtype, in `out` if that is given. x: `[n, in]`, contiguous."""
        values, scales = quantize(x)
        if self._plain is None:
            shape = (len(x), len(self.weight))
            product = x.new_empty(shape) if out is None else out
            return torch._scaled_mm(
                values,
                self.weight.t(),
                scale_a=scales,
                scale_b=self.scales.t(),
                bias=self.bias,
                out_dtype=x.dtype,
                use_fast_accum=True,
                out=product,
            )
        product = (self._plain(values.to(x.dtype)).float() * scales * self.scales.t()).to(x.dtype)
        if self.bias is not None:
            product += self.bias
        return product if out is None else out.copy_(product)
