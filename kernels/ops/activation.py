"""The gated activations between a layer's two large matrix products (https://arxiv.org/abs/2002.05202)."""

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns `silu(gate) * up`, `[..., n]`, for gate and up in one tensor `[..., 2 * n]`, the gate first."""
    if gate_up.is_cuda:
        from kernels.ops import fused

        return fused.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns `gelu(gate) * up`, `[..., n]`, with the tanh form of gelu, for gate and up in one tensor `[..., 2 * n]`,
    the gate first."""
    if gate_up.is_cuda:
        from kernels.ops import fused

        return fused.gelu_tanh_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
