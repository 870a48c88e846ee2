"""Linear layers and embeddings on CPUs whose weights stay in blocks of 4 or 8 bits.

Products read the blocks, a fifth of the bytes of float32 (`kernels.linear.block_kernel`). On a CPU without dots of
bytes, a step of many rows writes the weights of some tiles at a time, and multiplies with BLAS.
"""

import threading
from typing import Literal

import numpy as np
import torch

from kernels import openmp
from kernels.linear import block_kernel as kernel
from kernels.linear.block_instructions import LANES, has_byte_dots
from kernels.linear.block_weight import BlockMatrix, BlockWeight

FEW_ROWS = 24  # without dots of bytes, products of up to this many rows of x read the blocks
_SCRATCH_BYTES = 1 << 20  # weights that are floats at a time, for more rows

_scratch = threading.local()


class BlockProduct:
    """The product with one `BlockWeight`. Not for several threads at once."""

    def __init__(self, weight: BlockWeight, has_dots: bool | None = None) -> None:
        """`has_dots`: whether to use instructions that sum products of bytes, by default where the CPU has them."""
        self.weight = weight
        self._has_dots = has_byte_dots() if has_dots is None else has_dots
        kernel.kernel("digits" if self._has_dots else "floats", weight.bits, weight.group)  # not in the first step
        arguments = np.zeros(kernel.NUM_ARGUMENTS, dtype=np.int64)
        arguments[kernel.GROUPS] = weight.columns // weight.group
        arguments[kernel.SHARE], arguments[kernel.ZERO] = weight.share, weight.zero
        arguments[kernel.HALF] = weight.scales.dtype == torch.float16
        arrays = (weight.quants, weight.scales, weight.least, weight.sub_scales, weight.sub_least)
        arguments[kernel.QUANTS : kernel.X] = [0 if array is None else array.data_ptr() for array in arrays]
        self._arguments = arguments

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes `x @ weight.T` to `out`, `[n, rows]`, of which rows of elements are contiguous. x: float32
        `[n, columns]`, contiguous."""
        tiles = len(self.weight.quants)
        if self._has_dots or len(x) <= FEW_ROWS:
            self._run("digits" if self._has_dots else "floats", 0, tiles, x, out)
            return
        each = max(1, _SCRATCH_BYTES // (4 * LANES * self.weight.columns))
        for first in range(0, tiles, each):
            weights = self._columns(first, min(first + each, tiles))
            rows = slice(first * LANES, min((first + each) * LANES, self.weight.rows))
            torch.mm(x, weights[:, : rows.stop - rows.start], out=out[:, rows])

    def dense(self) -> torch.Tensor:
        """All weights, float32 `[rows, columns]`."""
        return self._columns(0, len(self.weight.quants))[:, : self.weight.rows].t().contiguous()

    def _columns(self, first: int, end: int) -> torch.Tensor:
        """The weights of some tiles, transposed, float32 `[columns, rows]`, until the next call in this thread."""
        shape = (self.weight.columns, (end - first) * LANES)
        if getattr(_scratch, "memory", None) is None or _scratch.memory.numel() < shape[0] * shape[1]:
            _scratch.memory = torch.empty(shape[0] * shape[1])
        out: torch.Tensor = _scratch.memory[: shape[0] * shape[1]].view(shape)
        self._run("weights", first, end, None, out)
        return out

    def _run(
        self,
        name: Literal["digits", "floats", "weights"],
        first: int,
        end: int,
        x: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        own = self._arguments
        n, x_row, x_address = (0, 0, 0) if x is None else (len(x), x.stride(0), x.data_ptr())
        own[: kernel.GROUPS] = 0, first, end - first
        own[kernel.N : kernel.QUANTS] = n, x_row, out.stride(0), self.weight.rows
        own[kernel.X :] = x_address, out.data_ptr()
        openmp.run(kernel.kernel(name, self.weight.bits, self.weight.group), own)


class BlockLinear:
    """A linear layer, `x @ weight.T + bias`, whose weight is a `BlockMatrix`.

    The weights are exactly those of the format. Sums are in float32, in another order than BLAS's.
    """

    def __init__(self, weight: BlockMatrix, bias: torch.Tensor | None = None) -> None:
        """bias: `[out]` or None."""
        self.weight, self.bias = weight, bias
        self._products = [BlockProduct(part) for part in weight.parts]

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns `[n, out]` in x's dtype, in `out` if that is given. x: `[n, in]`, contiguous."""
        product = self.in_float32(x, out if out is not None and out.dtype == torch.float32 else None)
        if self.bias is not None:
            product += self.bias
        if out is None or out is product:
            return product.to(x.dtype)
        return out.copy_(product)

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product in float32, without the bias, for any dtype of x, in `out` if that is given."""
        x = x.float().contiguous()
        product = x.new_empty(len(x), self.weight.rows) if out is None else out
        begin = 0
        for each in self._products:
            each.into(x, product[:, begin : begin + each.weight.rows])
            begin += each.weight.rows
        return product
