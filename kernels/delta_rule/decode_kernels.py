"""The gated delta rule for one token of each of many sequences, as Triton kernels: bound by reading and writing the
states, each once.

A program of `_step` holds some value rows of a head's state in registers. Its reads begin before the kernel before it
has ended, because no other kernel of a step touches a layer's states.

Imported only where there is a GPU (or Triton's interpreter). Arithmetic is in float32 whatever the tensors' dtypes.
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.delta_rule.states import StateShape, TokenGates
from kernels.pdl import launch_dependents, wait_for_previous

_CHANNELS = 512  # channels that one program of `_convolve` mixes
_VALUES = 32  # value rows that one program of `_step` updates
_ELEMENTS = 1024  # elements that one program of `_gated_norm` normalises
_LEAST_LENGTH = tl.constexpr(1e-6)  # as in `chunked.py`


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    inputs: torch.Tensor,
    out: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    copies: torch.Tensor,
) -> None:
    """Writes `DeltaRuleStates.convolve` of the tokens at `tokens` to `out`, and moves the last inputs of `rows` on.

    inputs: `[rows, channels, width - 1]`. tokens, rows, copies: int64 `[m]`; copies has the row that gets a copy of the
    states afterwards, or -1 for none.
    """
    channels, width = weight.shape
    _convolve[(len(tokens), triton.cdiv(channels, _CHANNELS))](
        x,
        weight,
        inputs,
        out,
        tokens,
        rows,
        copies,
        x.stride(0),
        channels,
        width,
        _CHANNELS,
        num_warps=4,
        **pdl.OPTIONS,
    )


def step(
    mixed: torch.Tensor,
    gates: TokenGates,
    recurrent: torch.Tensor,
    shape: StateShape,
    out: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    copies: torch.Tensor,
) -> None:
    """Writes `DeltaRuleStates.attend` of the tokens at `tokens` to `out`, `[num_tokens, value_heads, value_dim]`, and
    updates the states of `rows`. recurrent: `[rows, value_heads, value_dim, key_dim]`. The others as for `convolve`."""
    values = min(_VALUES, triton.next_power_of_2(shape.value_dim))
    _step[(len(tokens), shape.value_heads, triton.cdiv(shape.value_dim, values))](
        mixed,
        gates.decay,
        gates.strength,
        gates.decay_log,
        gates.decay_bias,
        recurrent,
        out,
        tokens,
        rows,
        copies,
        gates.decay.stride(0),
        gates.strength.stride(0),
        shape.key_heads,
        shape.value_heads,
        shape.key_dim,
        shape.value_dim,
        triton.next_power_of_2(shape.key_dim),
        values,
        num_warps=4,
        **pdl.OPTIONS,
    )


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`kernels.delta_rule.gated_norm.gated_rms_norm`."""
    n, heads, size = x.shape
    block = triton.next_power_of_2(size)
    at_once = max(1, _ELEMENTS // block)
    out = torch.empty_like(x)
    _gated_norm[(n, triton.cdiv(heads, at_once))](
        x, gate, weight, out, gate.stride(0), heads, size, eps, at_once, block, num_warps=4, **pdl.OPTIONS
    )
    return out


@triton.jit
def _convolve(
    x,
    weight,
    inputs,
    out,
    tokens,
    rows,
    copies,
    stride,
    channels,
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
    newest = tl.load(x + token * stride + channel, mask=inside, other=0.0)
    total = newest.to(tl.float32) * tl.load(weight + channel * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    # Each thread has channels of its own, and reads an input before it writes the place before.
    for place in tl.static_range(WIDTH - 1):
        seen = tl.load(own + place, mask=inside, other=0.0)
        total += seen.to(tl.float32) * tl.load(weight + channel * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        if place > 0:
            tl.store(own + place - 1, seen, mask=inside)
            tl.store(copied + place - 1, seen, mask=inside & (copy >= 0))
    tl.store(own + WIDTH - 2, newest, mask=inside)
    tl.store(copied + WIDTH - 2, newest, mask=inside & (copy >= 0))
    tl.store(out + token * channels + channel, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def log_decay_and_beta(decay, strength, decay_log, decay_bias):
    """`TokenGates.log_decay` and `beta` of float32 numbers."""
    sum_ = decay + decay_bias
    # The softplus; for large numbers, the number itself.
    soft = tl.where(sum_ > 20.0, sum_, tl.log(1.0 + tl.exp(tl.minimum(sum_, 20.0))))
    return -tl.exp(decay_log) * soft, tl.sigmoid(strength)


@triton.jit
def _step(
    mixed,
    decay,
    strength,
    decay_log,
    decay_bias,
    recurrent,
    out,
    tokens,
    rows,
    copies,
    decay_stride,
    strength_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    launch_dependents()
    number, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, KEYS)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = at < KEY_DIM, value < VALUE_DIM
    token, row, copy = tl.load(tokens + number), tl.load(rows + number), tl.load(copies + number)
    place = head * VALUE_DIM * KEY_DIM + value[:, None] * KEY_DIM + at[None, :]
    mask = is_value[:, None] & is_key[None, :]
    SIZE: tl.constexpr = VALUE_HEADS * VALUE_DIM * KEY_DIM
    state = tl.load(recurrent + row * SIZE + place, mask=mask, other=0.0)
    rate, bias = tl.load(decay_log + head).to(tl.float32), tl.load(decay_bias + head).to(tl.float32)
    wait_for_previous()
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    query = mixed + token * CHANNELS + (head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + at
    q = tl.load(query, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(query + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0).to(tl.float32)
    v = tl.load(
        mixed + token * CHANNELS + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value, mask=is_value, other=0.0
    ).to(tl.float32)
    q *= tl.math.rsqrt(tl.sum(q * q, 0) + _LEAST_LENGTH) * tl.math.rsqrt(KEY_DIM * 1.0)
    k *= tl.math.rsqrt(tl.sum(k * k, 0) + _LEAST_LENGTH)
    own_decay = tl.load(decay + token * decay_stride + head).to(tl.float32)
    own_strength = tl.load(strength + token * strength_stride + head).to(tl.float32)
    log_decay, beta = log_decay_and_beta(own_decay, own_strength, rate, bias)
    state *= tl.exp(log_decay)
    correction = (v - tl.sum(state * k[None, :], 1)) * beta
    state += correction[:, None] * k[None, :]
    tl.store(recurrent + row * SIZE + place, state, mask=mask)
    if copy >= 0:
        tl.store(recurrent + copy * SIZE + place, state, mask=mask)
    result = tl.sum(state * q[None, :], 1)
    tl.store(out + (token * VALUE_HEADS + head) * VALUE_DIM + value, result.to(out.dtype.element_ty), mask=is_value)


@triton.jit
def _gated_norm(
    x,
    gate,
    weight,
    out,
    stride,
    heads,
    size,
    eps,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, BLOCK)
    inside = (head < heads)[:, None] & (at < size)[None, :]
    place = head[:, None] * size + at[None, :]
    factor = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32)
    wait_for_previous()
    value = tl.load(x + token * heads * size + place, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * stride + place, mask=inside, other=0.0).to(tl.float32)
    value *= tl.math.rsqrt(tl.sum(value * value, 1) / size + eps)[:, None] * factor[None, :]
    value *= opened * tl.sigmoid(opened)
    tl.store(out + token * heads * size + place, value.to(out.dtype.element_ty), mask=inside)
