"""Prefixes of prompts that were just placed: a replica will soon have them cached, but its events do not say so yet.

Without them, a burst of requests with one new prefix would be spread over all replicas, and each would compute it.
"""

import functools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radix.index import set_slots

EXPIRES_S = 2.0
MAX_HASHES = 1 << 20  # of all entries together: about 100 MB


def marks(num_tokens: int) -> list[int]:
    """The prefix lengths, in tokens, at which prompts are compared: every 16 up to 512, then 16 in each doubling. So a
    long prompt costs little, and no length is off by more than a sixteenth."""
    found, _ = _all_marks()
    return found[: bisect_right(found, num_tokens)]


@functools.cache
def _all_marks() -> tuple[list[int], NDArray[np.int64]]:
    """The marks of the longest prompt that there can be, and where the parts begin that they end."""
    found = []
    mark = step = 16
    while mark < 2**31:
        found.append(mark)
        if mark == 32 * step:
            step *= 2
        mark += step
    return found, np.array([0, *found[:-1]])


def prefix_hashes(tokens: np.ndarray) -> list[int]:
    """A 64-bit hash of the prefix of `tokens` (int32 [n]) at each of its `marks`, the same in every process.

    Multilinear hashing: the sum of (token + 1) times the number at the token's position in a fixed sequence of random
    odd numbers. One pass gives the hashes of all prefixes.
    """
    ends = marks(len(tokens))
    if not ends:
        return []
    values = tokens[: ends[-1]].astype(np.uint64)
    values += np.uint64(1)
    values *= multipliers(len(values).bit_length())[: len(values)]
    return np.cumsum(np.add.reduceat(values, _all_marks()[1][: len(ends)])).tolist()


class OptimisticPrefixes:
    """The prefixes that the replicas of a router were recently given. An entry lasts `EXPIRES_S`: by then the replica's
    events show what it has cached, and a prefix that they do not show may never be.

    Replicas are known by slots, small numbers of the caller's. All prefixes of one prompt come and go together, so
    a replica that has a prefix has all shorter ones.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # of each prefix, the bits of the slots that were given it
        self._again: dict[tuple[int, int], int] = {}  # of (prefix, slot): entries beyond the first
        self._entries: deque[tuple[float, int, Sequence[int]]] = deque()  # when each ends, slot, hashes
        self._num_hashes = 0

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, slot: int, hashes: Sequence[int], now: float) -> None:
        """Records that a replica was given a prompt with these `prefix_hashes` at time `now` (seconds)."""
        bit, holders, again = 1 << slot, self._holders, self._again
        for prefix in hashes:
            bits = holders.get(prefix, 0)
            if bits & bit:
                again[prefix, slot] = again.get((prefix, slot), 0) + 1
            else:
                holders[prefix] = bits | bit
        self._entries.append((now + EXPIRES_S, slot, hashes))
        self._num_hashes += len(hashes)
        while self._num_hashes > MAX_HASHES:
            self._drop_oldest()

    def expire(self, now: float) -> None:
        """Drops the entries that have expired."""
        while self._entries and self._entries[0][0] <= now:
            self._drop_oldest()

    def forget(self, slot: int) -> None:
        """Drops all entries of a replica."""
        kept, self._entries = self._entries, deque()
        for entry in kept:
            if entry[1] == slot:
                self._drop(slot, entry[2])
            else:
                self._entries.append(entry)

    def match(self, hashes: Sequence[int], now: float, num_slots: int) -> NDArray[np.intp]:
        """How many of a prompt's `prefix_hashes`, counted from the shortest, each replica was recently given
        [num_slots]. Drops expired entries."""
        self.expire(now)
        found, holders, set_ = np.zeros(num_slots, dtype=np.intp), self._holders, 0
        most = bisect_left(hashes, True, key=lambda prefix: prefix not in holders)
        for index in range(most - 1, -1, -1):
            bits = holders[hashes[index]]
            if bits != set_:
                set_slots(found, bits ^ set_, index + 1)
                set_ = bits
        return found

    def _drop_oldest(self) -> None:
        _, slot, hashes = self._entries.popleft()
        self._drop(slot, hashes)

    def _drop(self, slot: int, hashes: Sequence[int]) -> None:
        bit, holders, again = 1 << slot, self._holders, self._again
        self._num_hashes -= len(hashes)
        for prefix in hashes:
            if again and (prefix, slot) in again:
                again[prefix, slot] -= 1
                if not again[prefix, slot]:
                    del again[prefix, slot]
            elif bits := holders[prefix] ^ bit:
                holders[prefix] = bits
            else:
                del holders[prefix]


@functools.cache
def multipliers(bits: int) -> np.ndarray:
    """The first 2**bits of a fixed pseudorandom sequence of odd numbers (SplitMix64: Steele, Lea, Flood 2014)."""
    state = np.arange(1, (1 << bits) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)
