"""How many threads take in the tokens of a batch and fill its masks.

Threads wait for each other, and outputs of one grammar wait for the automata that they share. So several threads pay
where the work takes long, and how long that is depends on the machine. Here both ways are timed, by kind of work.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

MAX_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
QUICK_S = 3e-4  # what one thread does in this time is left to it
_TRY_EVERY_RUNS = 64  # runs between two attempts in the other way
_WEIGHT = 0.25  # of a new time
_MAX_RISE_FACTOR = 2.0  # a single time counts as this many times the average at most: a grammar may be new


@dataclass
class _Ways:
    """Seconds for an output, moving averages: on one thread, and on several."""

    one_s: float = 0.0
    several_s: float = 0.0
    runs: int = 0


class GrammarThreads:
    """The choice between one thread and `several`. Not thread-safe."""

    def __init__(self, several: int = MAX_THREADS) -> None:
        self._several = several
        self._ways: dict[str, _Ways] = {}

    def run(self, kind: str, count: int, work: Callable[[int], T]) -> T:
        """Does `work`, of this kind and for `count` outputs, on as many threads as are quickest: its argument."""
        threads = self.choose(kind, count)
        began_s = time.monotonic()
        result = work(threads)
        self.took(kind, threads, count, time.monotonic() - began_s)
        return result

    def choose(self, kind: str, count: int) -> int:
        """The number of threads for work of this kind for `count` outputs."""
        ways = self._ways.setdefault(kind, _Ways())
        if self._several == 1 or count * ways.one_s < QUICK_S:
            return 1
        ways.runs += 1
        is_quicker = ways.several_s < ways.one_s
        return self._several if is_quicker != (ways.runs % _TRY_EVERY_RUNS == 0) else 1

    def took(self, kind: str, threads: int, count: int, seconds: float) -> None:
        """Learns what such work took."""
        ways = self._ways.setdefault(kind, _Ways())
        each_s = seconds / count
        if threads == 1:
            ways.one_s = _average(ways.one_s, each_s)
        else:
            ways.several_s = _average(ways.several_s, each_s)


def _average(known_s: float, new_s: float) -> float:
    if not known_s:
        return new_s
    return known_s + _WEIGHT * (min(new_s, _MAX_RISE_FACTOR * known_s) - known_s)
