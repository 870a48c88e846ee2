"""Forecast of the pages that running sequences will need, so that a new one starts only if all are likely to fit.

The idea is that of LightLLM's Past-Future scheduler (arXiv 2507.10150): predict output lengths from recent requests,
and admit a request by the predicted peak of KV use. Keeping pages free for every sequence's limit would waste most of
them, because most sequences end long before it and then free their pages for the others.

1. Every sequence is expected to produce as many tokens as recent requests did, relative to their limits
   (`OutputLengthHistory`). A sequence that only its limit can end is expected to reach it.
2. With one token per sequence and step, demand is computed up to the end of the last sequence. The forecast is the
   peak (`peak_pages`).
3. A forecast that was too low is corrected by preemption, which also raises later forecasts.
"""

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from worker.scheduler.running import RunningSequences
from worker.scheduler.sequence import Sequence, pages_for


class OutputLengthHistory:
    """Prediction of output lengths, for requests that may end before their limit.

    The history holds the fraction `produced / allowed` of recent requests, and 1.0 for the limit. A request that has
    produced a fraction p of its own limit is expected to reach the mean of the fractions above p. A margin on top grows
    with every preemption and shrinks with every request that ends. Nothing depends on time, so the same traffic gives
    the same decisions.
    """

    FIRST_FRACTIONS = (0.7,) * 8  # initial fractions; each request that ends removes one of them
    MAX_REMEMBERED_REQUESTS = 128  # size of the history, in requests
    PENALTY_FRACTION = 0.25  # growth of the margin with each preemption
    FORGIVEN_FRACTION = 1 / 32  # fraction of the margin that each request that ends takes away

    def __init__(self) -> None:
        self._fractions: deque[float] = deque(self.FIRST_FRACTIONS, maxlen=self.MAX_REMEMBERED_REQUESTS)
        self._num_guessed = len(self.FIRST_FRACTIONS)
        self._margin = 0.0
        # Caches, rebuilt on demand: the fractions and 1.0, ascending, and the sums from each to the last.
        self._sorted: np.ndarray | None = None
        self._sums = np.empty(0)

    def ended(self, produced: int, allowed: int) -> None:
        """Adds a request that ended after `produced` of at most `allowed` output tokens."""
        if self._num_guessed:
            self._num_guessed -= 1
            self._fractions.popleft()
        self._fractions.append(produced / allowed)
        self._margin -= self._margin * self.FORGIVEN_FRACTION
        self._sorted = None

    def preempted(self) -> None:
        """Raises the margin: the predictions were too low."""
        self._margin += self.PENALTY_FRACTION

    def expected_tokens(self, produced: int, allowed: int) -> int:
        """Expected further output tokens of a request that has produced `produced` of at most `allowed`."""
        if produced >= allowed:
            return 0
        if self._sorted is None:
            self._sorted = np.sort([*self._fractions, 1.0])
            self._sums = np.cumsum(self._sorted[::-1])[::-1]
        fraction = produced / allowed
        first = int(self._sorted.searchsorted(fraction, side="right"))
        longer = len(self._sorted) - first  # at least one, the limit's 1.0
        expected = (self._sums[first] / longer - fraction) * allowed
        return min(allowed - produced, math.ceil(expected * (1 + self._margin)))


class KVClaim(NamedTuple):
    """A sequence in a forecast.

    | field | meaning |
    | --- | --- |
    | `tokens` | prompt + output tokens now |
    | `to_come` | expected further output tokens |
    | `held` | pages that it holds |
    | `released` | pages of `held` that no other sequence holds, so that they are free when it ends |
    """

    tokens: int
    to_come: int
    held: int
    released: int


def tokens_to_come(seq: Sequence, outputs: OutputLengthHistory) -> int:
    """Expected further output tokens of a sequence: all up to its limit if nothing else can end it."""
    if seq.ends_at_limit:
        return max(0, seq.token_limit - seq.num_tokens)
    return outputs.expected_tokens(seq.num_tokens - seq.num_prompt, seq.token_limit - seq.num_prompt)


def claim_of(seq: Sequence, outputs: OutputLengthHistory) -> KVClaim:
    """The claim of a sequence that holds its pages. Nodes of the tree that only this sequence locks count as
    `released`."""
    tokens, to_come = seq.num_tokens, tokens_to_come(seq, outputs)
    released = seq.num_pages - seq.num_shared
    node = seq.node
    while node is not None and node.locks == 1:
        released += len(node.pages)
        node = node.parent
    return KVClaim(tokens, to_come, seq.num_pages, released)


