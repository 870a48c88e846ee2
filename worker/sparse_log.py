"""Warnings about what others do, who could fill the log."""

import logging
import threading
import time
from collections.abc import Callable

EVERY_S = 60.0


class SparseLog:
    """A warning that is written `most` times in `every_s` seconds, with the number of those that were left out."""

    def __init__(
        self,
        log: "logging.Logger | logging.LoggerAdapter[logging.Logger]",
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
        most: int = 1,
    ) -> None:
        self._log, self._every_s, self._clock, self._most = log, every_s, clock, most
        self._until_s = float("-inf")
        self._written = self._left_out = 0
        self._lock = threading.Lock()

    def warning(self, message: str, *args: object) -> None:
        """Writes the warning, or counts it. `args`: of its %-format."""
        with self._lock:
            now_s = self._clock()
            if now_s >= self._until_s:
                self._until_s, self._written = now_s + self._every_s, 0
            if self._written == self._most:
                self._left_out += 1
                return
            self._written += 1
            left_out, self._left_out = self._left_out, 0
        if left_out:
            message, args = f"{message} (and %d more since the last such line)", (*args, left_out)
        self._log.warning(message, *args)
