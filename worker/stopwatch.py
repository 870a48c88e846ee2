"""When a stage had, began and ended each of its steps, by this machine's clock (`time.monotonic`).

A GPU is not waited for. It notes times in events, by a clock of its own, that are read once it is past them. Both
clocks are kept together by what is known of an event: it comes no sooner than it was recorded, and no later than it was
seen to have come.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

import torch

from pipeline.meter import Span

KEPT = 4096  # steps, where nobody takes them


class Stopwatch(ABC):
    """Of each step: `came` when its plan is here, if it may be some time before it is begun, or `ready` when all is
    here but what the stage before makes of it; `begin`, `end`. The first of these is what a `Span` has as received."""

    def __init__(self) -> None:
        self._came: dict[int, float] = {}

    @classmethod
    def of(cls, device: torch.device) -> "Stopwatch":
        """For a stage that computes on this device, and on the current stream of a GPU."""
        return _OnGpu() if device.type == "cuda" else _OnCpu()

    def came(self, step: int) -> None:
        """Its plan, which is all that it needs, is here."""
        self._came[step] = time.monotonic()

    @abstractmethod
    def ready(self) -> None:
        """What the stage gets to do from now on, up to `begin`, is to wait for the input of a step."""

    @abstractmethod
    def begin(self) -> None:
        """What the stage gets to do from now on is for a step."""

    @abstractmethod
    def end(self, step: int) -> None:
        """That was it, and the step was this one."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether a step that has its `end` has not been taken."""

    @abstractmethod
    def take(self) -> list[tuple[int, Span]]:
        """The steps that are over, in order, each once. Waits for nothing."""


class _OnCpu(Stopwatch):
    def __init__(self) -> None:
        super().__init__()
        self._ready_s: float | None = None
        self._begin_s = 0.0
        self._over: deque[tuple[int, Span]] = deque(maxlen=KEPT)

    def ready(self) -> None:
        self._ready_s = time.monotonic()

    def begin(self) -> None:
        self._begin_s = time.monotonic()

    def end(self, step: int) -> None:
        came_s = self._came.pop(step, self._begin_s if self._ready_s is None else self._ready_s)
        self._ready_s = None
        self._over.append((step, Span(came_s, self._begin_s, time.monotonic())))

    @property
    def is_running(self) -> bool:
        return bool(self._over)

    def take(self) -> list[tuple[int, Span]]:
        over = list(self._over)
        self._over.clear()
        return over


class _Mark(NamedTuple):
    """An event, and when it was recorded."""

    event: torch.cuda.Event
    recorded_s: float


class _OnGpu(Stopwatch):
    def __init__(self) -> None:
        super().__init__()
        self._spare: list[torch.cuda.Event] = []
        self._open: deque[tuple[int, float | _Mark | None, _Mark, _Mark]] = deque(maxlen=KEPT)
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
    def is_running(self) -> bool:
        return bool(self._open)

    def take(self) -> list[tuple[int, Span]]:
        over = []
        while self._open and self._open[0][3].event.query():
            step, came, begun, ended = self._open.popleft()
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
        """When this one came, which did so after all that were asked for before."""
        at_s = self._last_s + self._last.event.elapsed_time(mark.event) / 1e3
        self._spare.append(self._last.event)
        self._last, self._last_s = mark, min(max(at_s, mark.recorded_s), time.monotonic())
        return self._last_s
