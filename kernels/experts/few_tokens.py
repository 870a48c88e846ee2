"""The products of experts for few tokens on a GPU, which are bound by reading the weights of the experts chosen.

Each (token, expert) pair is computed by itself, without sorting: `_gate_up_pair`, then `_down_token`, which also adds
the outputs of a token's experts. An expert that several tokens have is read once for each, from the L2 cache at best.

Imported only where there is a GPU (or Triton's interpreter). Arithmetic is in float32 whatever the tensors' dtypes.
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.experts.fp8_numbers import arguments, numbers, scales_of
from kernels.experts.tiles import ExpertTiles
from kernels.experts.weights import ExpertWeights
from kernels.ops.fused import gated
from kernels.pdl import launch_dependents, wait_for_previous


def experts(
    weights: ExpertWeights,
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    tiles: ExpertTiles,
    out: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.experts.grouped.experts` for few tokens. A tile's `columns` are outputs of a program, its `depth` the
    columns of the weight that it reads at a time. With `norm`, `[hidden]`, x is normalised first; `residual`, `[n,
    hidden]`, is added to the sum."""
    inner = gate_up(weights, x, chosen, tiles, norm, eps)
    return down(weights, inner, chosen, shares, tiles, out, residual)


def gate_up(
    weights: ExpertWeights,
    x: torch.Tensor,
    chosen: torch.Tensor,
    tiles: ExpertTiles,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """The activated intermediate states, `[n * top_k, size]`. Those of experts that are elsewhere are not set."""
    count, hidden, size = len(weights.gate_up), x.shape[1], weights.down.shape[2]
    tile = tiles.gate_up
    inner = x.new_empty(chosen.numel(), size)
    scales, scale_columns = arguments(weights.gate_up_scales, x)
    _gate_up_pair[(triton.cdiv(size, tile.columns), len(inner))](
        x,
        weights.gate_up,
        weights.gate_up if weights.gate_up_bias is None else weights.gate_up_bias,
        scales,
        chosen,
        x if norm is None else norm,
        inner,
        hidden,
        size,
        chosen.shape[1],
        weights.first,
        count,
        eps,
        norm is not None,
        weights.is_gelu,
        *weights.clamp,
        weights.gate_up_bias is not None,
        scale_columns,
        tile.columns,
        min(tile.depth, triton.next_power_of_2(hidden)),
        num_warps=tile.warps,
        **pdl.OPTIONS,
    )
    return inner


def down(
    weights: ExpertWeights,
    inner: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    tiles: ExpertTiles,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of each token's experts, times their shares, and of `residual`, `[n, hidden]`, in `out` if given."""
    (count, hidden, size), (n, top_k) = weights.down.shape, chosen.shape
    tile = tiles.down
    if out is None:
        out = inner.new_empty(n, hidden)
    scales, scale_columns = arguments(weights.down_scales, inner)
    _down_token[(triton.cdiv(hidden, tile.columns), n)](
        inner,
        weights.down,
        weights.down if weights.down_bias is None else weights.down_bias,
        scales,
        chosen,
        shares,
        inner if residual is None else residual,
        out,
        hidden,
        size,
        weights.first,
        count,
        weights.down_bias is not None,
        residual is not None,
        scale_columns,
        top_k,
        tile.columns,
        min(tile.depth, triton.next_power_of_2(size)),
        num_warps=tile.warps,
        **pdl.OPTIONS,
    )
    return out


@triton.jit
def _gate_up_pair(
    x,
    weight,
    bias,
    scales,
    chosen,
    norm,
    inner,
    hidden,
    size,
    top_k,
    first,
    experts,
    eps,
    NORM: tl.constexpr,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    wait_for_previous()
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(chosen + pair).to(tl.int64) - first
    if (expert < 0) | (expert >= experts):
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < size
    at = tl.arange(0, BLOCK)
    gates = weight + expert * 2 * size * hidden + row[:, None] * hidden
    ups = gates + size * hidden
    source = x + pair // top_k * hidden
    gate = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    up = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, hidden, BLOCK):
        place = begin + at
        inside = place < hidden
        mask = is_row[:, None] & inside[None, :]
        opened = tl.load(gates + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        lifted = tl.load(ups + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        value = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(norm + place, mask=inside, other=0.0).to(tl.float32)
        value = value[None, :]
        opened, lifted = numbers(opened, tl.float32, SCALES), numbers(lifted, tl.float32, SCALES)
        if SCALES > 0:
            lines, group = row[:, None], place[None, :]
            opened *= scales_of(scales, expert, group, lines, hidden, 2 * size, mask, SCALES)
            lifted *= scales_of(scales, expert, group, size + lines, hidden, 2 * size, mask, SCALES)
        gate += opened * value
        up += lifted * value
    opened_sum, lifted_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if NORM:
        scale = tl.math.rsqrt(tl.sum(squares) / hidden + eps)
        opened_sum *= scale
        lifted_sum *= scale
    if BIAS:
        own = bias + expert * 2 * size + row
        opened_sum += tl.load(own, mask=is_row, other=0.0).to(tl.float32)
        lifted_sum += tl.load(own + size, mask=is_row, other=0.0).to(tl.float32)
    result = gated(opened_sum, lifted_sum, GELU, LIMIT, ALPHA)
    tl.store(inner + pair * size + row, result.to(inner.dtype.element_ty), mask=is_row)


@triton.jit
def _down_token(
    inner,
    weight,
    bias,
    scales,
    chosen,
    shares,
    residual,
    out,
    hidden,
    size,
    first,
    experts,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SCALES: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    wait_for_previous()
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < hidden
    at = tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    biases = tl.zeros([ROWS], dtype=tl.float32)
    for number in range(TOP_K):
        pair = token * TOP_K + number
        expert = tl.load(chosen + pair).to(tl.int64) - first
        is_here = (expert >= 0) & (expert < experts)
        share = tl.where(is_here, tl.load(shares + pair), 0.0)
        if BIAS:
            own = bias + expert * hidden + row
            biases += share * tl.load(own, mask=is_row & is_here, other=0.0).to(tl.float32)
        lines = weight + tl.where(is_here, expert, 0) * hidden * size + row[:, None] * size
        for begin in range(0, size, BLOCK):
            place = begin + at
            inside = (place < size) & is_here
            mask = is_row[:, None] & inside[None, :]
            part = tl.load(lines + place[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            value = tl.load(inner + pair * size + place, mask=inside, other=0.0).to(tl.float32) * share
            part = numbers(part, tl.float32, SCALES)
            if SCALES > 0:
                own_expert = tl.where(is_here, expert, 0)
                part *= scales_of(scales, own_expert, place[None, :], row[:, None], size, hidden, mask, SCALES)
            total += part * value[None, :]
    result = tl.sum(total, 1) + biases
    if RESIDUAL:
        result += tl.load(residual + token * hidden + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + row, result.to(out.dtype.element_ty), mask=is_row)
