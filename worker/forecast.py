"""How many pages running sequences are going to need, so that a new one starts only when all of them are likely to fit.

All that a sequence may yet produce is too much to keep free for it: most end long before their limit, and one that ends
gives its pages to those that go on. So the forecast runs ahead: every sequence is expected to produce what others like
it did (all that it may where nothing but the limit can end it), one token a step, and the pages needed are the most
there are at any moment on the way. What is guessed too low is taken back by preemption, which makes the guesses higher.
"""

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from worker.request import Sequence, pages_for
from worker.running import Running


class Outputs:
    """What is to be expected of requests that may end early: the parts of their limits that others produced lately tell
    how much more one has before it that has come so far. A margin on top grows with every preemption and shrinks with
    every request that ends. Nothing depends on time, so that the same traffic gives the same decisions.
    """

    FIRST = (0.7,) * 8  # parts that stand for what has not been seen yet: one goes with each that ends
    REMEMBERED = 128
    PENALTY = 0.25
    FORGIVEN = 1 / 32  # of the margin, with every request that ends

    def __init__(self) -> None:
        self._parts: deque[float] = deque(self.FIRST, maxlen=self.REMEMBERED)
        self._num_guessed = len(self.FIRST)
        self._margin = 0.0
        # Ascending, with one that goes to its limit, and the sums from each to the last; made anew when they are asked.
        self._sorted: np.ndarray | None = None
        self._sums = np.empty(0)

    def ended(self, produced: int, allowed: int) -> None:
        """A request produced so many tokens of those that it was allowed."""
        if self._num_guessed:
            self._num_guessed -= 1
            self._parts.popleft()
        self._parts.append(produced / allowed)
        self._margin -= self._margin * self.FORGIVEN
        self._sorted = None

    def preempted(self) -> None:
        """The guesses were too low."""
        self._margin += self.PENALTY

    def to_come(self, produced: int, allowed: int) -> int:
        """How many more tokens to expect of a request that has produced so many of those that it is allowed."""
        if produced >= allowed:
            return 0
        if self._sorted is None:
            self._sorted = np.sort([*self._parts, 1.0])
            self._sums = np.cumsum(self._sorted[::-1])[::-1]
        part = produced / allowed
        first = int(self._sorted.searchsorted(part, side="right"))
        longer = len(self._sorted) - first
        if longer == 0:
            return allowed - produced
        expected = (self._sums[first] / longer - part) * allowed
        return min(allowed - produced, math.ceil(expected * (1 + self._margin)))


class Claim(NamedTuple):
    """One sequence in a forecast: its tokens now and those still to come, the pages that it holds, and how many of
    these are nobody else's, so that they are free when it ends."""

    tokens: int
    to_come: int
    held: int
    released: int


def tokens_to_come(seq: Sequence, outputs: Outputs) -> int:
    """How many more tokens to expect of a sequence."""
    if seq.ends_at_limit:
        return max(0, seq.token_limit - seq.num_tokens)
    return outputs.to_come(seq.num_tokens - seq.num_prompt, seq.token_limit - seq.num_prompt)


def claim_of(seq: Sequence, outputs: Outputs) -> Claim:
    """What a running sequence is expected to need. A locked node of the tree that no other sequence stands on counts as
    its own."""
    tokens, to_come = seq.num_tokens, tokens_to_come(seq, outputs)
    released = seq.num_pages - seq.num_shared
    node = seq.node
    while node is not None and node.locks == 1:
        released += len(node.pages)
        node = node.parent
    return Claim(tokens, to_come, seq.num_pages, released)


def most_pages(claims: list[Claim], page_size: int) -> int:
    """The most pages, beyond those held now, that these sequences need together at any moment until the last has ended,
    if each gets one token a step. A sequence's last token needs no page."""
    if not claims:
        return 0
    rows = np.array(claims, dtype=np.int64)
    tokens, to_come, held, released = rows[np.argsort(-rows[:, 1], kind="stable")].T
    # At the end of sequence i, those that go on longer (0 .. i in this order) are there, the others have ended. Their
    # whole pages and, by how full the last one is, the number of those that then have one page more, or two, ...
    steps = np.maximum(to_come - 1, 0)
    fill = np.arange(page_size)
    there = np.cumsum(tokens[:, None] % page_size == fill, axis=0)
    begun = -(-(fill + steps[:, None]) // page_size)
    needed = np.cumsum(tokens // page_size) + (there * begun).sum(axis=1) - np.cumsum(held)
    given_back = released.sum() - np.cumsum(released)
    return int((needed - given_back).max())


def all_pages(seq: Sequence, page_size: int) -> int:
    """Pages that a running sequence may need at most beyond those that it holds."""
    return max(0, pages_for(seq.token_limit - 1, page_size) - seq.num_pages)


class Forecast:
    """Whether one more sequence has room beside those that run. Asked in the middle of a step: `begin`, then `has_room`
    for a sequence and, if it starts, `start`, as often as there are sequences to start."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._outputs = Outputs()
        self._running = Running(0)
        self._claims: list[tuple[int, Claim]] | None = None  # with priorities; made when first needed
        self._most_growth = 0  # pages that the running ones may take at most

    def begin(self, running: Running, most_growth: int) -> None:
        """`most_growth`: the sum of `all_pages` of those that run."""
        self._running = running
        self._claims = None
        self._most_growth = most_growth

    def has_room(self, seq: Sequence, available: int) -> bool:
        """Whether `available` pages will do for `seq`, which holds what is cached of it, and all that run. To grow, one
        of higher priority may count on what those of lower priority hold."""
        if seq.pages_missing(self._page_size) > available:
            return False
        if not len(self._running) or self._most_growth + all_pages(seq, self._page_size) <= available:
            return True
        if self._claims is None:
            self._claims = [(other.priority, claim_of(other, self._outputs)) for other in self._running]
        claims = [claim for priority, claim in self._claims if priority >= seq.priority]
        available += sum(claim.released for priority, claim in self._claims if priority < seq.priority)
        return most_pages([*claims, claim_of(seq, self._outputs)], self._page_size) <= available

    def to_come(self, seq: Sequence) -> int:
        """How many more tokens to expect of a sequence."""
        return tokens_to_come(seq, self._outputs)

    def start(self, seq: Sequence) -> None:
        """`seq` runs now, and has the pages of its first chunk."""
        self._most_growth += all_pages(seq, self._page_size)
        if self._claims is not None:
            self._claims.append((seq.priority, claim_of(seq, self._outputs)))

    def end(self, seq: Sequence) -> None:
        """`seq` has produced all that it does."""
        if not seq.ends_at_limit:
            self._outputs.ended(seq.num_known - seq.num_prompt, seq.token_limit - seq.num_prompt)

    def preempt(self) -> None:
        """A sequence had to give its pages to another."""
        self._outputs.preempted()
