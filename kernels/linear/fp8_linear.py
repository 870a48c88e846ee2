"""Matrix products in 8-bit floating point (e4m3, https://arxiv.org/abs/2209.05433).

| scales of the weight | scales of activations, which are quantized dynamically | GPUs |
| --- | --- | --- |
| one for each output | one for each token | compute capability 8.9 and later |
| one for each output and group of 128 columns | one for each token and group | Hopper, with CUDA 12.9 or later |

Scales for blocks of 128 by 128 (https://arxiv.org/abs/2412.19437, section 3.3.2) are those of groups, each stated for
128 outputs: 3% more memory, and ranks and fused matrices may have any rows.
"""

from typing import NamedTuple

import torch

from kernels.linear.fp8_format import GROUP, LARGEST, LEAST_SCALE
from kernels.linear.linear import Linear

CAPABILITY = (8, 9)  # the first compute capability with matrix products in 8-bit floating point
_HOPPER, _CUDA_WITH_GROUPS = (9, 0), (12, 9)
_ROWS_MULTIPLE = 4  # of x, in products with groups


class Fp8Weight(NamedTuple):
    """A weight `values * scales`. values: float8_e4m3fn `[out, in]`; scales: float32 `[out, 1]`, or `[out, groups]` for
    groups of `GROUP` columns, of which the last may be shorter."""

    values: torch.Tensor
    scales: torch.Tensor


def multiplies(device: torch.device, shape: tuple[int, ...], has_groups: bool) -> bool:
    """Whether `Fp8Linear` has products with a weight of a shape on a device. `has_groups`: with scales for groups."""
    if device.type == "cpu":
        return True
    if any(size % 16 for size in shape):
        return False
    capability = torch.cuda.get_device_capability(device)
    if has_groups:
        cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
        return capability == _HOPPER and cuda >= _CUDA_WITH_GROUPS
    return capability >= CAPABILITY


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each row of x, float `[n, size]`. Returns float8_e4m3fn `[n, size]` and scales, float32 `[n, 1]`, such
    that the largest element of a row becomes `LARGEST`."""
    if x.is_cuda:
        from kernels.linear import fp8_quantize

        return fp8_quantize.quantize(x)
    x = x.float()
    scales = (x.abs().amax(1, keepdim=True) / LARGEST).clamp_(min=LEAST_SCALE)
    return (x / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize` with a scale for each group of `GROUP` columns of a row. Returns float8_e4m3fn `[n, size]` and scales,
    float32 `[n, groups]`."""
    n, size = x.shape
    missing = -size % GROUP
    values, scales = quantize(torch.nn.functional.pad(x, (0, missing)).view(-1, GROUP))
    return values.view(n, size + missing)[:, :size], scales.view(n, -1)


def by_column(scales: torch.Tensor, columns: int) -> torch.Tensor:
    """The scale of each element: `[n, groups]` or `[n, 1]` to `[n, columns]`, or `[n, 1]` as it is."""
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(GROUP, dim=1)[:, :columns]


class Fp8Linear:
    """A linear layer, `x @ weight.T + bias`, with x and weight in 8 bits and sums in float32.

    `weight` `[out, in]` and `scales` `[out, 1]` or `[out, groups]` are the two parts of the weight. CPUs have no fp8
    products: there the same values are multiplied in the model's dtype.
    """

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """`dtype` is the dtype of the result; bias: `[out]` in that dtype, or None. Raises ValueError for sizes that a
        GPU does not support: all must be multiples of 16."""
        self.bias = bias
        self.weight = weight.values
        self.has_groups = weight.scales.shape[1] > 1
        # Scales of groups are read by group: for all outputs one after the other.
        self.scales = weight.scales.t().contiguous().t() if self.has_groups else weight.scales
        self._plain: Linear | None = None
        if not self.weight.is_cuda:
            columns = self.weight.shape[1]
            factors = by_column(self.scales, columns) if self.has_groups else 1.0
            self._plain = Linear((self.weight.float() * factors).to(dtype))
        elif any(size % 16 for size in weight.values.shape):
            sizes = " by ".join(map(str, weight.values.shape))
            raise ValueError(
                f"fp8 needs weights whose sizes are multiples of 16, and one is {sizes}: leave quantization out"
            )

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns `[n, out]` in x's dtype, in `out` if that is given. x: `[n, in]`, contiguous."""
        if self._plain is not None:
            return self._on_cpu(self._plain, x, out)
        if self.has_groups:
            return self._with_groups(x, out)
        values, scales = quantize(x)
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

    def _with_groups(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """The product on a GPU with scales for groups. cuBLAS takes a multiple of 4 rows."""
        from kernels.linear import fp8_quantize

        n = len(x)
        values, scales = fp8_quantize.quantize_groups(x, -(-n // _ROWS_MULTIPLE) * _ROWS_MULTIPLE)
        is_whole = len(values) == n
        product = torch._scaled_mm(
            values,
            self.weight.t(),
            scale_a=scales,
            scale_b=self.scales.t(),
            out_dtype=x.dtype,
            out=out if is_whole and out is not None else x.new_empty(len(values), len(self.weight)),
        )[:n]
        if self.bias is not None:
            product += self.bias
        return product if out is None or is_whole else out.copy_(product)

    def _on_cpu(self, plain: Linear, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if self.has_groups:
            values, scales = quantize_groups(x)
            product = plain((values.float() * by_column(scales, x.shape[1])).to(x.dtype))
        else:
            values, scales = quantize(x)
            product = (plain(values.to(x.dtype)).float() * scales * self.scales.t()).to(x.dtype)
        if self.bias is not None:
            product += self.bias
        return product if out is None else out.copy_(product)
