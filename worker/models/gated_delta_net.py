"""Gated delta net in place of a layer's attention (https://arxiv.org/abs/2412.06464): a linear attention."""

from dataclasses import dataclass
from typing import Any

import torch

from kernels.delta_rule.gated_norm import gated_rms_norm
from kernels.delta_rule.gates import TokenGates
from kernels.delta_rule.rule import DeltaRule
from kernels.recurrent.states import RecurrentStates
from worker.models.recurrent_layer import RecurrentConfig, RecurrentLayer


@dataclass(frozen=True)
class DeltaNetConfig(RecurrentConfig):
    """The layers with a gated delta net.

    | field | meaning |
    | --- | --- |
    | `eps` | epsilon of the norm of a layer's outputs, whatever the scale of the hidden states |
    | `is_fused` | a checkpoint has the input products of a layer in two tensors, key head after key head |
    """

    eps: float
    is_fused: bool

    @property
    def projected_sizes(self) -> tuple[int, int, int, int]:
        """Outputs of the input product: queries, keys and values; gates; strengths; decays."""
        heads = self.states.value_heads
        return self.states.channels, self.attended_size, heads, heads

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        states = self.states
        return super().parameter_shapes(hidden_size) | {
            "decay_log": (states.value_heads,),
            "decay_bias": (states.value_heads,),
            "head_scale": (states.value_dim,),
        }

    def layer(self, index: int, parameters: dict[str, Any]) -> "GatedDeltaNet":
        return GatedDeltaNet(
            self,
            index,
            parameters["input_norm"],
            parameters["qkv"],
            parameters["out"],
            parameters["conv"].squeeze(1),
            parameters["decay_log"],
            parameters["decay_bias"],
            parameters["head_scale"],
        )


@dataclass(frozen=True)
class GatedDeltaNet(RecurrentLayer):
    """Gated delta net of a layer.

    `conv`: `[channels, width]`. The decay of a token is exp(-exp(`decay_log`) softplus(its output + `decay_bias`)),
    both float32 `[value_heads]`. `head_scale` multiplies the normalised output of each head.
    """

    config: DeltaNetConfig
    conv: torch.Tensor
    decay_log: torch.Tensor
    decay_bias: torch.Tensor
    head_scale: torch.Tensor

    def _attend(self, projected: torch.Tensor, states: RecurrentStates) -> torch.Tensor:
        qkv, gate, strength, decay = projected.split(self.config.projected_sizes, dim=1)
        mixed = states.convolve(self.index, qkv, self.conv)
        gates = TokenGates(decay, strength, self.decay_log, self.decay_bias)
        attended = states.update(self.index, DeltaRule(mixed, states.shape, gates))
        return gated_rms_norm(attended, gate, self.head_scale, self.config.eps).flatten(1)
