"""The products of `kernels.experts.few_tokens` with weights in MXFP4.

A number takes two instructions to read and one to multiply, if each is multiplied by itself, and then the instructions
would take longer than the memory. So tensor cores multiply here too: a token's states are all of the columns of the
other factor, which are the same.

`_down_token` reads the weights of a token's first experts before it waits, as the kernel there does, and those of the
others while it multiplies. Each of its warps has chunks of its own.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32.
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.experts.mxfp4_grouped import apart, precision
from kernels.experts.mxfp4_numbers import numbers_of_group
from kernels.experts.mxfp4_weight import CHUNK, GROUP, WORDS, chunks_of
from kernels.experts.tiles import ExpertTiles
from kernels.experts.weights import ExpertWeights
from kernels.ops.fused import gated
from kernels.pdl import launch_dependents, wait_for_previous

DOWN_ROWS = 16
"""Outputs of a program of `_down_token`, whatever its tile's `columns`: as many as tensor cores' products have."""

_GROUP, _CHUNK, _WORDS, _ROWS = (tl.constexpr(size) for size in (GROUP, CHUNK, WORDS, DOWN_ROWS))
_SAME = tl.constexpr(8)  # columns of tensor cores' products at least


def gate_up(
    weights: ExpertWeights,
    x: torch.Tensor,
    chosen: torch.Tensor,
    tiles: ExpertTiles,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """The activated intermediate states, `[n * top_k, size]`. Those of experts that are elsewhere are not set."""
    count, hidden, size = weights.sizes
    assert weights.gate_up_scales is not None
    tile = tiles.gate_up
    inner = x.new_empty(chosen.numel(), size)
    _gate_up_pair[(triton.cdiv(size, tile.columns), len(inner))](
        x,
        weights.gate_up,
        weights.gate_up_scales.factors,
        weights.gate_up if weights.gate_up_bias is None else weights.gate_up_bias,
        chosen,
        x if norm is None else norm,
        inner,
        hidden,
        size,
        chunks_of(hidden),
        chosen.shape[1],
        weights.first,
        count,
        eps,
        norm is not None,
        weights.is_gelu,
        *weights.clamp,
        weights.gate_up_bias is not None,
        precision(x.dtype),
        2 * tile.columns,
        triton.next_power_of_2(hidden),
        num_warps=tile.warps,
        num_stages=tile.stages,
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
    """The sum of each token's experts, times their shares, and of `residual`, `[n, hidden]`, in `out` if given. A
    tile's `stages` are the experts of a token whose weights are read ahead.

    The kernel launched last before must be that of `gate_up` for the same `chosen`, or a plain one (`kernels.pdl`).
    """
    count, hidden, size = weights.sizes
    n, top_k = chosen.shape
    assert weights.down_scales is not None
    tile = tiles.down
    if out is None:
        out = inner.new_empty(n, hidden)
    chunks = chunks_of(size)
    _down_token[(triton.cdiv(hidden, DOWN_ROWS), n)](
        inner.view(torch.int32) if inner.dtype == torch.bfloat16 else inner,
        weights.down,
        weights.down_scales.factors,
        weights.down if weights.down_bias is None else weights.down_bias,
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
        precision(inner.dtype),
        top_k,
        chunks,
        triton.cdiv(chunks, tile.warps),
        tile.stages,
        tile.warps,
        num_warps=tile.warps,
        **pdl.OPTIONS,
    )
    return out


@triton.jit
def _gate_up_pair(
    x,
    weight,
    scales,
    bias,
    chosen,
    norm,
    inner,
    hidden,
    size,
    chunks,
    top_k,
    first,
    experts,
    eps,
    NORM: tl.constexpr,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
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
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.where(row < 2 * size, row, 0)
    begin = expert * chunks * 2 * size
    lines = weight + begin * _WORDS + row[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    factors = scales + begin + row
    source = x + pair // top_k * hidden
    at = tl.arange(0, _GROUP)
    total = tl.zeros([ROWS, _SAME], dtype=tl.float32)
    for chunk in range(chunks):
        words = tl.load(lines)
        scale = tl.load(factors)
        for group in tl.static_range(_CHUNK // _GROUP):
            place = chunk * _CHUNK + group * _GROUP + at
            inside = chunk * _CHUNK + group * _GROUP < hidden
            value = tl.load(source + place, mask=inside, other=0.0)
            if NORM:
                value *= tl.load(norm + place, mask=inside, other=0.0)
            a = numbers_of_group(words, scale[:, None], group).reshape(ROWS, _GROUP).to(value.dtype)
            b = tl.broadcast_to(value[:, None], [_GROUP, _SAME])
            total = tl.dot(a, b, total, input_precision=PRECISION)
        lines += 2 * size * _WORDS
        factors += 2 * size
    if NORM:
        whole = tl.arange(0, BLOCK)
        state = tl.load(source + whole, mask=whole < hidden, other=0.0).to(tl.float32)
        total *= tl.math.rsqrt(tl.sum(state * state) / hidden + eps)
    gate, up = apart(total, ROWS, _SAME)
    opened, lifted = tl.max(gate, 1), tl.max(up, 1)  # of columns that are the same
    column = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    is_column = column < size
    if BIAS:
        own = bias + expert * 2 * size + column
        opened += tl.load(own, mask=is_column, other=0.0).to(tl.float32)
        lifted += tl.load(own + size, mask=is_column, other=0.0).to(tl.float32)
    result = gated(opened, lifted, GELU, LIMIT, ALPHA)
    tl.store(inner + pair * size + column, result.to(inner.dtype.element_ty), mask=is_column)


@triton.jit
def _down_token(
    inner,
    weight,
    scales,
    bias,
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
    PRECISION: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    PIECES: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
):
    launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * _ROWS
    warp = tl.arange(0, WARPS)
    ahead = ()
    for number in tl.static_range(AHEAD):
        expert = _expert(chosen, token, number, first, TOP_K)
        parts = _read(weight, scales, expert, warp, begin, hidden, experts, CHUNKS, PIECES)
        ahead += (parts,)  # type: ignore[assignment]
    wait_for_previous()
    total = tl.zeros([WARPS, _ROWS, _SAME], dtype=tl.float32)
    for number in tl.range(TOP_K, num_stages=1):
        expert = _expert(chosen, token, number + AHEAD, first, TOP_K)
        later = _read(weight, scales, expert, warp, begin, hidden, experts, CHUNKS, PIECES)
        expert = _expert(chosen, token, number, first, TOP_K)
        is_here = (expert >= 0) & (expert < experts)
        pair = token * TOP_K + number
        product = tl.zeros([WARPS, _ROWS, _SAME], dtype=tl.float32)
        for piece in tl.static_range(PIECES):
            words, scale = ahead[0][piece]  # type: ignore[misc]
            for group in tl.static_range(_CHUNK // _GROUP):
                column = (piece * WARPS + warp) * _CHUNK + group * _GROUP
                value = _states(inner, pair * size, column, (column < size) & is_here)
                a = numbers_of_group(words, scale, group).reshape(WARPS, _ROWS, _GROUP).to(value.dtype)
                b = tl.broadcast_to(value[:, :, None], [WARPS, _GROUP, _SAME])
                product = tl.dot(a, b, product, input_precision=PRECISION)
        total += product * tl.load(shares + pair, mask=is_here, other=0.0)
        ahead = ahead[1:] + (later,)  # type: ignore[assignment]  # noqa: RUF005
    result = tl.max(tl.sum(total, 0), 1)  # of columns that are the same
    row = begin + tl.arange(0, _ROWS)
    is_row = row < hidden
    if BIAS:
        for number in range(TOP_K):
            expert = _expert(chosen, token, number, first, TOP_K)
            is_here = (expert >= 0) & (expert < experts)
            share = tl.load(shares + token * TOP_K + number, mask=is_here, other=0.0)
            biases = tl.load(bias + expert * hidden + row, mask=is_row & is_here, other=0.0)
            result += share * biases.to(tl.float32)
    if RESIDUAL:
        result += tl.load(residual + token * hidden + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + row, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _expert(chosen, token, number, first, TOP_K: tl.constexpr):
    """A token's expert, counted from `first`; -1 beyond the last."""
    # Not from the cache of the multiprocessor, which may hold an older choice: see `kernels.pdl`.
    place = chosen + token * TOP_K + number
    return tl.load(place, mask=number < TOP_K, other=first - 1, cache_modifier=".cg").to(tl.int64) - first


