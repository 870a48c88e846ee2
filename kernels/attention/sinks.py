"""Sinks for attention whose kernel knows none, as a Triton kernel: from its outputs and the sums of its weights.

Attention with a sink has one more weight in its sum, and no more values. So its output is the output without, times the
part of the sum that is not the sink's: `1 / (1 + exp(sink - log sum))`.

Imported only where there is a GPU (or Triton's interpreter).
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.pdl import launch_dependents, wait_for_previous

_HEADS_A_PROGRAM = 8


def add_sinks(out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> None:
    """Makes outputs of attention without sinks those with them, in place.

    out: `[n, num_heads, head_dim]`, contiguous. sums: float32 `[n, num_heads]`, contiguous, the logarithms to base 2 of
    the sums of weights, as FlashInfer's kernels return them. sinks: the layer's, float32 `[num_heads]`.
    """
    n, num_heads, head_dim = out.shape
    _add_sinks[(n, triton.cdiv(num_heads, _HEADS_A_PROGRAM))](
        out,
        sums,
        sinks,
        num_heads,
        head_dim,
        _HEADS_A_PROGRAM,
        triton.next_power_of_2(head_dim),
        num_warps=4,
        **pdl.OPTIONS,
    )


@triton.jit
def _add_sinks(
    out,
    sums,
    sinks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    at = tl.arange(0, BLOCK_DIM)
    is_head = head < HEADS
    sink = tl.load(sinks + head, mask=is_head, other=0.0)
    wait_for_previous()
    lse = tl.load(sums + token * HEADS + head, mask=is_head, other=0.0)
    place = out + (token * HEADS + head)[:, None] * HEAD_DIM + at[None, :]
    mask = is_head[:, None] & (at < HEAD_DIM)[None, :]
    # A sink so far above the sum that float32 cannot hold their ratio gets a smaller one: the output is 0 all the same.
    kept = 1.0 / (1.0 + tl.exp2(tl.minimum(sink * 1.4426950408889634 - lse, 126.0)))
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32) * kept[:, None]
    tl.store(place, value.to(out.dtype.element_ty), mask=mask)
