"""The operators of latent attention between its matrix products and the attention, as one Triton kernel, for GPUs.

Imported only where there is a GPU (or Triton's interpreter). Arithmetic is in float32 whatever the tensors' dtypes.
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.pdl import launch_dependents, wait_for_previous

# Heads that one program computes.
_HEADS_A_PROGRAM = 8


def rotate_and_store(
    q: torch.Tensor,
    rows: torch.Tensor,
    num_heads: int,
    angles: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the rotated queries, `[n, num_heads, query]`, in `out` if that is given.

    1. Latents are normalised with `norm`, `[rank]`.
    2. The last `rope` elements of each query and each row are rotated by row `positions[i]` of `angles` (`Rope.table`).
    3. Row i is written to row `slots[i]` of `pages`, seen as `[num_pages * page_size, rank + rope]`.

    q: `[n, num_heads * query]`; rows: `[n, rank + rope]`; the elements of a token are contiguous in both. pages: `[1,
    num_pages, 1, page_size, rank + rope]`. positions, slots: int64 `[n]`.
    """
    n, query, rank = len(q), q.shape[1] // num_heads, len(norm)
    rope = rows.shape[1] - rank
    if out is None:
        out = q.new_empty(n, num_heads, query)
    _rotate_and_store[(n, 1 + triton.cdiv(num_heads, _HEADS_A_PROGRAM))](
        q,
        rows,
        out,
        pages,
        angles,
        positions,
        slots,
        norm,
        q.stride(0),
        rows.stride(0),
        eps,
        num_heads,
        rank,
        triton.next_power_of_2(rank),
        query - rope,
        triton.next_power_of_2(query - rope),
        rope // 2,
        triton.next_power_of_2(rope // 2),
        _HEADS_A_PROGRAM,
        num_warps=4,
        **pdl.OPTIONS,
    )
    return out


@triton.jit
def _rotated(x, y, cos, sin):
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def _rotate_and_store(
    q,
    rows,
    out,
    pages,
    angles,
    positions,
    slots,
    norm,
    q_stride,
    row_stride,
    eps,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    turn = tl.arange(0, HALF_BLOCK)
    turning = turn < HALF
    angle = angles + tl.load(positions + token) * (2 * HALF) + turn
    cos = tl.load(angle, mask=turning, other=0.0)
    sin = tl.load(angle + HALF, mask=turning, other=0.0)
    wait_for_previous()
    if program == 0:
        column = tl.arange(0, RANK_BLOCK)
        kept = column < RANK
        weight = tl.load(norm + column, mask=kept, other=0.0).to(tl.float32)
        row = rows + token * row_stride
        page = pages + tl.load(slots + token) * (RANK + 2 * HALF)
        latent = tl.load(row + column, mask=kept, other=0.0).to(tl.float32)
        latent *= tl.math.rsqrt(tl.sum(latent * latent) / RANK + eps) * weight
        tl.store(page + column, latent.to(pages.dtype.element_ty), mask=kept)
        first = tl.load(row + RANK + turn, mask=turning, other=0.0).to(tl.float32)
        second = tl.load(row + RANK + HALF + turn, mask=turning, other=0.0).to(tl.float32)
        first, second = _rotated(first, second, cos, sin)
        tl.store(page + RANK + turn, first.to(pages.dtype.element_ty), mask=turning)
        tl.store(page + RANK + HALF + turn, second.to(pages.dtype.element_ty), mask=turning)
    else:
        SIZE: tl.constexpr = PLAIN + 2 * HALF
        head = (program - 1) * GROUP + tl.arange(0, GROUP)[:, None]
        own = head < HEADS
        source = q + token * q_stride + head * SIZE
        target = out + (token * HEADS + head) * SIZE
        at = tl.arange(0, PLAIN_BLOCK)[None, :]
        copied = own & (at < PLAIN)
        tl.store(target + at, tl.load(source + at, mask=copied, other=0.0), mask=copied)
        place = PLAIN + turn[None, :]
        moved = own & turning[None, :]
        low = tl.load(source + place, mask=moved, other=0.0).to(tl.float32)
        high = tl.load(source + HALF + place, mask=moved, other=0.0).to(tl.float32)
        low, high = _rotated(low, high, cos[None, :], sin[None, :])
        tl.store(target + place, low.to(out.dtype.element_ty), mask=moved)
        tl.store(target + HALF + place, high.to(out.dtype.element_ty), mask=moved)
