"""The interface of recurrences, and the parts into which a step is cut for their kernels."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.recurrent.shape import StateShape

BLOCK = 64  # tokens of a block


class ConvolutionGates(NamedTuple):
    """The gates of a convolution that is followed by no recurrence: factors of its inputs, and of its outputs. Both
    `[num_tokens, channels]`, with the stride of the inputs between tokens."""

    inputs: torch.Tensor
    outputs: torch.Tensor


class SingleTokens(NamedTuple):
    """Chunks of one token: their places in the step, their rows, and the rows that get copies of the states afterwards,
    -1 for none. int64, on the device."""

    tokens: torch.Tensor
    rows: torch.Tensor
    copies: torch.Tensor


class ChunkBlocks(NamedTuple):
    """Chunks cut into blocks of at most `BLOCK` tokens. All int64, on the device.

    | field | shape | meaning |
    | --- | --- | --- |
    | `blocks` | `[num_blocks, 5]` | first token, number of tokens, tokens of the chunk before it, row of the chunk, row that gets a copy of the states after the block, or -1 |
    | `chunks` | `[num_chunks, 3]` | row, first block, last block (exclusive) |
    | `kept` | `[num_kept, 3]` | last inputs to keep: first token of the chunk, tokens of it, row to keep them in |
    | `kept_chunks` | `[num_chunks, 3]` | row, first and last (exclusive) of the chunk's part of `kept`, whose last one is its own row |
    """  # noqa: E501

    blocks: torch.Tensor
    chunks: torch.Tensor
    kept: torch.Tensor
    kept_chunks: torch.Tensor


@dataclass(frozen=True)
class Recurrence(ABC):
    """A rule by which the tokens of a step update the recurrent states of a layer and read them. `mixed`: the result of
    `RecurrentStates.convolve`. `shape`: sizes of the states.

    `RecurrentStates.update` runs it: in PyTorch by `sources`, `step` and `blocks`, which compute in float32, or by the
    kernels that `launch_step` and `launch_blocks` launch.
    """

    mixed: torch.Tensor
    shape: StateShape

    def output(self) -> torch.Tensor:
        """Memory for the outputs, `[num_tokens, value_heads, value_dim]`."""
        return self.mixed.new_empty(len(self.mixed), self.shape.value_heads, self.shape.value_dim)

    @abstractmethod
    def sources(self) -> tuple[torch.Tensor, ...]:
        """Arguments of `step` and `blocks` for all tokens, `[num_tokens, ...]` each."""

    @abstractmethod
    def step(self, sources: tuple[torch.Tensor, ...], state: torch.Tensor) -> torch.Tensor:
        """Computes one token of each of n sequences, and updates their states in place: float32 `[n, value_heads,
        value_dim, key_dim]`. Returns `[n, value_heads, value_dim]`."""

    @abstractmethod
    def blocks(self, sources: tuple[torch.Tensor, ...], state: torch.Tensor) -> torch.Tensor:
        """Computes n tokens of one sequence in blocks, and updates its state in place: float32 `[value_heads,
        value_dim, key_dim]`. Returns `[n, value_heads, value_dim]`."""

    @abstractmethod
    def launch_step(self, recurrent: torch.Tensor, out: torch.Tensor, singles: SingleTokens) -> None:
        """Writes the outputs of single tokens to `out`, and updates the states of their rows. recurrent: `[rows,
        value_heads, value_dim, key_dim]`."""

    @abstractmethod
    def launch_blocks(self, recurrent: torch.Tensor, out: torch.Tensor, blocks: ChunkBlocks) -> None:
        """Writes the outputs of the blocks' tokens to `out`, and updates the states. recurrent: as in
        `launch_step`."""
