"""How one Triton kernel takes over from the one before it: from Hopper on it is started while that one still runs, so
that starting it, and reading what no kernel writes, cost no time of their own ("programmatic dependent launch").

Every kernel that is launched with `OPTIONS` keeps to this:

- All its programs call `wait`, before they read what another kernel wrote and before they write anything.
- Before that they read only what was on the device when the step's first plain kernel began: weights, tables of
  angles, and the arrays that the host sent for the step.
- `let_next_start` says when the kernel after it may be started, if that one is launched so too: when all programs of
  this one have called it.

`wait` returns when the kernel before has ended, with all that it wrote. That one had waited itself before it ended, and
so had those before it, back to the last plain one: hence all kernels before have ended, not only the last, and memory
that one of them read may be written again. A plain kernel (PyTorch's, cuBLAS's, NCCL's, FlashInfer's FlashAttention 3)
starts when the one before it has ended, in the same sense; FlashInfer's other kernels wait as ours do, before they read
queries, keys or values. In a CUDA graph the same holds along its edges, and a graph as a whole starts and ends as a
plain kernel does.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_EARLY = tl.constexpr(torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0))

# What such a kernel is launched with.
OPTIONS: dict[str, Any] = {"launch_pdl": True} if _EARLY else {}


@triton.jit
def let_next_start():
    if _EARLY:
        gdc_launch_dependents()


@triton.jit
def wait():
    if _EARLY:
        gdc_wait()
