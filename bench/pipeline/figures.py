"""Figures of a study of pipelines, and the reasons for figures that miss their targets."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.pipeline.capacity_search import MORE_REQUESTS, OURS, SIMULATED, CapacitySearch, Carried, Expected, unknown
from bench.pipeline.layout import ParallelLayout, Setting
from bench.pipeline.load_generator import ServiceObjective
from bench.pipeline.meter_report import causes
from bench.pipeline.result_store import Points
from bench.pipeline.simulated_site import SimulatedSite
from bench.pipeline.simulator import Hardware, errors
from bench.pipeline.traffic import Traffic
from bench.results import Figure, number
from bench.targets import reached
from pipeline.cost import Coefficients
from pipeline.meter import Meter, Span
from pipeline.padding import UNPADDED, PaddedSizes
from pipeline.roofline import LinkSpec
from pipeline.shape import BatchShape

EXPECTED = (OURS, "fixed_chunk")  # schedules that are simulated before they are measured
ROUGHLY = 0.1  # precision of rates at which a search begins
# Jobs with many decodes, and with many prompts. The decodes suffice for each of four micro-batches to compute for as
# long as it reads weights. With fewer, a layout without a pipeline, which reads the weights once for all decodes, is
# always faster.
HEAVY = ("mini_1024", "prefill_half")


def measured_link(speed: dict[str, Any]) -> LinkSpec:
    """The link between stages that `bench.replica.link_speed` measured."""
    return LinkSpec("measured", speed["latency_s"], speed["bytes_per_s"], 0.0, math.inf)


@dataclass(frozen=True)
class Twin:
    """The measured properties of a layout, for the simulator: stages, links, and the capacity of the KV cache in
    tokens."""

    hardware: Hardware
    kv_tokens: int
    max_running: int
    rows: PaddedSizes = UNPADDED

    @classmethod
    def of(
        cls,
        learned: dict[str, Any],
        link: LinkSpec,
        token_bytes: int,
        max_running: int,
        rows: PaddedSizes,
    ) -> "Twin":
        """From `RealSite.calibrate`'s result. `rows`: number of rows that a step computes."""
        stages = [Coefficients(values, rows).predict for values in learned["coefficients"]]
        return cls(Hardware(stages, link, token_bytes), learned["kv_tokens"], max_running, rows)

    def site(self, hardware: Hardware | None = None) -> SimulatedSite:
        """The simulator of the layout. `hardware` replaces the measured hardware."""
        simulated = hardware or self.hardware
        return SimulatedSite(lambda _: simulated, lambda _: self.kv_tokens, self.max_running, self.rows)

    def study(self, like: CapacitySearch, hardware: Hardware | None = None) -> CapacitySearch:
        """A study in the simulator of the same loads as `like`. `hardware`: as for `site`."""
        return replace(like, points=Points(), site=self.site(hardware), expected=unknown, progress=SIMULATED)

    def expected(self, like: CapacitySearch, layout: ParallelLayout) -> Expected:
        """The capacities that the simulator predicts for the measured layout, roughly."""
        simulated = replace(self.study(like), precision=ROUGHLY)

        def carried(other: ParallelLayout, schedule: str, traffic: Traffic, objective: ServiceObjective) -> float:
            if other != layout or schedule not in EXPECTED:
                return unknown()
            found = like.points.point(
                f"{layout}/{traffic.name}/{schedule}/{objective}/expected",
                lambda: {"rate": simulated.carried(layout, schedule, traffic, objective).rate},
            )
            return float(found["rate"])

        return carried

    def needed(
        self, like: CapacitySearch, simulated: Callable[[CapacitySearch], float], is_enough: Callable[[float], bool]
    ) -> str:
        """The change of the hardware that would be enough, in words: the first of `Hardware.changes` for which
        `is_enough` holds of the `simulated` value."""
        tried = []
        for name, hardware in self.hardware.changes():
            value = simulated(self.study(like, hardware))
            if is_enough(value):
                return f"the simulator says that it takes {name} ({number(value)})"
            tried.append(f"{name} ({number(value)})")
        return f"in the simulator none of these is enough: {', '.join(tried)}"


