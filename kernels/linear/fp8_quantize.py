"""Quantization to 8-bit floating point with a scale for each row, or for groups of a row, as Triton kernels. Imported
only where there is a GPU (or Triton's interpreter)."""

import torch
import triton
import triton.language as tl

from kernels.linear.fp8_format import GROUP, LARGEST, LEAST_SCALE

_GROUPS_AT_ONCE = 16  # of a row, in one program


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


def quantize_groups(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.linear.fp8_linear.quantize_groups` for a GPU. Values and scales have `rows` rows, of which those after
    x's last are undefined. Scales of a group are neighbours in memory, as cuBLAS takes them."""
    n, size = x.shape
    groups = triton.cdiv(size, GROUP)
    values = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    height = min(triton.next_power_of_2(groups), _GROUPS_AT_ONCE)
    _quantize_groups[(n, triton.cdiv(groups, height))](
        x, values, scales, x.stride(0), size, rows, LARGEST, LEAST_SCALE, height, GROUP, num_warps=max(height // 4, 1)
    )
    return values, scales.t()


@triton.jit
def _quantize_groups(
    x, values, scales, stride, size, rows, largest, least_scale, GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + row * stride + at, mask=at < size, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1) / largest, least_scale)
    value = tl.minimum(tl.maximum(value / scale[:, None], -largest), largest)
    tl.store(values + row * size + at, value.to(values.dtype.element_ty), mask=at < size)
    tl.store(scales + group.to(tl.int64) * rows + row, scale, mask=group * GROUP < size)


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
