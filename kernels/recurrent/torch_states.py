"""Recurrent states in plain PyTorch, for any device. Faster ways are tested against it."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from kernels.recurrent.recurrence import ConvolutionGates, Recurrence
from kernels.recurrent.states import RecurrentStates, StateBatch


class _Long(NamedTuple):
    """A chunk of more than one token: tokens `first` to `last` (exclusive) of the step. `saves`: numbers of its tokens,
    ascending, after which the states are copied, each with the row to copy to."""

    row: int
    first: int
    last: int
    saves: tuple[tuple[int, int], ...]


class TorchStates(RecurrentStates):
    """All chunks of one token are computed as one batch; every longer chunk is computed alone."""

    def plan(self, batch: StateBatch) -> None:
        lasts = np.cumsum(batch.lengths, dtype=np.int64)
        firsts = lasts - batch.lengths
        is_single = batch.lengths == 1
        single = is_single.nonzero()[0]
        self._num_singles = len(single)
        self._single_tokens, self._single_rows = self._indices(firsts[single]), self._indices(batch.rows[single])
        # Rows next to each other are updated where they are.
        rows = batch.rows[single]
        is_range = len(rows) > 0 and bool((np.diff(rows) == 1).all())
        self._single_range = slice(int(rows[0]), int(rows[-1]) + 1) if is_range else None
        saves = batch.copies[batch.copies[:, 1] > 0]
        copied = saves[is_single[saves[:, 0]]]
        # Of chunks of one token, which of them are copied, and the rows to copy to.
        self._copied: tuple[torch.Tensor, torch.Tensor] | None = None
        if len(copied):
            self._copied = self._indices(np.searchsorted(single, copied[:, 0])), self._indices(copied[:, 2])
        self._long = [
            _Long(
                int(batch.rows[i]),
                int(firsts[i]),
                int(lasts[i]),
                tuple((int(tokens), int(row)) for chunk, tokens, row in saves if chunk == i),
            )
            for i in (~is_single).nonzero()[0].tolist()
        ]
        self.begin(batch)

    def convolve(
        self,
        layer: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gates: ConvolutionGates | None = None,
    ) -> torch.Tensor:
        x = x if gates is None else x * gates.inputs
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        inputs, before = self.inputs[layer], weight.shape[1] - 1
        if self._num_singles:
            seen = torch.cat((inputs[self._single_rows], x[self._single_tokens, :, None]), dim=2)
            inputs[self._single_rows] = seen[:, :, 1:]
            if self._copied is not None:
                which, rows = self._copied
                inputs[rows] = seen[which, :, 1:]
            mixed = (seen * weight).sum(2)
            out[self._single_tokens] = mixed if bias is None else mixed + bias
        for chunk in self._long:
            seen = torch.cat((inputs[chunk.row], x[chunk.first : chunk.last].t()), dim=1)
            inputs[chunk.row] = seen[:, -before:]
            for count, row in chunk.saves:
                inputs[row] = seen[:, count : count + before]
            out[chunk.first : chunk.last] = F.conv1d(seen[None], weight[:, None], bias, groups=len(weight))[0].t()
        return F.silu(out, inplace=True) if gates is None else out.mul_(gates.outputs)

    def update(self, layer: int, recurrence: Recurrence) -> torch.Tensor:
        out, sources = recurrence.output(), recurrence.sources()
        states = self.recurrent[layer]
        if self._num_singles:
            tokens, place = self._single_tokens, self._single_range
            state = states[self._single_rows if place is None else place]
            out[tokens] = recurrence.step(tuple(source[tokens] for source in sources), state).to(out.dtype)
            if place is None:
                states[self._single_rows] = state
            if self._copied is not None:
                which, rows = self._copied
                states[rows] = state[which]
        for chunk in self._long:
            first = chunk.first
            for count, row in (*chunk.saves, (chunk.last - chunk.first, chunk.row)):
                part = slice(first, chunk.first + count)
                if part.start < part.stop:
                    own = tuple(source[part] for source in sources)
                    out[part] = recurrence.blocks(own, states[chunk.row]).to(out.dtype)
                if row != chunk.row:
                    states[row] = states[chunk.row]
                first = part.stop
        return out
