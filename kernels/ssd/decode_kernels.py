"""The recurrence of Mamba2 for one token of each of many sequences, as a Triton kernel: bound by reading and writing
the states, each once.

A program of `_step` holds some value rows of a head's state in registers. Its reads begin before the kernel before it
has ended, because no other kernel of a step touches a layer's states.

Imported only where there is a GPU (or Triton's interpreter). Arithmetic is in float32 whatever the tensors' dtypes.
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.pdl import launch_dependents, wait_for_previous
from kernels.recurrent.recurrence import SingleTokens
from kernels.recurrent.shape import StateShape
from kernels.recurrent.softplus import softplus

_ELEMENTS = 4096  # of a head's state, that one program of `_step` updates


def step(
    mixed: torch.Tensor,
    steps: torch.Tensor,
    gate: torch.Tensor,
    decay_log: torch.Tensor,
    step_bias: torch.Tensor,
    skip: torch.Tensor,
    recurrent: torch.Tensor,
    shape: StateShape,
    out: torch.Tensor,
    singles: SingleTokens,
) -> None:
    """`Ssd.launch_step`."""
    keys = triton.next_power_of_2(shape.key_dim)
    values = min(max(1, _ELEMENTS // keys), triton.next_power_of_2(shape.value_dim))
    _step[(len(singles.tokens), shape.value_heads, triton.cdiv(shape.value_dim, values))](
        mixed,
        steps,
        gate,
        decay_log,
        step_bias,
        skip,
        recurrent,
        out,
        *singles,
        steps.stride(0),
        gate.stride(0),
        shape.key_heads,
        shape.value_heads,
        shape.key_dim,
        shape.value_dim,
        keys,
        values,
        num_warps=4,
        **pdl.OPTIONS,
    )


@triton.jit
def _step(
    mixed,
    steps,
    gate,
    decay_log,
    step_bias,
    skip,
    recurrent,
    out,
    tokens,
    rows,
    copies,
    steps_stride,
    gate_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
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
    SIZE: tl.constexpr = HEADS * VALUE_DIM * KEY_DIM
    state = tl.load(recurrent + row * SIZE + place, mask=mask, other=0.0)
    rate = tl.exp(tl.load(decay_log + head).to(tl.float32))
    bias, kept = tl.load(step_bias + head).to(tl.float32), tl.load(skip + head).to(tl.float32)
    wait_for_previous()
    CHANNELS: tl.constexpr = HEADS * VALUE_DIM + 2 * GROUPS * KEY_DIM
    of_token = mixed + token * CHANNELS
    x = tl.load(of_token + head * VALUE_DIM + value, mask=is_value, other=0.0).to(tl.float32)
    of_group = of_token + HEADS * VALUE_DIM + (head // (HEADS // GROUPS)) * KEY_DIM + at
    b = tl.load(of_group, mask=is_key, other=0.0).to(tl.float32)
    c = tl.load(of_group + GROUPS * KEY_DIM, mask=is_key, other=0.0).to(tl.float32)
    own = softplus(tl.load(steps + token * steps_stride + head).to(tl.float32) + bias)
    state = state * tl.exp(-rate * own) + (x * own)[:, None] * b[None, :]
    tl.store(recurrent + row * SIZE + place, state, mask=mask)
    if copy >= 0:
        tl.store(recurrent + copy * SIZE + place, state, mask=mask)
    opened = tl.load(gate + token * gate_stride + head * VALUE_DIM + value, mask=is_value, other=0.0).to(tl.float32)
    result = (tl.sum(state * c[None, :], 1) + kept * x) * opened * tl.sigmoid(opened)
    tl.store(out + (token * HEADS + head) * VALUE_DIM + value, result.to(out.dtype.element_ty), mask=is_value)
