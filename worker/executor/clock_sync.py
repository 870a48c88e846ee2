"""Offsets between the clocks of a replica's machines, estimated from messages that are sent anyway.

A message arrives after it was sent. A plan from the leading rank to another machine therefore bounds the offset of the
two clocks from below, and a message back bounds it from above. The estimate is the middle between the closest recent
bounds. Its error is at most half the delay of the quickest messages. Processes of one machine share one clock.
"""

import math
import platform
import time
from collections import deque
from pathlib import Path

import msgspec

RECENT_MESSAGES = 64  # number of newest messages in each direction whose bounds count


class ClockStamp(msgspec.Struct, array_like=True, frozen=True):
    """Times in a message, by its sender's clock.

    | field | meaning |
    | --- | --- |
    | `host` | the sender's machine, as `host_id` names it |
    | `sent_s` | when the message was sent |
    | `came` | pairs (step, time of arrival) of the plans that arrived since the previous message |
    """

    host: str
    sent_s: float
    came: list[tuple[int, float]]


def host_id() -> str:
    """Returns an id of this machine's clock: the same in all its processes until it reboots, different on every other
    machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # exists on Linux
    return boot.read_text().strip() if boot.exists() else platform.node()


class ClockOffset:
    """Estimates from bounds the offset to add to another clock's times to convert them to this process's clock."""

    def __init__(self) -> None:
        self._least: deque[float] = deque(maxlen=RECENT_MESSAGES)
        self._most: deque[float] = deque(maxlen=RECENT_MESSAGES)

    def at_least(self, seconds: float) -> None:
        """Records a lower bound."""
        self._least.append(seconds)

    def at_most(self, seconds: float) -> None:
        """Records an upper bound."""
        self._most.append(seconds)

    def seconds(self) -> float:
        """The estimate. Raises ValueError unless there is a bound on each side."""
        return (max(self._least) + min(self._most)) / 2


class ClockSync:
    """Clock offsets of all other machines, as the leading rank sees them: the rank that sends the plans."""

    def __init__(self) -> None:
        self._host = host_id()
        self._sent_s: dict[int, float] = {}  # when recent plans were sent, by step
        self._offsets: dict[str, ClockOffset] = {}

    def sent(self, step: int) -> None:
        """Records that a step's plan is sent now."""
        self._sent_s[step] = time.monotonic()
        if len(self._sent_s) > 2 * RECENT_MESSAGES:
            self._sent_s = dict(list(self._sent_s.items())[-RECENT_MESSAGES:])

    def offset_s(self, stamp: ClockStamp) -> float:
        """Returns the offset, in seconds, to add to the times in a message that has just arrived."""
        if stamp.host == self._host:
            return 0.0
        offset = self._offsets.setdefault(stamp.host, ClockOffset())
        offset.at_most(time.monotonic() - stamp.sent_s)
        for step, came_s in stamp.came:
            offset.at_least(self._sent_s.get(step, -math.inf) - came_s)
        return offset.seconds()
