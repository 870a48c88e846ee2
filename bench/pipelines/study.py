"""What a layout and a schedule can carry, wherever it is found out: on devices or in the simulator."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from bench.pipelines.layout import Layout, Setting, settings_of
from bench.pipelines.offered import Load, Objective
from bench.pipelines.sweep import Points, say
from bench.pipelines.traffic import Traffic
from bench.results import number
from bench.workload import Session, Span, Turn
from pipeline.capacity import RELAXED, STEP, STRICT, capacity

OBJECTIVES = {"strict": STRICT, "relaxed": RELAXED}
DECODES, DECODE_CONTEXT = 32, 4096  # the decode iteration that objectives are multiples of
SIMULATED = "simulated: "  # before lines of what was not measured
OURS, FOR_JOBS = "uniform", "offline"
# Of what comes through a second when all requests arrive at once, which they leave with a long tail: where the search
# for a capacity begins, and where it ends.
GUESS, MOST = 1.0, 4.0
WIDEST = 64.0  # from the lowest rate of a search to where it ends, where nothing else says how much it may be
MORE_REQUESTS = "loads of so few requests end before they can be too much (--requests)"
NEAR = 2  # times the precision: the first step of a search from a rate that was expected
DECODE_TOKENS = 64  # out of each, when it is timed
DECODERS_PROMPT, DECODERS_TOKENS = 256, 256  # of each sequence, where as many decode as may run


Expected = Callable[[Layout, str, Traffic, Objective], float]


def unknown(*_: object) -> float:
    """What is `Expected` where nobody knows."""
    return 0.0


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
    load; None where no rate that was tried kept to the objective: `below` is the lowest of these, if it is known.
    `at_least`: the search ended at a rate that kept to it, the highest that was to be tried. `key` is the point's."""

    rate: float
    setting: Setting
    point: dict[str, Any] | None
    below: float = 0.0
    at_least: bool = False
    key: str = ""


@dataclass(frozen=True)
class _Search:
    """As `pipeline.capacity.capacity` takes it."""

    guess: float
    most: float
    least: float | None = None
    step: float = STEP

    def beyond(self, rate: float) -> "_Search":
        """From a rate that holds."""
        return replace(self, guess=rate, most=max(rate, self.most))


