"""The products of experts on a GPU, as grouped matrix products in Triton.

1. `_count` and `_place` sort the (token, expert) pairs by expert, and cut each expert's into blocks. For few pairs
   `_place` does it alone.
2. `_gate_up` computes gates and ups of a block for some columns, or ups alone, and their activation.
3. `_down` computes the output of each pair, times its weight.
4. `_combine` adds the outputs of each token's pairs, in their order.

Grids depend on the number of tokens alone: programs without a block end at once. So nothing waits for the device, and
all of it may be in a CUDA graph. An output does not depend on the other tokens but by the choice of tiles.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32 whatever the tensors' dtypes.
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.experts.fp8_numbers import arguments, numbers, scales_of
from kernels.experts.pair_blocks import PairBlocks
from kernels.experts.tiles import EACH_PAIR, ExpertTiles
from kernels.experts.weights import ExpertWeights, precision
from kernels.ops.fused import gated, plain
from kernels.pdl import launch_dependents, wait_for_previous

_MOST_COMPARED = 32768  # elements of the matrix that compares a chunk of pairs with all experts
_MOST_CHUNK = 256  # pairs of a chunk
_BLOCKS_AT_ONCE = 32  # blocks that a program of `_place` describes at a time
_COUNTS_AT_ONCE = 8  # chunks whose counts a program of `_place` reads at a time
_COMBINED_COLUMNS = 1024  # columns that one program of `_combine` computes


def experts(
    weights: ExpertWeights,
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    tiles: ExpertTiles,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of each token's experts, times their shares: `[n, hidden]` in x's dtype, in `out` if that is given.

    x: `[n, hidden]`, contiguous. chosen: int32 `[n, top_k]`; shares: float32 `[n, top_k]`.
    """
    if tiles.rows == EACH_PAIR:
        from kernels.experts import few_tokens

        return few_tokens.experts(weights, x, chosen, shares, tiles, out)
    blocks = sort_pairs(chosen, weights.first, len(weights.gate_up), tiles.rows)
    inner = gate_up(weights, x, chosen.shape[1], blocks, tiles)
    parts = down(weights, inner, shares, blocks, tiles)
    return combine(parts, chosen, weights.first, len(weights.gate_up), out)


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Number of blocks of `rows` rows that `pairs` pairs of `experts` experts may need."""
    return min(pairs, (pairs + min(pairs, experts) * (rows - 1)) // rows)


def sort_pairs(chosen: torch.Tensor, first: int, experts: int, rows: int) -> PairBlocks:
    """Sorts the pairs of `chosen` by expert, for experts `first` to `first + experts`, in blocks of `rows`."""
    pairs, device = chosen.numel(), chosen.device
    bins = triton.next_power_of_2(experts + 1)
    size = min(_MOST_CHUNK, max(16, _MOST_COMPARED // bins), max(16, triton.next_power_of_2(pairs)))
    chunks, most = triton.cdiv(pairs, size), most_blocks(pairs, experts, rows)
    # Each part begins at a multiple of 16 bytes, or Triton would compile kernels of their own for the others.
    at, stride = 4 * triton.cdiv(pairs, 4), 4 * triton.cdiv(most, 4)
    ints = torch.empty(at + 3 * stride, dtype=torch.int32, device=device)
    blocks = PairBlocks(ints[:pairs], *ints[at:].view(3, stride)[:, :most])
    counts = ints  # not read if there is one chunk
    if chunks > 1:
        counts = torch.empty(chunks, bins, dtype=torch.int32, device=device)
        _count[(chunks,)](chosen, counts, pairs, first, experts, size, bins, num_warps=4, **pdl.OPTIONS)
    _place[(chunks,)](
        chosen,
        counts,
        *blocks,
        pairs,
        first,
        experts,
        chunks,
        most,
        rows,
        size,
        bins,
        _BLOCKS_AT_ONCE,
        _COUNTS_AT_ONCE,
        chunks == 1,
        num_warps=8,
        **pdl.OPTIONS,
    )
    return blocks


def gate_up(
    weights: ExpertWeights, x: torch.Tensor, top_k: int, blocks: PairBlocks, tiles: ExpertTiles
) -> torch.Tensor:
    """The activated intermediate states, `[n * top_k, size]`, in the order of `blocks.pairs`."""
    if weights.is_mxfp4:
        from kernels.experts import mxfp4_grouped

        return mxfp4_grouped.gate_up(weights, x, top_k, blocks, tiles)
    hidden, size = x.shape[1], weights.down.shape[2]
    tile = tiles.gate_up
    inner = x.new_empty(len(blocks.pairs), size)
    scales, scale_columns = arguments(weights.gate_up_scales, x)
    _gate_up[(len(blocks.expert) * triton.cdiv(size, tile.columns),)](
        x,
        weights.gate_up,
        weights.gate_up if weights.gate_up_bias is None else weights.gate_up_bias,
        scales,
        inner,
        *blocks,
        hidden,
        size,
        top_k,
        weights.is_gated,
        weights.is_gelu,
        *weights.clamp,
        weights.gate_up_bias is not None,
        scale_columns,
        hidden % tile.depth == 0,
        precision(x.dtype),
        tiles.rows,
        tile.columns,
        tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl.OPTIONS,
    )
    return inner


def down(
    weights: ExpertWeights, inner: torch.Tensor, shares: torch.Tensor, blocks: PairBlocks, tiles: ExpertTiles
) -> torch.Tensor:
    """The outputs of all pairs times their shares, `[n * top_k, hidden]`, in the order of the tokens. Those of experts
    that are elsewhere are not set."""
    if weights.is_mxfp4:
        from kernels.experts import mxfp4_grouped

        return mxfp4_grouped.down(weights, inner, shares, blocks, tiles)
    hidden, size = weights.down.shape[1:]
    tile = tiles.down
    parts = inner.new_empty(len(inner), hidden)
    scales, scale_columns = arguments(weights.down_scales, inner)
    _down[(len(blocks.expert) * triton.cdiv(hidden, tile.columns),)](
        inner,
        weights.down,
        weights.down if weights.down_bias is None else weights.down_bias,
        scales,
        shares,
        parts,
        *blocks,
        hidden,
        size,
        weights.down_bias is not None,
        scale_columns,
        size % tile.depth == 0,
        precision(inner.dtype),
        tiles.rows,
        tile.columns,
        tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl.OPTIONS,
    )
    return parts


def combine(
    parts: torch.Tensor, chosen: torch.Tensor, first: int, experts: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of each token's pairs, `[n, hidden]`, in `out` if given."""
    (n, top_k), hidden = chosen.shape, parts.shape[1]
    if out is None:
        out = parts.new_empty(n, hidden)
    _combine[(triton.cdiv(hidden, _COMBINED_COLUMNS), n)](
        parts, chosen, out, hidden, first, experts, top_k, _COMBINED_COLUMNS, num_warps=4, **pdl.OPTIONS
    )
    return out


