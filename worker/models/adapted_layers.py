"""The layers of a decoder with adapters: those of the base model, whose linear layers add the products of LoRA."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kernels.lora.lora_weights import ColumnPart, LoraWeights
from kernels.lora.segments import Segments
from worker.models.adapted_linear import AdaptedLinear
from worker.models.decoder import Decoder
from worker.models.layer import MLP, DecoderLayer, SelfAttention
from worker.models.parameters import parameter_shapes
from worker.models.recurrent_layer import RecurrentLayer

ADAPTED = ("qkv", "out", "gate_up", "down")
"""Linear layers that adapters may change, of attention over keys and values, of recurrent layers and of MLPs."""


class AdaptedLayers:
    """The adapters of a rank in their device slots, and the layers that run with them.

    `layers`: for `Decoder.forward`. The decoder's own layers are unchanged, so steps without adapters pay nothing.
    """

    def __init__(
        self,
        decoder: Decoder,
        parts: Mapping[str, Sequence[ColumnPart]],
        num_slots: int,
        rank: int,
        max_tokens: int,
    ) -> None:
        """`parts`: of each parameter that adapters may change, by the names of `parameter_shapes`. `max_tokens`: of a
        step. Call after `Decoder.build_rope_tables`."""
        self.segments = Segments(max_tokens, num_slots, decoder.device)
        self._names = list(parts)
        self._used = torch.zeros(len(parts), num_slots, dtype=torch.int32, device=decoder.device)
        shapes = parameter_shapes(decoder.config)
        self._weights = {}
        for (name, own), used in zip(parts.items(), self._used, strict=True):
            outputs, inputs = shapes[name]
            self._weights[name] = LoraWeights(own, num_slots, rank, inputs, outputs, decoder.dtype, used)
        self.layers = [self._adapted(index, layer) for index, layer in enumerate(decoder.layers)]

    def write(self, slot: int, matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Puts an adapter into a slot. `matrices`: by parameter, as `LoraWeights.write` takes them."""
        for name, weights in self._weights.items():
            weights.write(slot, *matrices.get(name, (None, None)))
        flags = torch.tensor([name in matrices for name in self._names], dtype=torch.int32)
        self._used[:, slot].copy_(flags.pin_memory() if self._used.is_cuda else flags, non_blocking=True)

    def fill(self, slots: np.ndarray, size: int | None = None) -> None:
        """Takes the adapters of a step's tokens, as `Segments.fill` does."""
        self.segments.fill(slots, size)

    def filled(self, slots: np.ndarray) -> list[DecoderLayer]:
        """Does the same for a step without a CUDA graph, and returns the layers that run it."""
        self.fill(slots)
        return self.layers

    def _adapted(self, index: int, layer: DecoderLayer) -> DecoderLayer:
        def linears(part: Any, *names: str) -> dict[str, Any]:
            own = ((name, self._weights.get(f"layers.{index}.{name}")) for name in names)
            return {
                name: AdaptedLinear(getattr(part, name), weights, self.segments)
                for name, weights in own
                if weights is not None
            }

        attention, mlp = layer.attention, layer.mlp
        if isinstance(attention, SelfAttention | RecurrentLayer):
            attention = replace(attention, **linears(attention, "qkv", "out"))
        if isinstance(mlp, MLP):
            mlp = replace(mlp, **linears(mlp, "gate_up", "down"))
        return replace(layer, attention=attention, mlp=mlp)