@dataclass
class Study:
    """Finds `points` out at `site`. `budget`: the most tokens in a micro-batch; `fixed_chunk` is tried with
    each of `chunk_budgets`; `most_running` is the most sequences at once. `shrink` divides the lengths of what decodes,
    as it does those of requests. Requests of a load arrive within `seconds`. Rates are found to within `precision`,
    from what is `expected` of a layout and a schedule, where that is known: 0 where it is not. Lines of progress begin
    with `progress`."""

    points: Points
    site: Site
    budget: int
    chunk_budgets: list[int]
    most_running: int
    shrink: int = 1
    precision: float = 0.05
    seconds: float = 120.0
    expected: Expected = unknown
    progress: str = ""

    def at(
        self,
        layout: Layout,
        setting: Setting,
        traffic: Traffic,
        rate: float,
        objective: Objective | None = None,
    ) -> dict[str, Any]:
        """A load of `rate` requests a second, ended early where it cannot keep to `objective`."""
        return self._point(layout, setting, self._load(layout, setting, traffic, rate, objective))

    def flood(self, layout: Layout, traffic: Traffic) -> dict[str, Any]:
        """All requests at once: what can be carried at most."""
        load = Load(self.flood_key(layout, traffic), traffic.at_once())
        return self._point(layout, self.setting_of(traffic), load)

    def flood_key(self, layout: Layout, traffic: Traffic) -> str:
        return f"{layout}/{traffic.name}/{self.setting_of(traffic)}/flood"

    def setting_of(self, traffic: Traffic) -> Setting:
        """Ours, where all of this comes at once."""
        return Setting(FOR_JOBS if traffic.is_job else OURS, self.budget)

    def decode_s(self, layout: Layout) -> float:
        """One decode iteration of DECODES sequences with DECODE_CONTEXT tokens each, prompts gone."""
        sessions = together(DECODES, max(1, DECODE_CONTEXT // self.shrink), DECODE_TOKENS)
        load = Load(f"{layout}/decode_iteration", sessions)
        point = self._point(layout, Setting("fixed_chunk", self.budget), load)
        return float(point["tbt_s"]["p50"])

    def decoding(self, layout: Layout) -> dict[str, Any]:
        """As many sequences as may run at once, which end together: once their prompts are gone, nothing but decodes. A
        job that spreads its prompts over its decodes has few of those alone, when most of its requests have ended."""
        prompt, output = (max(1, tokens // self.shrink) for tokens in (DECODERS_PROMPT, DECODERS_TOKENS))
        load = Load(self.decoding_key(layout), together(self.most_running, prompt, output))
        return self._point(layout, Setting(OURS, self.budget), load)

    def decoding_key(self, layout: Layout) -> str:
        return f"{layout}/decodes"

    def _load(
        self, layout: Layout, setting: Setting, traffic: Traffic, rate: float, objective: Objective | None
    ) -> Load:
        rate = float(f"{rate:.4g}")
        key = f"{layout}/{traffic.name}/{setting}/{objective or 'whole'}/{rate:g}"
        return Load(key, traffic.at(rate, self.seconds), rate, objective)

    def _point(self, layout: Layout, setting: Setting, load: Load) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            point = self.site.offer(layout, setting, load)
            say(f"  {self.progress}{load.key}: {line(point)}")
            return point

        found: dict[str, Any] = self.points.point(load.key, make)
        return found

    def carried(
        self, layout: Layout, schedule: str, traffic: Traffic, objective: Objective, least: float | None = None
    ) -> Carried:
        """The capacity of a schedule with the best of its settings. Rates below `least` are not tried, where it is
        given."""
        search = self._search(layout, schedule, traffic, objective, least)
        best: Carried | None = None
        for setting in settings_of(schedule, objective.tbt_s, self.budget, self.chunk_budgets):
            if best is None or not best.rate:
                best = self._highest(layout, setting, traffic, objective, search)
                continue
            # What a setting carries is of interest only where it is more than the best so far does.
            more = best.rate * (1 + self.precision)
            if objective.holds(self.at(layout, setting, traffic, more, objective)):
                best = self._highest(layout, setting, traffic, objective, search.beyond(more))
        assert best is not None, "every schedule has a setting"
        rate = number(best.rate) if best.rate else f"less than {number(best.below)}" if best.below else "0"
        of = f"{layout} {schedule} {traffic.name} {objective.name}"
        say(f"{self.progress}{of}: {rate} requests/s with {best.setting}")
        if best.rate >= search.most:
            say(f"  {self.progress}it is more: {MORE_REQUESTS}")
            return replace(best, at_least=True)
        return best

    def beside(self, ours: Carried, other: Carried) -> float:
        """The rate at which ours is looked at beside another schedule: what that one carries, or what ours does where
        it is higher by no more than the precision, since it is known already what happens there."""
        return ours.rate if other.rate <= ours.rate <= other.rate * (1 + self.precision) else other.rate

    def _search(
        self, layout: Layout, schedule: str, traffic: Traffic, objective: Objective, least: float | None
    ) -> "_Search":
        if expected := self.expected(layout, schedule, traffic, objective):
            return _Search(expected, MOST * expected, least, 1 + NEAR * self.precision)
        if least is not None:
            return _Search(least, WIDEST * least, least)
        at_once = self.flood(layout, traffic)["requests_per_s"]
        return _Search(GUESS * at_once, MOST * at_once)

    def _highest(
        self, layout: Layout, setting: Setting, traffic: Traffic, objective: Objective, search: "_Search"
    ) -> Carried:
        def holds(rate: float) -> bool:
            return objective.holds(self.at(layout, setting, traffic, rate, objective))

        rate = capacity(holds, search.guess, search.most, self.precision, search.least, search.step)
        if not rate:
            return Carried(0.0, setting, None, below=search.least or 0.0)
        load = self._load(layout, setting, traffic, rate, objective)
        return Carried(rate, setting, self._point(layout, setting, load), key=load.key)


def line(point: dict[str, Any]) -> str:
    """A point for a terminal."""
    parts = [f"{number(point['output_tok_s'])} output tokens/s", f"bubble {point['bubble']:.1%}"]
    for key, name in (("ttft_s", "TTFT"), ("tbt_s", "TBT")):
        if point[key]:
            parts.append(f"{name} {number(point[key]['p50'])} / {number(point[key]['p99'])} s")
    if "watts" in point:
        parts.append(f"{number(point['watts'])} of {number(point['limit_watts'])} W")
    if point["given_up"]:
        parts.append(f"ended early: {point['given_up']}")
    return ", ".join(parts)
