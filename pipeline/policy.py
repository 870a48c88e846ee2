"""What a scheduler and a policy say to each other: see `schedule.py` for who calls what, and when."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipeline.budget import Budget
from pipeline.cost import CostModel
from pipeline.shape import BatchShape


@dataclass(frozen=True)
class Settings:
    """What a policy is told once.

    `token_budget`: the most tokens that a micro-batch may hold. `models`: one for each stage, where their costs differ
    (for policies that predict). `tbt_slo_s`: the aim for the 99th percentile of the time between two tokens of a
    sequence. `exposed_s`: what a micro-batch spends on its way through all stages without being computed (links,
    plans), in which a stage would wait if there were no more micro-batches than stages.
    """

    stages: int
    token_budget: int
    models: Sequence[CostModel] = ()
    tbt_slo_s: float | None = None
    exposed_s: float = 0.0


class Horizon(NamedTuple):
    """What is to come until all has ended that is there, if as much of it runs at once as can, and each sequence that
    does gets a token a round.

    `rounds`: the tokens of whoever gets the most. `tokens`: those of all prompts and outputs. `due`: the tokens of
    prompts that each round has to compute so that none ends later than that one, if those with the most tokens to come
    go first.
    """

    rounds: int = 1
    tokens: int = 0
    due: float = 0.0

    @classmethod
    def of(cls, missing: np.ndarray, to_come: np.ndarray) -> "Horizon":
        """Of sequences that lack `missing` tokens of their prompts, and are to get `to_come`, at least one: integers
        `[n]`."""
        rounds = int(to_come.max())
        waits = np.flatnonzero(missing > 0)
        waits = waits[np.argsort(-to_come[waits], kind="stable")]
        before = np.cumsum(missing[waits], dtype=np.int64)
        due = (before / (rounds - to_come[waits] + 1)).max() if len(waits) else 0.0
        return cls(rounds, int(missing.sum(dtype=np.int64) + to_come.sum(dtype=np.int64)), float(due))


@dataclass
class View:
    """What the scheduler knows before it makes a micro-batch.

    `decoding`: sequences past their prompt, those in flight among them, and `decoding_context` the tokens before them
    together. `waiting`: sequences that lack more, running or waiting to start, and `waiting_tokens` what they lack
    together and no micro-batch holds; none of those for which there is no slot or page now: what these lack is
    `blocked_tokens`. `free_kv`: the part of all pages that is free or can be made so. `in_flight`: the micro-batches
    under way, oldest first. `ahead_s`: the predicted time until the first stage is done with what was sent to it.
    `returning_s`: the predicted time until the last stage is done with the oldest micro-batch, whose tokens the next
    one may then take from there; infinity where it may not, or does so already. `horizon`: of all that is there, while
    prompts wait for nothing but this policy; for those that are `longest_first`.
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
    """The base: as many micro-batches in flight as there are stages, each made as soon as there is a place for it."""

    name: str
    predicts = False  # whether it needs the stages' models, and takes tokens from the last stage before they are known
    chunks_follow = False  # whether a sequence's next chunk may be sent while its last is in flight
    longest_first = False  # whether of those that wait the ones with the most tokens to come go first

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # One stage: the next step is prepared while the one before it runs, and comes after it.
        self.most_in_flight = settings.stages if settings.stages > 1 else 2
        self.chunks_follow = self.chunks_follow or settings.stages == 1

    def begin(self, view: View) -> Budget | None:
        """The budget of the next micro-batch, or None if there is to be none now."""
        return self._budget(view) if self._has_place(view) else None

    def ask_again_s(self, view: View, is_idle: bool) -> float:
        """After what time to ask `begin` again though nothing else happens; infinity if it would be of no use. With
        `is_idle` it has just allowed a micro-batch, and there was nothing to put into it."""
        return math.inf

    def counts_as_ended(self, view: View) -> bool:
        """Whether the oldest micro-batch makes place for the next, and its sequences may be in that, though it has not
        ended: their tokens come before they are needed."""
        return False

    def finished(self, gap_s: float) -> None:  # noqa: B027 - not all have a use for it
        """A micro-batch with decodes has ended, and the one of them that had waited longest got a token after `gap_s`
        without one."""

    def _has_place(self, view: View) -> bool:
        """Whether there is to be a micro-batch now."""
        return len(view.in_flight) < self.most_in_flight

    @abstractmethod
    def _budget(self, view: View) -> Budget:
        """What a micro-batch that has a place may hold."""
