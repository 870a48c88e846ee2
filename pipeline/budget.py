"""Limits of one micro-batch: tokens, decodes, predicted time."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from pipeline.chunk import chunk_tokens, tokens_within
from pipeline.cost import CostModel, slowest_s
from pipeline.shape import TILE, BatchShape

UNLIMITED_TOKENS = 1 << 40


class Budget:
    """The limits of one micro-batch, and its content so far (`shape`). `least_chunk`: tokens below which a chunk costs
    much more per token; 0 where that is not known."""

    least_chunk = 0

    def __init__(self, tokens: int, *, prompt_tokens: int = UNLIMITED_TOKENS, decodes: int = UNLIMITED_TOKENS) -> None:
        """`tokens`: limit of all tokens. `prompt_tokens`: limit of the tokens in chunks longer than one. `decodes`:
        limit of sequences with a single token."""
        self.tokens_left = tokens
        self.shape = BatchShape()
        self._prompt_tokens_left = prompt_tokens
        self._decodes = decodes

    def take_decodes(self, contexts: np.ndarray) -> int:
        """Adds decodes, one token each, for as many of the sequences as the limits allow, from the first on. `contexts`
        [n]: tokens before each. Returns the number added."""
        taken = min(self._share(contexts), max(0, self.tokens_left))
        contexts = contexts[:taken]
        self.tokens_left -= taken
        self.shape.tokens += taken
        self.shape.decodes += taken
        self.shape.decode_context += int(np.add.reduce(contexts)) + taken
        return taken

    def chunk(self, start: int, missing: int, room: int) -> int:
        """Tokens that a sequence may have next; 0 if none.

        `start`: tokens before the chunk. `missing`: remaining tokens to compute. `room`: tokens for which it has pages
        or could get some.
        """
        return chunk_tokens(missing, self._limit(start, min(missing, room)), room)

    def add(self, start: int, length: int) -> None:
        """Adds a chunk to the micro-batch."""
        self.tokens_left -= length
        if length > 1:
            self._prompt_tokens_left -= length
        self.shape.add(start, length)

    def remove(self, start: int, length: int) -> None:
        """Takes a chunk or a decode out again."""
        self.tokens_left += length
        if length > 1:
            self._prompt_tokens_left += length
        self.shape.remove(start, length)

    def _share(self, contexts: np.ndarray) -> int:
        """The number of decodes allowed, counted from the first."""
        return min(len(contexts), self._decodes)

    def _limit(self, start: int, most: int) -> int:
        # The single token after a prompt whose last chunk is in flight is a decode.
        return self.tokens_left if most == 1 else min(self.tokens_left, self._prompt_tokens_left)


class TimedBudget(Budget):
    """Chunks fill a micro-batch up to `full` tokens and up to `target_s` on every stage, as the stages' models predict
    it."""

    def __init__(
        self, tokens: int, models: Sequence[CostModel], target_s: float, full: int, least_chunk: int = 0
    ) -> None:
        super().__init__(tokens)
        self._models = models
        self._target_s, self._full, self.least_chunk = target_s, full, least_chunk

    def _limit(self, start: int, most: int) -> int:
        most = min(most, super()._limit(start, most))
        if most < 1:
            return 0
        limit = min(most, max(0, self._full - self.shape.tokens))
        limit = tokens_within(self._models, self.shape, start, self._target_s, limit)
        # The first chunk goes even if it takes too long: its sequence holds pages that others may wait for.
        return limit if limit or self.shape.chunks else min(most, TILE)


class EvenDecodes(Budget):
    """Decodes alone, spread evenly over the micro-batches in flight.

    The decodes that have returned are sent again as they are. The exception: if leaving some for the next micro-batch
    makes the costliest micro-batch cheaper by more than the fraction `MIN_GAIN`, then as many go as cost about what the
    other micro-batches do.

    Simulated on 70B in four stages, all that have returned going at once instead: TBT P50 +16% (long prompts), 3% fewer
    tokens a second (1,024 sequences running).
    """

    MIN_GAIN = 0.005  # a tolerance: decodes would wait for gains that are none, within the same CUDA graph

    def __init__(
        self, tokens: int, models: Sequence[CostModel], decoding: int, context: int, in_flight: int, unbuilt: int
    ) -> None:
        """`decoding` sequences, with `context` tokens before them in sum, are in flight or ready. They are shared among
        `in_flight` micro-batches, of which `unbuilt` are still to be made."""
        super().__init__(tokens, prompt_tokens=0)
        self._models = models
        self._decoding, self._context = decoding, context
        self._in_flight, self._unbuilt = in_flight, unbuilt

    def _share(self, contexts: np.ndarray) -> int:
        most = -(-len(contexts) // self._unbuilt)
        if most < 2 or self._in_flight == 1:
            return most
        sums = np.cumsum(contexts)

        def own_s(count: int) -> float:
            return self._predict(count, int(sums[count - 1]) + count)

        def other_s(count: int) -> float:
            """Seconds of the largest of the other micro-batches if they share the rest."""
            rest = self._decoding - count
            each = -(-rest // (self._in_flight - 1))
            return self._predict(each, (self._context - int(sums[count - 1]) + rest) * each // max(1, rest))

        now_s = own_s(most)
        if now_s <= other_s(most) * (1 + self.MIN_GAIN):
            return most  # sending fewer would only make the others costlier
        # The fewest that cost no less than the others: if every micro-batch took fewer, some would never go.
        best = bisect_left(range(1, most), True, key=lambda count: own_s(count) >= other_s(count)) + 1
        best_s = own_s(best)
        if best > 1 and other_s(best - 1) * (1 + self.MIN_GAIN) < best_s:  # the last one begins a larger graph
            best -= 1
            best_s = other_s(best)
        return best if best_s * (1 + self.MIN_GAIN) < now_s else most

    def _predict(self, decodes: int, context: int) -> float:
        return slowest_s(self._models, BatchShape.decoding(decodes, context))
