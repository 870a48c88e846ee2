"""A gated short convolution in place of a layer's attention (https://arxiv.org/abs/2511.23404). Its only state of a
sequence is the last inputs of the convolution."""

from dataclasses import dataclass
from typing import Any

import torch

from kernels.recurrent.recurrence import ConvolutionGates
from kernels.recurrent.states import RecurrentStates
from worker.models.recurrent_layer import RecurrentConfig, RecurrentLayer


@dataclass(frozen=True)
class ShortConvolutionConfig(RecurrentConfig):
    """The layers with a short convolution. Heads are groups of channels. `has_bias`: products and convolution have
    biases."""

    has_bias: bool

    @property
    def projected_sizes(self) -> tuple[int, int, int]:
        """Outputs of the input product: gates of the convolution's inputs; gates of its outputs; its inputs."""
        return (self.states.channels,) * 3

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        shapes, channels = super().parameter_shapes(hidden_size), self.states.channels
        if self.has_bias:
            shapes |= {"qkv_bias": (3 * channels,), "conv_bias": (channels,), "out_bias": (hidden_size,)}
        return shapes

    def layer(self, index: int, parameters: dict[str, Any]) -> "ShortConvolution":
        return ShortConvolution(
            self,
            index,
            parameters["input_norm"],
            parameters["qkv"],
            parameters["out"],
            parameters["conv"].squeeze(1),
            parameters.get("conv_bias"),
        )


@dataclass(frozen=True)
class ShortConvolution(RecurrentLayer):
    """Short convolution of a layer. `conv`: `[channels, width]`, `conv_bias`: `[channels]`."""

    config: ShortConvolutionConfig
    conv: torch.Tensor
    conv_bias: torch.Tensor | None

    def _attend(self, projected: torch.Tensor, states: RecurrentStates) -> torch.Tensor:
        *gates, x = projected.split(self.config.projected_sizes, dim=1)
        return states.convolve(self.index, x, self.conv, self.conv_bias, ConvolutionGates(*gates))
