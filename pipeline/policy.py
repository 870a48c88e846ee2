"""The interface between the scheduler and a policy. `schedule.py` says who calls what, and when."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipeline.budget import Budget
from pipeline.cost import CostModel
from pipeline.shape import BatchShape

# The decode iteration that objectives are multiples of, as in Sarathi-Serve (arXiv 2403.02310, section 5.1): 32
# sequences of 4,096 tokens.
ITERATION = BatchShape.decoding(32, 32 * 4096)


@dataclass(frozen=True)
class Objective:
    """Bound for the 99th percentile of the time between two tokens of a sequence (TBT): `tbt_s` seconds, or
    `iterations` decode iterations (`ITERATION`) where these take longer."""

    tbt_s: float
    iterations: float = 0.0


@dataclass(frozen=True)
class PolicySettings:
    """Settings of a policy, fixed for its lifetime.

    - `stages`: number of pipeline stages.
    - `token_budget`: limit of the tokens in a micro-batch.
    - `models`: one cost model for each stage whose costs differ, for policies that predict.
    - `objective`: for the time between tokens, if there is one.
    - `exposed_s`: seconds that a micro-batch spends on its way through all stages without being computed (links,
      plans). A stage would wait for these if there were no more micro-batches than stages.
    """

    stages: int
    token_budget: int
    models: Sequence[CostModel] = ()
    objective: Objective | None = None
    exposed_s: float = 0.0


class Horizon(NamedTuple):
    """The remaining work of all sequences, if as many run at once as can, and each of these gets one token a round.

    - `rounds`: output tokens to come of the sequence with the most.
    - `tokens`: remaining tokens of all prompts and outputs.
    - `due`: prompt tokens that each round has to compute so that no sequence ends after the one with the most tokens to
      come, if sequences start in descending order of their tokens to come.
    """

    rounds: int = 1
    tokens: int = 0
    due: float = 0.0

    @classmethod
    def from_lengths(cls, missing: np.ndarray, to_come: np.ndarray) -> "Horizon":
        """The horizon of n sequences. `missing` [n], integer: prompt tokens that remain to be computed. `to_come` [n],
        integer, at least 1: output tokens to come."""
        rounds = int(to_come.max())
        waits = np.flatnonzero(missing > 0)
        waits = waits[np.argsort(-to_come[waits], kind="stable")]
        before = np.cumsum(missing[waits], dtype=np.int64)
        due = (before / (rounds - to_come[waits] + 1)).max() if len(waits) else 0.0
        return cls(rounds, int(missing.sum(dtype=np.int64) + to_come.sum(dtype=np.int64)), float(due))


@dataclass
class SchedulerView:
    """The scheduler's state before it makes a micro-batch.

    | field | meaning |
    | --- | --- |
    | `decoding` | sequences past their prompt, including those in flight |
    | `decoding_context` | tokens before those sequences' next ones, in sum |
    | `waiting` | sequences with more tokens to compute, running or waiting to start |
    | `waiting_tokens` | their remaining tokens that no micro-batch holds, without `blocked_tokens` |
    | `blocked_tokens` | remaining tokens of sequences without a slot or pages for now; these are not in `waiting` |
    | `free_kv` | fraction of all pages that is free or can be freed |
    | `in_flight` | micro-batches in flight, oldest first |
    | `ahead_s` | predicted seconds until the first stage is done with what was sent to it |
    | `returning_s` | predicted seconds until the last stage is done with the oldest micro-batch |
    | `horizon` | of all sequences, for jobs that end as a whole, while prompts wait for nothing but the policy |

    After `returning_s`, the next micro-batch may take the oldest one's tokens from the last stage, on the device.
    Infinite where it may not, or already does so.
    """

    decoding: int = 0
    decoding_context: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_kv: float = 1.0
    blocked_tokens: int = 0
    in_flight: Sequence[BatchShape] = ()
    ahead_s: float = 0.0
    returning_s: float = math.inf
    horizon: Horizon | None = None


class Policy(ABC):
    """Base of all policies: as many micro-batches in flight as there are stages, each made as soon as there is a
    place."""

    name: str
    predicts = False  # whether it needs cost models, and decodes on tokens that the host does not know yet
    chunks_follow = False  # whether a sequence's next chunk may be sent while the one before is in flight
    is_for_jobs = False  # whether requests are jobs, in which nothing but the end counts

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        # One stage: the next step is prepared while the step before it runs.
        self.most_in_flight = settings.stages if settings.stages > 1 else 2
        self.chunks_follow = self.chunks_follow or settings.stages == 1

    def begin(self, view: SchedulerView) -> Budget | None:
        """The budget of the next micro-batch, or None if none is to be made now."""
        return self._budget(view) if self._has_place(view) else None

    def ask_again_s(self, view: SchedulerView, is_idle: bool) -> float:
        """Seconds after which to ask `begin` again even if nothing else happens; infinite if that would be of no use.
        `is_idle`: `begin` has just allowed a micro-batch, and there was nothing to put into it."""
        return math.inf

    def may_overlap_oldest(self, view: SchedulerView) -> bool:
        """Whether the oldest micro-batch makes place for the next before it has ended, and the next may hold its
        sequences. Their tokens arrive before they are needed."""
        return False

    def finished(self, gap_s: float) -> None:  # noqa: B027 - optional
        """Called when a micro-batch with decodes has ended. `gap_s`: time between tokens of its sequence that had
        waited longest."""

    def _has_place(self, view: SchedulerView) -> bool:
        """Whether a micro-batch is to be made now."""
        return len(view.in_flight) < self.most_in_flight

    @abstractmethod
    def _budget(self, view: SchedulerView) -> Budget:
        """The budget of a micro-batch for which there is a place."""
