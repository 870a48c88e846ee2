"""Mamba2 in place of a layer's attention (https://arxiv.org/abs/2405.21060): a linear attention whose heads share keys
and queries in groups."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from kernels.ops.norm import rms_norm
from kernels.recurrent.states import RecurrentStates
from kernels.ssd.recurrence import Ssd, SsdParameters
from worker.models.recurrent_layer import RecurrentConfig, RecurrentLayer
from worker.models.residual_stream import ResidualStream


@dataclass(frozen=True)
class Mamba2Config(RecurrentConfig):
    """The layers with Mamba2.

    | field | meaning |
    | --- | --- |
    | `eps` | epsilon of the norm of a layer's outputs, whatever the scale of the hidden states |
    | `has_bias` | the convolution has a bias |
    | `has_norm` | a layer's outputs are normalised |
    | `group_size` | elements of a group's outputs, on all ranks that have some |
    | `shared_group` | where several ranks have heads of one group: its number, and how many groups there are |
    """

    eps: float
    has_bias: bool
    group_size: int
    shared_group: tuple[int, int] | None = None
    has_norm: bool = True

    @property
    def projected_sizes(self) -> tuple[int, int, int]:
        """Outputs of the input product: inputs, keys and queries; gates; steps."""
        return self.states.channels, self.attended_size, self.states.value_heads

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        states = self.states
        shapes = super().parameter_shapes(hidden_size) | {
            "decay_log": (states.value_heads,),
            "step_bias": (states.value_heads,),
            "skip": (states.value_heads,),
        }
        if self.has_norm:
            shapes["gated_norm"] = (self.attended_size,)
        return shapes | ({"conv_bias": (states.channels,)} if self.has_bias else {})

    def copies(self, size: int) -> int:
        return min(max(1, size // self.states.key_heads), self.states.value_heads // self.states.key_heads)

    def of_rank(self, rank: int, size: int) -> Self:
        own, copies, groups = super().of_rank(rank, size), self.copies(size), self.states.key_heads
        # A rank without heads adds zeros to the last group.
        return own if copies == 1 else replace(own, shared_group=(min(rank // copies, groups - 1), groups))

    def layer(self, index: int, parameters: dict[str, Any]) -> "Mamba2":
        return Mamba2(
            self,
            index,
            parameters["input_norm"],
            parameters["qkv"],
            parameters["out"],
            parameters["conv"].squeeze(1),
            parameters.get("conv_bias"),
            SsdParameters(parameters["decay_log"], parameters["step_bias"], parameters["skip"]),
            parameters.get("gated_norm"),
        )


@dataclass(frozen=True)
class Mamba2(RecurrentLayer):
    """Mamba2 of a layer. `conv`: `[channels, width]`, `conv_bias`: `[channels]`. `gated_norm`: weight of the norm of
    the outputs after their gates, of each group by itself, `[attended_size]`; None without a norm."""

    config: Mamba2Config
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    ssd: SsdParameters
    gated_norm: torch.Tensor | None

    def _attend(self, projected: torch.Tensor, states: RecurrentStates) -> torch.Tensor:
        inputs, gate, steps = projected.split(self.config.projected_sizes, dim=1)
        mixed = states.convolve(self.index, inputs, self.conv, self.conv_bias)
        return states.update(self.index, Ssd(mixed, states.shape, steps, gate, self.ssd)).flatten(1)

    def add_output(self, x: ResidualStream, attended: torch.Tensor) -> None:
        """Adds the output product of `forward`'s result, normalised if there is a norm."""
        own = attended if self.gated_norm is None else self._normalised(x, attended, self.gated_norm)
        super().add_output(x, own)

    def _normalised(self, x: ResidualStream, attended: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """The norm is here, and not in `forward`, because a group's sum may be that of several ranks."""
        config, shared = self.config, self.config.shared_group
        if shared is None and config.states.key_heads == 1:
            return rms_norm(attended, norm, config.eps)
        groups = attended.float().unflatten(1, (config.states.key_heads, -1))
        sums = groups.square().sum(2)
        if shared is not None:
            number, count = shared
            of_all = sums.new_zeros(len(sums), count)
            of_all[:, number] = sums[:, 0]
            sums = x.sum_of_ranks(of_all)[:, number, None]
        scaled = groups * (sums / config.group_size + config.eps).rsqrt()[..., None]
        return (scaled.flatten(1) * norm).to(attended.dtype)
