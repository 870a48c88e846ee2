"""Times of each step on a stage (input received, begin, end), by this machine's clock (`time.monotonic`).

The host does not wait for a GPU. The GPU writes times into CUDA events, by its own clock, and the host reads events
that have completed. To convert GPU times, the difference between two events is added to the host time of the earlier
one. Two bounds keep the clocks from drifting apart: an event completes no sooner than the host recorded it, and no
later than the host saw it complete.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import NamedTuple

import torch

from pipeline.meter import Span

MAX_KEPT_STEPS = 4096  # most steps whose times are kept until `take`


class StepTimer(ABC):
    """Measures a stage's steps. For each step, the runner calls in this order:

    | call | when | optional |
    | --- | --- | --- |
    | `came` | the plan has arrived and is all that the step needs; it may begin some time later | yes |
    | `ready` | only the input from another stage is missing | yes |
    | `begin` | the input is there, the step's work is launched next | |
    | `end` | the step's work has been launched, or on a CPU done | |

    `Span.received_s` is the time of `came`, else of `ready`, else of `begin`.
    """

    def __init__(self) -> None:
        self._came: dict[int, float] = {}
        self._ended = 0  # newest step that was seen to have been computed

    @classmethod
    def for_device(cls, device: torch.device) -> "StepTimer":
        """Returns a timer for a stage on this device. On a GPU it times the current stream."""
        return _OnGpu() if device.type == "cuda" else _OnCpu()

    def came(self, step: int) -> None:
        """Records that a step's plan has arrived, and that the step needs nothing else."""
        self._came[step] = time.monotonic()

    @abstractmethod
    def ready(self) -> None:
        """Records that from now on, until `begin`, the stage waits for the input of a step."""

    @abstractmethod
    def begin(self) -> None:
        """Records that from now on, until `end`, the stage computes a step."""

    @abstractmethod
    def end(self, step: int) -> None:
        """Records the end of the step that began last. `step` is its number."""

    @property
    def ended(self) -> int:
        """Number of the newest step that has been computed. May be read by any thread, also while the device
        hangs."""
        return self._ended

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether there are steps after `end` whose times have not been taken; on a GPU they may still run."""

    @abstractmethod
    def take_spans(self) -> list[tuple[int, Span]]:
        """Returns (step, span) of the steps that have been computed since the last call, in order. Does not wait."""


class _OnCpu(StepTimer):
    def __init__(self) -> None:
        super().__init__()
        self._ready_s: float | None = None
        self._begin_s = 0.0
        self._over: deque[tuple[int, Span]] = deque(maxlen=MAX_KEPT_STEPS)

    def ready(self) -> None:
        self._ready_s = time.monotonic()

    def begin(self) -> None:
        self._begin_s = time.monotonic()

    def end(self, step: int) -> None:
        came_s = self._came.pop(step, self._begin_s if self._ready_s is None else self._ready_s)
        self._ready_s = None
        self._over.append((step, Span(came_s, self._begin_s, time.monotonic())))
        self._ended = step

    @property
    def is_running(self) -> bool:
        return bool(self._over)

    def take_spans(self) -> list[tuple[int, Span]]:
        over = list(self._over)
        self._over.clear()
        return over


class _Mark(NamedTuple):
    """A CUDA event, and the host time at which it was recorded."""

    event: torch.cuda.Event
    recorded_s: float


class _OnGpu(StepTimer):
    def __init__(self) -> None:
        super().__init__()
        self._spare: list[torch.cuda.Event] = []
        self._open: deque[tuple[int, float | _Mark | None, _Mark, _Mark]] = deque(maxlen=MAX_KEPT_STEPS)
        self._ready: _Mark | None = None
        self._begun = self._last = self._mark()
        self._last.event.synchronize()
        self._last_s = time.monotonic()

    def ready(self) -> None:
        self._ready = self._mark()

    def begin(self) -> None:
        self._begun = self._mark()

    def end(self, step: int) -> None:
        self._open.append((step, self._came.pop(step, self._ready), self._begun, self._mark()))
        self._ready = None

    @property
    def ended(self) -> int:
        # The thread that takes the times may wait for the device. It may also take some just now, and use their events
        # again: then what it has seen is good enough.
        with suppress(RuntimeError):
            for step, _, _, mark in reversed(list(self._open)):
                if mark.event.query():
                    return step
        return self._ended

    @property
    def is_running(self) -> bool:
        return bool(self._open)

    def take_spans(self) -> list[tuple[int, Span]]:
        over = []
        while self._open and self._open[0][3].event.query():
            step, came, begun, ended = self._open.popleft()
            self._ended = step
            came_s = self._time(came) if isinstance(came, _Mark) else came
            begin_s, end_s = self._time(begun), self._time(ended)
            over.append((step, Span(begin_s if came_s is None else came_s, begin_s, end_s)))
        return over

    def _mark(self) -> _Mark:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        recorded_s = time.monotonic()
        event.record()
        return _Mark(event, recorded_s)

    def _time(self, mark: _Mark) -> float:
        """Host time at which a completed event was reached. Must be called in the order of recording."""
        at_s = self._last_s + self._last.event.elapsed_time(mark.event) / 1e3
        self._spare.append(self._last.event)
        self._last, self._last_s = mark, min(max(at_s, mark.recorded_s), time.monotonic())
        return self._last_s
