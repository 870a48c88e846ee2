"""The clocks of a replica's machines, set to one by what passes between them anyway.

A plan comes after it was sent, and so does what a rank tells of it: each bounds the difference of two clocks from one
side. What lies between the closest bounds of late is taken for it, wrong by no more than half of what the quickest
messages took. On one machine there is but one clock.
"""

import math
import platform
import time
from collections import deque
from pathlib import Path

import msgspec

RECENT = 64  # messages that the bounds are taken from


class Stamp(msgspec.Struct, array_like=True, frozen=True):
    """What a message says of its sender's clock: of which machine it is, when the message was `sent_s`, and when plans
    had come since the one before, by step."""

    host: str
    sent_s: float
    came: list[tuple[int, float]]


def host_id() -> str:
    """The same in all processes of a machine since it was started, and no other's."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # Linux has it
    return boot.read_text().strip() if boot.exists() else platform.node()


class Offset:
    """What to add to the times of another clock to have those of one's own, from bounds."""

    def __init__(self) -> None:
        self._least: deque[float] = deque(maxlen=RECENT)
        self._most: deque[float] = deque(maxlen=RECENT)

    def at_least(self, seconds: float) -> None:
        """A bound from below."""
        self._least.append(seconds)

    def at_most(self, seconds: float) -> None:
        """A bound from above."""
        self._most.append(seconds)

    def seconds(self) -> float:
        """There must have been a bound on each side."""
        return (max(self._least) + min(self._most)) / 2


class Clocks:
    """The other machines', for the rank that sends the plans."""

    def __init__(self) -> None:
        self._host = host_id()
        self._sent_s: dict[int, float] = {}  # by step, of late
        self._offsets: dict[str, Offset] = {}

    def sent(self, step: int) -> None:
        """The step's plan is being sent."""
        self._sent_s[step] = time.monotonic()
        if len(self._sent_s) > 2 * RECENT:
            self._sent_s = dict(list(self._sent_s.items())[-RECENT:])

    def offset_s(self, stamp: Stamp) -> float:
        """What to add to the times in a message that has just come."""
        if stamp.host == self._host:
            return 0.0
        offset = self._offsets.setdefault(stamp.host, Offset())
        offset.at_most(time.monotonic() - stamp.sent_s)
        for step, came_s in stamp.came:
            offset.at_least(self._sent_s.get(step, -math.inf) - came_s)
        return offset.seconds()
