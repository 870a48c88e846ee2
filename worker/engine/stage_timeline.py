"""The time line of a replica's stages: their backlog, the times of their steps, and what they waited for.

Made from the engine's decisions and from the times that stages report. A step counts once all stages have reported it.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.meter import Meter, Span
from pipeline.shape import BatchShape
from pipeline.stage_backlog import StageBacklog
from worker.engine.cost_store import CostStore
from worker.scheduler.scheduled_step import ScheduledStep
from worker.step import StepTime

# Planning of the next step begins one lead before the device ends its backlog. LEADS_S has the shortest, the initial
# and the longest lead. On an H200 a step of decodes takes its host 1 ms. The lead changes by at most LEAD_STEP_S per
# step, so that a part LATE_SHARE of the steps that were put off makes the device wait longer than WAITED_S. This is
# more than the gap between two steps that were both sent in time: 0.03 ms on average (8B, H200). It is also about what
# most steps then wait, since the lead shrinks that far: with 0.3 ms it was 0.2 ms, 1.7% of the device's time at 24
# conversations a second.
LEADS_S = 0.001, 0.003, 0.01
LATE_SHARE, LEAD_STEP_S, WAITED_S = 0.02, 2e-4, 1e-4


@dataclass
class _Open:
    """A step that not all stages have reported. `after`: the step whose tokens it waits for on the first stage, if
    any. `spans`: by stage."""

    shape: BatchShape
    after: int | None
    spans: list[Span | None]


class StageTimeline:
    """Follows the steps of a replica through its stages, and gives measured times to the meter and the cost models.

    `planned`, `nothing` and `finished` record what the engine does, `record` what stages report. `stages`: number of
    stages. `costs`: predict the backlog, and learn from the measured times.
    """

    def __init__(self, stages: int, costs: CostStore) -> None:
        self.meter = Meter(stages)
        self._stages = stages
        self._costs = costs
        self._ahead = StageBacklog(stages)
        self._open: dict[int, _Open] = {}
        self._in_flight: set[int] = set()
        self._ended_s = [-math.inf] * stages  # by stage, the end of the last step that counted
        self._newest = 0  # the step that was planned last
        self._put_off: set[int] = set()  # steps whose planning was put off until the lead
        self._lead_s = LEADS_S[1]

    def planned(self, step: ScheduledStep) -> None:
        """Records that a step is sent now."""
        now_s, number = time.monotonic(), step.plan.step
        self.meter.planned(number, now_s, step.shape, self._costs.decode_s(step.shape), step.tokens_from_step)
        self._newest = number
        self._open[number] = _Open(step.shape, step.tokens_from_step, [None] * self._stages)
        self._in_flight.add(number)
        if self._costs.models:
            self._ahead.sent(number, now_s, [model.predict(step.shape) for model in self._costs.models])

    def nothing(self, cause: str) -> None:
        """Records that the scheduler has a place for a step and found nothing to put into it. `cause`: see
        `Meter.nothing`."""
        self.meter.nothing(time.monotonic(), cause)

    def record(self, ran: Iterable[StepTime]) -> None:
        """Records the times of steps that stages have computed."""
        for stage, number, span in ran:
            step = self._open.get(number)
            if step is None:
                continue  # the step failed
            step.spans[stage] = span
            self._ahead.ended(number, stage, span.end_s)
            if None not in step.spans:
                del self._open[number]
                self._count(number, step)

    def finished(self, step: ScheduledStep, computed: bool = True) -> None:
        """Records that a step's tokens have arrived, or with `computed` False, that the step failed. Ignored for a step
        that was not planned or that has failed before."""
        number = step.plan.step
        if number in self._in_flight:
            self._in_flight.remove(number)
            self.meter.finished(number, computed)
            if not computed:
                self._open.pop(number, None)
                self._ahead.failed(number)

    def ahead_s(self) -> float:
        """Seconds until the first stage is done with all steps sent to it."""
        return self._ahead.free_s(time.monotonic())

    def spare_s(self) -> float:
        """Seconds for which planning of the next step can be put off, with a single stage; 0 without cost models.

        The caller is expected to put it off if the result is not 0. Then the lead grows if the stage waits for that
        step, and shrinks if not.
        """
        spare_s = self.ahead_s() - self._lead_s if self._costs.models else 0.0
        if spare_s <= 0.0:
            return 0.0
        self._put_off.add(self._newest + 1)
        return spare_s

    def returning_s(self, step: ScheduledStep) -> float:
        """Seconds until the last stage is done with a step; infinity without cost models."""
        return self._ahead.returning_s(step.plan.step, time.monotonic()) if self._costs.models else math.inf

    def spent(self) -> list[dict[str, float]]:
        """Seconds of each stage: `compute`, and waiting by cause."""
        meter = self.meter
        return [{"compute": meter.compute_s[stage], **meter.gap_s[stage]} for stage in range(self._stages)]

    def _count(self, number: int, step: _Open) -> None:
        sent_s, seconds = self.meter.sent_s(number), []
        for stage, found in enumerate(step.spans):
            assert found is not None
            received_s, begin_s, end_s = found
            last_s = self._ended_s[stage]
            begin_s = max(begin_s, sent_s)  # clocks differ a little
            if stage > 0 or step.after is not None:
                # `received_s` is when the stage was ready for its input; when the input arrived is unknown. The meter
                # counts the time from `received_s` to the begin as the host's. So the time that the host took to get
                # ready is moved to just before the begin, and the rest counts as waiting for the input.
                received_s = begin_s - max(0.0, received_s - max(self._ended_s[stage], sent_s))
            elif self._stages == 1:
                received_s = sent_s
            span = Span(min(max(received_s, sent_s), begin_s), begin_s, max(end_s, begin_s))
            self.meter.ran(number, stage, span)
            self._ended_s[stage] = sent_s = span.end_s
            seconds.append(end_s - found.begin_s)
            self._follow_lead(number, begin_s - last_s)
        self._costs.observe(step.shape, seconds)

    def _follow_lead(self, number: int, waited_s: float) -> None:
        """Adjusts the lead after the stage waited `waited_s` for a step, if that step was put off. In balance, one in
        fifty of these steps (`LATE_SHARE`) makes the stage wait."""
        if number in self._put_off:
            self._put_off.discard(number)
            least, _, most = LEADS_S
            step_s = LEAD_STEP_S * (1.0 - LATE_SHARE if waited_s > WAITED_S else -LATE_SHARE)
            self._lead_s = min(most, max(least, self._lead_s + step_s))
