"""Inputs of each layer besides the hidden states, made of a token and its embedding alone.

A second embedding has some elements for each layer (Gemma 3n calls these per-layer embeddings). With several stages,
the first one makes the inputs of all layers, and each stage passes those of later layers on.
"""

from dataclasses import dataclass

import torch

from kernels.linear.any_linear import AnyLinear
from kernels.linear.linear import Linear
from kernels.ops.norm import rms_norm
from worker.models.residual_stream import Activation, ResidualStream


@dataclass(frozen=True)
class LayerInputsConfig:
    """Sizes. `size`: elements of a layer's input. `layers`: from the stage's first layer to the last of the model."""

    size: int
    layers: int


@dataclass(frozen=True)
class LayerInputs:
    """Makes the inputs of all layers. `projection`: from hidden states to the inputs of all layers. `norm`: float32
    or the activations' dtype, `[size]`."""

    config: LayerInputsConfig
    projection: Linear
    norm: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The inputs, `[n, layers, size]`. rows: of the second embedding, `[n, layers * size]`. embedded: hidden states
        before the first layer, `[n, hidden_size]`."""
        size = self.config.size
        projected = (self.projection(embedded) * embedded.shape[1] ** -0.5).view(-1, size)
        context = rms_norm(projected, self.norm, self.eps).view(-1, self.config.layers, size)
        return (context + rows.view_as(context) * size**0.5) * 2.0**-0.5


@dataclass(frozen=True)
class LayerInput:
    """The sublayer that adds a layer's input. Parameters are named as in `parameter_shapes`, with `layer_input_` before
    them. Every rank computes all of it."""

    index: int
    gate: AnyLinear
    out: AnyLinear
    norm: torch.Tensor
    activation: Activation

    def forward(self, x: ResidualStream) -> None:
        """Adds the product of the activated gate and the input of layer `index` of the stage."""
        assert x.layer_inputs is not None
        own = x.layer_inputs[:, self.index]
        gated = self.activation(torch.cat((self.gate(x.complete()), own), dim=1))
        x.add_sum(rms_norm(self.out(gated), self.norm, x.eps))
