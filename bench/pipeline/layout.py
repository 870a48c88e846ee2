"""Parallel layouts of a model over devices, and settings of schedules."""

import re
from dataclasses import dataclass
from typing import TypeVar

from bench.pipeline.baselines import BASELINES
from pipeline.schedule import POLICIES
from worker.config import WorkerConfig

# Schedules for requests that arrive over time.
SCHEDULES = (*(name for name, policy in POLICIES.items() if not policy.is_for_jobs), *BASELINES)
AnyConfig = TypeVar("AnyConfig", bound=WorkerConfig)


@dataclass(frozen=True)
class ParallelLayout:
    """`pp` stages of `tp` ranks each."""

    tp: int
    pp: int

    @classmethod
    def parse(cls, text: str) -> "ParallelLayout":
        """`tp4`, `pp4` or `tp2pp2`. Raises ValueError."""
        found = re.fullmatch(r"(?:tp(\d+))?(?:pp(\d+))?", text)
        if not text or found is None or "0" in found.groups():
            raise ValueError(f"{text!r} is not a layout: use tp4, pp4 or tp2pp2")
        return cls(*(int(size or 1) for size in found.groups()))

    def __str__(self) -> str:
        sizes = (("tp", self.tp), ("pp", self.pp))
        return "".join(f"{name}{size}" for name, size in sizes if size > 1) or "tp1"

    @property
    def devices(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True)
class Setting:
    """A schedule and its parameters: the limit of the tokens in a micro-batch, and the objective in seconds for the
    time between tokens, which only `uniform` takes."""

    schedule: str
    token_budget: int
    tbt_slo_s: float | None = None

    def __str__(self) -> str:
        slo = f"@{self.tbt_slo_s * 1e3:.3g}ms" if self.tbt_slo_s is not None else ""
        return f"{self.schedule}/{self.token_budget}{slo}"

    def applied(self, config: AnyConfig) -> AnyConfig:
        """A replica's configuration with this setting. No objective is 0 there. A baseline is no valid choice in a
        configuration, and `model_copy` does not ask."""
        schedule = BASELINES.get(self.schedule, self.schedule)
        settings = {"schedule": schedule, "token_budget": self.token_budget, "tbt_slo": self.tbt_slo_s or 0.0}
        return config.model_copy(update=settings)


def settings_of(schedule: str, tbt_s: float, budget: int, chunk_budgets: list[int]) -> list[Setting]:
    """The settings with which a schedule is tried when the time between tokens may be `tbt_s`. The best of them
    counts."""
    if schedule == "uniform":
        return [Setting(schedule, budget, tbt_s)]
    if schedule in ("fixed_chunk", "throttle"):
        return [Setting(schedule, tokens) for tokens in chunk_budgets]
    return [Setting(schedule, budget)]
