"""Whether the head of a Ray cluster answers: its host may be gone without a word, and Ray itself looks for a minute."""

import socket
import threading
import time
from collections.abc import Callable

ASK_S = 2.0  # between questions
ANSWER_S = 2.0  # that a question waits
SILENT_S = 10.0  # without an answer, after which the head counts as lost
GIVE_UP_S = 45.0  # without an answer, after which `follow` gives up: Ray ends a process that needs the head after 60 s


class HeadWatch:
    """Asks the head whether it is there. `is_lost`: it has not answered for `SILENT_S`."""

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`address`: host:port, as Ray has it."""
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._address = address
        self._clock = clock
        self._asked_s = self._answered_s = clock()
        self.is_lost = False

    @property
    def silent_s(self) -> float:
        """How long ago it answered."""
        return self._clock() - self._answered_s

    def look(self) -> str | None:
        """Asks if it is time. Returns what is new, in a line for people: that the head is lost, or back."""
        if self._clock() - self._asked_s < ASK_S and not self.is_lost:
            return None
        self._asked_s = self._clock()
        try:
            socket.create_connection(self._place, timeout=ANSWER_S).close()
        except OSError as error:
            if self.is_lost or self.silent_s < SILENT_S:
                return None
            self.is_lost = True
            return f"the head of the cluster, {self._address}, has not answered for {self.silent_s:.0f} s: {error}"
        self._answered_s = self._clock()
        if not self.is_lost:
            return None
        self.is_lost = False
        return f"the head of the cluster, {self._address}, answers again"

    def follow(self, tell: Callable[[str], None], gone: Callable[[], None], over: threading.Event) -> None:
        """Looks until `over`. Calls `tell` with what is new, and `gone` once after `GIVE_UP_S`."""
        while not over.wait(ASK_S):
            if (line := self.look()) is not None:
                tell(line)
            if self.silent_s > GIVE_UP_S:
                return gone()
