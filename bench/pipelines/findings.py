"""What a study of pipelines found, as figures; and for those that are not what they should be, the reason."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.pipelines.layout import Layout, Setting
from bench.pipelines.metered import causes
from bench.pipelines.offered import Objective
from bench.pipelines.simulated import Simulated
from bench.pipelines.study import MORE_REQUESTS, OURS, SIMULATED, Carried, Expected, Study, unknown
from bench.pipelines.sweep import Points
from bench.pipelines.traffic import Traffic
from bench.results import Figure, number
from bench.targets import reached
from pipeline.cost import Coefficients
from pipeline.meter import Meter, Span
from pipeline.roofline import Link
from pipeline.rows import UNPADDED, Rows
from pipeline.shape import BatchShape
from pipeline.simulate import Hardware, errors

EXPECTED = (OURS, "fixed_chunk")  # schedules that are simulated before they are measured
ROUGHLY = 0.1  # the precision of what is only where a search begins
# Loads of many decodes, and of many prompts. The decodes are so many that each of four micro-batches computes as long
# as it reads weights: with fewer, what reads all weights once for all of them is faster, and no pipeline could be.
HEAVY = ("mini_1024", "prefill_half")


@dataclass(frozen=True)
class Twin:
    """What was measured of a layout, for the simulator: stages, links, and the tokens that the KV cache holds."""

    hardware: Hardware
    kv_tokens: int
    max_running: int
    rows: Rows = UNPADDED

    @classmethod
    def of(cls, learned: dict[str, Any], link: Link, token_bytes: int, max_running: int, rows: Rows) -> "Twin":
        """From what `Measured.calibrate` gave. `rows`: those that steps compute."""
        stages = [Coefficients(values, rows).predict for values in learned["coefficients"]]
        return cls(Hardware(stages, link, token_bytes), learned["kv_tokens"], max_running, rows)

    def study(self, like: Study, hardware: Hardware | None = None) -> Study:
        """A study in the simulator, of loads like another one's, maybe with other hardware."""
        simulated = hardware or self.hardware
        site = Simulated(lambda _: simulated, lambda _: self.kv_tokens, self.max_running, self.rows)
        return replace(like, points=Points(), site=site, expected=unknown, progress=SIMULATED)

    def expected(self, like: Study, layout: Layout) -> Expected:
        """What the simulator says that schedules carry on the layout that was measured, roughly."""
        simulated = replace(self.study(like), precision=ROUGHLY)

        def carried(other: Layout, schedule: str, traffic: Traffic, objective: Objective) -> float:
            if other != layout or schedule not in EXPECTED:
                return unknown()
            found = like.points.point(
                f"{layout}/{traffic.name}/{schedule}/{objective}/expected",
                lambda: {"rate": simulated.carried(layout, schedule, traffic, objective).rate},
            )
            return float(found["rate"])

        return carried

    def needed(self, like: Study, simulated: Callable[[Study], float], is_enough: Callable[[float], bool]) -> str:
        """What would have to be otherwise: the first of some changes that is enough, with what the simulator gives."""
        tried = []
        for name, hardware in self.hardware.changes():
            value = simulated(self.study(like, hardware))
            if is_enough(value):
                return f"the simulator says that it takes {name} ({number(value)})"
            tried.append(f"{name} ({number(value)})")
        return f"in the simulator none of these is enough: {', '.join(tried)}"


