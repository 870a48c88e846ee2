"""The recurrence of Mamba2 for chunks of many tokens, as Triton kernels. `chunked.py` has the formulas.

1. `_multiply` has the products of queries and keys of every block, once for all heads of a group.
2. `_scan` goes through the blocks of a chunk with the state in registers. Each program has some value rows of a head.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32 whatever the tensors' dtypes.
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.pdl import launch_dependents, wait_for_previous
from kernels.recurrent.recurrence import BLOCK, ChunkBlocks
from kernels.recurrent.shape import StateShape
from kernels.recurrent.softplus import softplus

_VALUES = 32  # value rows that one program of `_scan` updates
_PIPELINED_KEYS = 128  # largest states for which the reads of the next block have memory, too


def scan(
    mixed: torch.Tensor,
    steps: torch.Tensor,
    gate: torch.Tensor,
    decay_log: torch.Tensor,
    step_bias: torch.Tensor,
    skip: torch.Tensor,
    recurrent: torch.Tensor,
    shape: StateShape,
    out: torch.Tensor,
    blocks: ChunkBlocks,
) -> None:
    """`Ssd.launch_blocks`."""
    keys, values = (max(16, triton.next_power_of_2(size)) for size in (shape.key_dim, shape.value_dim))
    # In float32: rounded to bfloat16, they double the error of the outputs.
    products = mixed.new_empty(len(blocks.blocks), shape.key_heads, BLOCK, BLOCK, dtype=torch.float32)
    precision = "ieee" if mixed.dtype == torch.float32 else "tf32"
    sizes = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim
    _multiply[(len(blocks.blocks), shape.key_heads)](
        mixed, blocks.blocks, products, *sizes, keys, BLOCK, precision, num_warps=4, **pdl.OPTIONS
    )
    at_once = min(_VALUES, values)
    _scan[(triton.cdiv(shape.value_dim, at_once), shape.value_heads, len(blocks.chunks))](
        mixed,
        steps,
        gate,
        decay_log,
        step_bias,
        skip,
        blocks.blocks,
        blocks.chunks,
        products,
        recurrent,
        out,
        steps.stride(0),
        gate.stride(0),
        *sizes,
        keys,
        at_once,
        BLOCK,
        precision,
        num_warps=4,
        num_stages=2 if keys <= _PIPELINED_KEYS else 1,
        **pdl.OPTIONS,
    )


@triton.jit
def _keys_and_queries(
    mixed,
    token,
    group,
    inside,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    """b and c of the tokens for a group, float32 `[tokens, KEYS]`."""
    at = tl.arange(0, KEYS)
    mask = inside[:, None] & (at < KEY_DIM)[None, :]
    CHANNELS: tl.constexpr = HEADS * VALUE_DIM + 2 * GROUPS * KEY_DIM
    source = mixed + token[:, None] * CHANNELS + HEADS * VALUE_DIM + group * KEY_DIM + at[None, :]
    b = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(source + GROUPS * KEY_DIM, mask=mask, other=0.0).to(tl.float32)
    return b, c


@triton.jit
def _multiply(
    mixed,
    blocks,
    products,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    launch_dependents()
    number, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = tl.load(blocks + number * 5), tl.load(blocks + number * 5 + 1)
    at = tl.arange(0, TOKENS)
    wait_for_previous()
    b, c = _keys_and_queries(mixed, first + at, group, at < count, GROUPS, HEADS, KEY_DIM, VALUE_DIM, KEYS)
    product = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    target = products + (number * GROUPS + group) * TOKENS * TOKENS + at[:, None] * TOKENS + at[None, :]
    tl.store(target, product)


@triton.jit
def _scan(
    mixed,
    steps,
    gate,
    decay_log,
    step_bias,
    skip,
    blocks,
    chunks,
    products,
    recurrent,
    out,
    steps_stride,
    gate_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    launch_dependents()
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    chunk = chunks + tl.program_id(2) * 3
    row, begin, end = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    at, key = tl.arange(0, TOKENS), tl.arange(0, KEYS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_value = value < VALUE_DIM
    # The state lies in memory by values, and here by keys.
    SIZE: tl.constexpr = HEADS * VALUE_DIM * KEY_DIM
    element = head * VALUE_DIM * KEY_DIM + value[None, :] * KEY_DIM + key[:, None]
    is_element = (key < KEY_DIM)[:, None] & is_value[None, :]
    state = tl.load(recurrent + row * SIZE + element, mask=is_element, other=0.0)
    rate = tl.exp(tl.load(decay_log + head).to(tl.float32))
    bias, kept = tl.load(step_bias + head).to(tl.float32), tl.load(skip + head).to(tl.float32)
    CHANNELS: tl.constexpr = HEADS * VALUE_DIM + 2 * GROUPS * KEY_DIM
    is_seen = at[:, None] >= at[None, :]
    wait_for_previous()
    for number in range(begin, end):
        first, count = tl.load(blocks + number * 5), tl.load(blocks + number * 5 + 1)
        copy = tl.load(blocks + number * 5 + 4)
        is_token = at < count
        token = first + at
        own = softplus(tl.load(steps + token * steps_stride + head, mask=is_token, other=0.0).to(tl.float32) + bias)
        own = tl.where(is_token, own, 0.0)  # tokens after the last change nothing
        total = tl.cumsum(-rate * own, 0)
        last = tl.sum(tl.where(at == TOKENS - 1, total, 0.0), 0)
        between = tl.exp(tl.where(is_seen, total[:, None] - total[None, :], float("-inf")))
        b, c = _keys_and_queries(mixed, token, group, is_token, GROUPS, HEADS, KEY_DIM, VALUE_DIM, KEYS)
        mask = is_token[:, None] & is_value[None, :]
        place = head * VALUE_DIM + value[None, :]
        x = tl.load(mixed + token[:, None] * CHANNELS + place, mask=mask, other=0.0).to(tl.float32)
        source = products + (number * GROUPS + group) * TOKENS * TOKENS + at[:, None] * TOKENS + at[None, :]
        within = tl.load(source) * between
        scaled = x * own[:, None]
        result = tl.dot(c * tl.exp(total)[:, None], state, input_precision=PRECISION)
        result += tl.dot(within, scaled, input_precision=PRECISION) + kept * x
        opened = tl.load(gate + token[:, None] * gate_stride + place, mask=mask, other=0.0).to(tl.float32)
        result *= opened * tl.sigmoid(opened)
        tl.store(out + token[:, None] * HEADS * VALUE_DIM + place, result.to(out.dtype.element_ty), mask=mask)
        late = tl.trans(b * tl.exp(last - total)[:, None])
        state = state * tl.exp(last) + tl.dot(late, scaled, input_precision=PRECISION)
        if copy >= 0:
            tl.store(recurrent + copy * SIZE + element, state, mask=is_element)
    tl.store(recurrent + row * SIZE + element, state, mask=is_element)