@triton.jit
def _local(chosen, pair, pairs, first, experts):
    """The experts of pairs, counted from `first`; `experts` for those that are elsewhere, and beyond the last pair."""
    own = tl.load(chosen + pair, mask=pair < pairs, other=-1) - first
    return tl.where((own >= 0) & (own < experts) & (pair < pairs), own, experts)


@triton.jit(do_not_specialize=["pairs"])
def _count(chosen, counts, pairs, first, experts, CHUNK: tl.constexpr, BINS: tl.constexpr):
    launch_dependents()
    wait_for_previous()
    chunk = tl.program_id(0)
    own = _local(chosen, chunk * CHUNK + tl.arange(0, CHUNK), pairs, first, experts)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(own, BINS))


@triton.jit(do_not_specialize=["pairs", "chunks", "most_blocks"])
def _place(
    chosen,
    counts,
    sorted_pairs,
    block_expert,
    block_first,
    block_count,
    pairs,
    first,
    experts,
    chunks,
    most_blocks,
    rows,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COUNTS: tl.constexpr,
    SINGLE: tl.constexpr,
):
    launch_dependents()
    wait_for_previous()
    chunk = tl.program_id(0)
    at = tl.arange(0, BINS)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    own = _local(chosen, pair, pairs, first, experts)
    total = tl.zeros([BINS], dtype=tl.int32)
    before = tl.zeros([BINS], dtype=tl.int32)
    if SINGLE:
        total += tl.histogram(own, BINS)
    else:
        for begin in range(0, chunks, COUNTS):
            number = begin + tl.arange(0, COUNTS)
            some = tl.load(counts + number[:, None] * BINS + at[None, :], mask=(number < chunks)[:, None], other=0)
            total += tl.sum(some, 0)
            before += tl.sum(tl.where((number < chunk)[:, None], some, 0), 0)
    total = tl.where(at < experts, total, 0)
    starts = tl.cumsum(total, 0) - total
    # Places of the chunk's pairs: after those of smaller experts, of earlier chunks, and of earlier pairs.
    earlier = (own[:, None] == own[None, :]) & (pair[None, :] < pair[:, None])
    place = tl.sum(earlier.to(tl.int32), 1)
    place += tl.sum(tl.where(own[:, None] == at[None, :], (starts + before)[None, :], 0), 1)
    tl.store(sorted_pairs + place, pair, mask=own < experts)
    # The blocks, some by each program.
    blocks = (total + rows - 1) // rows
    ends = tl.cumsum(blocks, 0)
    for begin in range(chunk * BLOCKS, most_blocks, chunks * BLOCKS):
        block = begin + tl.arange(0, BLOCKS)
        is_own = (block[:, None] < ends[None, :]) & (block[:, None] >= (ends - blocks)[None, :])
        exists = tl.sum(is_own.to(tl.int32), 1) > 0
        expert = tl.sum(tl.where(is_own, at[None, :], 0), 1)
        offset = (block[:, None] - (ends - blocks)[None, :]) * rows
        row = tl.sum(tl.where(is_own, starts[None, :] + offset, 0), 1)
        left = tl.sum(tl.where(is_own, total[None, :] - offset, 0), 1)
        mask = block < most_blocks
        tl.store(block_expert + block, tl.where(exists, expert, -1), mask=mask)
        tl.store(block_first + block, row, mask=mask)
        tl.store(block_count + block, tl.minimum(left, rows), mask=mask)


