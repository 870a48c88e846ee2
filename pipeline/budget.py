"""What one micro-batch may hold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.chunk import chunk_tokens, tokens_within
from pipeline.cost import CostModel
from pipeline.shape import TILE, BatchShape

UNLIMITED = 1 << 40


class Budget:
    """What one micro-batch may hold, and what it holds so far."""

    def __init__(self, tokens: int, *, prompt_tokens: int = UNLIMITED, decode_share: "Share | None" = None) -> None:
        """`prompt_tokens`: how many of the tokens may be of chunks of more than one. `decode_share`: which part of the
        decodes; None takes every one."""
        self.tokens_left = tokens
        self.shape = BatchShape()
        self._prompt_tokens_left = prompt_tokens
        self._decode_share = decode_share

    def take_decodes(self, contexts: np.ndarray) -> int:
        """Adds as many of these sequences as may go, from the first on, with one token each; `contexts`: the tokens
        before each. Returns how many."""
        if self._decode_share is not None:
            contexts = contexts[: self._decode_share.of(contexts)]
        taken = min(len(contexts), max(0, self.tokens_left))
        contexts = contexts[:taken]
        self.tokens_left -= taken
        self.shape.tokens += taken
        self.shape.decodes += taken
        self.shape.decode_context += int(np.add.reduce(contexts)) + taken
        return taken

    def chunk(self, start: int, missing: int, room: int) -> int:
        """The tokens that a sequence may have which lacks `missing` after `start`, and has `room` for some; 0 if
        none."""
        return chunk_tokens(missing, self._limit(start, min(missing, room)), room)

    def add(self, start: int, length: int) -> None:
        """The batch now holds such a chunk."""
        self.tokens_left -= length
        if length > 1:
            self._prompt_tokens_left -= length
        self.shape.add(start, length)

    def remove(self, start: int, length: int) -> None:
        """A chunk or a decode is taken out again."""
        self.tokens_left += length
        if length > 1:
            self._prompt_tokens_left += length
        self.shape.remove(start, length)

    def _limit(self, start: int, most: int) -> int:
        return min(self.tokens_left, self._prompt_tokens_left)


class WholePrompts(Budget):
    """Prompts are not cut, but for those that no micro-batch could hold."""

    def __init__(self, tokens: int, *, decode_share: "Share | None" = None) -> None:
        super().__init__(tokens, decode_share=decode_share)
        self._tokens = tokens

    def _limit(self, start: int, most: int) -> int:
        return self.tokens_left if most <= self.tokens_left or most > self._tokens else 0


class Timed(Budget):
    """Chunks that keep the whole batch within a time, as the stages' models predict it."""

    def __init__(self, tokens: int, models: Sequence[CostModel], target_s: float, prompt_tokens: int) -> None:
        super().__init__(tokens, prompt_tokens=prompt_tokens)
        self._models = models
        self._target_s = target_s

    def _limit(self, start: int, most: int) -> int:
        most = min(most, super()._limit(start, most))
        if most < 1:
            return 0
        limit = tokens_within(self._models, self.shape, start, self._target_s, most)
        # However late it is, the first moves: it holds pages that others may wait for.
        return limit if limit or self.shape.chunks else min(most, TILE)


@dataclass(frozen=True)
class Share:
    """A part of all decodes, in time or any other measure: each counts `each`, and `context` for every token before
    it."""

    amount: float
    each: float = 1.0
    context: float = 0.0

    def of(self, contexts: np.ndarray) -> int:
        """How many of the first of these make up the share. The last may go beyond it, but by no more than an average
        one of them counts."""
        costs = self.each + self.context * contexts
        if not len(costs) or self.amount <= 0:
            return 0
        return max(1, int(np.searchsorted(np.cumsum(costs) - costs.mean(), self.amount * (1 - 1e-9))))
