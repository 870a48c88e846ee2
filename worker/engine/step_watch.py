"""How long a replica may work without finishing a step, before it counts as hung.

A step may take `FACTOR` times its predicted time, and never less than a floor: a device's clock, a full collection of
garbage or a neighbour may delay any step by seconds. A kind of step that is new may compile kernels, and the cost of it
is a guess, so it may take as long as `step_timeout_s` says.
"""

import time
from collections.abc import Callable

from worker.engine.cost_store import CostStore
from worker.scheduler.scheduled_step import ScheduledStep

# Generous on purpose: a false alarm costs a replica its cache and a minute. A step that takes 20 times as long as it
# should has not been seen on an H100 or H200, and on a CPU of two cores only while other programs had both of them.
FACTOR = 20.0
MIN_S = {"cuda": 15.0, "cpu": 60.0}
WARM_STEPS = 16  # steps of a kind after which its kernels are compiled, and its time is known
NEWEST_STEPS = 8  # steps of a kind over which its time is averaged

Kind = tuple[int, bool, bool, bool, bool, bool]


class _StepsSeen:
    """Steps of one kind that have ended: how many, and the mean of their newest times in seconds."""

    __slots__ = ("mean_s", "number")

    def __init__(self) -> None:
        self.number, self.mean_s = 0, 0.0

    def add(self, seconds: float) -> None:
        self.number += 1
        self.mean_s += (seconds - self.mean_s) / min(self.number, NEWEST_STEPS)


class StepWatch:
    """Follows the steps in flight. `limit_s` and `ended` may be read by any thread.

    | attribute | meaning |
    | --- | --- |
    | `limit_s` | how long, in seconds, work may go on now without a step that ends |
    | `ended` | number of steps that have ended, failed ones included |
    """

    def __init__(
        self, costs: CostStore, longest_s: float, device: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`costs` predict steps; without cost models the mean of the newest steps of a kind does. `longest_s`:
        `step_timeout_s`, which no step may exceed. `device`: its type."""
        self._costs, self._longest_s, self._clock = costs, longest_s, clock
        self._least_s = min(longest_s, MIN_S.get(device, MIN_S["cpu"]))
        self._seen: dict[Kind, _StepsSeen] = {}
        self._open: dict[int, tuple[Kind, float, float]] = {}  # kind, when it began, seconds that it may take
        self._last_s = 0.0  # when a step ended last
        self.limit_s = self._least_s
        self.ended = 0

    def began(self, step: ScheduledStep) -> None:
        """Records that a step is sent now."""
        kind = self._kind(step)
        self._open[step.plan.step] = kind, self._clock(), self._may_take_s(step, kind)
        self._set_limit()

    def finished(self, step: ScheduledStep, computed: bool = True) -> None:
        """Records that a step has ended; with `computed` False, that it failed. Steps that are not in flight are
        ignored."""
        found = self._open.pop(step.plan.step, None)
        if found is None:
            return
        kind, began_s, _ = found
        now_s = self._clock()
        if computed:
            self._seen.setdefault(kind, _StepsSeen()).add(now_s - max(began_s, self._last_s))
        self._last_s = now_s
        self.ended += 1
        self._set_limit()

    def _set_limit(self) -> None:
        may_take_s = sum(seconds for _, _, seconds in self._open.values())
        self.limit_s = min(self._longest_s, max(self._least_s, may_take_s))

    def _may_take_s(self, step: ScheduledStep, kind: Kind) -> float:
        seen = self._seen.get(kind)
        if seen is None or seen.number < WARM_STEPS:
            return self._longest_s
        models = self._costs.models
        predicted_s = len(models) * self._costs.seconds(step.shape) if models else 0.0
        return FACTOR * max(predicted_s, seen.mean_s)

    def _kind(self, step: ScheduledStep) -> Kind:
        """Steps of one kind run the same kernels, and take about the same time."""
        shape = step.shape
        rows = self._costs.rows.padded(shape).bit_length()
        return (
            rows,
            shape.chunks > 0,
            shape.decodes > 0,
            bool(step.drafts),
            bool(step.prompted),
            len(step.plan.hidden) > 0,
        )
