"""The demand for one model as a router sees it, from which autoscaling decides; and what a model without replicas does
with requests."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from router.fleet.placement import Candidates, Floats


@dataclass(frozen=True, slots=True)
class Demand:
    """The work that requests bring to the replicas of a model at one moment.

    | field | meaning |
    | --- | --- |
    | `waiting` | requests for which there is no replica |
    | `ready` | replicas that requests can be sent to |
    | `wait_s` | seconds that a new request would wait in the shortest queue |
    | `load` | the work of all replicas, in replicas: 1.5 is as much as one and a half can do |
    | `is_idle` | whether there is no request at all |
    """

    waiting: int = 0
    ready: int = 0
    wait_s: float = 0.0
    load: float = 0.0
    is_idle: bool = True


def busy_parts(candidates: Candidates) -> Floats:
    """The part of what each replica can do that it does now, float64 from 0 to 1, [replicas]: 1 while it computes
    prompts, else what its decodes add to a step of those that the longest one allows, or the part of its KV cache that
    they hold, whichever is more. The mean over time counts prompts by the time that they take."""
    c = candidates
    decodes_s = c["decode_s"] * c["running"] + c["context_s"] * c["context_tokens"]
    steps = decodes_s / np.maximum(1e-9, c["full_s"] - c["step_s"])
    pages = np.where(c["kv_tokens"] > 0, c["context_tokens"] / np.maximum(1.0, c["kv_tokens"]), 0.0)
    return np.where(c["waiting_tokens"] > 0, 1.0, np.clip(np.maximum(steps, pages), 0.0, 1.0))


def of_all_routers(demands: Sequence[Demand]) -> Demand:
    """The demand as all routers together see it: each knows of its own waiting requests, and of all that replicas
    have."""
    return Demand(
        waiting=sum(demand.waiting for demand in demands),
        ready=max((demand.ready for demand in demands), default=0),
        wait_s=max((demand.wait_s for demand in demands), default=0.0),
        load=max((demand.load for demand in demands), default=0.0),
        is_idle=all(demand.is_idle for demand in demands),
    )


class Sleep:
    """Whether a model without replicas would answer a request all the same: autoscaling has taken the last one, and the
    request starts another."""

    def __init__(self, start_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`start_s`: how long, in seconds, a start may take."""
        self._start_s = start_s
        self._clock = clock
        self._slept_s: float | None = None

    def told(self, wanted: int, ready: int) -> None:
        """Takes how many replicas there should be, and how many can answer."""
        if wanted == 0:
            self._slept_s = self._clock()
        elif ready:
            self._slept_s = None

    @property
    def can_answer(self) -> bool:
        """True while it sleeps, and while it may wake."""
        return self._slept_s is not None and self._clock() - self._slept_s < self._start_s
