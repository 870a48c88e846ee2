"""The softplus, for Triton kernels. Imported only where there is a GPU (or Triton's interpreter)."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)); of large numbers, the number itself."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
