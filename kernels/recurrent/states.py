"""Recurrent states: their layout, the description of a step, and the interface of all ways to run it.

In place of keys and values, a recurrent layer keeps two tensors of fixed size for each sequence, after its tokens so
far:

- the recurrent state, float32 `[value_heads, value_dim, key_dim]`, of no elements in a layer without a recurrence;
- the last inputs of its convolution, `[channels, width - 1]` in the dtype of the activations, the newest last.

Both lie in rows: one for each sequence, and further ones for copies of states that later sequences begin with.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.host_device import to_device
from kernels.recurrent.recurrence import ConvolutionGates, Recurrence
from kernels.recurrent.shape import StateShape

NO_COPIES = np.empty((0, 3), dtype=np.int32)


@dataclass(frozen=True)
class StateBatch:
    """The chunks of one step, in the order in which their tokens stand. All int32, on the host.

    | field | shape | meaning |
    | --- | --- | --- |
    | `rows` | `[num_chunks]` | the row of each chunk's sequence; none occurs twice |
    | `starts` | `[num_chunks]` | position of each chunk's first token; a sequence that starts at 0 begins with zeros |
    | `lengths` | `[num_chunks]` | tokens of each chunk |
    | `copies` | `[num_copies, 3]` | index of a chunk, number of its tokens, row: the states after these tokens are copied to the row; with 0 tokens, the chunk begins with the row's states |

    Rows to begin with are read before any row is written. Copies of one chunk are in the order of their tokens. A chunk
    of one token has at most one after it.
    """  # noqa: E501

    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    copies: np.ndarray = field(default_factory=lambda: NO_COPIES)


class RecurrentStates(ABC):
    """The states of all recurrent layers of a rank, and the operators that read and write them.

    `plan` is called once a step, then for each layer `convolve`, and `update` if it has a recurrence.
    """

    def __init__(self, recurrent: torch.Tensor, inputs: torch.Tensor, shape: StateShape) -> None:
        """`recurrent`: float32 `[layers, rows, value_heads, value_dim, key_dim]`. `inputs`: `[layers, rows, channels,
        width - 1]`."""
        self.recurrent, self.inputs, self.shape = recurrent, inputs, shape
        self.device = recurrent.device

    @abstractmethod
    def plan(self, batch: StateBatch) -> None:
        """Prepares the rows of the step: zeros for sequences that begin, or the states of another row."""

    @abstractmethod
    def convolve(
        self,
        layer: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gates: ConvolutionGates | None = None,
    ) -> torch.Tensor:
        """Mixes each channel with its last inputs, adds the bias and applies the silu, or in place of it the gates, if
        given. The inputs that are kept are those after their gate.

        x: `[num_tokens, channels]`, tokens at any stride. weight: `[channels, width]`. bias: `[channels]`. Returns
        `[num_tokens, channels]`, contiguous."""

    @abstractmethod
    def update(self, layer: int, recurrence: Recurrence) -> torch.Tensor:
        """Updates the recurrent states token by token, and reads them, as `recurrence` says. Returns `[num_tokens,
        value_heads, value_dim]` in the dtype of what `convolve` returned."""

    def begin(self, batch: StateBatch) -> None:
        """Sets the rows with which chunks begin: zeros, or copies of other rows."""
        loads = batch.copies[batch.copies[:, 1] == 0]
        if len(loads):
            loaded, sources = self._indices(batch.rows[loads[:, 0]]), self._indices(loads[:, 2])
            self.recurrent[:, loaded] = self.recurrent[:, sources]
            self.inputs[:, loaded] = self.inputs[:, sources]
        rows = batch.rows[batch.starts == 0]
        if len(rows):
            begun = self._indices(rows)
            self.recurrent.index_fill_(1, begun, 0.0)
            self.inputs.index_fill_(1, begun, 0.0)

    def _indices(self, rows: np.ndarray) -> torch.Tensor:
        """int64 on the device."""
        return to_device(np.ascontiguousarray(rows, dtype=np.int64), self.device)