def peak_pages(claims: list[KVClaim], page_size: int) -> int:
    """The peak of the pages that these sequences need together, beyond those that they hold now, until the last one
    ends. Each gets one token per step.

    1. Demand falls only when a sequence ends, so the peak is reached at one of the ends, just before pages are freed.
    2. Sort the sequences by tokens to come, descending. At the end of sequence i, sequences 0 .. i are still there, and
       the later ones have ended.
    3. A sequence's last token needs no page. So at the end of i, each of 0 .. i has `steps[i] = to_come[i] - 1` tokens
       more than now (0 if that is negative).
    4. With `fill = tokens % page_size`, each needs `tokens // page_size + ceil((fill + steps[i]) / page_size)` pages.
       Demand at i is the sum of this over 0 .. i, less the pages that they hold, less the pages that the ended
       sequences released.
    """
    if not claims:
        return 0
    rows = np.array(claims, dtype=np.int64)
    tokens, to_come, held, released = rows[np.argsort(-rows[:, 1], kind="stable")].T
    steps = np.maximum(to_come - 1, 0)
    fill = np.arange(page_size)
    # there[i, fill]: number of sequences among 0 .. i with this fill. begun[i, fill]: pages that such a sequence needs
    # at the end of i beyond `tokens // page_size`.
    there = np.cumsum(tokens[:, None] % page_size == fill, axis=0)
    begun = -(-(fill + steps[:, None]) // page_size)
    needed = np.cumsum(tokens // page_size) + (there * begun).sum(axis=1) - np.cumsum(held)
    given_back = released.sum() - np.cumsum(released)
    return int((needed - given_back).max())


def all_pages(seq: Sequence, page_size: int) -> int:
    """Most pages that a sequence may need beyond those that it holds, if it runs up to its limit."""
    return max(0, pages_for(seq.token_limit - 1, page_size) - seq.num_pages)


class PeakKVEstimator:
    """Forecast of the peak KV demand, which decides whether one more sequence may start.

    Use, while a step is built: `begin` once, then for each candidate `has_room` and, if it starts, `start`.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._outputs = OutputLengthHistory()
        self._running = RunningSequences(0)
        self._claims: list[tuple[int, KVClaim]] | None = None  # (priority, claim) of running sequences, built on demand
        self._most_growth = 0  # sum of `all_pages` of running sequences

    def begin(self, running: RunningSequences, most_growth: int) -> None:
        """Begins a step. `most_growth`: the sum of `all_pages` of the running sequences."""
        self._running = running
        self._claims = None
        self._most_growth = most_growth

    def has_room(self, seq: Sequence, available: int) -> bool:
        """Whether `available` pages are enough for `seq`, which holds its cached prefix already, and all running
        sequences. Pages of running sequences of lower priority count as available, since `seq` may preempt those."""
        if seq.pages_missing(self._page_size) > available:
            return False
        if not len(self._running) or self._most_growth + all_pages(seq, self._page_size) <= available:
            return True
        if self._claims is None:
            self._claims = [(other.priority, claim_of(other, self._outputs)) for other in self._running]
        claims = [claim for priority, claim in self._claims if priority >= seq.priority]
        available += sum(claim.released for priority, claim in self._claims if priority < seq.priority)
        return peak_pages([*claims, claim_of(seq, self._outputs)], self._page_size) <= available

    def expected_tokens(self, seq: Sequence) -> int:
        """Expected further output tokens of a sequence: as `worker.lengths` predicts, or else as recent outputs say. At
        most what its grammar allows."""
        if seq.length is None:
            return tokens_to_come(seq, self._outputs)
        produced = seq.num_tokens - seq.num_prompt
        if (estimate := seq.length.estimate) is not None:
            allowed = min(seq.token_limit - seq.num_prompt, seq.length.longest)
            return math.ceil(estimate.to_come(produced, allowed))
        return min(tokens_to_come(seq, self._outputs), max(1, seq.length.longest - produced))

    def start(self, seq: Sequence) -> None:
        """Counts `seq` as running; it has the pages of its first chunk."""
        self._most_growth += all_pages(seq, self._page_size)
        if self._claims is not None:
            self._claims.append((seq.priority, claim_of(seq, self._outputs)))

    def end(self, seq: Sequence) -> None:
        """Adds the output length of `seq`, which has ended, to the history."""
        if not seq.ends_at_limit:
            self._outputs.ended(seq.num_known - seq.num_prompt, seq.token_limit - seq.num_prompt)

    def preempt(self) -> None:
        """Raises later forecasts after a preemption."""
        self._outputs.preempted()