@triton.jit
def _states(inner, first, column, mask):
    """States from some columns on, `[columns, _GROUP]`, in the order of `_in_order`. States of 16 bits are given as
    words too."""
    if inner.dtype.element_ty == tl.int32:
        at = first // 2 + column[:, None] // 2 + tl.arange(0, _WORDS)[None, :]
        pairs = _in_order(tl.load(inner + at, mask=mask[:, None], other=0))
        states = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    else:
        at = first + column[:, None] + tl.arange(0, _GROUP)[None, :]
        states = tl.load(inner + at, mask=mask[:, None], other=0.0)
        states = states.reshape(column.shape[0], 4, 2, 2, 2).permute(0, 2, 1, 3, 4)
    return states.reshape(column.shape[0], _GROUP)


@triton.jit
def _in_order(words):
    """Words `[lines, _WORDS]` in the order in which four threads hold them, if each has read four neighbours."""
    return words.reshape(words.shape[0], 4, 2, 2).permute(0, 2, 1, 3).reshape(words.shape[0], _WORDS)


@triton.jit
def _read(weight, scales, expert, warp, begin, hidden, experts, CHUNKS: tl.constexpr, PIECES: tl.constexpr):
    """An expert's weight for 16 rows, in pieces of a chunk for each warp: the words, `[chunks, 16, _WORDS]`, in the
    order of `_in_order`, and their scales, `[chunks, 16, 1]`. Zeros if the expert is elsewhere."""
    is_here = (expert >= 0) & (expert < experts)
    row = tl.arange(0, _ROWS)
    parts = ()
    for piece in tl.static_range(PIECES):
        chunk = piece * warp.shape[0] + warp
        inside = (chunk < CHUNKS) & is_here
        line = (expert * CHUNKS + chunk) * hidden + begin
        # A thread multiplies rows that are 8 apart, and reads both.
        upper = _read_rows(weight, line, inside, begin, hidden)
        lower = _read_rows(weight, line + 8, inside, begin + 8, hidden)
        words = tl.join(upper, lower).permute(0, 3, 1, 2).reshape(_ROWS * chunk.shape[0], _WORDS)
        words = _in_order(words).reshape(chunk.shape[0], _ROWS, _WORDS)
        mask = inside[:, None] & (begin + row < hidden)[None, :]
        scale = tl.load(scales + line[:, None] + row[None, :], mask=mask, other=0, eviction_policy="evict_first")
        parts += ((words, scale[:, :, None]),)  # type: ignore[assignment]
    return parts


@triton.jit
def _read_rows(weight, line, inside, begin, hidden):
    row = tl.arange(0, 8)
    at = (line[:, None] + row[None, :])[:, :, None] * _WORDS + tl.arange(0, _WORDS)[None, None, :]
    mask = inside[:, None] & (begin + row < hidden)[None, :]
    return tl.load(weight + at, mask=mask[:, :, None], other=0, eviction_policy="evict_first")
