"""What one micro-batch may hold."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from pipeline.chunk import chunk_tokens, tokens_within
from pipeline.cost import CostModel, slowest_s
from pipeline.shape import TILE, BatchShape

UNLIMITED = 1 << 40


class Budget:
    """What one micro-batch may hold, and what it holds so far."""

    def __init__(self, tokens: int, *, prompt_tokens: int = UNLIMITED, decodes: int = UNLIMITED) -> None:
        """`prompt_tokens`: how many of the tokens may be of chunks of more than one. `decodes`: how many sequences may
        go with one token."""
        self.tokens_left = tokens
        self.shape = BatchShape()
        self._prompt_tokens_left = prompt_tokens
        self._decodes = decodes

    def take_decodes(self, contexts: np.ndarray) -> int:
        """Adds as many of these sequences as may go, from the first on, with one token each; `contexts`: the tokens
        before each. Returns how many."""
        taken = min(self._share(contexts), max(0, self.tokens_left))
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

    def _share(self, contexts: np.ndarray) -> int:
        """How many of the first of these may go."""
        return min(len(contexts), self._decodes)

    def _limit(self, start: int, most: int) -> int:
        # The token after a prompt, whose last chunk is in flight, is none of a prompt.
        return self.tokens_left if most == 1 else min(self.tokens_left, self._prompt_tokens_left)


class WholePrompts(Budget):
    """Prompts are not cut, but for those that no micro-batch could hold beside the decodes of this one."""

    def __init__(self, tokens: int, *, decodes: int = UNLIMITED) -> None:
        super().__init__(tokens, decodes=decodes)
        self._tokens = tokens

    def _limit(self, start: int, most: int) -> int:
        whole = self._tokens - self.shape.decodes
        return self.tokens_left if most <= self.tokens_left or most > whole else 0


class Timed(Budget):
    """Chunks that fill a batch up to `full` tokens, beside so many `decodes` at most, and keep it within a time, as the
    stages' models predict it."""

    def __init__(
        self, tokens: int, models: Sequence[CostModel], target_s: float, full: int, decodes: int = UNLIMITED
    ) -> None:
        super().__init__(tokens, decodes=decodes)
        self._models = models
        self._target_s, self._full = target_s, full

    def _limit(self, start: int, most: int) -> int:
        most = min(most, super()._limit(start, most))
        if most < 1:
            return 0
        limit = min(most, max(0, self._full - self.shape.tokens))
        limit = tokens_within(self._models, self.shape, start, self._target_s, limit)
        # However late it is, the first moves: it holds pages that others may wait for.
        return limit if limit or self.shape.chunks else min(most, TILE)


class EvenDecodes(Budget):
    """Decodes alone, spread over all places that there are. What comes back is sent again as it is, but where leaving
    some behind, who wait for the next micro-batch, makes the costliest one cheaper by more than `WORTH`: then so many
    go that they cost about what the others do."""

    WORTH = 0.005

    def __init__(
        self, tokens: int, models: Sequence[CostModel], decoding: int, context: int, in_flight: int, places: int
    ) -> None:
        """`decoding` sequences, with `context` tokens before them together, are in `in_flight` micro-batches or ready
        for one; `places`: how many of these are yet to be made."""
        super().__init__(tokens, prompt_tokens=0)
        self._models = models
        self._decoding, self._context = decoding, context
        self._in_flight, self._places = in_flight, places

    def _share(self, contexts: np.ndarray) -> int:
        most = -(-len(contexts) // self._places)
        if most < 2 or self._in_flight == 1:
            return most
        sums = np.cumsum(contexts)

        def own_s(count: int) -> float:
            return self._predict(count, int(sums[count - 1]) + count)

        def other_s(count: int) -> float:
            """The largest of the others, if they share the rest."""
            rest = self._decoding - count
            each = -(-rest // (self._in_flight - 1))
            return self._predict(each, (self._context - int(sums[count - 1]) + rest) * each // max(1, rest))

        now_s = own_s(most)
        if now_s <= other_s(most) * (1 + self.WORTH):
            return most  # the others would only be costlier
        # As many as cost no less than the others: if each took fewer, some would never go.
        best = bisect_left(range(1, most), True, key=lambda count: own_s(count) >= other_s(count)) + 1
        best_s = own_s(best)
        if best > 1 and other_s(best - 1) * (1 + self.WORTH) < best_s:  # one more would begin a larger graph
            best -= 1
            best_s = other_s(best)
        return best if best_s * (1 + self.WORTH) < now_s else most

    def _predict(self, decodes: int, context: int) -> float:
        return slowest_s(self._models, BatchShape.decoding(decodes, context))
