"""The gated delta rule, as recurrent states take it. `chunked.py` has the formulas."""

from dataclasses import dataclass

import torch

from kernels.delta_rule.chunked import delta_rule_blocks, delta_rule_step, unit_heads
from kernels.delta_rule.gates import TokenGates
from kernels.recurrent.recurrence import ChunkBlocks, Recurrence, SingleTokens


@dataclass(frozen=True)
class DeltaRule(Recurrence):
    """The rule for the tokens of a step. `mixed` has queries and keys of all key heads, then values of all value
    heads."""

    gates: TokenGates

    def sources(self) -> tuple[torch.Tensor, ...]:
        shape = self.shape
        size = shape.key_heads * shape.key_dim
        q, k, v = self.mixed.split((size, size, shape.value_heads * shape.value_dim), dim=1)
        heads = (shape.key_heads, shape.key_dim)
        q, k = unit_heads(q.unflatten(1, heads), k.unflatten(1, heads), shape.value_heads)
        v = v.unflatten(1, (shape.value_heads, shape.value_dim)).float()
        return q, k, v, self.gates.log_decay, self.gates.beta

    def step(self, sources: tuple[torch.Tensor, ...], state: torch.Tensor) -> torch.Tensor:
        q, k, v, log_decay, beta = sources
        return delta_rule_step(q, k, v, log_decay, beta, state)

    def blocks(self, sources: tuple[torch.Tensor, ...], state: torch.Tensor) -> torch.Tensor:
        q, k, v, log_decay, beta = sources
        return delta_rule_blocks(q, k, v, log_decay, beta, state)

    def launch_step(self, recurrent: torch.Tensor, out: torch.Tensor, singles: SingleTokens) -> None:
        from kernels.delta_rule import decode_kernels

        decode_kernels.step(self.mixed, self.gates, recurrent, self.shape, out, singles)

    def launch_blocks(self, recurrent: torch.Tensor, out: torch.Tensor, blocks: ChunkBlocks) -> None:
        from kernels.delta_rule import chunk_kernels

        chunk_kernels.attend(self.mixed, self.gates, recurrent, self.shape, out, blocks)