@dataclass
class Findings:
    """Figures of a study on `layout`, whose names begin with `prefix`, or with `base` where they do not depend on the
    links; `whole` is the layout without a pipeline on as many devices, if that was measured. `twin` is None where
    nothing was measured. `reasons`: why figures are not what they should be, or not there; `bounds`: which of them are
    no more than that, and why."""

    study: Study
    layout: Layout
    whole: Layout | None
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
        simulated: Callable[[Study], float] | None = None,
    ) -> None:
        """A figure; `point` is the load that explains it, and `simulated` finds it out in a simulator."""
        self._add(Figure(f"{self.prefix}.{name}", value, unit, higher_is_better), point, simulated)

    def _add(
        self,
        figure: Figure,
        point: dict[str, Any] | None = None,
        simulated: Callable[[Study], float] | None = None,
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
        """The figures that are held against something are of the workload with long prompts."""
        return name if traffic.name == "long" else f"{traffic.name}.{name}"

    def capacities(self, carried: Mapping[tuple[Layout, str], Carried], traffic: Traffic, objective: Objective) -> None:
        """Ours beside each other schedule, and beside the layout without a pipeline. Where it is only known what the
        other carries at most, the ratio is a bound: it is at least as high. Where it is only known what one carries at
        least, there is no figure."""
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

            def simulated(study: Study, theirs: float = theirs) -> float:
                return study.carried(self.layout, OURS, traffic, objective).rate / theirs

            self.add(ratio, ours.rate / theirs, "ratio", True, ours.point, simulated)

    def _leave_out(self, name: str, carried: Carried) -> None:
        why = f"{carried.setting} carries at least {number(carried.rate)} requests/s: {MORE_REQUESTS}"
        self.reasons[f"{self.prefix}.{name}"] = f"it is not known, since {why}"

    def bubble(self, ours: Carried, fixed: Carried, traffic: Traffic, objective: Objective) -> None:
        """Ours beside that of fixed chunks, at the rate that those carry, or somewhat above; and what a user sees of
        it."""
        name = self._of(traffic, "bubble.vs_fixed_chunk")
        if fixed.at_least:
            self._leave_out(name, fixed)
            return
        if fixed.point is None or not (theirs := fixed.point["bubble"]):
            return
        setting, rate = Setting(OURS, self.study.budget, objective.tbt_s), self.study.beside(ours, fixed)

        def of_ours(study: Study) -> dict[str, Any]:
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
        # A capacity does not say it: whoever takes several prompts in turns begins each early, and ends it late.
        if ttft_s := point["ttft_s"]:
            waited = ttft_s["p50"] / fixed.point["ttft_s"]["p50"]
            self.add(self._of(traffic, "ttft_p50.vs_fixed_chunk"), waited, "ratio", False)

    def offline(self, traffic: Traffic) -> None:
        """All requests at once: throughput, beside the layout without a pipeline."""
        is_prefill = traffic.name.startswith("prefill")
        key, kind = ("input_tok_s", "prefill_heavy") if is_prefill else ("output_tok_s", "decode_heavy")

        def rate(study: Study, layout: Layout) -> float:
            return float(study.flood(layout, traffic)[key])

        point = self.study.flood(self.layout, traffic)
        self.add(f"{traffic.name}.{key}", point[key], "tokens/s", True, point, lambda study: rate(study, self.layout))
        if self.whole is not None:
            whole = rate(self.study, self.whole)

            def ratio(study: Study) -> float:
                return rate(study, self.layout) / whole

            name = f"{kind}.vs_{self.whole}" if traffic.name in HEAVY else f"{traffic.name}.vs_{self.whole}"
            self.add(name, point[key] / whole, "ratio", True, point, ratio)

    def decoding(self) -> None:
        """The bubble of decoding, with as many sequences as may run."""

        def bubble(study: Study) -> float:
            return float(study.decoding(self.layout)["decode_bubble"])

        self.add("decode_bubble", bubble(self.study), "ratio", False, self.study.decoding(self.layout), bubble)

    def link(self, speed: dict[str, Any]) -> None:
        """What was measured of the ways between stages (`bench.link.Speed`)."""
        self.add("link.bytes_per_s", speed["bytes_per_s"], "bytes/s", True)
        self.add("link.latency", speed["latency_s"], "s", False)

    def meter(self, loads: Sequence[Traffic]) -> None:
        """What it costs to know all this, and how well the time of a micro-batch is predicted: the worst of loads that
        all came at once."""
        points = [self.study.flood(self.layout, load) for load in loads]
        self._add(Figure(f"{self.base}.meter.overhead", max(map(meter_overhead, points)), "ratio", False))
        errors = [point["model_error"] for point in points if point["model_error"] is not None]
        if errors:
            self._add(Figure(f"{self.base}.cost_model.median_error", max(errors), "ratio", False))

    def simulator(self, loads: Sequence[Traffic]) -> dict[str, Any]:
        """How far off the simulator is: throughput of loads on which nothing was fitted, all at once."""
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
    """What it carries; where no rate that was tried held, the lowest of these: it carries less."""
    return carried.rate or carried.below


def meter_overhead(point: dict[str, Any], rounds: int = 2000) -> float:
    """The part of a pipeline's time that its meter takes, when each micro-batch of a load is told to it by all stages,
    on this machine."""
    stages = len(point["stages"])
    meter = Meter(stages)
    begin_s = time.perf_counter()
    for step in range(rounds):
        meter.planned(step, float(step), BatchShape([(10, 1)]), 0.1)
        for stage in range(stages):
            # Each is late, so that there are gaps with causes.
            at_s = 1.5 * step + 1.1 * stage
            meter.ran(step, stage, Span(at_s, at_s + 0.1, at_s + 1.0))
        meter.finished(step)
    each_s = (time.perf_counter() - begin_s) / rounds
    return each_s * float(point["micro_batches"]) / float(point["seconds"])
