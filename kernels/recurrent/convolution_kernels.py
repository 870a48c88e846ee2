"""The short causal convolution before a recurrence, or between gates in place of one, as Triton kernels: for one token
of each of many sequences, and for the blocks of chunks.

1. `_convolve_singles` mixes each token, and moves the last inputs of its row on.
2. `_convolve_blocks` mixes the tokens of all blocks, and then `_keep_inputs` keeps the last inputs of each chunk.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32 whatever the tensors' dtypes.
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.pdl import launch_dependents, wait_for_previous
from kernels.recurrent.recurrence import BLOCK, ChunkBlocks, ConvolutionGates, SingleTokens

_SINGLE_CHANNELS = 512  # channels that one program of `_convolve_singles` mixes
_CHANNELS, _TOKENS = 256, 8  # channels, and tokens of a block at a time, that one program of `_convolve_blocks` mixes
_KEPT_CHANNELS = 256  # channels that one program of `_keep_inputs` moves


def convolve_singles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gates: ConvolutionGates | None,
    inputs: torch.Tensor,
    out: torch.Tensor,
    singles: SingleTokens,
) -> None:
    """Writes `RecurrentStates.convolve` of single tokens to `out`, and moves the last inputs of their rows on.

    inputs: `[rows, channels, width - 1]`.
    """
    channels, width = weight.shape
    _convolve_singles[(len(singles.tokens), triton.cdiv(channels, _SINGLE_CHANNELS))](
        x,
        weight,
        weight if bias is None else bias,
        *_pointers(x, gates),
        inputs,
        out,
        *singles,
        x.stride(0),
        channels,
        bias is not None,
        gates is not None,
        width,
        _SINGLE_CHANNELS,
        num_warps=4,
        **pdl.OPTIONS,
    )


def convolve_blocks(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gates: ConvolutionGates | None,
    inputs: torch.Tensor,
    out: torch.Tensor,
    blocks: ChunkBlocks,
) -> None:
    """Writes `RecurrentStates.convolve` of the blocks' tokens to `out`, and moves the last inputs on.

    inputs: `[rows, channels, width - 1]`.
    """
    channels, width = weight.shape
    _convolve_blocks[(len(blocks.blocks), triton.cdiv(channels, _CHANNELS), triton.cdiv(BLOCK, _TOKENS))](
        x,
        weight,
        weight if bias is None else bias,
        *_pointers(x, gates),
        inputs,
        out,
        blocks.blocks,
        x.stride(0),
        channels,
        bias is not None,
        gates is not None,
        width,
        _TOKENS,
        _CHANNELS,
        num_warps=4,
        **pdl.OPTIONS,
    )
    _keep_inputs[(len(blocks.kept_chunks), triton.cdiv(channels, _KEPT_CHANNELS))](
        x,
        _pointers(x, gates).inputs,
        inputs,
        blocks.kept,
        blocks.kept_chunks,
        x.stride(0),
        channels,
        gates is not None,
        width,
        _KEPT_CHANNELS,
        num_warps=4,
        **pdl.OPTIONS,
    )


def _pointers(x: torch.Tensor, gates: ConvolutionGates | None) -> ConvolutionGates:
    """The gates as kernels take them: without any, another tensor that is not read."""
    if gates is None:
        return ConvolutionGates(x, x)
    assert gates.inputs.stride() == gates.outputs.stride() == x.stride(), "gates lie as the inputs do"
    return gates


@triton.jit
def _gated_inputs(x, gates, place, mask, GATED: tl.constexpr):
    """Inputs as the convolution mixes them, in the dtype of `x`, in which they are kept."""
    seen = tl.load(x + place, mask=mask, other=0.0)
    if GATED:
        gate = tl.load(gates + place, mask=mask, other=0.0)
        seen = (seen.to(tl.float32) * gate.to(tl.float32)).to(seen.dtype)
    return seen


@triton.jit
def _gated_outputs(total, gates, place, mask, GATED: tl.constexpr):
    if GATED:
        result = total * tl.load(gates + place, mask=mask, other=0.0).to(tl.float32)
    else:
        result = total * tl.sigmoid(total)
    return result


@triton.jit
def _convolve_singles(
    x,
    weight,
    bias,
    input_gates,
    output_gates,
    inputs,
    out,
    tokens,
    rows,
    copies,
    stride,
    channels,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    number = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    token, row, copy = tl.load(tokens + number), tl.load(rows + number), tl.load(copies + number)
    own = inputs + (row * channels + channel) * (WIDTH - 1)
    copied = inputs + (copy * channels + channel) * (WIDTH - 1)
    wait_for_previous()
    newest = _gated_inputs(x, input_gates, token * stride + channel, inside, GATED)
    total = newest.to(tl.float32) * tl.load(weight + channel * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    # Each thread has channels of its own, and reads an input before it writes the place before.
    for place in tl.static_range(WIDTH - 1):
        seen = tl.load(own + place, mask=inside, other=0.0)
        total += seen.to(tl.float32) * tl.load(weight + channel * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        if place > 0:
            tl.store(own + place - 1, seen, mask=inside)
            tl.store(copied + place - 1, seen, mask=inside & (copy >= 0))
    tl.store(own + WIDTH - 2, newest, mask=inside)
    tl.store(copied + WIDTH - 2, newest, mask=inside & (copy >= 0))
    result = _gated_outputs(total, output_gates, token * stride + channel, inside, GATED)
    tl.store(out + token * channels + channel, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _convolve_blocks(
    x,
    weight,
    bias,
    input_gates,
    output_gates,
    inputs,
    out,
    blocks,
    stride,
    channels,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    block = blocks + tl.program_id(0) * 5
    first, count = tl.load(block), tl.load(block + 1)
    before, row = tl.load(block + 2), tl.load(block + 3)
    at = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    mask = (at < count)[:, None] & inside[None, :]
    wait_for_previous()
    total = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    for place in tl.static_range(WIDTH):
        source = at + (place - (WIDTH - 1))  # counted from the block's first token
        is_here = (before + source >= 0)[:, None]
        own = (first + source)[:, None] * stride + channel[None, :]
        seen = _gated_inputs(x, input_gates, own, mask & is_here, GATED)
        old = inputs + (row * channels + channel)[None, :] * (WIDTH - 1) + (before + source + (WIDTH - 1))[:, None]
        earlier = tl.load(old, mask=mask & ((before + source) < 0)[:, None], other=0.0)
        factor = tl.load(weight + channel * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        total += (seen.to(tl.float32) + earlier.to(tl.float32)) * factor[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    result = _gated_outputs(total, output_gates, (first + at)[:, None] * stride + channel[None, :], mask, GATED)
    place = (first + at)[:, None] * channels + channel[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _keep_inputs(
    x,
    input_gates,
    inputs,
    kept,
    kept_chunks,
    stride,
    channels,
    GATED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    chunk = kept_chunks + tl.program_id(0) * 3
    row, begin, end = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    own = inputs + (row * channels + channel) * (WIDTH - 1)
    wait_for_previous()
    for number in range(begin, end):
        first, count = tl.load(kept + number * 3), tl.load(kept + number * 3 + 1)
        target = inputs + (tl.load(kept + number * 3 + 2) * channels + channel) * (WIDTH - 1)
        # Each thread has channels of its own. What it reads of the chunk's row lies after what it has written there.
        for place in tl.static_range(WIDTH - 1):
            source = count - (WIDTH - 1) + place
            new = _gated_inputs(x, input_gates, (first + source) * stride + channel, inside & (source >= 0), GATED)
            old = tl.load(own + source + (WIDTH - 1), mask=inside & (source < 0), other=0.0)
            tl.store(target + place, tl.where(source >= 0, new, old), mask=inside)
