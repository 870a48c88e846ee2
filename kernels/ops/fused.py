"""The operators between a layer's matrix products as Triton kernels, for GPUs: each reads and writes its tensors once.

On an H200 `rotate_and_store` takes 3.1 us for 256 tokens and 61 us for 8,192.

Imported only where there is a GPU (or Triton's interpreter). Arithmetic is in float32 whatever the tensors' dtypes.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.pdl import launch_dependents, wait_for_previous

# Heads that one program of `rotate_and_store` computes. With 4 heads it takes twice as long for many tokens (H200).
_HEADS_A_PROGRAM = 8
# Columns that one program of `_gated` or `_plain` computes.
_GATED_COLUMNS = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`kernels.ops.norm.rms_norm` for `[n, size]`, rows contiguous."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    _rms_norm[(len(x),)](
        x, x, weight, out, x.stride(0), size, eps, False, block, num_warps=_warps(block), **pdl.OPTIONS
    )
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`kernels.ops.norm.add_rms_norm` for contiguous `[n, size]`."""
    out = torch.empty_like(x)
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    _rms_norm[(len(x),)](
        x, residual, weight, out, x.stride(0), size, eps, True, block, num_warps=_warps(block), **pdl.OPTIONS
    )
    return out


def silu_and_mul(gate_up: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """`kernels.ops.activation.silu_and_mul` for contiguous `[n, 2 * size]`."""
    return _activate(_gated, gate_up, gate_up.shape[1] // 2, added, False)


def gelu_tanh_and_mul(gate_up: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """`kernels.ops.activation.gelu_tanh_and_mul` for contiguous `[n, 2 * size]`."""
    return _activate(_gated, gate_up, gate_up.shape[1] // 2, added, True)


def relu2(up: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """`kernels.ops.activation.relu2` for contiguous `[n, size]`."""
    return _activate(_plain, up, up.shape[1], added, False)


def gelu_tanh(up: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """`kernels.ops.activation.gelu_tanh` for contiguous `[n, size]`."""
    return _activate(_plain, up, up.shape[1], added, True)


def rotate_and_store(
    qkv: torch.Tensor,
    num_heads: int,
    angles: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
    *,
    normalises_values: bool = False,
    has_kv: bool = True,
) -> torch.Tensor:
    """All operators between the product with the fused QKV weight and attention, in one pass. Returns the queries
    `[n, num_heads, head_dim]`, in `out` if that is given.

    1. Queries and keys are normalised, each head by itself, if `q_norm` and `k_norm` (`[head_dim]`) are given. With
       `normalises_values` values are too, without weights.
    2. They are rotated by row `positions[i]` of `angles` (`Rope.table`).
    3. Keys and values of token i are written to row `rows[i]` of `pages`, seen as
       `[num_pages * num_kv_heads * page_size, head_dim]`, head h `h * page_size` rows further.

    Without `has_kv` there are queries alone, and `pages` are not written.

    qkv: `[n, at least (num_heads + 2 * num_kv_heads) * head_dim]`, rows at any stride; what follows these in a row is
    not read.
    pages: `[2, num_pages, num_kv_heads, page_size, head_dim]`. positions, rows: int64 `[n]`.
    """
    num_kv_heads, page_size, head_dim = pages.shape[2:]
    n, half = len(qkv), head_dim // 2
    q = qkv.new_empty(n, num_heads, head_dim) if out is None else out
    keys, values = pages
    programs = triton.cdiv(num_heads, _HEADS_A_PROGRAM)
    if has_kv:
        programs += 2 * triton.cdiv(num_kv_heads, _HEADS_A_PROGRAM)
    _rotate_and_store[(n, programs)](
        qkv,
        q,
        keys,
        values,
        angles,
        positions,
        rows,
        qkv if q_norm is None else q_norm,
        k_norm if k_norm is not None else qkv if q_norm is None else q_norm,
        eps,
        qkv.stride(0),
        num_heads,
        num_kv_heads,
        page_size,
        half,
        triton.next_power_of_2(half),
        _HEADS_A_PROGRAM,
        q_norm is not None,
        normalises_values,
        num_warps=4,
        **pdl.OPTIONS,
    )
    return q


def _activate(kernel: Any, x: torch.Tensor, size: int, added: torch.Tensor | None, gelu: bool) -> torch.Tensor:
    """Runs `_gated` or `_plain`, which make `[n, size]` of x."""
    n = len(x)
    out = x.new_empty(n, size)
    kernel[(triton.cdiv(size, _GATED_COLUMNS), n)](
        x,
        x if added is None else added,
        out,
        size,
        added is not None,
        gelu,
        _GATED_COLUMNS,
        num_warps=4,
        **pdl.OPTIONS,
    )
    return out


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


@triton.jit
def _rms_norm(x, residual, weight, out, stride, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous()
    value = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * size + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    value *= tl.math.rsqrt(tl.sum(value * value) / size + eps)
    tl.store(out + row * size + at, (value * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """The silu, or the tanh form of gelu, of float32 values."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate * tl.sigmoid(2.0 * inner)
    else:
        result = gate * tl.sigmoid(gate)
    return result


@triton.jit
def plain(up, GELU: tl.constexpr):
    """The activation of an MLP without a gate, of float32 values: the tanh form of gelu, or the square of the relu."""
    if GELU:
        result = activated(up, True)
    else:
        positive = tl.maximum(up, 0.0)
        result = positive * positive
    return result


@triton.jit
def gated(gate, up, GELU: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """The product of activated gates and ups, float32. With a LIMIT other than 0 it is
    `kernels.ops.activation.ClampedSwiGLU`."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        result = (tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0) * gate * tl.sigmoid(gate * ALPHA)
    else:
        result = activated(gate, GELU) * up
    return result


@triton.jit
def _gated(gate_up, added, out, size, ADDED: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    wait_for_previous()
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        gate += tl.load(added + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(added + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, (activated(gate, GELU) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _plain(up, added, out, size, ADDED: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    wait_for_previous()
    value = tl.load(up + row * size + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        value += tl.load(added + row * size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, plain(value, GELU).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv,
    q,
    keys,
    values,
    angles,
    positions,
    rows,
    q_norm,
    k_norm,
    eps,
    ROW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr,
):
    launch_dependents()
    Q_PROGRAMS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    KV_PROGRAMS: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    at = tl.arange(0, HALF_BLOCK)[None, :]
    is_query = program < Q_PROGRAMS
    is_key = (program >= Q_PROGRAMS) & (program < Q_PROGRAMS + KV_PROGRAMS)
    first = tl.where(is_query, program, tl.where(is_key, program - Q_PROGRAMS, program - Q_PROGRAMS - KV_PROGRAMS))
    head = first * GROUP + tl.arange(0, GROUP)[:, None]
    count = tl.where(is_query, HEADS, KV_HEADS)
    before = tl.where(is_query, 0, tl.where(is_key, HEADS, HEADS + KV_HEADS))
    inside = (head < count) & (at < HALF)
    # Values are not rotated: their programs load no angles.
    turning = at < tl.where(is_query | is_key, HALF, 0)
    turn = angles + tl.load(positions + token) * (2 * HALF) + at
    cos = tl.load(turn, mask=turning, other=0.0)
    sin = tl.load(turn + HALF, mask=turning, other=0.0)
    row = tl.load(rows + token)
    if NORM:
        of_query = at < tl.where(is_query, HALF, 0)
        of_key = at < tl.where(is_key, HALF, 0)
        low_weight = tl.load(q_norm + at, mask=of_query, other=0.0).to(tl.float32)
        low_weight += tl.load(k_norm + at, mask=of_key, other=0.0).to(tl.float32)
        high_weight = tl.load(q_norm + HALF + at, mask=of_query, other=0.0).to(tl.float32)
        high_weight += tl.load(k_norm + HALF + at, mask=of_key, other=0.0).to(tl.float32)
    wait_for_previous()
    source = qkv + token * ROW + (before + head) * (2 * HALF) + at
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + HALF, mask=inside, other=0.0)
    if is_query | is_key:
        x, y = low.to(tl.float32), high.to(tl.float32)
        if NORM:
            scale = tl.math.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
            x *= scale * low_weight
            y *= scale * high_weight
        low = (x * cos - y * sin).to(low.dtype)
        high = (y * cos + x * sin).to(high.dtype)
    elif VALUE_NORM:
        x, y = low.to(tl.float32), high.to(tl.float32)
        scale = tl.math.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
        low, high = (x * scale).to(low.dtype), (y * scale).to(high.dtype)
    if is_query:
        target = q + (token * HEADS + head) * (2 * HALF) + at
        tl.store(target, low, mask=inside)
        tl.store(target + HALF, high, mask=inside)
    else:
        place = (row + head * PAGE_SIZE) * (2 * HALF) + at
        if is_key:
            tl.store(keys + place, low, mask=inside)
            tl.store(keys + place + HALF, high, mask=inside)
        else:
            tl.store(values + place, low, mask=inside)
            tl.store(values + place + HALF, high, mask=inside)
