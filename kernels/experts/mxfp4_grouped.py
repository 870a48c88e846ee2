"""The grouped products of `kernels.experts.grouped` with weights in MXFP4.

The weight is the left factor of each product, and the tokens are the right one: on Hopper the numbers then go from
registers, where they are made, straight to the tensor cores. A program reads a chunk of its rows at a time.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32.
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.experts.mxfp4_numbers import numbers_of_chunk
from kernels.experts.mxfp4_weight import CHUNK, TURN, WORDS, chunks_of
from kernels.experts.pair_blocks import PairBlocks
from kernels.experts.tiles import ExpertTiles
from kernels.experts.weights import ExpertWeights, precision
from kernels.ops.fused import gated
from kernels.pdl import launch_dependents, wait_for_previous

_CHUNK, _WORDS, _TURN = (tl.constexpr(size) for size in (CHUNK, WORDS, TURN))


def gate_up(
    weights: ExpertWeights, x: torch.Tensor, top_k: int, blocks: PairBlocks, tiles: ExpertTiles
) -> torch.Tensor:
    """The activated intermediate states, `[n * top_k, size]`, in the order of `blocks.pairs`."""
    _, hidden, size = weights.sizes
    assert weights.gate_up_scales is not None
    tile = tiles.gate_up
    inner = x.new_empty(len(blocks.pairs), size)
    _gate_up[(len(blocks.expert) * triton.cdiv(size, tile.columns),)](
        x,
        weights.gate_up,
        weights.gate_up_scales.factors,
        weights.gate_up if weights.gate_up_bias is None else weights.gate_up_bias,
        inner,
        *blocks,
        hidden,
        size,
        chunks_of(hidden),
        top_k,
        weights.is_gelu,
        *weights.clamp,
        weights.gate_up_bias is not None,
        precision(x.dtype),
        tiles.rows,
        2 * tile.columns,
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
    _, hidden, size = weights.sizes
    assert weights.down_scales is not None
    tile = tiles.down
    parts = inner.new_empty(len(inner), hidden)
    _down[(len(blocks.expert) * triton.cdiv(hidden, tile.columns),)](
        inner,
        weights.down,
        weights.down_scales.factors,
        weights.down if weights.down_bias is None else weights.down_bias,
        shares,
        parts,
        *blocks,
        hidden,
        size,
        chunks_of(size),
        weights.down_bias is not None,
        precision(inner.dtype),
        tiles.rows,
        tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl.OPTIONS,
    )
    return parts


@triton.jit
def _multiplied(
    source,
    is_token,
    weight,
    scales,
    row,
    rows,
    columns,
    chunks,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The product of some rows of an expert's weight and of tokens, float32 `[ROWS, TOKENS]`. source: pointers to the
    tokens' states, of which there are `columns`."""
    at = tl.arange(0, _CHUNK)
    lines = weight + row[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    factors = scales + row
    states = source[:, None] + at[None, :]
    total = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
    for chunk in range(chunks):
        words = tl.load(lines)
        scale = tl.load(factors)
        b = tl.load(states, mask=is_token[:, None] & (at < columns - chunk * _CHUNK)[None, :], other=0.0)
        a = numbers_of_chunk(words, scale[:, None]).to(b.dtype)
        total = tl.dot(a, b.T, total, input_precision=PRECISION)
        lines += rows * _WORDS
        factors += rows
        states += _CHUNK
    return total


@triton.jit
def _gate_up(
    x,
    weight,
    scales,
    bias,
    inner,
    sorted_pairs,
    block_expert,
    block_first,
    block_count,
    hidden,
    size,
    chunks,
    top_k,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    launch_dependents()
    wait_for_previous()
    program = tl.program_id(0)
    tiles = tl.cdiv(2 * size, ROWS)
    block, tile = program // tiles, program % tiles
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(block_first + block) + tl.arange(0, TOKENS)
    is_token = tl.arange(0, TOKENS) < tl.load(block_count + block)
    token = tl.load(sorted_pairs + place, mask=is_token, other=0) // top_k
    row = tile * ROWS + tl.arange(0, ROWS)
    row = tl.where(row < 2 * size, row, 0)
    first = expert * chunks * 2 * size
    product = _multiplied(
        x + token.to(tl.int64) * hidden,
        is_token,
        weight + first * _WORDS,
        scales + first,
        row,
        2 * size,
        hidden,
        chunks,
        PRECISION,
        TOKENS,
        ROWS,
    )
    gate, up = apart(product, ROWS, TOKENS)
    column = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
    is_column = column < size
    if BIAS:
        own = bias + expert * 2 * size + column
        gate += tl.load(own, mask=is_column, other=0.0).to(tl.float32)[:, None]
        up += tl.load(own + size, mask=is_column, other=0.0).to(tl.float32)[:, None]
    result = gated(gate, up, GELU, LIMIT, ALPHA)
    target = inner + place.to(tl.int64)[None, :] * size + column[:, None]
    tl.store(target, result.to(inner.dtype.element_ty), mask=is_token[None, :] & is_column[:, None])


@triton.jit
def apart(product, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Gates and ups of rows that have them in turns: `[ROWS, TOKENS]` to twice `[ROWS // 2, TOKENS]`."""
    pairs = product.reshape(ROWS // (2 * _TURN), 2, _TURN, TOKENS).permute(0, 2, 3, 1)
    gate, up = pairs.split()
    return gate.reshape(ROWS // 2, TOKENS), up.reshape(ROWS // 2, TOKENS)


@triton.jit
def _down(
    inner,
    weight,
    scales,
    bias,
    shares,
    parts,
    sorted_pairs,
    block_expert,
    block_first,
    block_count,
    hidden,
    size,
    chunks,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    launch_dependents()
    wait_for_previous()
    program = tl.program_id(0)
    tiles = tl.cdiv(hidden, ROWS)
    block, tile = program // tiles, program % tiles
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(block_first + block) + tl.arange(0, TOKENS)
    is_token = tl.arange(0, TOKENS) < tl.load(block_count + block)
    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = row < hidden
    first = expert * chunks * hidden
    total = _multiplied(
        inner + place.to(tl.int64) * size,
        is_token,
        weight + first * _WORDS,
        scales + first,
        tl.where(is_row, row, 0),
        hidden,
        size,
        chunks,
        PRECISION,
        TOKENS,
        ROWS,
    )
    pair = tl.load(sorted_pairs + place, mask=is_token, other=0)
    if BIAS:
        total += tl.load(bias + expert * hidden + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    total *= tl.load(shares + pair, mask=is_token, other=0.0)[None, :]
    target = parts + pair.to(tl.int64)[None, :] * hidden + row[:, None]
    tl.store(target, total.to(parts.dtype.element_ty), mask=is_token[None, :] & is_row[:, None])
