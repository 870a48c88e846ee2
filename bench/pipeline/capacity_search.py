"""Search for the load that a layout and a schedule carry, on devices or in the simulator."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from bench.load.workload import ConversationTurn, Session, TokenSpan
from bench.pipeline.capacity import MAX_STEP_FACTOR, RELAXED, STRICT, capacity
from bench.pipeline.layout import ParallelLayout, Setting, settings_of
from bench.pipeline.load_generator import OfferedLoad, ServiceObjective
from bench.pipeline.result_store import Points, say
from bench.pipeline.traffic import Traffic
from bench.results import number

OBJECTIVES = {"strict": STRICT, "relaxed": RELAXED}
DECODES, DECODE_CONTEXT = 32, 4096  # the decode iteration that objectives are multiples of
SIMULATED = "simulated: "  # before lines that were not measured
OURS, FOR_JOBS = "uniform", "offline"
# Where the search for a capacity begins and ends, relative to the requests per second when all arrive at once (that
# includes a long tail).
GUESS, MAX_GUESS = 1.0, 4.0
MAX_RATE_RATIO = 64.0  # highest rate of a search relative to its lowest, if nothing else bounds it
MORE_REQUESTS = "loads of so few requests end before they can be too much (--requests, --seconds)"
FIRST_STEP = 2  # first step of a search from an expected rate, in units of the precision
DECODE_TOKENS = 64  # output tokens of each, when the iteration is timed
DECODERS_PROMPT, DECODERS_TOKENS = 256, 256  # of each sequence in `decoding`


Expected = Callable[[ParallelLayout, str, Traffic, ServiceObjective], float]


def unknown(*_: object) -> float:
    """An `Expected` that knows no rate: 0."""
    return 0.0


class Site(Protocol):
    """Executes loads, on devices or in the simulator."""

    def offer(self, layout: ParallelLayout, setting: Setting, load: OfferedLoad) -> dict[str, Any]:
        """The outcome of a load: `bench.pipeline.load_generator.summary` and `bench.pipeline.meter_report.metered`. The
        trace is kept."""


def together(count: int, prompt: int, output: int) -> list[Session]:
    """`count` requests of one size that all arrive at once."""
    return [Session((ConversationTurn((TokenSpan((0, i), prompt),), output),), 0.0) for i in range(count)]


@dataclass(frozen=True)
class Carried:
    """The highest rate within an objective.

    | field | meaning |
    | --- | --- |
    | `rate` | requests per second; 0 if no rate that was tried kept to the objective |
    | `setting` | the setting that reached it |
    | `point` | outcome of that load; None where `rate` is 0 |
    | `below` | where `rate` is 0: the lowest rate that was tried, if known |
    | `at_least` | whether the search ended at its highest rate, which still kept to the objective |
    | `key` | key of the point |
    """

    rate: float
    setting: Setting
    point: dict[str, Any] | None
    below: float = 0.0
    at_least: bool = False
    key: str = ""


@dataclass(frozen=True)
class _Search:
    """Arguments of `bench.pipeline.capacity.capacity`."""

    guess: float
    most: float
    least: float | None = None
    step: float = MAX_STEP_FACTOR

    def beyond(self, rate: float) -> "_Search":
        """The search from a rate that holds."""
        return replace(self, guess=rate, most=max(rate, self.most))


@dataclass
class CapacitySearch:
    """Measures `points` at `site`.

    | field | meaning |
    | --- | --- |
    | `budget` | limit of the tokens in a micro-batch |
    | `chunk_budgets` | budgets with which `fixed_chunk` and `throttle` are tried |
    | `most_running` | limit of running sequences |
    | `shrink` | divisor of the lengths in `decode_s` and `decoding`; traffics come divided |
    | `precision` | fraction to within which rates are found |
    | `seconds` | time within which the requests of a load arrive |
    | `expected` | expected rate of a layout and a schedule, 0 where unknown; the search begins there |
    | `progress` | prefix of the lines of progress |
    """

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
        layout: ParallelLayout,
        setting: Setting,
        traffic: Traffic,
        rate: float,
        objective: ServiceObjective | None = None,
    ) -> dict[str, Any]:
        """The outcome of `rate` requests per second. The load is ended early if it cannot keep to `objective`."""
        return self._point(layout, setting, self._load(layout, setting, traffic, rate, objective))

    def flood(self, layout: ParallelLayout, traffic: Traffic) -> dict[str, Any]:
        """The outcome of all requests at once: the throughput under full load."""
        load = OfferedLoad(self.flood_key(layout, traffic), traffic.at_once())
        return self._point(layout, self.setting_of(traffic), load)

    def flood_key(self, layout: ParallelLayout, traffic: Traffic) -> str:
        return f"{layout}/{traffic.name}/{self.setting_of(traffic)}/flood"

    def setting_of(self, traffic: Traffic) -> Setting:
        """Our schedule's setting when all of `traffic` arrives at once."""
        return Setting(FOR_JOBS if traffic.is_job else OURS, self.budget)

    def decode_s(self, layout: ParallelLayout) -> float:
        """Seconds of one decode iteration of DECODES sequences with DECODE_CONTEXT tokens each, without any prompts."""
        sessions = together(DECODES, max(1, DECODE_CONTEXT // self.shrink), DECODE_TOKENS)
        load = OfferedLoad(f"{layout}/decode_iteration", sessions)
        point = self._point(layout, Setting("fixed_chunk", self.budget), load)
        return float(point["tbt_s"]["p50"])

    def decoding(self, layout: ParallelLayout) -> dict[str, Any]:
        """The outcome of as many sequences as may run at once, which all end together. After their prompts there are
        only decodes. A job that spreads its prompts over its decodes has few steps of decodes alone, at its end."""
        prompt, output = (max(1, tokens // self.shrink) for tokens in (DECODERS_PROMPT, DECODERS_TOKENS))
        load = OfferedLoad(self.decoding_key(layout), together(self.most_running, prompt, output))
        return self._point(layout, Setting(OURS, self.budget), load)

    def decoding_key(self, layout: ParallelLayout) -> str:
        return f"{layout}/decodes"

    def _load(
        self,
        layout: ParallelLayout,
        setting: Setting,
        traffic: Traffic,
        rate: float,
        objective: ServiceObjective | None,
    ) -> OfferedLoad:
        rate = float(f"{rate:.4g}")
        key = f"{layout}/{traffic.name}/{setting}/{objective or 'whole'}/{rate:g}"
        return OfferedLoad(key, traffic.at(rate, self.seconds), rate, objective)

    def _point(self, layout: ParallelLayout, setting: Setting, load: OfferedLoad) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            point = self.site.offer(layout, setting, load)
            say(f"  {self.progress}{load.key}: {line(point)}")
            return point

        found: dict[str, Any] = self.points.point(load.key, make)
        return found

    def carried(
        self,
        layout: ParallelLayout,
        schedule: str,
        traffic: Traffic,
        objective: ServiceObjective,
        least: float | None = None,
    ) -> Carried:
        """The capacity of a schedule with the best of its settings. Rates below `least`, if given, are not tried."""
        search = self._search(layout, schedule, traffic, objective, least)
        best: Carried | None = None
        for setting in settings_of(schedule, objective.tbt_s, self.budget, self.chunk_budgets):
            if best is None or not best.rate:
                best = self._highest(layout, setting, traffic, objective, search)
                continue
            # The capacity of a setting matters only if it exceeds the best so far.
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
        """The rate at which our schedule is compared with another one: the other's capacity. If ours is higher by at
        most the precision, our own capacity, since that load has been measured already."""
        return ours.rate if other.rate <= ours.rate <= other.rate * (1 + self.precision) else other.rate

    def _search(
        self, layout: ParallelLayout, schedule: str, traffic: Traffic, objective: ServiceObjective, least: float | None
    ) -> "_Search":
        if expected := self.expected(layout, schedule, traffic, objective):
            return _Search(expected, MAX_GUESS * expected, least, 1 + FIRST_STEP * self.precision)
        if least is not None:
            return _Search(least, MAX_RATE_RATIO * least, least)
        at_once = self.flood(layout, traffic)["requests_per_s"]
        return _Search(GUESS * at_once, MAX_GUESS * at_once)

    def _highest(
        self, layout: ParallelLayout, setting: Setting, traffic: Traffic, objective: ServiceObjective, search: "_Search"
    ) -> Carried:
        def holds(rate: float) -> bool:
            return objective.holds(self.at(layout, setting, traffic, rate, objective))

        rate = capacity(holds, search.guess, search.most, self.precision, search.least, search.step)
        if not rate:
            return Carried(0.0, setting, None, below=search.least or 0.0)
        load = self._load(layout, setting, traffic, rate, objective)
        return Carried(rate, setting, self._point(layout, setting, load), key=load.key)


def line(point: dict[str, Any]) -> str:
    """A point as text for a terminal."""
    parts = [f"{number(point['output_tok_s'])} output tokens/s", f"bubble {point['bubble']:.1%}"]
    for key, name in (("ttft_s", "TTFT"), ("tbt_s", "TBT")):
        if point[key]:
            parts.append(f"{name} {number(point[key]['p50'])} / {number(point[key]['p99'])} s")
    if "watts" in point:
        parts.append(f"{number(point['watts'])} of {number(point['limit_watts'])} W")
    if point["given_up"]:
        parts.append(f"ended early: {point['given_up']}")
    return ", ".join(parts)
