"""When what a replica has learned is written to disk."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

SAVE_EVERY_S = 60.0  # at most, and only while nothing runs


class Saver:
    """Writes what was learned, if it is more than the last time. If it cannot be written, warns once, and the next call
    tries again: a disk may be full for a while."""

    def __init__(self, what: str, num_learned: Callable[[], int], write: Callable[[], None]) -> None:
        """`what` is not kept, says the warning. `write` raises OSError if it cannot."""
        self._what, self._num_learned, self._write = what, num_learned, write
        self._num_saved = num_learned()
        self._saved_s = time.monotonic()
        self._is_told = False  # that it cannot be saved

    def save(self) -> None:
        """Writes it now."""
        learned = self._num_learned()
        if learned == self._num_saved:
            return
        self._saved_s = time.monotonic()
        try:
            self._write()
        except OSError as error:
            if not self._is_told:
                log.warning("%s is not kept: %s", self._what, error)
            self._is_told = True
        else:
            self._num_saved, self._is_told = learned, False

    def save_if_due(self) -> None:
        """Calls `save` at most once every `SAVE_EVERY_S`. Called while nothing runs."""
        if time.monotonic() - self._saved_s > SAVE_EVERY_S:
            self.save()
