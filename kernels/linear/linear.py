"""Linear layers whose weight never changes."""

import torch
import torch.nn.functional as F

from kernels.linear.cublaslt import Product
from kernels.linear.gemm_autotune import Epilogue, TunedGemm

# Rows of x for which oneDNN chooses the weight's layout. Measured: this layout is as fast for 1 to 512 rows as layouts
# chosen for those numbers.
_PACKED_FOR_ROWS = 64
# oneDNN makes code for each number of rows of each shape of a weight, 0.5 MB of it in 0.7 ms, and keeps most of it for
# good, whatever its cache of primitives may hold. For five shapes, memory grows by 560 MB from 256 numbers of rows and
# by 690 MB from 2,048. So there are only 8 numbers between two powers of two, which is 4% more rows in the mean. Up to
# 32 rows, as in most decode steps, none is added.
_EXACT_ROWS, _NUMBERS_OF_ROWS = 32, 8


def padded_rows(rows: int) -> int:
    """The number of rows that oneDNN computes for a product of `rows`, at least as many."""
    if rows <= _EXACT_ROWS:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * _NUMBERS_OF_ROWS)
    return -(-rows // step) * step


def _has_blocked_layout(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype on this CPU. 16-bit weights need AVX-512 or newer."""
    mkldnn = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():
        return False
    needs = {torch.bfloat16: mkldnn._is_mkldnn_bf16_supported, torch.float16: mkldnn._is_mkldnn_fp16_supported}
    return bool(needs[dtype]()) if dtype in needs else dtype == torch.float32


class Linear:
    """A linear layer, `x @ weight.T + bias`. weight: `[out, in]`; bias: `[out]` or None.

    On a CPU the weight is kept only in oneDNN's blocked layout. Products of few rows are 1.3 to 2 times as fast with
    it as `torch.nn.functional.linear` with the plain layout (float32 and bfloat16, AVX-512).
    """

    scales: torch.Tensor | None = None  # only a `kernels.linear.fp8_linear.Fp8Linear` has scales
    tuned: TunedGemm | None = None  # set by `kernels.linear.gemm_autotune.autotune`

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self.is_packed = weight.device.type == "cpu" and _has_blocked_layout(weight.dtype)
        if self.is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self.weight = weight
        # Float32 sums on a GPU round the product before the residual is added, as the reference does.
        self.adds = bias is None and (not weight.is_cuda or weight.itemsize < 4)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns `[n, out]` in x's dtype, in `out` if that is given. x: `[n, in]`, contiguous."""
        if self.is_packed:
            rows = len(x)
            if (more := padded_rows(rows) - rows) > 0:
                x = F.pad(x, (0, 0, 0, more))
            product = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")[:rows]
            return product if out is None else out.copy_(product)
        if (chosen := self._chosen(Epilogue.PLAIN, x)) is not None:
            out = x.new_empty(len(x), len(self.weight)) if out is None else out
            chosen(x, self.weight, out)
            return out
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Does `residual += self(x)`. residual: `[n, out]`, contiguous. On a GPU one kernel computes product and sum;
        whether it rounds the product to x's dtype first is cuBLAS's choice: measured on an H200, it does not for few
        rows (8), and does for more (64 to 2,048). If `adds` is false, it is faster to leave the sum to the operator
        that reads it next."""
        if (chosen := self._chosen(Epilogue.ADDED, x)) is not None:
            chosen(x, self.weight, residual)
        elif self.adds and residual.is_cuda:
            residual.addmm_(x, self.weight.t())
        else:
            residual += self(x)

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product in float32, for any dtype of x, in `out` if that is given."""
        if x.dtype == torch.float32 or not x.is_cuda:
            product = self(x).float()
            return product if out is None else out.copy_(product)
        if out is None:
            out = x.new_empty(len(x), len(self.weight), dtype=torch.float32)
        if (chosen := self._chosen(Epilogue.FLOAT32, x)) is not None:
            chosen(x, self.weight, out)
        else:
            torch.ops.aten.mm.dtype_out(x, self.weight.t(), torch.float32, out=out)
        return out if self.bias is None else out.add_(self.bias)

    def _chosen(self, use: Epilogue, x: torch.Tensor) -> Product | None:
        """The tuned product for `use` and x's number of rows; None if PyTorch's own should be used."""
        return None if self.tuned is None else self.tuned.find(len(x), use)
