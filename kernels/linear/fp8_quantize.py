"""Quantization to 8-bit floating point with a scale for each row, as a Triton kernel. Imported only where there is a
GPU (or Triton's interpreter)."""

import torch
import triton
import triton.language as tl

from kernels.linear.fp8_format import LARGEST, LEAST_SCALE


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.linear.fp8_linear.quantize` for a GPU. Reads x twice: once from memory and once from the cache."""
    rows, size = x.shape
    values = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(size), 8192)
    _quantize[(rows,)](
        x, values, scales, x.stride(0), size, LARGEST, LEAST_SCALE, block, num_warps=max(block // 1024, 1)
    )
    return values, scales


@triton.jit
def _quantize(x, values, scales, stride, size, largest, least_scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    line = x + row * stride
    at = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        inside = start + at < size
        most = tl.maximum(most, tl.abs(tl.load(line + start + at, mask=inside, other=0.0).to(tl.float32)))
    scale = tl.maximum(tl.max(most, 0) / largest, least_scale)
    for start in range(0, size, BLOCK):
        inside = start + at < size
        value = tl.load(line + start + at, mask=inside, other=0.0).to(tl.float32) / scale
        value = tl.minimum(tl.maximum(value, -largest), largest)
        tl.store(values + row * size + start + at, value.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)
