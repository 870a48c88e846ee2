"""Loads on real ranks. `local_ranks.py` and `ray_nodes.py` start the ranks."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from bench.load.workload import Session, Vocabulary
from bench.pipeline.capacity_search import together
from bench.pipeline.layout import ParallelLayout, Setting
from bench.pipeline.load_generator import LoadTarget, OfferedLoad, offer, summary
from bench.pipeline.meter_report import keep, metered
from bench.replica.energy import Energy
from pipeline.cost import CostModel
from pipeline.meter import Meter

WARM = 16  # requests before anything is measured


class MeteredReplica(LoadTarget, Protocol):
    """A replica whose meter and cost models can be read."""

    kv_tokens: int

    def settle(self) -> None:
        """Waits until nothing is in flight, clears the cache and resets the meter."""

    def observed(self) -> tuple[Meter, list[CostModel]]:
        """The meter since `settle`, once nothing is in flight, and the cost models, if there are any."""


class ReplicaSource(Protocol):
    """Starts replicas."""

    def under(self, layout: ParallelLayout, setting: Setting) -> tuple[MeteredReplica, bool]:
        """A replica of a layout with a setting, and whether its ranks are new. It lives until another is asked for."""

    def close(self) -> None:
        """Ends all replicas and ranks."""


@dataclass
class RealSite:
    """A site of real ranks, with GPUs if `on_gpu`. Traces are written to the folder `traces`."""

    targets: ReplicaSource
    vocabulary: Vocabulary
    traces: Path
    on_gpu: bool = False
    num_loads: int = 0

    def offer(self, layout: ParallelLayout, setting: Setting, load: OfferedLoad) -> dict[str, Any]:
        """Implements `bench.pipeline.capacity_search.Site`."""
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

    def calibrate(self, layout: ParallelLayout, setting: Setting, sessions: list[Session]) -> dict[str, Any]:
        """The layout's properties for the simulator: offers a load, and returns the learned coefficients of each stage
        and the capacity of the KV cache in tokens."""
        self.offer(layout, setting, OfferedLoad(f"{layout}/calibration", sessions))
        target, _ = self.targets.under(layout, setting)
        _, models = target.observed()
        return {"coefficients": [model.coefficients.values for model in models], "kv_tokens": target.kv_tokens}

    def _warm(self, target: MeteredReplica, sessions: list[Session]) -> None:
        """Runs requests so that everything compiled or chosen at its first use exists."""
        offer(target, together(WARM, 256, 32), self._fresh())
        offer(target, [replace(session, arrival_s=0.0) for session in sessions[:WARM]], self._fresh())

    def _fresh(self) -> Vocabulary:
        """A vocabulary whose prompts have not been sent before, so that no cache has them."""
        self.num_loads += 1
        return replace(self.vocabulary, seed=self.vocabulary.seed + self.num_loads)


def _progress(requests: int) -> Callable[[int], None] | None:
    """On a terminal, prints how many requests have ended."""
    if not sys.stderr.isatty():
        return None

    def show(ended: int) -> None:
        print(f"\r  {ended} of {requests} requests", end="\r", file=sys.stderr, flush=True)

    return show
