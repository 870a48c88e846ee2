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
from kernels.delta_rule.gates import TokenGates
from kernels.pdl import launch_dependents, wait_for_previous
from kernels.recurrent.recurrence import SingleTokens
from kernels.recurrent.shape import StateShape
from kernels.recurrent.softplus import softplus

_VALUES = 32  # value rows that one program of `_step` updates
_ELEMENTS = 1024  # elements that one program of `_gated_norm` normalises
_LEAST_LENGTH = tl.constexpr(1e-6)  # as in `chunked.py`


def step(
    mixed: torch.Tensor,
    gates: TokenGates,
    recurrent: torch.Tensor,
    shape: StateShape,
    out: torch.Tensor,
    singles: SingleTokens,
) -> None:
    """`DeltaRule.launch_step`."""
    values = min(_VALUES, triton.next_power_of_2(shape.value_dim))
    _step[(len(singles.tokens), shape.value_heads, triton.cdiv(shape.value_dim, values))](
        mixed,
        gates.decay,
        gates.strength,
        gates.decay_log,
        gates.decay_bias,
        recurrent,
        out,
        *singles,
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
def log_decay_and_beta(decay, strength, decay_log, decay_bias):
    """`TokenGates.log_decay` and `beta` of float32 numbers."""
    return -tl.exp(decay_log) * softplus(decay + decay_bias), tl.sigmoid(strength)


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
