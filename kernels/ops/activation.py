"""The activations between a layer's two large matrix products: gated ones (https://arxiv.org/abs/2002.05202), and those
of MLPs without a gate."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `silu(gate) * up`, `[..., n]`, for gate and up in one tensor `[..., 2 * n]`, the gate first. With `added`
    they are in the sum of both tensors."""
    if gate_up.is_cuda:
        from kernels.ops import fused

        return fused.silu_and_mul(gate_up, added)
    gate, up = (gate_up if added is None else gate_up + added).chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `gelu(gate) * up`, `[..., n]`, with the tanh form of gelu, for gate and up in one tensor `[..., 2 * n]`,
    the gate first. With `added` they are in the sum of both tensors."""
    if gate_up.is_cuda:
        from kernels.ops import fused

        return fused.gelu_tanh_and_mul(gate_up, added)
    gate, up = (gate_up if added is None else gate_up + added).chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def relu2(up: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the square of `relu(up)`, `[..., n]` both (https://arxiv.org/abs/2109.08668). With `added`, up is the sum
    of both tensors."""
    if up.is_cuda:
        from kernels.ops import fused

        return fused.relu2(up, added)
    return F.relu(up if added is None else up + added).square()


def gelu_tanh(up: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `gelu(up)`, `[..., n]` both, in its tanh form. With `added`, up is the sum of both tensors."""
    if up.is_cuda:
        from kernels.ops import fused

        return fused.gelu_tanh(up, added)
    return F.gelu(up if added is None else up + added, approximate="tanh")


def gelu(up: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `gelu(up)`, `[..., n]` both, in its exact form. With `added`, up is the sum of both tensors."""
    return F.gelu(up if added is None else up + added)


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss's gated activation, `(up + 1) * gate * sigmoid(alpha * gate)`, of gates up to `limit` and ups between
    `-limit` and `limit`. It is a function like those above, but for any device by PyTorch's operators."""

    limit: float
    alpha: float

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=self.limit)
        return up.clamp(-self.limit, self.limit).add_(1).mul_(gate * (gate * self.alpha).sigmoid_())
