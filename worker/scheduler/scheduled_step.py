"""The scheduler's answer: the next step, and what the engine has to prepare for it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pipeline.shape import BatchShape
from worker.scheduler.sequence import Sequence
from worker.step import Plan


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """A plan and its sequences, from scheduling to the update with its tokens. Arrays have an entry for each chunk.

    | field | meaning |
    | --- | --- |
    | `plan` | what all ranks are told |
    | `rows` | the sequence's row in the `SequenceTable`, int64 |
    | `sequences` | the sequence |
    | `samples` | whether the next token is sampled: the chunk ends at the last token or its drafts, bool |
    | `dropped` | whether the sequence has ended or was preempted since, so that its token is thrown away, bool |
    | `has_dropped` | whether any chunk is `dropped`; most steps have none |
    | `prompted` | chunks that return log probabilities of their prompt, by index |
    | `shape` | the chunks as policies and cost models see them |
    | `drafts` | the drafts that a chunk ends with, by index |
    | `tokens_from_step` | with pipeline parallelism, the step in flight whose tokens this one reads on the device |
    """

    plan: Plan
    rows: np.ndarray
    sequences: list[Sequence]
    samples: np.ndarray
    dropped: np.ndarray
    prompted: list[int]
    shape: BatchShape
    tokens_from_step: int | None = None
    drafts: dict[int, list[int]] = field(default_factory=dict)
    has_dropped: bool = False

    @property
    def sampled(self) -> np.ndarray:
        """The chunks whose next token is sampled and whose sequence was not dropped, by index: int64."""
        return (self.samples & ~self.dropped if self.has_dropped else self.samples).nonzero()[0]

    @property
    def sequences_left(self) -> list[Sequence]:
        """The sequences that were not dropped."""
        return [seq for seq, dropped in zip(self.sequences, self.dropped.tolist(), strict=True) if not dropped]

    def drop(self, row: int) -> None:
        """Throws away what this step gives the sequence of `row`, which has ended or was preempted."""
        self.dropped |= self.rows == row
        self.has_dropped = bool(np.count_nonzero(self.dropped))

    def compact(self) -> None:
        """Removes the chunks of dropped sequences from the plan, before it runs."""
        kept = ~self.dropped
        for start, length in zip(self.plan.starts[self.dropped], self.plan.lengths[self.dropped], strict=True):
            self.shape.remove(int(start), int(length))
        new_index = np.cumsum(kept) - 1
        self.plan = self.plan.only(kept)
        self.prompted = [int(new_index[i]) for i in self.prompted if kept[i]]
        self.drafts = {int(new_index[i]): drafts for i, drafts in self.drafts.items() if kept[i]}
        self.sequences = self.sequences_left
        self.rows, self.samples, self.dropped = self.rows[kept], self.samples[kept], self.dropped[kept]
        self.has_dropped = False


class SchedulerOutput(NamedTuple):
    """The result of `Scheduler.schedule`.

    | field | meaning |
    | --- | --- |
    | `step` | the step to run; None if nothing can run now, or if the policy waits (`Scheduler.ask_again_s`) |
    | `started` | sequences that have a slot since this step |
    | `freed_slots` | slots that sequences gave back since the last `Scheduler.take_freed_slots` |
    | `idle_reason` | without a step, and without a policy that waits: the cause of idle time, as `Meter` names it |

    A slot may be in `freed_slots` and belong to a sequence in `started` again.
    """

    step: ScheduledStep | None
    started: list[Sequence]
    freed_slots: list[int]
    idle_reason: str | None = None
