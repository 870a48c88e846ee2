"""The hidden states of a prompt, reduced to one vector while its chunks are computed."""

from typing import Literal

import numpy as np


class Pool:
    """The embedding of one prompt, as far as it is known.

    - `last`: the hidden state of the last token.
    - `mean`: the average over all tokens, summed up chunk by chunk. A sequence that was preempted begins again at its
      first token, and so does the sum. A chunk that does not follow the ones before belongs to an earlier start.
    """

    __slots__ = ("_num_summed", "_num_tokens", "_sum", "takes_all")

    def __init__(self, method: Literal["last", "mean"], num_tokens: int) -> None:
        """`num_tokens`: length of the prompt."""
        self.takes_all = method == "mean"
        self._num_tokens = num_tokens
        self._num_summed = 0
        self._sum = np.zeros(0, dtype=np.float32)

    def num_hidden(self, start: int, end: int) -> int:
        """Number of the last tokens of the chunk `start` to `end - 1` whose hidden states are needed."""
        if self.takes_all:
            return end - start
        return 1 if end == self._num_tokens else 0

    def add(self, start: int, end: int, total: np.ndarray) -> np.ndarray | None:
        """Takes the sum of the hidden states of a chunk, float32 [hidden_size]. Returns the embedding, float32
        [hidden_size], if it is complete."""
        if not self.takes_all:
            return total
        if start == 0:
            self._sum, self._num_summed = total.copy(), end
        elif start == self._num_summed:
            self._sum += total
            self._num_summed = end
        if self._num_summed < self._num_tokens:
            return None
        return self._sum / np.float32(self._num_tokens)
