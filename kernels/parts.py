"""What ranges of keys leave of attention, and the merging of it, as a Triton kernel for GPUs.

Imported only where there is a GPU (or Triton's interpreter).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import handover
from kernels.handover import let_next_start, wait

# Heads that one program merges.
_MERGED_HEADS = 8


class Parts(NamedTuple):
    """What ranges leave to be merged: float32 `[parts, num_heads, head_dim]`, and the logarithms to base 2 of the sums
    of their weights, `[parts, num_heads]`. Token t's are `counts[t]` from `slots[t]` on (int32); with none it has its
    output already. `arrived`: int32 `[n, num_kv_heads]`, zeros before and after each kernel."""

    out: torch.Tensor
    lse: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor
    arrived: torch.Tensor


def merge(out: torch.Tensor, parts: Parts) -> None:
    """The parts of every token that has any into `out` `[n, num_heads, head_dim]`."""
    n, num_heads, head_dim = out.shape
    _merge[(n, triton.cdiv(num_heads, _MERGED_HEADS))](
        out,
        parts.out,
        parts.lse,
        parts.slots,
        parts.counts,
        out.stride(0),
        num_heads,
        head_dim,
        min(_MERGED_HEADS, triton.next_power_of_2(num_heads)),
        triton.next_power_of_2(head_dim),
        num_warps=4,
        **handover.OPTIONS,
    )


@triton.jit
def _merge(
    out,
    part_out,
    part_lse,
    slots,
    counts,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + token)
    wait()
    if count == 0:
        return
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    at = tl.arange(0, BLOCK_DIM)
    is_head, in_head = head < HEADS, at < HEAD_DIM
    first = tl.load(slots + token).to(tl.int64)
    whole = merged(
        part_out, part_lse, first, count, head, at, is_head, in_head, HEADS, HEAD_DIM, BLOCK_HEADS, BLOCK_DIM
    )
    target = out + token * out_stride + head[:, None] * HEAD_DIM + at[None, :]
    tl.store(target, whole.to(out.dtype.element_ty), mask=is_head[:, None] & in_head[None, :])


@triton.jit
def merged(
    part_out,
    part_lse,
    first,
    count,
    head,
    at,
    is_head,
    in_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """`count` parts of one token, from `first` on, as one: of each `head`, `[BLOCK_HEADS, BLOCK_DIM]`. Other programs
    of the kernel that calls this may have written them: they do not come from the cache of a multiprocessor."""
    both = is_head[:, None] & in_head[None, :]
    top = tl.full([BLOCK_HEADS], -1e30, tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    sums = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
    for index in range(count):
        place = (first + index) * HEADS + head
        lse = tl.load(part_lse + place, mask=is_head, other=0.0, cache_modifier=".cg")
        part = tl.load(part_out + place[:, None] * HEAD_DIM + at[None, :], mask=both, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, lse)
        shrink, weight = tl.exp2(top - new_top), tl.exp2(lse - new_top)
        sums = sums * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        top = new_top
    return sums / total[:, None]