@triton.jit
def _gate_up(
    x,
    weight,
    bias,
    scales,
    inner,
    sorted_pairs,
    block_expert,
    block_first,
    block_count,
    hidden,
    size,
    top_k,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    launch_dependents()
    wait_for_previous()
    program = tl.program_id(0)
    # Programs of a block follow each other, and then those of the expert's next block: its weight, and the tokens'
    # states, are read from memory once.
    columns = tl.cdiv(size, COLUMNS)
    block = program // columns
    column = program % columns * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(block_first + block) + tl.arange(0, ROWS)
    is_row = tl.arange(0, ROWS) < tl.load(block_count + block)
    token = tl.load(sorted_pairs + place, mask=is_row, other=0) // top_k
    at = tl.arange(0, DEPTH)
    source = x + token.to(tl.int64)[:, None] * hidden + at[None, :]
    is_column = column < size
    # Without a gate, the ups are read, summed and activated in place of gates.
    HALVES: tl.constexpr = 2 if GATED else 1
    gates = weight + expert * HALVES * size * hidden + tl.where(is_column, column, 0)[None, :] * hidden + at[:, None]
    if GATED:
        ups = gates + size * hidden
    gate = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    if GATED:
        up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, hidden, DEPTH):
        if EVEN:
            a = tl.load(source, mask=is_row[:, None], other=0.0)
            b = tl.load(gates)
            if GATED:
                c = tl.load(ups)
        else:
            inside = at < hidden - begin
            a = tl.load(source, mask=is_row[:, None] & inside[None, :], other=0.0)
            b = tl.load(gates, mask=inside[:, None], other=0.0)
            if GATED:
                c = tl.load(ups, mask=inside[:, None], other=0.0)
        if SCALES > 0:
            tl.static_assert(SCALES % DEPTH == 0, "a part of the weight has one scale a row")
            opened = tl.dot(a, numbers(b, a.dtype, SCALES), input_precision=PRECISION)
            gate += opened * scales_of(scales, expert, begin, column, hidden, HALVES * size, is_column, SCALES)[None, :]
            if GATED:
                lifted = tl.dot(a, numbers(c, a.dtype, SCALES), input_precision=PRECISION)
                factors = scales_of(scales, expert, begin, size + column, hidden, HALVES * size, is_column, SCALES)
                up += lifted * factors[None, :]
        else:
            gate = tl.dot(a, b, gate, input_precision=PRECISION)
            if GATED:
                up = tl.dot(a, c, up, input_precision=PRECISION)
        source += DEPTH
        gates += DEPTH
        if GATED:
            ups += DEPTH
    if BIAS:
        own = bias + expert * HALVES * size + column
        gate += tl.load(own, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(own + size, mask=is_column, other=0.0).to(tl.float32)[None, :]
    target = inner + place.to(tl.int64)[:, None] * size + column[None, :]
    if GATED:
        result = gated(gate, up, GELU, LIMIT, ALPHA)
    else:
        result = plain(gate, GELU)
    tl.store(target, result.to(inner.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _down(
    inner,
    weight,
    bias,
    scales,
    shares,
    parts,
    sorted_pairs,
    block_expert,
    block_first,
    block_count,
    hidden,
    size,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    launch_dependents()
    wait_for_previous()
    program = tl.program_id(0)
    columns = tl.cdiv(hidden, COLUMNS)
    block = program // columns
    column = program % columns * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(block_first + block) + tl.arange(0, ROWS)
    is_row = tl.arange(0, ROWS) < tl.load(block_count + block)
    pair = tl.load(sorted_pairs + place, mask=is_row, other=0)
    at = tl.arange(0, DEPTH)
    source = inner + place.to(tl.int64)[:, None] * size + at[None, :]
    is_column = column < hidden
    lines = weight + expert * hidden * size + tl.where(is_column, column, 0)[None, :] * size + at[:, None]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for begin in range(0, size, DEPTH):
        if EVEN:
            a = tl.load(source, mask=is_row[:, None], other=0.0)
            b = tl.load(lines)
        else:
            inside = at < size - begin
            a = tl.load(source, mask=is_row[:, None] & inside[None, :], other=0.0)
            b = tl.load(lines, mask=inside[:, None], other=0.0)
        if SCALES > 0:
            tl.static_assert(SCALES % DEPTH == 0, "a part of the weight has one scale a row")
            product = tl.dot(a, numbers(b, a.dtype, SCALES), input_precision=PRECISION)
            total += product * scales_of(scales, expert, begin, column, size, hidden, is_column, SCALES)[None, :]
        else:
            total = tl.dot(a, b, total, input_precision=PRECISION)
        source += DEPTH
        lines += DEPTH
    if BIAS:
        total += tl.load(bias + expert * hidden + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    total *= tl.load(shares + pair, mask=is_row, other=0.0)[:, None]
    target = parts + pair.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(target, total.to(parts.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _combine(parts, chosen, out, hidden, first, experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents()
    wait_for_previous()
    token = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for number in tl.static_range(TOP_K):
        pair = token * TOP_K + number
        own = tl.load(chosen + pair) - first
        is_here = (own >= 0) & (own < experts)
        total += tl.load(parts + pair * hidden + at, mask=(at < hidden) & is_here, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + at, total.to(out.dtype.element_ty), mask=at < hidden)
