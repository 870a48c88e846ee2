"""How one Triton kernel takes over from the kernel before it ("programmatic dependent launch").

From Hopper on a kernel starts while the kernel before it still runs, so that its start, and its reads of data that no
kernel writes, cost no time of their own. Every kernel that is launched with `OPTIONS` keeps these rules:

- All its programs call `wait_for_previous` before they read what another kernel wrote, and before they write anything.
- Before that call they read only data that was on the device when the step's first plain kernel began: weights, tables
  of angles, the arrays that the host sent for the step, and the keys and values of earlier steps.
- Once all its programs have called `launch_dependents`, the next kernel may start, if that is launched with `OPTIONS`.

Why no kernel reads memory too early, or overwrites memory too early:

1. `wait_for_previous` returns when the kernel before has ended and its writes are visible. Where streams meet, in a
   CUDA graph or by an event, that holds of the last kernel of each.
2. That kernel had waited itself before it ended, and so had those before it, back to the last plain kernel. Hence all
   earlier kernels have ended, and memory that any of them read may be written again.
3. A plain kernel (PyTorch's, cuBLAS's, NCCL's, FlashInfer's FlashAttention 3) starts when the kernel before it has
   ended, in the same sense. FlashInfer's other kernels wait as ours do, before they read queries, keys or values.
4. In a CUDA graph the same holds along the edges. A graph as a whole starts and ends like a plain kernel.
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
