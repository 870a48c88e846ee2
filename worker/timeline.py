"""Where the stages of this replica are: what lies before the first of them, what each step took, what they waited for.

Put together from what the engine does and from what the stages report. A step counts when all stages have told of it.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.ahead import Ahead
from pipeline.meter import Meter, Span
from pipeline.shape import BatchShape
from worker.batch import Step
from worker.costs import Costs
from worker.runner import Ran


@dataclass
class _Open:
    """A step of which not all stages have told."""

    shape: BatchShape
    after: int | None
    spans: list[Span | None]


class Timeline:
    """Of a replica with so many `stages`. `costs` learn from it."""

    def __init__(self, stages: int, costs: Costs) -> None:
        self.meter = Meter(stages)
        self._stages = stages
        self._costs = costs
        self._ahead = Ahead(stages)
        self._open: dict[int, _Open] = {}
        self._in_flight: set[int] = set()
        self._ended_s = [-math.inf] * stages  # the last step of each that counted

    def planned(self, step: Step) -> None:
        """The step is sent."""
        now_s, number = time.monotonic(), step.plan.step
        self.meter.planned(number, now_s, step.shape, self._costs.decode_s(step.shape), step.after)
        self._open[number] = _Open(step.shape, step.after, [None] * self._stages)
        self._in_flight.add(number)
        if self._costs.models:
            self._ahead.sent(number, now_s, [model.predict(step.shape) for model in self._costs.models])

    def nothing(self, cause: str) -> None:
        """The scheduler has a place for a step and nothing to put into it."""
        self.meter.nothing(time.monotonic(), cause)

    def take(self, ran: Iterable[Ran]) -> None:
        """Steps that stages have computed."""
        for stage, number, span in ran:
            step = self._open.get(number)
            if step is None:
                continue  # it failed
            step.spans[stage] = span
            self._ahead.ended(number, stage, span.end_s)
            if None not in step.spans:
                del self._open[number]
                self._count(number, step)

    def finished(self, step: Step, computed: bool = True) -> None:
        """Its tokens are there, or it could not be `computed`. Ignored if it has not been planned, or failed before."""
        number = step.plan.step
        if number in self._in_flight:
            self._in_flight.remove(number)
            self.meter.finished(number, computed)
            if not computed:
                self._open.pop(number, None)
                self._ahead.failed(number)

    def ahead_s(self) -> float:
        """Until the first stage is done with all that was sent to it."""
        return self._ahead.free_s(time.monotonic())

    def returning_s(self, step: Step) -> float:
        """Until the last stage is done with a step; infinity where nobody predicts it."""
        return self._ahead.returning_s(step.plan.step, time.monotonic()) if self._costs.models else math.inf

    def spent(self) -> list[dict[str, float]]:
        """For each stage the seconds that it computed, and those that it waited by cause."""
        meter = self.meter
        return [{"compute": meter.compute_s[stage], **meter.gap_s[stage]} for stage in range(self._stages)]

    def _count(self, number: int, step: _Open) -> None:
        sent_s, seconds = self.meter.sent_s(number), []
        for stage, found in enumerate(step.spans):
            assert found is not None
            received_s, begin_s, end_s = found
            begin_s = max(begin_s, sent_s)  # clocks are not quite one
            if stage > 0 or step.after is not None:
                # When the input came can be told only if the stage was ready. What it was not ready for is the host's.
                received_s = begin_s - max(0.0, received_s - max(self._ended_s[stage], sent_s))
            elif self._stages == 1:
                received_s = sent_s
            span = Span(min(max(received_s, sent_s), begin_s), begin_s, max(end_s, begin_s))
            self.meter.ran(number, stage, span)
            self._ended_s[stage] = sent_s = span.end_s
            seconds.append(end_s - found.begin_s)
        self._costs.observe(step.shape, seconds)
