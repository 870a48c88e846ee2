"""Matrix times one vector as Triton kernels, for a batch of one sequence on a GPU, where nothing but the rate at which
weights come from memory counts. What stands before and after the product in a layer is done in the same kernel: at one
row, starting a kernel of its own for it would take longer than the work. The first weights are on their way before the
kernel waits for the one before it, and each further part of them before the last one is multiplied.

Imported only where there is a GPU (or Triton's interpreter). Arithmetic is in float32 whatever the tensors' dtypes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import handover
from kernels.fused import activated
from kernels.handover import let_next_start, wait


class _Tile(NamedTuple):
    """What one program reads at a time: `rows` rows of the weight, `columns` wide."""

    rows: int
    columns: int
    warps: int


def _tile(rows: int, columns: int, itemsize: int) -> _Tile:
    """Enough programs for a few on each multiprocessor, each with several independent 16-byte loads a thread. Measured
    on an H200 with the shapes of Llama-3.1-8B and Qwen3-0.6B, in bfloat16."""
    height = 4 if rows >= 4096 else 2
    width = (512 if rows == 4096 else 1024) * (2 if itemsize == 1 else 1)
    return _Tile(height, min(triton.next_power_of_2(columns), width), 4)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias + residual` for x `[1, in]` and a contiguous weight `[out, in]`; returns `[1, out]`.

    x is first normalised by its root mean square and multiplied by `norm` (`[in]`) if that is given. The result is in
    `out`, of any float dtype, or in a new tensor of x's. A weight in 8 bits has `scales`, float32 `[out, 1]`.
    """
    rows, columns = weight.shape
    if out is None:
        out = x.new_empty(1, rows)
    tile = _tile(rows, columns, weight.itemsize)
    _gemv[(triton.cdiv(rows, tile.rows),)](
        x,
        weight,
        x if bias is None else bias,
        x if scales is None else scales,
        x if norm is None else norm,
        x if residual is None else residual,
        out,
        rows,
        columns,
        eps,
        norm is not None,
        bias is not None,
        scales is not None,
        residual is not None,
        tile.rows,
        tile.columns,
        num_warps=tile.warps,
        **handover.OPTIONS,
    )
    return out


def gated_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gelu: bool = False,
) -> torch.Tensor:
    """`gemv` with a weight `[2 * out, in]` of gates and then ups, and the gated activation after it: `[1, out]`."""
    rows, columns = weight.shape[0] // 2, weight.shape[1]
    out = x.new_empty(1, rows)
    tile = _tile(2 * rows, columns, weight.itemsize)
    height = max(1, tile.rows // 2)
    _gated_gemv[(triton.cdiv(rows, height),)](
        x,
        weight,
        x if bias is None else bias,
        x if scales is None else scales,
        x if norm is None else norm,
        out,
        rows,
        columns,
        eps,
        gelu,
        norm is not None,
        bias is not None,
        scales is not None,
        height,
        tile.columns,
        num_warps=tile.warps,
        **handover.OPTIONS,
    )
    return out


@triton.jit
def _gemv(
    x,
    weight,
    bias,
    scales,
    norm,
    residual,
    out,
    rows,
    columns,
    eps,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    let_next_start()
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    lines = weight + row.to(tl.int64)[:, None] * columns
    at = tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    squares = tl.zeros([BLOCK_COLUMNS], dtype=tl.float32)
    mask = (row < rows)[:, None] & (at < columns)[None, :]
    part = tl.load(lines + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    wait()
    for _ in range(0, columns, BLOCK_COLUMNS):
        inside = at < columns
        ahead = at + BLOCK_COLUMNS
        mask = (row < rows)[:, None] & (ahead < columns)[None, :]
        next_part = tl.load(lines + ahead[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        value = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        squares += value * value
        if NORM:
            value *= tl.load(norm + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        total += part.to(tl.float32) * value[None, :]
        at, part = ahead, next_part
    result = tl.sum(total, 1)
    if SCALES:
        result *= tl.load(scales + row, mask=row < rows, other=0.0)
    if NORM:
        result *= tl.math.rsqrt(tl.sum(squares) / columns + eps)
    if BIAS:
        result += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    if RESIDUAL:
        result += tl.load(residual + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < rows)


@triton.jit
def _gated_gemv(
    x,
    weight,
    bias,
    scales,
    norm,
    out,
    rows,
    columns,
    eps,
    GELU: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    let_next_start()
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    gates = weight + row.to(tl.int64)[:, None] * columns
    ups = gates + rows.to(tl.int64) * columns
    at = tl.arange(0, BLOCK_COLUMNS)
    gate = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    squares = tl.zeros([BLOCK_COLUMNS], dtype=tl.float32)
    mask = (row < rows)[:, None] & (at < columns)[None, :]
    gate_part = tl.load(gates + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    up_part = tl.load(ups + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    wait()
    for _ in range(0, columns, BLOCK_COLUMNS):
        inside = at < columns
        ahead = at + BLOCK_COLUMNS
        mask = (row < rows)[:, None] & (ahead < columns)[None, :]
        next_gate = tl.load(gates + ahead[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        next_up = tl.load(ups + ahead[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        value = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        squares += value * value
        if NORM:
            value *= tl.load(norm + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        gate += gate_part.to(tl.float32) * value[None, :]
        up += up_part.to(tl.float32) * value[None, :]
        at, gate_part, up_part = ahead, next_gate, next_up
    opened, lifted = tl.sum(gate, 1), tl.sum(up, 1)
    if SCALES:
        opened *= tl.load(scales + row, mask=row < rows, other=0.0)
        lifted *= tl.load(scales + rows + row, mask=row < rows, other=0.0)
    if NORM:
        scale = tl.math.rsqrt(tl.sum(squares) / columns + eps)
        opened *= scale
        lifted *= scale
    if BIAS:
        opened += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
        lifted += tl.load(bias + rows + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + row, (activated(opened, GELU) * lifted).to(out.dtype.element_ty), mask=row < rows)
