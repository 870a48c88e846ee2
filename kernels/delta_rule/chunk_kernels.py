"""The gated delta rule for chunks of many tokens, as Triton kernels. `chunked.py` has the formulas.

1. `_prepare` solves the triangular system of every block, all blocks at once.
2. `_scan` goes through the blocks of a chunk with the state in registers. Each program has some value rows of a head.

The inverse of a unit triangular matrix is built from those of its diagonal blocks, which double in size: with X the
inverse of the diagonal blocks and M what the doubled blocks have besides, X - X M X is the inverse of the doubled ones.

Imported only where there is a GPU (or Triton's interpreter). Sums are in float32 whatever the tensors' dtypes.
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.delta_rule.decode_kernels import log_decay_and_beta
from kernels.delta_rule.gates import TokenGates
from kernels.pdl import launch_dependents, wait_for_previous
from kernels.recurrent.recurrence import BLOCK, ChunkBlocks
from kernels.recurrent.shape import StateShape

_VALUES = 32  # value rows that one program of `_scan` updates
_LEAST_LENGTH = tl.constexpr(1e-6)  # as in `chunked.py`


def attend(
    mixed: torch.Tensor,
    gates: TokenGates,
    recurrent: torch.Tensor,
    shape: StateShape,
    out: torch.Tensor,
    blocks: ChunkBlocks,
) -> None:
    """`DeltaRule.launch_blocks`."""
    count, heads = len(blocks.blocks), shape.value_heads
    keys, values = (max(16, triton.next_power_of_2(size)) for size in (shape.key_dim, shape.value_dim))
    # By block: corrections without a state before, how they depend on that state, and products of queries and keys.
    alone = mixed.new_empty(count, heads, BLOCK, values)
    of_state = mixed.new_empty(count, heads, BLOCK, keys)
    inside = mixed.new_empty(count, heads, BLOCK, BLOCK)
    totals = torch.empty(count, heads, BLOCK, dtype=torch.float32, device=mixed.device)
    precision = "ieee" if mixed.dtype == torch.float32 else "tf32"
    sizes = shape.key_heads, heads, shape.key_dim, shape.value_dim
    _prepare[(count, heads)](
        mixed,
        *gates,
        blocks.blocks,
        alone,
        of_state,
        inside,
        totals,
        gates.decay.stride(0),
        gates.strength.stride(0),
        *sizes,
        keys,
        values,
        BLOCK,
        BLOCK.bit_length() - 1,
        precision,
        num_warps=4,
        **pdl.OPTIONS,
    )
    at_once = min(_VALUES, values)
    _scan[(triton.cdiv(shape.value_dim, at_once), heads, len(blocks.chunks))](
        mixed,
        blocks.blocks,
        blocks.chunks,
        alone,
        of_state,
        inside,
        totals,
        recurrent,
        out,
        *sizes,
        keys,
        values,
        at_once,
        BLOCK,
        precision,
        num_warps=4,
        num_stages=2,
        **pdl.OPTIONS,
    )


@triton.jit
def _queries_and_keys(
    mixed,
    token,
    head,
    inside,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Queries and keys of the tokens for a value head, float32 `[tokens, KEYS]`, as the rule takes them."""
    at = tl.arange(0, KEYS)
    mask = inside[:, None] & (at < KEY_DIM)[None, :]
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    source = mixed + token[:, None] * CHANNELS + (head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + at[None, :]
    q = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(source + KEY_HEADS * KEY_DIM, mask=mask, other=0.0).to(tl.float32)
    q *= (tl.math.rsqrt(tl.sum(q * q, 1) + _LEAST_LENGTH) * tl.math.rsqrt(KEY_DIM * 1.0))[:, None]
    k *= tl.math.rsqrt(tl.sum(k * k, 1) + _LEAST_LENGTH)[:, None]
    return q, k


@triton.jit
def _prepare(
    mixed,
    decay,
    strength,
    decay_log,
    decay_bias,
    blocks,
    alone,
    of_state,
    inside,
    totals,
    decay_stride,
    strength_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    TOKENS: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    launch_dependents()
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = tl.load(blocks + number * 5), tl.load(blocks + number * 5 + 1)
    at = tl.arange(0, TOKENS)
    is_token = at < count
    token = first + at
    rate, bias = tl.load(decay_log + head).to(tl.float32), tl.load(decay_bias + head).to(tl.float32)
    wait_for_previous()
    own_decay = tl.load(decay + token * decay_stride + head, mask=is_token, other=0.0).to(tl.float32)
    own_strength = tl.load(strength + token * strength_stride + head, mask=is_token, other=0.0).to(tl.float32)
    log_decay, beta = log_decay_and_beta(own_decay, own_strength, rate, bias)
    # Tokens after the last change nothing.
    log_decay, beta = tl.where(is_token, log_decay, 0.0), tl.where(is_token, beta, 0.0)
    total = tl.cumsum(log_decay, 0)
    place = number * VALUE_HEADS + head
    tl.store(totals + place * TOKENS + at, total)
    q, k = _queries_and_keys(mixed, token, head, is_token, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KEYS)
    is_earlier = at[:, None] > at[None, :]
    is_seen = at[:, None] >= at[None, :]
    between = tl.exp(tl.where(is_seen, total[:, None] - total[None, :], float("-inf")))
    within = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
    pair = at[:, None] * TOKENS + at[None, :]
    tl.store(inside + place * TOKENS * TOKENS + pair, within.to(inside.dtype.element_ty))
    scaled = k * beta[:, None]
    system = tl.where(is_earlier, tl.dot(scaled, tl.trans(k), input_precision=PRECISION) * between, 0.0)
    # The inverse of the unit triangular system.
    inverse = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    for size in tl.static_range(DOUBLINGS):
        is_new = ((at[:, None] >> (size + 1)) == (at[None, :] >> (size + 1))) & (
            (at[:, None] >> size) != (at[None, :] >> size)
        )
        besides = tl.where(is_new, system, 0.0)
        if size == 0:
            inverse -= besides
        else:
            half_done = tl.dot(inverse, besides, input_precision=PRECISION)
            inverse -= tl.dot(half_done, inverse, input_precision=PRECISION)
    key, value = tl.arange(0, KEYS), tl.arange(0, VALUES)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    source = mixed + token[:, None] * CHANNELS + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value[None, :]
    v = tl.load(source, mask=is_token[:, None] & (value < VALUE_DIM)[None, :], other=0.0).to(tl.float32)
    corrections = tl.dot(inverse, v * beta[:, None], input_precision=PRECISION)
    tl.store(
        alone + place * TOKENS * VALUES + at[:, None] * VALUES + value[None, :], corrections.to(alone.dtype.element_ty)
    )
    depends = tl.dot(inverse, scaled * tl.exp(total)[:, None], input_precision=PRECISION)
    tl.store(
        of_state + place * TOKENS * KEYS + at[:, None] * KEYS + key[None, :], depends.to(of_state.dtype.element_ty)
    )


@triton.jit
def _scan(
    mixed,
    blocks,
    chunks,
    alone,
    of_state,
    inside,
    totals,
    recurrent,
    out,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    ALL_VALUES: tl.constexpr,
    VALUES: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    launch_dependents()
    head = tl.program_id(1)
    chunk = chunks + tl.program_id(2) * 3
    row, begin, end = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    at, key = tl.arange(0, TOKENS), tl.arange(0, KEYS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    # The state lies in memory by values, and here by keys.
    SIZE: tl.constexpr = VALUE_HEADS * VALUE_DIM * KEY_DIM
    element = head * VALUE_DIM * KEY_DIM + value[None, :] * KEY_DIM + key[:, None]
    is_element = is_key[:, None] & is_value[None, :]
    state = tl.load(recurrent + row * SIZE + element, mask=is_element, other=0.0)
    wait_for_previous()
    for number in range(begin, end):
        first, count = tl.load(blocks + number * 5), tl.load(blocks + number * 5 + 1)
        copy = tl.load(blocks + number * 5 + 4)
        is_token = at < count
        place = number * VALUE_HEADS + head
        total = tl.load(totals + place * TOKENS + at)
        last = tl.sum(tl.where(at == TOKENS - 1, total, 0.0), 0)
        q, k = _queries_and_keys(mixed, first + at, head, is_token, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KEYS)
        depends = tl.load(of_state + place * TOKENS * KEYS + at[:, None] * KEYS + key[None, :]).to(tl.float32)
        own = tl.load(alone + place * TOKENS * ALL_VALUES + at[:, None] * ALL_VALUES + value[None, :]).to(tl.float32)
        within = tl.load(inside + place * TOKENS * TOKENS + at[:, None] * TOKENS + at[None, :]).to(tl.float32)
        corrections = own - tl.dot(depends, state, input_precision=PRECISION)
        result = tl.dot(q * tl.exp(total)[:, None], state, input_precision=PRECISION)
        result += tl.dot(within, corrections, input_precision=PRECISION)
        target = out + ((first + at)[:, None] * VALUE_HEADS + head) * VALUE_DIM + value[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=is_token[:, None] & is_value[None, :])
        late = tl.trans(k * tl.exp(last - total)[:, None])
        state = state * tl.exp(last) + tl.dot(late, corrections, input_precision=PRECISION)
        if copy >= 0:
            tl.store(recurrent + copy * SIZE + element, state, mask=is_element)
    tl.store(recurrent + row * SIZE + element, state, mask=is_element)
