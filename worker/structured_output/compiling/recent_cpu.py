"""How much of the machine the grammars of each client have taken lately."""

import math
import os
import threading
import time

LATELY_S = 5.0  # in which the weight of what was taken falls to 1/e
# A part of the cores that a client's grammars may take without yielding. Eight well-behaved requests a second, two of
# which have a new schema, take 0.07 of a core.
CORES_SHARE = 0.1
_FORKS_S = 0.02  # of the two forks of a grammar, besides what the inner one counts: a guess, for some 170 MB of pages
_MAX_CLIENTS = 1024


class RecentCpu:
    """CPU seconds by client, which fade. Thread-safe."""

    def __init__(self, cores: int | None = None) -> None:
        """`cores`: by default those that this process may use."""
        self._most_s = CORES_SHARE * (cores or _cores()) * LATELY_S
        self._lock = threading.Lock()
        self._taken: dict[str, tuple[float, float]] = {}  # seconds, and when

    def is_much(self, client: str) -> bool:
        """Whether the client took more than its part."""
        with self._lock:
            return self._seconds(client, time.monotonic()) > self._most_s

    def add(self, client: str, seconds: float) -> None:
        """Counts what a grammar took."""
        now_s = time.monotonic()
        with self._lock:
            self._taken[client] = self._seconds(client, now_s) + seconds + _FORKS_S, now_s
            if len(self._taken) > _MAX_CLIENTS:  # those that took little are forgotten
                taken = {each: self._seconds(each, now_s) for each in self._taken}
                self._taken = {each: (left_s, now_s) for each, left_s in taken.items() if left_s > 2 * _FORKS_S}

    def _seconds(self, client: str, now_s: float) -> float:
        seconds, at_s = self._taken.get(client, (0.0, now_s))
        return seconds * math.exp((at_s - now_s) / LATELY_S)


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
