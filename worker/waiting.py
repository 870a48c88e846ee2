"""The requests that wait for a slot and pages, and which of them goes next."""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

import numpy as np

from worker.request import Sequence

WINDOW = 128  # of the first come, how many compete for being next
LOOKUPS_A_STEP = 8
LOOKUP_EVERY_STEPS = 16


class WaitingQueue:
    """Waiting sequences. Order: higher priority; then those that ran before and were preempted; then those that have
    waited for longer than `starvation_s`, first come first; then by longest cached prefix. With `longest_first` those
    that come within `starvation_s` are a job, and jobs go one after the other: of one, those with as much of a cached
    prefix in the order of the tokens to come, the most first.

    What the tree holds changes with every step, and thousands may wait, so a sequence's cached prefix is an estimate:
    looked up when it arrives and then, for those in the window, every few steps, or when it is known to be out of date.
    """

    def __init__(self, starvation_s: float, look_up: Callable[[Sequence], int], longest_first: bool = False) -> None:
        """`look_up`: how many of a sequence's tokens the tree has now."""
        self._starvation_s = starvation_s
        self._longest_first = longest_first
        self._job, self._job_began_s = 0, -math.inf  # the newest
        self._look_up = look_up
        self._queue: list[Sequence] = []  # by place
        self._rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    @property
    def rows(self) -> np.ndarray:
        """Theirs in the counts, int64, roughly in the order in which they are to go."""
        if self._rows is None:
            self._rows = np.array([seq.row for seq in self._queue], dtype=np.int64)
        return self._rows

    def add(self, seq: Sequence, step: int) -> None:
        """A sequence waits from before this step on."""
        self._estimate(seq, step)
        self._rows = None
        if self._longest_first and not seq.preempted:
            if seq.arrived_s - self._job_began_s > self._starvation_s:
                self._job, self._job_began_s = self._job + 1, seq.arrived_s
            seq.job = self._job
        insort(self._queue, seq, key=self._place)

    def remove(self, seq: Sequence) -> None:
        """It waits no more."""
        self._rows = None
        del self._queue[bisect_left(self._queue, self._place(seq), key=self._place)]

    def in_order(self, step: int, now_s: float) -> list[Sequence]:
        """Those that may go next, best first."""
        window = self._queue[:WINDOW]
        old = [seq for seq in window if seq.estimated_at_step + LOOKUP_EVERY_STEPS < step]
        for seq in sorted(old, key=lambda seq: seq.estimated_at_step)[:LOOKUPS_A_STEP]:
            self._estimate(seq, step)
        window.sort(key=lambda seq: self._urgency(seq, now_s))
        return window

    def outdate(self, seq: Sequence, step: int) -> None:
        """By the next step the tree has more of a sequence than it had."""
        seq.estimated_at_step = step - LOOKUP_EVERY_STEPS

    def _place(self, seq: Sequence) -> tuple[int, bool, int, int, int]:
        """Ascending from the front, and the same for as long as it waits."""
        to_come = seq.num_expected - seq.num_tokens if self._longest_first else 0
        return (-seq.priority, not seq.preempted, seq.job, -to_come, seq.arrival)

    def _urgency(self, seq: Sequence, now_s: float) -> tuple[int, bool, bool, int, int, int, int]:
        starved = seq.preempted or (not self._longest_first and now_s - seq.arrived_s > self._starvation_s)
        priority, is_new, job, to_come, arrival = self._place(seq)
        return (priority, is_new, not starved, job, 0 if starved else -seq.cached_estimate, to_come, arrival)

    def _estimate(self, seq: Sequence, step: int) -> None:
        seq.cached_estimate = self._look_up(seq)
        seq.estimated_at_step = step
