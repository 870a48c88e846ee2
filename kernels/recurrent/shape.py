"""Sizes of recurrent states."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateShape:
    """Sizes of the states of one layer on one rank. Key head `h // (value_heads // key_heads)` belongs to value head h.
    In a Mamba2 layer, key heads are groups, and `key_dim` is the size of the state. A layer whose only state is that of
    the convolution has as many key heads as value heads, and a `key_dim` of 0.

    `width` is the number of tokens that the convolution sees.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def channels(self) -> int:
        """Elements of queries, keys and values of a token, which the convolution mixes with those before."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row of one layer, `dtype` being that of the activations."""
        recurrent = 4 * self.value_heads * self.value_dim * self.key_dim
        return recurrent + self.channels * (self.width - 1) * dtype.itemsize
