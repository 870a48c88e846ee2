"""Gated delta net in place of a layer's attention (https://arxiv.org/abs/2412.06464): a linear attention, whose memory
of a sequence is a state of fixed size."""

from dataclasses import dataclass

import torch

from kernels.delta_rule.gated_norm import gated_rms_norm
from kernels.delta_rule.states import StateShape, TokenGates
from kernels.linear.any_linear import AnyLinear
from worker.models.forward_context import ForwardContext
from worker.models.residual_stream import ResidualStream


@dataclass(frozen=True)
class DeltaNetConfig:
    """The layers with a gated delta net.

    | field | meaning |
    | --- | --- |
    | `states` | sizes of a layer's heads and of its convolution; with several ranks, those of one rank |
    | `layers` | for each layer whether it has a gated delta net; the others have attention |
    | `is_fused` | a checkpoint has the input products of a layer in two tensors, key head after key head |
    """

    states: StateShape
    layers: tuple[bool, ...]
    is_fused: bool

    @property
    def num_layers(self) -> int:
        """Number of layers with a gated delta net."""
        return sum(self.layers)

    @property
    def projected_sizes(self) -> tuple[int, int, int, int]:
        """Outputs of the input product: queries, keys and values; gates; strengths; decays."""
        heads, size = self.states.value_heads, self.states.value_heads * self.states.value_dim
        return self.states.channels, size, heads, heads

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's parameters, as `worker.models.parameters` has those of attention."""
        states = self.states
        return {
            "qkv": (sum(self.projected_sizes), hidden_size),
            "out": (hidden_size, states.value_heads * states.value_dim),
            "conv": (states.channels, 1, states.width),
            "decay_log": (states.value_heads,),
            "decay_bias": (states.value_heads,),
            "head_scale": (states.value_dim,),
            "input_norm": (hidden_size,),
            "mlp_norm": (hidden_size,),
        }


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta net of a layer, number `index` of those that the rank has. It stands in the place of
    `worker.models.layer.SelfAttention`.

    `qkv` gives all that a token puts in (`DeltaNetConfig.projected_sizes`). `conv`: `[channels, width]`. The decay of
    a token is exp(-exp(`decay_log`) softplus(its output + `decay_bias`)), both float32 `[value_heads]`. `head_scale`
    multiplies the normalised output of each head.
    """

    config: DeltaNetConfig
    index: int
    eps: float
    input_norm: torch.Tensor
    qkv: AnyLinear
    out: AnyLinear
    conv: torch.Tensor
    decay_log: torch.Tensor
    decay_bias: torch.Tensor
    head_scale: torch.Tensor

    @property
    def projected_size(self) -> int:
        """Columns of the result of `project`."""
        return sum(self.config.projected_sizes)

    @property
    def attended_size(self) -> int:
        """Columns of the result of `forward`."""
        return self.config.projected_sizes[1]

    def project(self, x: ResidualStream, out: torch.Tensor | None = None) -> torch.Tensor:
        """The input product, `[n, projected_size]`, in `out` if given."""
        return x.project(self.input_norm, self.qkv, out)

    def forward(self, projected: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Concatenated outputs of the heads, `[n, attended_size]`. The states are those after the step's tokens
        afterwards."""
        states = context.states
        assert states is not None, "a model with gated delta nets is run with its states"
        qkv, gate, strength, decay = projected.split(self.config.projected_sizes, dim=1)
        mixed = states.convolve(self.index, qkv, self.conv)
        attended = states.attend(self.index, mixed, TokenGates(decay, strength, self.decay_log, self.decay_bias))
        return gated_rms_norm(attended, gate, self.head_scale, self.eps).flatten(1)

    def add_output(self, x: ResidualStream, attended: torch.Tensor) -> None:
        """Adds the output product of `forward`'s result."""
        x.add(self.out, attended)
