"""The products of experts for few tokens on a GPU, which are bound by reading the weights of the experts chosen.

Each (token, expert) pair is computed by itself, without sorting: `_gate_up_pair`, then `_down_token`, which also adds
the outputs of a token's experts. An expert that several tokens have is read once for each, from the L2 cache at best.

Both keep the memory busy. A program of `_gate_up_pair` computes several tiles, and reads one while it multiplies the
one before. `_down_token` knows its experts while `_gate_up_pair` still runs (`kernels.pdl` says why), and reads the
first half of their weights before it waits. On an H200 the kernels of a layer of Qwen3-30B-A3B for one token take 43.5
us instead of 53.5, of which 6.7 stand for attention.

Imported only where there is a GPU (or Triton's interpreter). Arithmetic is in float32 whatever the tensors' dtypes.
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.experts.fp8_numbers import arguments, numbers, scales_of
from kernels.experts.tiles import ExpertTiles
from kernels.experts.weights import ExpertWeights
from kernels.ops.fused import gated, plain
from kernels.pdl import launch_dependents, wait_for_previous

# Numbers of the gates that a thread of `_gate_up_pair` reads at once, and as many of the ups.
_THREAD_NUMBERS = 16
# Tiles of a program of `_down_token` at most: its loop over them is unrolled.
_MOST_PIECES = 48


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
    columns of the weight that it reads at a time. `stages` counts for the second product alone: the number of reads in
    flight. With `norm`, `[hidden]`, x is normalised first; `residual`, `[n, hidden]`, is added to the sum."""
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
    if weights.is_mxfp4:
        from kernels.experts import mxfp4_few_tokens

        return mxfp4_few_tokens.gate_up(weights, x, chosen, tiles, norm, eps)
    count, hidden, size = len(weights.gate_up), x.shape[1], weights.down.shape[2]
    tile = tiles.gate_up
    block = min(tile.depth, triton.next_power_of_2(hidden))
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
        weights.is_gated,
        weights.is_gelu,
        *weights.clamp,
        weights.gate_up_bias is not None,
        scale_columns,
        triton.cdiv(hidden, block),
        max(1, min(_power_of_2_within(tile.columns), _THREAD_NUMBERS * 32 * tile.warps // block)),
        block,
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
    """The sum of each token's experts, times their shares, and of `residual`, `[n, hidden]`, in `out` if given.

    The kernel launched last before must be that of `gate_up` for the same `chosen`, or a plain one (`kernels.pdl`).
    """
    if weights.is_mxfp4:
        from kernels.experts import mxfp4_few_tokens

        return mxfp4_few_tokens.down(weights, inner, chosen, shares, tiles, out, residual)
    (count, hidden, size), (n, top_k) = weights.down.shape, chosen.shape
    tile = tiles.down
    depth = max(tile.depth, triton.cdiv(size * top_k, _MOST_PIECES))
    block = triton.next_power_of_2(min(depth, size))
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
        triton.cdiv(size, block),
        tile.stages,
        tile.columns,
        block,
        num_warps=tile.warps,
        **pdl.OPTIONS,
    )
    return out


def _power_of_2_within(number: int) -> int:
    return 1 << (number.bit_length() - 1)


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
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous()
    # Not before: `_down_token` reads `chosen` before it waits.
    launch_dependents()
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(chosen + pair).to(tl.int64) - first
    if (expert < 0) | (expert >= experts):
        return
    begin, stride = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    own = tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    # Without a gate, the ups are read, summed and activated in place of gates.
    HALVES: tl.constexpr = 2 if GATED else 1
    gates = weight + expert * HALVES * size * hidden
    ups = gates + size * hidden
    source = x + pair // top_k * hidden
    opened, lifted = _read_pair(gates, ups, begin + own, at, size, hidden, GATED)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for chunk in tl.static_range(CHUNKS):
        value, square = _factors(source, norm, chunk * BLOCK + at, hidden, NORM)
        squares += square
    scale = 1.0
    if NORM:
        scale = tl.math.rsqrt(tl.sum(squares) / hidden + eps)
    for line in range(begin, size, stride):
        row = line + own
        gate = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        up = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for chunk in tl.static_range(CHUNKS):
            if chunk + 1 < CHUNKS:
                next_row, next_place = row, (chunk + 1) * BLOCK + at
            else:
                next_row, next_place = row + stride, at
            next_opened, next_lifted = _read_pair(gates, ups, next_row, next_place, size, hidden, GATED)
            place = chunk * BLOCK + at
            if CHUNKS > 1:
                value, square = _factors(source, norm, place, hidden, NORM)
            opened, lifted = numbers(opened, tl.float32, SCALES), numbers(lifted, tl.float32, SCALES)
            if SCALES > 0:
                lines, group = row[:, None], place[None, :]
                mask = (lines < size) & (group < hidden)
                opened *= scales_of(scales, expert, group, lines, hidden, HALVES * size, mask, SCALES)
                if GATED:
                    lifted *= scales_of(scales, expert, group, size + lines, hidden, HALVES * size, mask, SCALES)
            gate += opened * value[None, :]
            if GATED:
                up += lifted * value[None, :]
            opened, lifted = next_opened, next_lifted
        opened_sum, lifted_sum = tl.sum(gate, 1) * scale, tl.sum(up, 1) * scale
        is_row = row < size
        if BIAS:
            biases = bias + expert * HALVES * size + row
            opened_sum += tl.load(biases, mask=is_row, other=0.0).to(tl.float32)
            if GATED:
                lifted_sum += tl.load(biases + size, mask=is_row, other=0.0).to(tl.float32)
        if GATED:
            result = gated(opened_sum, lifted_sum, GELU, LIMIT, ALPHA)
        else:
            result = plain(opened_sum, GELU)
        tl.store(inner + pair * size + row, result.to(inner.dtype.element_ty), mask=is_row)


@triton.jit
def _read_pair(gates, ups, row, place, size, hidden, GATED: tl.constexpr):
    """A tile of an expert's gates and the same of its ups; without a gate twice the tile of its ups, read once."""
    mask = (row < size)[:, None] & (place < hidden)[None, :]
    lines = row[:, None] * hidden + place[None, :]
    opened = tl.load(gates + lines, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        lifted = tl.load(ups + lines, mask=mask, other=0.0, eviction_policy="evict_first")
    else:
        lifted = opened
    return opened, lifted


@triton.jit
def _factors(source, norm, place, hidden, NORM: tl.constexpr):
    """The factors of the columns `place`, and their squares without the norm's weight."""
    inside = place < hidden
    value = tl.load(source + place, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    square = value * value
    if NORM:
        value *= tl.load(norm + place, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return value, square


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
    CHUNKS: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    own = ()
    for number in tl.static_range(TOP_K):
        # Not from the cache of the multiprocessor, which may hold an older choice: see `kernels.pdl`.
        expert = tl.load(chosen + token * TOP_K + number, cache_modifier=".cg").to(tl.int64) - first
        own += (expert,)  # type: ignore[assignment]
    PIECES: tl.constexpr = TOP_K * CHUNKS
    parts = ()
    for piece in tl.static_range(min(AHEAD, PIECES)):
        part = _read_down(weight, own[piece // CHUNKS], row, piece % CHUNKS * BLOCK + at, hidden, size, experts)
        parts += (part,)  # type: ignore[assignment]
    wait_for_previous()
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for piece in tl.static_range(PIECES):
        if piece + AHEAD < PIECES:
            ahead = (piece + AHEAD) % CHUNKS * BLOCK + at
            part = _read_down(weight, own[(piece + AHEAD) // CHUNKS], row, ahead, hidden, size, experts)
            parts += (part,)  # type: ignore[assignment]
        expert = own[piece // CHUNKS]
        is_here = (expert >= 0) & (expert < experts)
        pair = token * TOP_K + piece // CHUNKS
        place = piece % CHUNKS * BLOCK + at
        inside = (place < size) & is_here
        value = tl.load(inner + pair * size + place, mask=inside, other=0.0).to(tl.float32)
        value *= tl.load(shares + pair, mask=is_here, other=0.0)
        part = numbers(parts[piece], tl.float32, SCALES)
        if SCALES > 0:
            mask = (row < hidden)[:, None] & inside[None, :]
            part *= scales_of(scales, expert, place[None, :], row[:, None], size, hidden, mask, SCALES)
        total += part * value[None, :]
    result = tl.sum(total, 1)
    is_row = row < hidden
    if BIAS:
        for number in tl.static_range(TOP_K):
            is_here = (own[number] >= 0) & (own[number] < experts)
            share = tl.load(shares + token * TOP_K + number, mask=is_here, other=0.0)
            biases = tl.load(bias + own[number] * hidden + row, mask=is_row & is_here, other=0.0)
            result += share * biases.to(tl.float32)
    if RESIDUAL:
        result += tl.load(residual + token * hidden + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + row, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _read_down(weight, expert, row, place, hidden, size, experts):
    """A tile of an expert's weight; zeros if the expert is elsewhere."""
    is_here = (expert >= 0) & (expert < experts)
    mask = (row < hidden)[:, None] & ((place < size) & is_here)[None, :]
    lines = weight + expert * hidden * size + row[:, None] * size + place[None, :]
    return tl.load(lines, mask=mask, other=0.0, eviction_policy="evict_first")
