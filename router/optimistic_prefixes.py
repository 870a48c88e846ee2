"""Prefixes of prompts that were just placed: the replica will soon have them cached, but its events do not say so yet.

Without them, a burst of requests with one new prefix would be spread over all replicas, and each would compute it.
"""

import bisect
import functools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

EXPIRES_S = 2.0
MAX_ENTRIES = 1 << 16


def marks(num_tokens: int) -> list[int]:
    """The prefix lengths, in tokens, at which prompts are compared: every 16 up to 512, then 16 in each doubling. So a
    long prompt costs little, and no length is off by more than a sixteenth."""
    found = []
    mark = step = 16
    while mark <= num_tokens:
        found.append(mark)
        if mark == 32 * step:
            step *= 2
        mark += step
    return found


def prefix_hashes(tokens: np.ndarray) -> list[int]:
    """A 64-bit hash of the prefix of `tokens` (int32 [n]) at each of its `marks`, the same in every process.

    Multilinear hashing: the sum of (token + 1) times the number at the token's position in a fixed sequence of random
    odd numbers. One pass gives the hashes of all prefixes.
    """
    ends = np.array(marks(len(tokens)), dtype=np.int64)
    if not len(ends):
        return []
    values = tokens[: ends[-1]].astype(np.uint64) + np.uint64(1)
    sums = np.cumsum(values * _multipliers(len(values).bit_length())[: len(values)])
    return sums[ends - 1].tolist()


class OptimisticPrefixes:
    """The prefixes that one replica was recently given. An entry lasts `EXPIRES_S`: by then the replica's events show
    what it has cached, and a prefix that they do not show may never be."""

    def __init__(self) -> None:
        self._expiry: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._expiry)

    def add(self, hashes: Sequence[int], now: float) -> None:
        """Records that the replica was given a prompt with these `prefix_hashes` at time `now` (seconds)."""
        # Longest first: entries leave in the order in which they came, so a prefix never leaves before its extensions.
        for prefix in reversed(hashes):
            self._expiry[prefix] = now + EXPIRES_S
            self._expiry.move_to_end(prefix)
        while len(self._expiry) > MAX_ENTRIES:
            self._expiry.popitem(last=False)

    def match(self, hashes: Sequence[int], now: float, known: int = 0) -> int:
        """How many of a prompt's `prefix_hashes`, counted from the shortest, the replica was recently given; at least
        the `known` ones that it has anyhow. Drops expired entries."""
        expiry = self._expiry
        while expiry and next(iter(expiry.values())) <= now:
            expiry.popitem(last=False)
        if known >= len(hashes) or hashes[known] not in expiry:
            return known
        return bisect.bisect_left(hashes, True, lo=known + 1, key=lambda prefix: prefix not in expiry)


@functools.cache
def _multipliers(bits: int) -> np.ndarray:
    """The first 2**bits of a fixed pseudorandom sequence of odd numbers (SplitMix64: Steele, Lea, Flood 2014)."""
    state = np.arange(1, (1 << bits) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)
