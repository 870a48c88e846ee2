"""The gated activations between a layer's two large matrix products (https://arxiv.org/abs/2002.05202)."""

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[..., 2 * n]`, the gate first; returns `[..., n]`."""
    if gate_up.is_cuda:
        from kernels import fused

        return fused.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` with the tanh form of gelu, of `[..., 2 * n]`, the gate first; returns `[..., n]`."""
    if gate_up.is_cuda:
        from kernels import fused

        return fused.gelu_tanh_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
