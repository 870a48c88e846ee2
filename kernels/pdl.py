"""How one Triton kernel takes over from the kernel before it ("programmatic dependent launch").

From Hopper on a kernel starts while the kernel before it still runs, so that its start, and its reads of data that no
kernel writes, cost no time of their own. Every kernel that is launched with `OPTIONS` keeps these rules:

- All its programs call `wait_for_previous` before they read what another kernel wrote, and before they write anything.
- Before that call they read only data that was on the device when the step's first plain kernel began: weights, tables
  of angles, the arrays that the host sent for the step, and the keys and values of earlier steps. One more thing is
  allowed, see below.
- Once all its programs have called `launch_dependents`, the next kernel may start, if that is launched with `OPTIONS`.

Why no kernel reads memory too early, or overwrites memory too early:

1. `wait_for_previous` returns when the kernel before has ended and its writes are visible. Where streams meet, in a
   CUDA graph or by an event, that holds of the last kernel of each.
2. That kernel had waited itself before it ended, and so had those before it, back to the last plain kernel. Hence all
   earlier kernels have ended, and memory that any of them read may be written again.
3. A plain kernel (PyTorch's, cuBLAS's, NCCL's, FlashInfer's FlashAttention 3) starts when the kernel before it has
   ended, in the same sense. FlashInfer's other kernels wait as ours do, before they read queries, keys or values.
4. In a CUDA graph the same holds along the edges. A graph as a whole starts and ends like a plain kernel.

A kernel C may also read, before it waits, what a kernel A wrote that ended before the kernel B before C went on, if B
calls `launch_dependents` only after `wait_for_previous`, and C reads it past the cache of the multiprocessor
(`cache_modifier=".cg"`). Why it does not read too early:

1. C starts once all programs of B have called `launch_dependents` or ended, hence once they all have waited. Then A, be
   it the kernel before B or an earlier one, has ended, and its writes are in the L2 cache or in memory. If B is a plain
   kernel, C starts when B has ended.
2. Nothing invalidates the cache of a multiprocessor between the starts of B and C, so it may hold what the memory held
   before A wrote there. The L2 cache does not.
3. Nothing overwrites what A wrote while C reads it: a kernel after C waits for C, and B does not write there.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_EARLY = tl.constexpr(torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0))

# Launch options of such a kernel.
OPTIONS: dict[str, Any] = {"launch_pdl": True} if _EARLY else {}


@triton.jit
def launch_dependents():
    if _EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    if _EARLY:
        gdc_wait()
