"""The norm of each head's output, times a gate."""

import torch
import torch.nn.functional as F

from kernels.ops.norm import rms_norm


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns `rms_norm(x) * silu(gate)`, with the shape and dtype of x.

    x: `[n, heads, size]`, contiguous. gate: `[n, heads * size]`, tokens at any stride. weight: `[size]`.
    """
    if x.is_cuda:
        from kernels.delta_rule import decode_kernels

        return decode_kernels.gated_rms_norm(x, gate, weight, eps)
    normalised = rms_norm(x.flatten(0, 1), weight, eps).view(x.shape)
    return (normalised * F.silu(gate.float()).view(x.shape)).to(x.dtype)
