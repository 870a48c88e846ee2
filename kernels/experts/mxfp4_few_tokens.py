"""The products of `kernels.experts.few_tokens` with weights in MXFP4.

A number takes two instructions to read and one to multiply, if each is multiplied by itself, and then the instructions
would take longer than the memory. So tensor cores multiply here too: a token's states are all of the columns of the
other factor, which are the same.

Each warp of a program has chunks of its own, reads some ahead of those that it multiplies (a tile's `stages`), and has
all rows of the program. `_down_token` reads the first chunks of a token's experts before it waits, as the kernel there
does. Rows are always filled: an expert has whole groups of columns in both matrices, and so multiples of `GROUP` rows.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32.
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.experts.mxfp4_numbers import numbers_of_group
from kernels.experts.mxfp4_weight import CHUNK, GROUP, TURN, WORDS, chunks_of
from kernels.experts.tiles import ExpertTiles
from kernels.experts.weights import ExpertWeights, precision
from kernels.ops.fused import gated
from kernels.pdl import launch_dependents, wait_for_previous

ROWS = 2 * TURN
"""Rows that are multiplied at once: as many as tensor cores' products have. A program of the first product has a
multiple, with `TURN` of its tile's `columns` in each; one of the second product has these, whatever its `columns`."""

_GROUP, _CHUNK, _WORDS, _TURN, _ROWS = (tl.constexpr(size) for size in (GROUP, CHUNK, WORDS, TURN, ROWS))
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
    tile, chunks = tiles.gate_up, chunks_of(hidden)
    inner = x.new_empty(chosen.numel(), size)
    _gate_up_pair[(triton.cdiv(size, tile.columns), len(inner))](
        _words(x),
        weights.gate_up,
        weights.gate_up_scales.factors,
        weights.gate_up if weights.gate_up_bias is None else weights.gate_up_bias,
        chosen,
        _words(x if norm is None else norm),
        inner,
        chosen.shape[1],
        weights.first,
        count,
        eps,
        hidden,
        size,
        norm is not None,
        weights.is_gelu,
        *weights.clamp,
        weights.gate_up_bias is not None,
        precision(x.dtype),
        chunks,
        triton.cdiv(chunks, tile.warps),
        tile.stages,
        tile.columns // TURN,
        tile.warps,
        triton.next_power_of_2(hidden),
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
    count, hidden, size = weights.sizes
    n, top_k = chosen.shape
    assert weights.down_scales is not None
    tile, chunks = tiles.down, chunks_of(size)
    if out is None:
        out = inner.new_empty(n, hidden)
    pieces = triton.cdiv(chunks, tile.warps)
    _down_token[(triton.cdiv(hidden, ROWS), n)](
        _words(inner),
        weights.down,
        weights.down_scales.factors,
        weights.down if weights.down_bias is None else weights.down_bias,
        chosen,
        shares,
        inner if residual is None else residual,
        out,
        weights.first,
        count,
        hidden,
        size,
        weights.down_bias is not None,
        residual is not None,
        precision(inner.dtype),
        top_k,
        chunks,
        pieces,
        min(tile.stages, top_k * pieces),
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
    top_k,
    first,
    experts,
    eps,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNKS: tl.constexpr,
    PIECES: tl.constexpr,
    AHEAD: tl.constexpr,
    TURNS: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous()
    # Not before: `_down_token` reads `chosen` before it waits.
    launch_dependents()
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(chosen + pair).to(tl.int64) - first
    if (expert < 0) | (expert >= experts):
        return
    begin = tl.program_id(0) * TURNS * _ROWS
    warp = tl.arange(0, WARPS)
    ahead = ()
    for piece in tl.static_range(AHEAD):
        ahead += (_read(weight, scales, expert, piece * WARPS + warp, begin, TURNS, 2 * SIZE, CHUNKS),)  # type: ignore[assignment]
    source = pair // top_k * HIDDEN
    totals = _zeros(TURNS, WARPS)
    for piece in tl.range(PIECES, num_stages=1):
        later = _read(weight, scales, expert, (piece + AHEAD) * WARPS + warp, begin, TURNS, 2 * SIZE, CHUNKS)
        for group in tl.static_range(_CHUNK // _GROUP):
            column = (piece * WARPS + warp) * _CHUNK + group * _GROUP
            value = _states(x, source, column, HIDDEN)
            if NORM:
                value *= _states(norm, 0, column, HIDDEN)
            totals = _multiplied(ahead[0], group, value, totals, TURNS, PRECISION)  # type: ignore[misc]
        ahead = ahead[1:] + (later,)  # type: ignore[assignment]  # noqa: RUF005
    factor = tl.math.rsqrt(_mean_square(x, source, HIDDEN, BLOCK) + eps) if NORM else 1.0
    for turn in tl.static_range(TURNS):
        sums = tl.max(tl.sum(totals[turn], 0), 1) * factor  # of columns that are the same
        opened, lifted = tl.split(tl.trans(sums.reshape(2, _TURN)))
        column = (tl.program_id(0) * TURNS + turn) * _TURN + tl.arange(0, _TURN)
        is_column = column < SIZE
        if BIAS:
            own = bias + expert * 2 * SIZE + column
            opened += tl.load(own, mask=is_column, other=0.0).to(tl.float32)
            lifted += tl.load(own + SIZE, mask=is_column, other=0.0).to(tl.float32)
        result = gated(opened, lifted, GELU, LIMIT, ALPHA)
        tl.store(inner + pair * SIZE + column, result.to(inner.dtype.element_ty), mask=is_column)


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
    first,
    experts,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
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
        expert, _ = _expert(chosen, token * TOP_K + number // PIECES, first, experts)
        chunk = number % PIECES * WARPS + warp
        ahead += (_read(weight, scales, expert, chunk, begin, 1, HIDDEN, CHUNKS),)  # type: ignore[assignment]
    wait_for_previous()
    total = tl.zeros([WARPS, _ROWS, _SAME], dtype=tl.float32)
    for number in tl.range(TOP_K * PIECES, num_stages=1):
        next_pair = token * TOP_K + tl.minimum((number + AHEAD) // PIECES, TOP_K - 1)
        expert, _ = _expert(chosen, next_pair, first, experts)
        later = _read(weight, scales, expert, (number + AHEAD) % PIECES * WARPS + warp, begin, 1, HIDDEN, CHUNKS)
        pair = token * TOP_K + number // PIECES
        products = _zeros(1, WARPS)
        for group in tl.static_range(_CHUNK // _GROUP):
            column = (number % PIECES * WARPS + warp) * _CHUNK + group * _GROUP
            value = _states(inner, pair * SIZE, column, SIZE)
            products = _multiplied(ahead[0], group, value, products, 1, PRECISION)  # type: ignore[misc]
        expert, is_here = _expert(chosen, pair, first, experts)
        # The states of an expert that is elsewhere are not set.
        total += tl.where(is_here, products[0] * tl.load(shares + pair), 0.0)
        ahead = ahead[1:] + (later,)  # type: ignore[assignment]  # noqa: RUF005
    result = tl.max(tl.sum(total, 0), 1)  # of columns that are the same
    row = begin + tl.arange(0, _ROWS)
    is_row = row < HIDDEN
    if BIAS:
        for number in tl.static_range(TOP_K):
            expert, is_here = _expert(chosen, token * TOP_K + number, first, experts)
            share = tl.load(shares + token * TOP_K + number, mask=is_here, other=0.0)
            biases = tl.load(bias + expert * HIDDEN + row, mask=is_row, other=0.0)
            result += share * biases.to(tl.float32)
    if RESIDUAL:
        result += tl.load(residual + token * HIDDEN + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + row, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _zeros(TURNS: tl.constexpr, WARPS: tl.constexpr):
    totals = ()
    for _turn in tl.static_range(TURNS):
        totals += (tl.zeros([WARPS, _ROWS, _SAME], dtype=tl.float32),)  # type: ignore[assignment]
    return totals


@triton.jit
def _multiplied(parts, GROUP: tl.constexpr, value, totals, TURNS: tl.constexpr, PRECISION: tl.constexpr):
    """A group of columns of turns of rows, times states, `[chunks, _GROUP]`, added to the totals."""
    b = tl.broadcast_to(value[:, :, None], [value.shape[0], _GROUP, _SAME])
    sums = ()
    for turn in tl.static_range(TURNS):
        words, scale = parts[turn]
        a = numbers_of_group(words, scale, GROUP).reshape(value.shape[0], _ROWS, _GROUP).to(value.dtype)
        sums += (tl.dot(a, b, totals[turn], input_precision=PRECISION),)  # type: ignore[assignment]
    return sums


def _words(states: torch.Tensor) -> torch.Tensor:
    """States of 16 bits as words of two, as `_states` reads them."""
    return states.view(torch.int32) if states.dtype == torch.bfloat16 else states


@triton.jit
def _mean_square(x, first, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """The mean of the squares of a token's states, of which those of 16 bits are given as words."""
    at = tl.arange(0, BLOCK)
    if x.dtype.element_ty == tl.int32:
        pairs = tl.load(x + first // 2 + at, mask=at < HIDDEN // 2, other=0)
        lower = (pairs << 16).to(tl.float32, bitcast=True)
        upper = (pairs & -0x10000).to(tl.float32, bitcast=True)
        total = tl.sum(lower * lower + upper * upper)
    else:
        state = tl.load(x + first + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
        total = tl.sum(state * state)
    return total / HIDDEN


@triton.jit
def _expert(chosen, pair, first, experts):
    """A pair's expert, counted from `first`, or any other if it is elsewhere; and whether it is here."""
    # Not from the cache of the multiprocessor, which may hold an older choice: see `kernels.pdl`.
    expert = tl.load(chosen + pair, cache_modifier=".cg").to(tl.int64) - first
    is_here = (expert >= 0) & (expert < experts)
    return tl.where(is_here, expert, 0), is_here


@triton.jit
def _states(states, first, column, SIZE: tl.constexpr):
    """The states of a group from each column on, `[chunks, _GROUP]`, in the order of `_in_order`; any states beyond the
    last one, where weights are zeros. States of 16 bits are given as words."""
    column = tl.where(column < SIZE, column, 0)
    if states.dtype.element_ty == tl.int32:
        pairs = _in_order(tl.load(states + first // 2 + column[:, None] // 2 + tl.arange(0, _WORDS)[None, :]))
        own = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    else:
        own = tl.load(states + first + column[:, None] + tl.arange(0, _GROUP)[None, :])
        own = own.reshape(column.shape[0], 4, 2, 2, 2).permute(0, 2, 1, 3, 4)
    return own.reshape(column.shape[0], _GROUP)


@triton.jit
def _in_order(words):
    """Words `[lines, _WORDS]` in the order in which four threads hold them, if each has read four neighbours."""
    return words.reshape(words.shape[0], 4, 2, 2).permute(0, 2, 1, 3).reshape(words.shape[0], _WORDS)


@triton.jit
def _read(weight, scales, expert, chunk, begin, TURNS: tl.constexpr, OUT: tl.constexpr, CHUNKS: tl.constexpr):
    """A chunk of an expert's weight for each warp, in turns of 16 of its OUT rows: the words, `[chunks, 16, _WORDS]`,
    in the order of `_in_order`, and their scales, `[chunks, 16, 1]`. Zeros beyond the last chunk."""
    line = (expert * CHUNKS + chunk) * OUT + begin
    parts = ()
    for turn in tl.static_range(TURNS):
        # A thread multiplies rows that are 8 apart, and reads both.
        first, first_scales = _read_rows(weight, scales, line + turn * _ROWS, chunk < CHUNKS)
        last, last_scales = _read_rows(weight, scales, line + turn * _ROWS + 8, chunk < CHUNKS)
        words = tl.join(first, last).permute(0, 3, 1, 2).reshape(_ROWS * chunk.shape[0], _WORDS)
        words = _in_order(words).reshape(chunk.shape[0], _ROWS, _WORDS)
        scale = tl.join(first_scales, last_scales).permute(0, 2, 1).reshape(chunk.shape[0], _ROWS)
        parts += ((words, scale[:, :, None]),)  # type: ignore[assignment]
    return parts


@triton.jit
def _read_rows(weight, scales, line, is_chunk):
    """Words, `[chunks, 8, _WORDS]`, and scales, `[chunks, 8]`, of the 8 rows from each `line` on."""
    # All words of a chunk at once, so that a warp has those of a chunk whatever the version of Triton.
    places = line[:, None] * _WORDS + tl.arange(0, 8 * _WORDS)[None, :]
    words = tl.load(weight + places, mask=is_chunk[:, None], other=0, eviction_policy="evict_first")
    own = scales + line[:, None] + tl.arange(0, 8)[None, :]
    factors = tl.load(own, mask=is_chunk[:, None], other=0, eviction_policy="evict_first")
    return words.reshape(line.shape[0], 8, _WORDS), factors
