"""The recurrence of Mamba2, as recurrent states take it. `chunked.py` has the formulas."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.recurrent.recurrence import ChunkBlocks, Recurrence, SingleTokens
from kernels.ssd.chunked import ssd_blocks, ssd_step


class SsdParameters(NamedTuple):
    """The parameters of a layer, float32 `[value_heads]` each.

    The decay of a token is exp(-exp(`decay_log`) step), its step being softplus(its output + `step_bias`). `skip` is
    the part of a token's input that its output has besides what the state gives.
    """

    decay_log: torch.Tensor
    step_bias: torch.Tensor
    skip: torch.Tensor


@dataclass(frozen=True)
class Ssd(Recurrence):
    """The recurrence for the tokens of a step, whose outputs are multiplied by the silu of their gates.

    `mixed` has the inputs x of all value heads, then b and c of all key heads. `steps`: outputs of the layer's input
    product, `[num_tokens, value_heads]`; `gate`: `[num_tokens, value_heads * value_dim]`; tokens at any stride.
    """

    steps: torch.Tensor
    gate: torch.Tensor
    parameters: SsdParameters

    def sources(self) -> tuple[torch.Tensor, ...]:
        shape, parameters = self.shape, self.parameters
        size = shape.key_heads * shape.key_dim
        x, b, c = self.mixed.float().split((shape.value_heads * shape.value_dim, size, size), dim=1)
        heads, groups = (shape.value_heads, shape.value_dim), (shape.key_heads, shape.key_dim)
        step = F.softplus(self.steps.float() + parameters.step_bias)
        gate = F.silu(self.gate.float()).unflatten(1, heads)
        log_decay = -parameters.decay_log.exp() * step
        return x.unflatten(1, heads), b.unflatten(1, groups), c.unflatten(1, groups), step, log_decay, gate

    def step(self, sources: tuple[torch.Tensor, ...], state: torch.Tensor) -> torch.Tensor:
        x, b, c, step, log_decay, gate = sources
        return ssd_step(x, b, c, step, log_decay, self.parameters.skip, state).mul_(gate)

    def blocks(self, sources: tuple[torch.Tensor, ...], state: torch.Tensor) -> torch.Tensor:
        x, b, c, step, log_decay, gate = sources
        return ssd_blocks(x, b, c, step, log_decay, self.parameters.skip, state).mul_(gate)

    def launch_step(self, recurrent: torch.Tensor, out: torch.Tensor, singles: SingleTokens) -> None:
        from kernels.ssd import decode_kernels

        decode_kernels.step(self.mixed, self.steps, self.gate, *self.parameters, recurrent, self.shape, out, singles)

    def launch_blocks(self, recurrent: torch.Tensor, out: torch.Tensor, blocks: ChunkBlocks) -> None:
        from kernels.ssd import chunk_kernels

        chunk_kernels.scan(self.mixed, self.steps, self.gate, *self.parameters, recurrent, self.shape, out, blocks)
