"""Warnings about what others do, who could fill the log."""

import logging
import threading
import time
from collections.abc import Callable

EVERY_S = 60.0


class SparseLog:
    """A warning that is written once in `every_s` seconds, with the number of those that were left out since."""

    def __init__(
        self, log: logging.Logger, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._every_s, self._clock = log, every_s, clock
        self._next_s = float("-inf")
        self._left_out = 0
        self._lock = threading.Lock()

    def warning(self, message: str, *args: object) -> None:
        """Writes the warning, or counts it. `args`: of its %-format."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._next_s:
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
            self._next_s = now_s + self._every_s
        if left_out:
            message, args = f"{message} (and %d more since the last such line)", (*args, left_out)
        self._log.warning(message, *args)
