"""The share of recent requests that begin with a prefix, and from that how many copies of it a fleet can use.

A prefix that a share p of all requests has is a share p of the work. On n replicas it is worth p n copies, so that no
holder gets more than its part; up to `HOLDERS_FACTOR` times as many leave placement a choice.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW_REQUESTS, MAX_WINDOW_REQUESTS = 16, 2048  # requests that are counted: for each replica, and in all
HOLDERS_FACTOR = 1.5  # with 2, zipf at half of 64 replicas' capacity: 99th percentile of the slowdown +10%
# Requests for each replica that the first ones count as: a prefix of one or two requests is wanted nowhere.
MIN_REQUESTS = 4


class Popularity:
    """Counts the prefixes of the newest requests. A router with 64 replicas counts 1,024 of them; with prompts of 4,096
    tokens, these take about 10 MB."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._window: deque[Sequence[int]] = deque()

    def __len__(self) -> int:
        return len(self._window)

    def add(self, hashes: Sequence[int], num_replicas: int) -> None:
        """Counts a request with these `prefix_hashes`, in a fleet of `num_replicas`."""
        self._window.append(hashes)
        self._counts.update(hashes)
        while len(self._window) > min(MAX_WINDOW_REQUESTS, WINDOW_REQUESTS * num_replicas):
            counts = self._counts
            for prefix in self._window.popleft():
                left = counts[prefix] - 1
                if left:
                    counts[prefix] = left
                else:
                    dict.pop(counts, prefix)  # `Counter`'s own way takes several times as long

    def wanted_tokens(
        self, hashes: Sequence[int], ends: Sequence[int], cached: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """For each replica, how many of a prompt's tokens that it has not cached are worth a copy there, [replicas].

        `hashes`, `ends`: the prompt's `prefix_hashes` and their lengths. `cached` [replicas]: tokens that each has.
        """
        num_replicas, counts = len(cached), self._counts
        scale = HOLDERS_FACTOR * num_replicas / max(MIN_REQUESTS * num_replicas, len(self._window))
        if not hashes or scale * counts[hashes[0]] <= 1:
            return np.zeros(num_replicas)
        popular = bisect_left(hashes, True, key=lambda prefix: scale * counts[prefix] <= 1)  # shares only fall
        shares = np.array([scale * counts[prefix] for prefix in hashes[:popular]])
        lengths = np.array([0, *ends[:popular]])
        copies = num_replicas - np.searchsorted(np.sort(cached), lengths[1:])  # replicas that have each prefix
        wanted = np.minimum(1, np.maximum(0, shares / np.maximum(1, copies) - 1))
        sums = np.zeros(popular + 1)
        np.cumsum(wanted * (lengths[1:] - lengths[:-1]), out=sums[1:])
        return sums[-1] - np.interp(cached, lengths, sums)
