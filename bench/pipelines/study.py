"""What a layout and a schedule can carry, wherever it is found out: on devices or in the simulator."""

from dataclasses import dataclass
from typing import Any, Protocol

from bench.pipelines.layout import Layout, Setting, settings_of
from bench.pipelines.offered import Load, Objective
from bench.pipelines.sweep import Points, say
from bench.pipelines.traffic import Traffic
from bench.results import number
from bench.workload import Session, Span, Turn
from pipeline.capacity import RELAXED, STRICT, capacity

OBJECTIVES = {"strict": STRICT, "relaxed": RELAXED}
DECODES, DECODE_CONTEXT = 32, 4096  # the decode iteration that objectives are multiples of
OURS = "uniform"
# Of what comes through a second when all requests arrive at once, which they leave with a long tail: where the search
# for a capacity begins, and where it ends.
GUESS, MOST = 1.0, 4.0
DECODE_TOKENS = 64  # out of each, when it is timed


class Site(Protocol):
    """Where loads are offered."""

    def offer(self, layout: Layout, setting: Setting, load: Load) -> dict[str, Any]:
        """What became of it: `bench.pipelines.offered.summary`, and what the meter says (`metered`), whose trace is
        kept."""


def together(count: int, prompt: int, output: int) -> list[Session]:
    """Requests of one size that all arrive at once."""
    return [Session((Turn((Span((0, i), prompt),), output),), 0.0) for i in range(count)]


@dataclass(frozen=True)
class Carried:
    """The highest rate within an objective, in requests a second, the setting that reached it, and what became of that
    load; None where no rate kept to the objective."""

    rate: float
    setting: Setting
    point: dict[str, Any] | None


@dataclass
class Study:
    """Finds `points` out at `site`. `budget`: the most tokens in a micro-batch; `fixed_chunk` is tried with
    each of `chunk_budgets`. `shrink` divides the context of the decode iteration, as it does the lengths of requests.
    Requests of a load arrive within `seconds`. Rates are found to within `precision`."""

    points: Points
    site: Site
    budget: int
    chunk_budgets: list[int]
    shrink: int = 1
    precision: float = 0.05
    seconds: float = 120.0

    def at(
        self,
        layout: Layout,
        setting: Setting,
        traffic: Traffic,
        rate: float,
        objective: Objective | None = None,
    ) -> dict[str, Any]:
        """A load of `rate` requests a second, ended early where it cannot keep to `objective`."""
        rate = float(f"{rate:.4g}")
        kept = f"{objective.name}@{objective.tbt_s * 1e3:.3g}ms" if objective is not None else "whole"
        key = f"{layout}/{traffic.name}/{setting}/{kept}/{rate:g}"
        load = Load(traffic.name, traffic.at(rate, self.seconds), rate, objective)
        return self._point(key, layout, setting, load)

    def flood(self, layout: Layout, setting: Setting, traffic: Traffic) -> dict[str, Any]:
        """All requests at once: what can be carried at most."""
        key = f"{layout}/{traffic.name}/{setting}/flood"
        return self._point(key, layout, setting, Load(traffic.name, traffic.at_once()))

    def decode_s(self, layout: Layout) -> float:
        """One decode iteration of DECODES sequences with DECODE_CONTEXT tokens each, prompts gone."""
        sessions = together(DECODES, max(1, DECODE_CONTEXT // self.shrink), DECODE_TOKENS)
        load = Load("decode_iteration", sessions)
        point = self._point(f"{layout}/{load.name}", layout, Setting("fixed_chunk", self.budget), load)
        return float(point["tbt_s"]["p50"])

    def _point(self, key: str, layout: Layout, setting: Setting, load: Load) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            point = self.site.offer(layout, setting, load)
            say(f"  {key}: {line(point)}")
            return point

        found: dict[str, Any] = self.points.point(key, make)
        return found

    def carried(self, layout: Layout, schedule: str, traffic: Traffic, objective: Objective) -> Carried:
        """The capacity of a schedule with the best of its settings."""
        most = self.flood(layout, Setting(OURS, self.budget), traffic)["requests_per_s"]
        guess, most = GUESS * most, MOST * most
        best: Carried | None = None
        for setting in settings_of(schedule, objective.tbt_s, self.budget, self.chunk_budgets):
            if best is None or not best.rate:
                best = self._highest(layout, setting, traffic, objective, guess, most)
                continue
            # What a setting carries is of interest only where it is more than the best so far does.
            more = best.rate * (1 + self.precision)
            if objective.holds(self.at(layout, setting, traffic, more, objective)):
                best = self._highest(layout, setting, traffic, objective, more, max(more, most))
        assert best is not None, "every schedule has a setting"
        say(f"{layout} {schedule} {traffic.name} {objective.name}: {number(best.rate)} requests/s with {best.setting}")
        if best.rate >= most:
            say("  it is more: loads of so few requests end before they can be too much (--requests)")
        return best

    def _highest(
        self, layout: Layout, setting: Setting, traffic: Traffic, objective: Objective, guess: float, most: float
    ) -> Carried:
        def holds(rate: float) -> bool:
            return objective.holds(self.at(layout, setting, traffic, rate, objective))

        rate = capacity(holds, guess, most, self.precision)
        return Carried(rate, setting, self.at(layout, setting, traffic, rate, objective) if rate else None)


def line(point: dict[str, Any]) -> str:
    """A point for a terminal."""
    parts = [f"{number(point['output_tok_s'])} output tokens/s", f"bubble {point['bubble']:.1%}"]
    for key, name in (("ttft_s", "TTFT"), ("tbt_s", "TBT")):
        if point[key]:
            parts.append(f"{name} {number(point[key]['p50'])} / {number(point[key]['p99'])} s")
    if point["given_up"]:
        parts.append(f"ended early: {point['given_up']}")
    return ", ".join(parts)
