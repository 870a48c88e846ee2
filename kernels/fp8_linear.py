"""Products in 8-bit floating point (e4m3, https://arxiv.org/abs/2209.05433): weights with a scale for each output, and
activations with a scale for each token, which is found when they come."""

from typing import NamedTuple

import torch

from kernels.linear import Linear

LARGEST = 448.0  # of e4m3
LEAST_SCALE = 1e-12  # of rows that are zero


class Fp8Weight(NamedTuple):
    """`values * scales`. values: float8_e4m3fn `[out, in]`; scales: float32 `[out, 1]`."""

    values: torch.Tensor
    scales: torch.Tensor


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x, float `[n, size]`, as float8_e4m3fn `[n, size]` and scales, float32 `[n, 1]`: the largest element of a
    row is the largest that there is."""
    if x.is_cuda:
        from kernels import fp8

        return fp8.quantize(x)
    x = x.float()
    scales = (x.abs().amax(1, keepdim=True) / LARGEST).clamp_(min=LEAST_SCALE)
    return (x / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


class Fp8Linear:
    """`x @ weight.T + bias` with both sides in 8 bits, added up in float32.

    `weight` `[out, in]` and `scales` `[out, 1]` are the weight's two parts. On a CPU, which has no such products, the
    same values are multiplied in the dtype that the model runs in.
    """

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """`dtype` is that of the products; bias: `[out]` in it, or None. Raises ValueError for sizes that a GPU does
        not multiply."""
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
        """x: `[n, in]`, contiguous; returns `[n, out]` of the same dtype, in `out` if that is given."""
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
