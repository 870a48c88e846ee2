"""Layers with recurrent states: a state of fixed size is their memory of a sequence, in place of keys and values."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from kernels.linear.any_linear import AnyLinear
from kernels.recurrent.shape import StateShape
from kernels.recurrent.states import RecurrentStates
from worker.models.forward_context import ForwardContext
from worker.models.residual_stream import ResidualStream


@dataclass(frozen=True)
class RecurrentConfig(ABC):
    """The layers with recurrent states.

    | field | meaning |
    | --- | --- |
    | `states` | sizes of a layer's heads and of its convolution; with several ranks, those of one rank |
    | `layers` | for each layer whether it is recurrent; the others have attention |
    | `alongside_attention` | recurrent layers have attention too, which reads and adds what the states do |
    """

    states: StateShape
    layers: tuple[bool, ...]
    alongside_attention: bool = field(default=False, kw_only=True)

    @property
    def num_layers(self) -> int:
        """Number of recurrent layers."""
        return sum(self.layers)

    @property
    @abstractmethod
    def projected_sizes(self) -> tuple[int, ...]:
        """Outputs of the input product, which has all that a token puts in."""

    @property
    def attended_size(self) -> int:
        """Elements of the outputs of all heads, which the output product reads."""
        return self.states.value_heads * self.states.value_dim

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's parameters, as `worker.models.parameters` has those of attention. Each rule adds its
        own."""
        return {
            "qkv": (sum(self.projected_sizes), hidden_size),
            "out": (hidden_size, self.attended_size),
            "conv": (self.states.channels, 1, self.states.width),
            "input_norm": (hidden_size,),
        }

    @abstractmethod
    def layer(self, index: int, parameters: dict[str, Any]) -> "RecurrentLayer":
        """Recurrent layer number `index` of those that the rank has, from the layer's parameters."""

    def copies(self, size: int) -> int:
        """Number of ranks, of `size`, that hold the same key head with some of its value heads each."""
        return 1

    def of_rank(self, rank: int, size: int) -> Self:
        """The part of one of `size` ranks. Heads that they cannot share equally are padded."""
        states, copies = self.states, self.copies(size)
        key_heads = -(-states.key_heads // (size // copies))
        value_heads = key_heads * -(-states.value_heads // (states.key_heads * copies))
        return replace(self, states=replace(states, key_heads=key_heads, value_heads=value_heads))


@dataclass(frozen=True)
class RecurrentLayer(ABC):
    """The part of a layer that reads and updates the recurrent states number `index` of those that the rank has. It
    stands in the place of `worker.models.layer.SelfAttention`. `qkv` gives all that a token puts in
    (`RecurrentConfig.projected_sizes`). `out_norm`: of the outputs, before they are added."""

    config: RecurrentConfig
    index: int
    input_norm: torch.Tensor
    qkv: AnyLinear
    out: AnyLinear
    out_norm: torch.Tensor | None = field(default=None, kw_only=True)

    @property
    def projected_size(self) -> int:
        """Columns of the result of `project`."""
        return sum(self.config.projected_sizes)

    @property
    def attended_size(self) -> int:
        """Columns of the result of `forward`."""
        return self.config.attended_size

    def project(self, x: ResidualStream, out: torch.Tensor | None = None) -> torch.Tensor:
        """The input product, `[n, projected_size]`, in `out` if given."""
        return x.project(self.input_norm, self.qkv, out)

    def forward(self, projected: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Concatenated outputs of the heads, `[n, attended_size]`. The states are those after the step's tokens
        afterwards."""
        assert context.states is not None, "a model with recurrent layers is run with its states"
        return self._attend(projected, context.states)

    @abstractmethod
    def _attend(self, projected: torch.Tensor, states: RecurrentStates) -> torch.Tensor: ...

    def add_output(self, x: ResidualStream, attended: torch.Tensor) -> None:
        """Adds the output product of `forward`'s result."""
        x.add(self.out, attended, self.out_norm)
