"""Loads offered to real ranks. How these are started is for `ranks.py` and `nodes.py` to know."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from bench.energy import Energy
from bench.pipelines.layout import Layout, Setting
from bench.pipelines.metered import keep, metered
from bench.pipelines.offered import Load, Replica, offer, summary
from bench.pipelines.study import together
from bench.workload import Session, Vocabulary
from pipeline.cost import CostModel
from pipeline.meter import Meter

WARM = 16  # requests, before anything is measured


class Target(Replica, Protocol):
    """A replica that says what became of its stages' time."""

    kv_tokens: int

    def settle(self) -> None:
        """Waits until nothing is in flight, and forgets what is cached. The meter begins anew."""

    def observed(self) -> tuple[Meter, list[CostModel]]:
        """Since `settle`, when nothing is in flight any more; and the models of what steps cost, if there are any."""


class Targets(Protocol):
    """Starts what loads are offered to."""

    def under(self, layout: Layout, setting: Setting) -> tuple[Target, bool]:
        """A replica of a layout with a setting, and whether nothing has run on its ranks. It is there until this is
        asked for another."""

    def close(self) -> None:
        """Ends what was started."""


@dataclass
class Measured:
    """A site of real ranks, `on_gpu` or not. Traces are written into a folder."""

    targets: Targets
    vocabulary: Vocabulary
    traces: Path
    on_gpu: bool = False
    num_loads: int = 0

    def offer(self, layout: Layout, setting: Setting, load: Load) -> dict[str, Any]:
        """As `bench.pipelines.study.Site`."""
        target, is_new = self.targets.under(layout, setting)
        if is_new:
            self._warm(target, load.sessions)
        target.settle()
        energy = Energy(layout.devices if self.on_gpu else 0)
        offered = offer(target, load.sessions, self._fresh(), load.objective, _progress(len(load.sessions)))
        drawn = energy.read()
        meter, models = target.observed()
        errors = [model.error() for model in models if model.num_observed]
        point = summary(offered, load.rate)
        keep(meter, self.traces, load, point)
        return point | metered(meter) | drawn | {"model_error": max(errors, default=None)}

    def calibrate(self, layout: Layout, setting: Setting, sessions: list[Session]) -> dict[str, Any]:
        """What a simulation needs to know of a layout: offers a load and gives what was learned of its stages' costs,
        as coefficients, and how many tokens the KV cache holds."""
        self.offer(layout, setting, Load("calibration", sessions))
        target, _ = self.targets.under(layout, setting)
        _, models = target.observed()
        return {"coefficients": [model.coefficients.values for model in models], "kv_tokens": target.kv_tokens}

    def _warm(self, target: Target, sessions: list[Session]) -> None:
        """What is compiled or chosen at its first use is then there."""
        offer(target, together(WARM, 256, 32), self._fresh())
        offer(target, [replace(session, arrival_s=0.0) for session in sessions[:WARM]], self._fresh())

    def _fresh(self) -> Vocabulary:
        """Prompts that were not sent before: no cache has them."""
        self.num_loads += 1
        return replace(self.vocabulary, seed=self.vocabulary.seed + self.num_loads)


def _progress(requests: int) -> Callable[[int], None] | None:
    """On a terminal, how many requests have ended."""
    if not sys.stderr.isatty():
        return None

    def show(ended: int) -> None:
        print(f"\r  {ended} of {requests} requests", end="\r", file=sys.stderr, flush=True)

    return show