@dataclass
class Findings:
    """Figures of a study on `layout`.

    | field | meaning |
    | --- | --- |
    | `whole` | the layout without a pipeline on as many devices, if measured |
    | `prefix` | prefix of the figures' names |
    | `base` | prefix of names of figures that do not depend on the links |
    | `twin` | None if nothing was measured |
    | `reasons` | why figures miss their targets or are absent |
    | `bounds` | why figures are only bounds |
    """

    study: CapacitySearch
    layout: ParallelLayout
    whole: ParallelLayout | None
    prefix: str
    base: str
    twin: Twin | None = None
    figures: list[Figure] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    bounds: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        higher_is_better: bool,
        point: dict[str, Any] | None = None,
        simulated: Callable[[CapacitySearch], float] | None = None,
    ) -> None:
        """Adds a figure. `point`: the load that explains it. `simulated`: computes its value from a simulated study."""
        self._add(Figure(f"{self.prefix}.{name}", value, unit, higher_is_better), point, simulated)

    def _add(
        self,
        figure: Figure,
        point: dict[str, Any] | None = None,
        simulated: Callable[[CapacitySearch], float] | None = None,
    ) -> None:
        self.figures.append(figure)
        if reached(figure) is not False:
            return
        reasons = []
        if point is not None:
            reasons.append(f"the stages of {self.layout} waited for {causes(point['parts'])}")
            if "watts" in point:
                reasons.append(f"their GPUs drew {number(point['watts'])} of {number(point['limit_watts'])} W")
        if simulated is not None and self.twin is not None:
            reasons.append(
                self.twin.needed(self.study, simulated, lambda other: bool(reached(replace(figure, value=other))))
            )
        self.reasons[figure.name] = "; ".join(reasons) or "nothing was measured that explains it"

    def _of(self, traffic: Traffic, name: str) -> str:
        """The name of a figure. Figures that have targets are those of the workload with long prompts; others get the
        workload's name."""
        return name if traffic.name == "long" else f"{traffic.name}.{name}"

    def capacities(
        self, carried: Mapping[tuple[ParallelLayout, str], Carried], traffic: Traffic, objective: ServiceObjective
    ) -> None:
        """Our capacity, and its ratios to each other schedule and to the layout without a pipeline.

        If the other's capacity is only known to be below a rate, the ratio is a lower bound. If a capacity is only
        known to be above a rate, there is no figure.
        """
        ours = carried.get((self.layout, OURS))
        if ours is None:
            return
        name = f"capacity_{objective.name}"
        others = {schedule: other for (layout, schedule), other in carried.items() if layout == self.layout}
        if self.whole is not None:
            best = [other for (layout, _), other in carried.items() if layout == self.whole]
            others[str(self.whole)] = max(best, key=lambda other: (other.at_least, _most(other)))
        if ours.at_least:
            self._leave_out(f"{traffic.name}.{name}", ours)
        else:
            self.add(f"{traffic.name}.{name}", ours.rate, "requests/s", True)
        for against, other in others.items():
            if against == OURS or not (theirs := _most(other)):
                continue
            ratio = self._of(traffic, f"{name}.vs_{against}")
            if ours.at_least or other.at_least:
                self._leave_out(ratio, ours if ours.at_least else other)
                continue
            if not other.rate:
                self.bounds[f"{self.prefix}.{ratio}"] = (
                    f"at least: {against} does not carry {number(theirs)} requests/s, the lowest rate that was tried"
                )

            def simulated(study: CapacitySearch, theirs: float = theirs) -> float:
                return study.carried(self.layout, OURS, traffic, objective).rate / theirs

            self.add(ratio, ours.rate / theirs, "ratio", True, ours.point, simulated)

    def _leave_out(self, name: str, carried: Carried) -> None:
        why = f"{carried.setting} carries at least {number(carried.rate)} requests/s: {MORE_REQUESTS}"
        self.reasons[f"{self.prefix}.{name}"] = f"it is not known, since {why}"

    def bubble(self, ours: Carried, fixed: Carried, traffic: Traffic, objective: ServiceObjective) -> None:
        """The ratio of our bubble to that of `fixed_chunk`, at the rate that the latter carries or slightly above, and
        the ratio of the median TTFT."""
        name = self._of(traffic, "bubble.vs_fixed_chunk")
        if fixed.at_least:
            self._leave_out(name, fixed)
            return
        if fixed.point is None or not (theirs := fixed.point["bubble"]):
            return
        setting, rate = Setting(OURS, self.study.budget, objective.tbt_s), self.study.beside(ours, fixed)

        def of_ours(study: CapacitySearch) -> dict[str, Any]:
            return study.at(self.layout, setting, traffic, rate, objective)

        point = of_ours(self.study)
        if point["given_up"]:
            self.reasons[f"{self.prefix}.{name}"] = (
                f"it is not known, since {setting} does not carry the {number(rate)} requests/s of {fixed.setting}: "
                f"its load was ended early ({point['given_up']})"
            )
            return
        self.add(
            name,
            point["bubble"] / theirs,
            "ratio",
            False,
            point,
            lambda study: float(of_ours(study)["bubble"] / theirs),
        )
        # Capacity does not show TTFT: a schedule that interleaves several prompts begins each early and ends each late.
        if ttft_s := point["ttft_s"]:
            waited = ttft_s["p50"] / fixed.point["ttft_s"]["p50"]
            self.add(self._of(traffic, "ttft_p50.vs_fixed_chunk"), waited, "ratio", False)

    def offline(self, traffic: Traffic) -> None:
        """Throughput with all requests at once, and its ratio to the layout without a pipeline."""
        is_prefill = traffic.name.startswith("prefill")
        key, kind = ("input_tok_s", "prefill_heavy") if is_prefill else ("output_tok_s", "decode_heavy")

        def rate(study: CapacitySearch, layout: ParallelLayout) -> float:
            return float(study.flood(layout, traffic)[key])

        point = self.study.flood(self.layout, traffic)
        self.add(f"{traffic.name}.{key}", point[key], "tokens/s", True, point, lambda study: rate(study, self.layout))
        if self.whole is not None:
            whole = rate(self.study, self.whole)

            def ratio(study: CapacitySearch) -> float:
                return rate(study, self.layout) / whole

            name = f"{kind}.vs_{self.whole}" if traffic.name in HEAVY else f"{traffic.name}.vs_{self.whole}"
            self.add(name, point[key] / whole, "ratio", True, point, ratio)

    def decoding(self) -> None:
        """The bubble of decodes alone, with as many sequences as may run."""

        def bubble(study: CapacitySearch) -> float:
            return float(study.decoding(self.layout)["decode_bubble"])

        self.add("decode_bubble", bubble(self.study), "ratio", False, self.study.decoding(self.layout), bubble)

    def link(self, speed: dict[str, Any]) -> None:
        """The measured speed of the links between stages (`bench.replica.link_speed.Speed`)."""
        self.add("link.bytes_per_s", speed["bytes_per_s"], "bytes/s", True)
        self.add("link.latency", speed["latency_s"], "s", False)

    def meter(self, loads: Sequence[Traffic]) -> None:
        """The meter's overhead, and the error of predicted micro-batch times: the worst of the loads that arrive all at
        once."""
        points = [self.study.flood(self.layout, load) for load in loads]
        self._add(Figure(f"{self.base}.meter.overhead", max(map(meter_overhead, points)), "ratio", False))
        errors = [point["model_error"] for point in points if point["model_error"] is not None]
        if errors:
            self._add(Figure(f"{self.base}.cost_model.median_error", max(errors), "ratio", False))

    def simulator(self, loads: Sequence[Traffic]) -> dict[str, Any]:
        """The errors of the simulator: throughput of loads that were not used for fitting, all requests at once."""
        assert self.twin is not None
        study = self.twin.study(self.study)
        measured: dict[str, float] = {}
        predicted: dict[str, float] = {}
        for load in loads:
            for found, of in ((measured, self.study), (predicted, study)):
                found[f"{load.name}/{study.setting_of(load)}"] = of.flood(self.layout, load)["requests_per_s"]
        off = errors(measured, predicted)
        self._add(Figure(f"{self.base}.simulator.throughput_error", max(map(abs, off.values())), "ratio", False))
        return {"measured_requests_per_s": measured, "simulated_requests_per_s": predicted, "errors": off}


def _most(carried: Carried) -> float:
    """The rate that is carried; if no rate that was tried is, the lowest of these, an upper bound."""
    return carried.rate or carried.below


def meter_overhead(point: dict[str, Any], rounds: int = 2000) -> float:
    """Fraction of a pipeline's time that its meter takes, if all stages report each micro-batch of a load to it, on
    this machine."""
    stages = len(point["stages"])
    meter = Meter(stages)
    begin_s = time.perf_counter()
    for step in range(rounds):
        meter.planned(step, float(step), BatchShape([(10, 1)]), 0.1)
        for stage in range(stages):
            # Late, so that there are gaps with causes.
            at_s = 1.5 * step + 1.1 * stage
            meter.ran(step, stage, Span(at_s, at_s + 0.1, at_s + 1.0))
        meter.finished(step)
    each_s = (time.perf_counter() - begin_s) / rounds
    return each_s * float(point["micro_batches"]) / float(point["seconds"])
