"""Memory of large requests: given back to the system."""

import asyncio
import contextlib
import ctypes
import threading

LARGE_BYTES = 256 << 10  # of a body
AFTER_S = 2.0  # after a large request has ended; also the time between two trims


class Trim:
    """Returns free memory to the system after large requests. By itself, glibc keeps what threads have freed, in an
    arena for each: hundreds of megabytes after a burst, for good."""

    def __init__(self) -> None:
        self._is_due = False

    def after(self, num_bytes: int) -> None:
        """Call it in the event loop when a request with a body of `num_bytes` has ended."""
        if num_bytes >= LARGE_BYTES and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(AFTER_S, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        threading.Thread(target=trim, name="trim", daemon=True).start()


def trim() -> None:
    """Returns all free memory to the system. Takes some ten milliseconds for hundreds of megabytes."""
    with contextlib.suppress(AttributeError):  # only GNU's C library has this function
        ctypes.CDLL(None).malloc_trim(0)
