"""Parameters that keep the 4 bits of a checkpoint's experts, while their parts are read."""

from collections.abc import Mapping

import torch

from kernels.experts.mxfp4_weight import CHUNK, WORDS, Mxfp4Weight, chunks_of, packed, row_of_turns
from worker.checkpoint.tensors import ReadMxfp4


class Mxfp4Parameters:
    """The experts' matrices in MXFP4 read so far, by parameter. `shapes`: those of all parameters, `[experts, rows,
    columns]`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self._shapes, self._device = shapes, device
        self._weights: dict[str, Mxfp4Weight] = {}

    def add(self, name: str, read: ReadMxfp4, dim: int, first: int, kept: range) -> None:
        """Reads the part `kept` along `dim`, which a parameter has from `first` on. A part of the columns is the
        parameter's first one. Raises ValueError for scales that kernels do not have."""
        experts, rows, columns = self._shapes[name]
        if name not in self._weights:
            # Zero bits are zeros.
            words = torch.zeros(experts, chunks_of(columns), rows, WORDS, dtype=torch.int32, device=self._device)
            self._weights[name] = Mxfp4Weight(words, torch.zeros_like(words[..., 0]))
        if not len(kept):
            return
        weight, (blocks, exponents) = self._weights[name], read(dim, kept)
        own_experts = range(first if dim == 0 else 0, experts)
        first_row = first if dim == 1 else 0
        row = torch.arange(first_row, first_row + blocks.shape[1], device=self._device)
        if name.endswith("gate_up"):
            row = row_of_turns(row, rows // 2)
        assert dim != 2 or first % CHUNK == 0
        # One expert at a time: tables and codes take several times the memory of the blocks.
        for expert, own_blocks, own_exponents in zip(own_experts, blocks, exponents, strict=False):
            words, scales = packed(own_blocks.to(self._device), own_exponents.to(self._device))
            weight.words[expert, : len(words)].index_copy_(1, row, words)
            weight.scales[expert, : len(scales)].index_copy_(1, row, scales)

    def finish(self, name: str) -> Mxfp4Weight:
        """The parameter, all of whose parts were added, with zeros where it has none."""
        return self._weights.pop(name)
