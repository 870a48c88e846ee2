"""The three loops of a replica. A turn of each schedules one step and finishes one.

    SerialLoop    schedule n | launch n | sample n | finish n
    OverlapLoop   schedule n+1 | launch n+1 | finish n | sample n+1
    PipelineLoop  as either, with steps announced to the earlier stages well ahead of their turn on this, the last stage

With overlap, the device computes step n while the host schedules and launches n+1. Sampling of n+1 is launched after
the tokens of n are known, so penalties, grammars and ended sequences are up to date. Between the steps, the tokens
themselves stay on the device.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque

import torch

from worker.engine.steps import InFlightStep, Steps
from worker.scheduler.scheduled_step import ScheduledStep

MAX_LAUNCH_S = 0.01  # a launch that takes longer has waited for the device
ASK_EVERY_S = 2e-4  # how often the policy of a pipeline is asked for its next step, while the host is idle


class StepLoop(ABC):
    """The order in which the parts of steps run."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    @abstractmethod
    def turn(self) -> None:
        """Advances by one step. Raises DeviceLost."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether steps are in flight between two turns."""

    def spare_s(self) -> float:
        """Seconds for which the next turn may be put off, because the device is busy until then."""
        return 0.0

    def ahead_s(self) -> float:
        """With pipeline parallelism, seconds until the first stage needs its next step."""
        return 0.0

    def returning_s(self, step: ScheduledStep) -> float:
        """With pipeline parallelism, seconds until the tokens of a step lie on the last stage's device."""
        return math.inf


class SerialLoop(StepLoop):
    """Runs one step after another: the next is scheduled when the tokens of the last are known."""

    @property
    def has_work(self) -> bool:
        return False

    def turn(self) -> None:
        if (step := self._steps.schedule()) is not None:
            self._steps.finish(self._steps.sample(step, self._steps.launch(step)), torch.cuda.Event.synchronize)


class OverlapLoop(StepLoop):
    """The next step is scheduled and launched while the device computes the last."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._in_flight: InFlightStep | None = None

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None

    def turn(self) -> None:
        if self._in_flight is not None and self._steps.waits_for_tokens(self._in_flight.step):
            self._finish_in_flight()
        step = self._steps.schedule()
        launched = self._steps.launch(step) if step is not None else None
        self._finish_in_flight()
        if step is not None:
            self._in_flight = self._steps.sample(step, launched)

    def _finish_in_flight(self) -> None:
        flight, self._in_flight = self._in_flight, None
        if flight is not None:
            self._steps.finish(flight, torch.cuda.Event.synchronize)

    def spare_s(self) -> float:
        """As `StepLoop.spare_s`. A request that arrives meanwhile starts in the next step instead of the one after. 0
        without predicted times, and where the queue is so long that a new request would not start."""
        if self._in_flight is None or self._steps.scheduler.is_full:
            return 0.0
        self._steps.record_times()
        return self._steps.timeline.spare_s()


class PipelineLoop(StepLoop):
    """The loop of the last stage, which samples. Steps are announced to the other stages when the policy asks for them,
    several ahead; a turn runs the oldest of these."""

    def __init__(self, steps: Steps, overlap: bool) -> None:
        super().__init__(steps)
        self._overlap = overlap
        self._in_flight: InFlightStep | None = None
        self._sampled: InFlightStep | None = None  # the newest step whose sampling was launched, finished or not
        self._announced: deque[ScheduledStep] = deque()  # steps that only the other stages have begun
        self._launch_s = 0.0  # the duration of the newest launch
        self._busy_for_s = 0.0  # how long the host is going to be busy, in which it announces nothing

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or len(self._announced) > 0

    def turn(self) -> None:
        step = self._next_step()
        begin_s = time.monotonic()
        launched = self._steps.launch(step) if step is not None else None
        if launched is not None:
            self._launch_s = time.monotonic() - begin_s
        self._finish_in_flight()
        if step is not None:
            self._in_flight = self._steps.sample(step, launched)
            if self._in_flight.is_computed:
                self._sampled = self._in_flight
            if not self._overlap:
                self._finish_in_flight()

    def ahead_s(self) -> float:
        return max(0.0, self._steps.timeline.ahead_s() - self._busy_for_s) if self._overlap else 0.0

    def returning_s(self, step: ScheduledStep) -> float:
        if self._sampled is None or self._sampled.step is not step:
            return math.inf
        return self._steps.timeline.returning_s(step) if self._sampled.done_event is not None else 0.0

    def _next_step(self) -> ScheduledStep | None:
        """The oldest announced step. Before its launch, announces the steps that the first stage will need during the
        launch."""
        self._busy_for_s = min(self._launch_s, MAX_LAUNCH_S) if self._announced else 0.0
        self._fill_stages()
        self._busy_for_s = 0.0
        return self._announced.popleft() if self._announced else None

    def _fill_stages(self) -> None:
        """Announces as many steps as the policy begins."""
        while (step := self._steps.schedule()) is not None:
            self._announced.append(step)
            self._steps.announce(step)

    def _finish_in_flight(self) -> None:
        flight, self._in_flight = self._in_flight, None
        if flight is not None:
            self._steps.finish(flight, self._fill_stages_until)
            self._fill_stages()  # the first stage is waiting for these tokens

    def _fill_stages_until(self, done: torch.cuda.Event) -> None:
        """Waits for the device, and announces steps whenever the policy wants to be asked again."""
        while (wait_s := self._steps.scheduler.ask_again_s()) < math.inf and not done.query():
            if wait_s > 0:
                time.sleep(min(wait_s, ASK_EVERY_S))
                self._steps.record_times()
            else:
                self._fill_stages()
        done.synchronize()
