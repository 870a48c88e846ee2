"""The steps in flight: what they hold back from the next step, and what the policy is told of them.

`StepsInFlight` is for one stage, `PipelineStepsInFlight` for several. Which one a scheduler has is all that it knows of
pipeline parallelism, but for the number of stages and the order of its queue.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from pipeline.policy import Policy, SchedulerView
from worker.scheduler.running_batch import RunningBatch
from worker.scheduler.scheduled_step import ScheduledStep
from worker.scheduler.sequence import Sequence
from worker.scheduler.sequence_table import SequenceTable


class StepsInFlight:
    """The steps between `Scheduler.schedule` and `Scheduler.update`, oldest first, with one stage.

    A token that a step in flight samples stays on the device, where the next step reads it. So every running sequence
    may be in the next step, and a preempted one keeps its pending token as an output.
    """

    def __init__(self, ahead_s: Callable[[], float]) -> None:
        """`ahead_s`: see `Scheduler`."""
        self._ahead_s = ahead_s
        self._steps: deque[ScheduledStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[ScheduledStep]:
        return iter(self._steps)

    @property
    def oldest(self) -> ScheduledStep:
        return self._steps[0]

    @property
    def newest(self) -> ScheduledStep:
        return self._steps[-1]

    def append(self, step: ScheduledStep) -> None:
        """Adds the newest step."""
        self._steps.append(step)

    def remove_oldest(self) -> None:
        """Removes the oldest step, which has ended."""
        self._steps.popleft()

    def drop(self, seq: Sequence) -> None:
        """Drops the chunks of a sequence that has ended."""
        for step in self._steps:
            step.drop(seq.row)

    def preempt(self, seq: Sequence) -> None:
        """Called before a running sequence is preempted."""

    def look_ahead(self, view: SchedulerView) -> None:
        """Sets the predicted times of the view."""
        view.ahead_s = self._ahead_s()

    def describe(self, view: SchedulerView) -> None:
        """Sets the steps and the predicted times of the view, which is complete but for the horizon."""
        view.in_flight = [step.shape for step in self._steps]
        self.look_ahead(view)

    def schedulable(self, running: RunningBatch) -> tuple[np.ndarray, np.ndarray]:
        """The sequences of `running` that may be in the next step: those with a decode, and those with other chunks.
        Two arrays, bool [n]."""
        return running.decode, running.chunked

    def in_decode_order(self, rows: np.ndarray) -> np.ndarray:
        """The order in which sequences with a decode go into the step. `rows`: their rows, int64, by rank."""
        return rows

    @property
    def overlapped_step(self) -> int | None:
        """Number of the step whose tokens the next one reads on the last stage's device."""
        return None


class PipelineStepsInFlight(StepsInFlight):
    """The steps in flight with several stages.

    - A sequence's next chunk may be in the very next step (`Policy.chunks_follow`).
    - A sequence waits for its token before its next decode. The exception is the oldest step when it is about to end
      (`Policy.may_overlap_oldest`): its tokens are `PENDING` in the next plan, and go from the last stage to the first
      one from GPU to GPU.
    - A preempted sequence loses the token in flight, because its slot may belong to another sequence when the token is
      sampled. It is sampled again later with the same seed and position.
    """

    def __init__(
        self,
        ahead_s: Callable[[], float],
        returning_s: Callable[[ScheduledStep], float],
        table: SequenceTable[Sequence],
        policy: Policy,
    ) -> None:
        """`ahead_s`, `returning_s`: see `Scheduler`."""
        super().__init__(ahead_s)
        self._returning_s = returning_s
        self._table = table
        self._policy = policy
        self._overlapped: ScheduledStep | None = None  # the oldest step, if the next one overlaps it

    def preempt(self, seq: Sequence) -> None:
        self.drop(seq)
        seq.num_tokens, seq.num_pending = seq.num_known, 0

    def look_ahead(self, view: SchedulerView) -> None:
        super().look_ahead(view)
        may_overlap = self._steps and self._overlapped is None
        view.returning_s = self._returning_s(self._steps[0]) if may_overlap else math.inf

    def describe(self, view: SchedulerView) -> None:
        """As `StepsInFlight.describe`. Also decides whether the next step overlaps the oldest one."""
        self._overlapped = None
        super().describe(view)
        if self._steps and self._policy.may_overlap_oldest(view):
            self._overlapped = self._steps[0]
            view.in_flight = view.in_flight[1:]

    def schedulable(self, running: RunningBatch) -> tuple[np.ndarray, np.ndarray]:
        table, rows = self._table, running.rows
        is_known = table.num_pending[rows] == 0
        if (oldest := self._overlapped) is not None:
            samples = oldest.rows[oldest.samples & ~oldest.dropped]
            is_known |= (table.num_pending[rows] == 1) & np.isin(rows, samples)
        chunked = running.chunked & is_known
        if not self._policy.chunks_follow:
            chunked &= table.num_confirmed[rows] == running.computed
        return running.decode & is_known, chunked

    def in_decode_order(self, rows: np.ndarray) -> np.ndarray:
        """As `StepsInFlight.in_decode_order`: sequences whose last token came first go first."""
        since_s = np.where(self._table.num_pending[rows] > 0, math.inf, self._table.last_output_s[rows])
        return rows[np.argsort(since_s, kind="stable")]

    @property
    def overlapped_step(self) -> int | None:
        return None if self._overlapped is None else self._overlapped.plan.step
