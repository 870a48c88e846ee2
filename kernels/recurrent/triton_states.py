"""Recurrent states with Triton kernels, for GPUs. Tested against the formulas as `torch_states.py` is.

Imported only where there is a GPU (or Triton's interpreter).
"""

import numpy as np
import torch

from kernels.host_device import all_to_device
from kernels.recurrent import convolution_kernels
from kernels.recurrent.recurrence import BLOCK, ChunkBlocks, ConvolutionGates, Recurrence, SingleTokens
from kernels.recurrent.states import RecurrentStates, StateBatch


class TritonStates(RecurrentStates):
    """Chunks of one token have kernels of their own. All longer chunks are computed together, in blocks."""

    _singles: SingleTokens | None = None
    _blocks: ChunkBlocks | None = None

    def plan(self, batch: StateBatch) -> None:
        self.begin(batch)
        is_single = batch.lengths == 1
        arrays: list[np.ndarray] = []
        if num_singles := int(is_single.sum()):
            tokens = np.cumsum(batch.lengths, dtype=np.int64)[is_single] - 1
            arrays += [tokens, batch.rows[is_single], copies_of_singles(batch)[is_single]]
        if num_singles < len(is_single):
            arrays += cut(batch)
        there = all_to_device([np.ascontiguousarray(array, dtype=np.int64) for array in arrays], self.device)
        self._singles = SingleTokens(*there[:3]) if num_singles else None
        self._blocks = ChunkBlocks(*there[-4:]) if num_singles < len(is_single) else None

    def plan_decodes(self, tokens: torch.Tensor, rows: torch.Tensor, copies: torch.Tensor) -> None:
        """Plans a step of chunks of one token from tensors on the device, so that it may be in a CUDA graph. `begin`
        has run on its batch. tokens: the numbers from 0; rows, copies: as `StateBatch` has them, -1 for no copy. All
        int64 `[n]`."""
        self._singles, self._blocks = SingleTokens(tokens, rows, copies), None

    def convolve(
        self,
        layer: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gates: ConvolutionGates | None = None,
    ) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if self._singles is not None:
            convolution_kernels.convolve_singles(x, weight, bias, gates, self.inputs[layer], out, self._singles)
        if self._blocks is not None:
            convolution_kernels.convolve_blocks(x, weight, bias, gates, self.inputs[layer], out, self._blocks)
        return out

    def update(self, layer: int, recurrence: Recurrence) -> torch.Tensor:
        out = recurrence.output()
        if self._singles is not None:
            recurrence.launch_step(self.recurrent[layer], out, self._singles)
        if self._blocks is not None:
            recurrence.launch_blocks(self.recurrent[layer], out, self._blocks)
        return out


def copies_of_singles(batch: StateBatch) -> np.ndarray:
    """For each chunk of one token the row that gets a copy of its states after the token; -1 for none, and for longer
    chunks. int64 `[num_chunks]`."""
    rows = np.full(len(batch.rows), -1, dtype=np.int64)
    copies = batch.copies[(batch.copies[:, 1] == 1)]
    copies = copies[batch.lengths[copies[:, 0]] == 1]
    rows[copies[:, 0]] = copies[:, 2]
    return rows


def cut(batch: StateBatch) -> list[np.ndarray]:
    """The arrays of `ChunkBlocks` for the chunks of more than one token. A block ends where states are copied."""
    blocks: list[tuple[int, int, int, int, int]] = []
    chunks: list[tuple[int, int, int]] = []
    kept: list[tuple[int, int, int]] = []
    kept_chunks: list[tuple[int, int, int]] = []
    firsts = np.cumsum(batch.lengths) - batch.lengths
    saves: dict[int, list[tuple[int, int]]] = {}
    for chunk, tokens, row in batch.copies.tolist():
        if tokens > 0:
            saves.setdefault(chunk, []).append((tokens, row))
    for chunk in (batch.lengths > 1).nonzero()[0].tolist():
        row, first, length = int(batch.rows[chunk]), int(firsts[chunk]), int(batch.lengths[chunk])
        first_block, first_kept, at = len(blocks), len(kept), 0
        for end, target in (*saves.get(chunk, ()), (length, -1)):
            if at == end and target >= 0:  # a further copy of the same states
                blocks.append((first + at, 0, at, row, target))
            for begin in range(at, end, BLOCK):
                is_last = end - begin <= BLOCK
                blocks.append((first + begin, min(BLOCK, end - begin), begin, row, target if is_last else -1))
            kept.append((first, end, row if target < 0 else target))
            at = end
        chunks.append((row, first_block, len(blocks)))
        kept_chunks.append((row, first_kept, len(kept)))
    return [np.array(each, dtype=np.int64) for each in (blocks, chunks, kept, kept_chunks)]
