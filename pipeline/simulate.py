"""A pipeline without its devices: what a schedule does to requests, stages and links, in virtual time.

The scheduler is the real one, behind `Replica`: it comes with the caller (`worker.rehearsal`), reads `Clock` instead of
the time, and makes micro-batches out of the same policies and cost models as on devices. Stages are servers that take
micro-batches in order, as long as `Hardware` says; links have latency and bandwidth.

    clock = Clock()
    run = simulate(requests, replica, hardware, clock)  # worker.rehearsal.Rehearsal, on the same clock
    run.output_tokens_per_s(), run.quantile("tbt", 0.99), run.meter.fractions()
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipeline.meter import Meter, Span
from pipeline.roofline import Link
from pipeline.shape import BatchShape


class Clock:
    """The time of a simulation, in seconds. Calling it gives the time, as calling `time.monotonic` does."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Request(NamedTuple):
    """One request: when it comes, and how many tokens it brings and wants. `number`: its place in the list of all."""

    number: int
    arrived_s: float
    prompt: int
    output: int


@dataclass
class MicroBatch:
    """What a replica sends, with ascending `step`. `started`: the requests, by number, that are in a micro-batch for
    the first time. `after`: a step under way whose tokens it takes from the last stage, on the device. `plan` is the
    replica's own."""

    step: int
    shape: BatchShape
    started: list[int]
    after: int | None = None
    plan: Any = None


class Replica(Protocol):
    """A scheduler with its policy, as the simulator drives it."""

    def arrive(self, request: Request) -> None:
        """A request is there."""

    def schedule(self) -> MicroBatch | None:
        """The next micro-batch, or None if none is to be sent now. It is called until it gives None."""

    def ask_again_s(self) -> float:
        """After what time `schedule`, that has just given None, wants to be called again if nothing else happens."""

    def found_nothing(self) -> str | None:
        """If `schedule` has just given None because there was nothing to send: the cause, as `Meter` names it."""

    def ended(self, batch: MicroBatch, stage: int, at_s: float) -> None:
        """A stage was done with a micro-batch at that time."""

    def finish(self, batch: MicroBatch, seconds: list[float]) -> Iterable[int]:
        """The tokens of the oldest micro-batch are back; each stage took so many `seconds` for it. Returns the
        requests, by number, that got one."""

    def decode_s(self, shape: BatchShape) -> float:
        """The predicted part of a micro-batch's time that its decodes cause."""


@dataclass
class Hardware:
    """Stages and what is between them.

    `stages`: the time that each takes for a micro-batch. `link` joins them (None: no time); a stage that does not
    `overlap` its sends waits until they are through. `plan_s`: from the decision to the plan's being on the first
    stage. `return_s`: from the end of the last stage to the tokens' being with the scheduler; to the first stage, on
    the devices, it is a way over the link. `jitter`: the standard deviation of each stage's times, relative.
    `token_bytes`: what a token sends from stage to stage.
    """

    stages: Sequence[Callable[[BatchShape], float]]
    link: Link | None = None
    token_bytes: int = 0
    overlap: bool = True
    plan_s: float = 5e-4
    return_s: float = 3e-4
    jitter: float = 0.0
    seed: int = 0

    def exposed_s(self, tokens: int = 1) -> float:
        """What a micro-batch spends on its way without being computed."""
        way = self.link.send_s(tokens * self.token_bytes) if self.link is not None else 0.0
        return self.plan_s + self.return_s + (len(self.stages) - 1) * way

    def changes(self) -> Iterator[tuple[str, "Hardware"]]:
        """The same with one thing better, by its name."""
        host = replace(self, plan_s=0.0, return_s=0.0)
        if self.link is not None and len(self.stages) > 1:
            link = self.link
            fast = replace(link, latency_s=link.latency_s / 2, bytes_per_s=2 * link.bytes_per_s)
            free = replace(link, latency_s=0.0, bytes_per_s=math.inf)
            yield "links twice as fast", replace(self, link=fast)
            yield "links that take no time", replace(self, link=free)
            yield "neither links nor a host that take time", replace(host, link=free)
        else:
            yield "a host that takes no time", host
        if len(self.stages) > 1:

            def mean_s(shape: BatchShape) -> float:
                return sum(seconds_of(shape) for seconds_of in self.stages) / len(self.stages)

            yield "stages that all take equally long", replace(self, stages=[mean_s] * len(self.stages))
        faster = [lambda shape, seconds_of=seconds_of: seconds_of(shape) / 1.25 for seconds_of in self.stages]
        yield "stages that compute 1.25 times as fast", replace(self, stages=faster)


@dataclass
class Life:
    """What became of a request."""

    request: Request
    started_s: float = math.nan
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.request.arrived_s


@dataclass
class Run:
    """The outcome of a simulation. `seconds`: until the last token."""

    lives: list[Life]
    meter: Meter
    seconds: float
    num_batches: int

    def values(self, what: str) -> np.ndarray:
        """Of all requests that got so far: `delay` (until first scheduled), `ttft`, or `tbt` (every time between two
        tokens), in seconds."""
        if what == "delay":
            return np.array([life.started_s - life.request.arrived_s for life in self.lives])
        begun = [life for life in self.lives if life.tokens_s]
        if what == "ttft":
            return np.array([life.ttft_s for life in begun])
        return np.concatenate([np.diff(life.tokens_s) for life in begun] or [np.empty(0)])

    def quantile(self, what: str, q: float) -> float:
        """Infinite where requests never got so far, NaN where there is nothing to measure."""
        values = np.sort(np.nan_to_num(self.values(what), nan=math.inf))
        return float(values[max(0, math.ceil(q * len(values)) - 1)]) if len(values) else math.nan

    def output_tokens_per_s(self) -> float:
        return sum(len(life.tokens_s) for life in self.lives) / self.seconds

    def input_tokens_per_s(self) -> float:
        return sum(life.request.prompt for life in self.lives if life.tokens_s) / self.seconds


class _Stages:
    """The stages' and links' time lines. Nothing overtakes, so a micro-batch's way is known when it sets out."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.free_s = [0.0] * len(hardware.stages)
        self.link_free_s = [0.0] * len(hardware.stages)
        self.random = np.random.default_rng(hardware.seed)

    def send(self, shape: BatchShape, now_s: float, tokens_s: float) -> list[Span]:
        """`tokens_s`: when the tokens are there that it waits for on the last stage."""
        hardware = self.hardware
        received_s = max(now_s + hardware.plan_s, tokens_s + (hardware.link.latency_s if hardware.link else 0.0))
        spans = []
        for stage, seconds_of in enumerate(hardware.stages):
            seconds = seconds_of(shape)
            if hardware.jitter:
                seconds *= self.random.lognormal(0.0, hardware.jitter)
            begin_s = max(received_s, self.free_s[stage])
            end_s = begin_s + seconds
            spans.append(Span(received_s, begin_s, end_s))
            self.free_s[stage] = received_s = end_s
            link = hardware.link
            if link is not None and stage < len(hardware.stages) - 1:
                sending_s = shape.tokens * hardware.token_bytes / link.bytes_per_s
                begin_s = max(end_s, self.link_free_s[stage])
                self.link_free_s[stage] = begin_s + sending_s
                received_s = begin_s + link.latency_s + sending_s
                if not hardware.overlap:
                    self.free_s[stage] = received_s
        return spans


ARRIVAL, ENDED, FINISH, ASK = range(4)


def simulate(
    requests: Sequence[Request],
    replica: Replica,
    hardware: Hardware,
    clock: Clock,
    until_s: float = math.inf,
    measure_s: tuple[float, float] = (0.0, math.inf),
) -> Run:
    """Runs `requests`, in the order of their arrival, to their end or up to `until_s`. The meter sees what is planned
    from the first of `measure_s` on and before the second."""
    stages, meter = _Stages(hardware), Meter(len(hardware.stages))
    lives = [Life(request) for request in requests]
    events: list[tuple[float, int, int, Any]] = []
    number = 0  # of events: those at one time come in the order in which they were made

    def push(at_s: float, kind: int, what: Any = None) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (at_s, number, kind, what))

    for request in requests:
        push(request.arrived_s, ARRIVAL, request)
    returning_s: dict[int, float] = {}  # when the last stage is done with each step under way
    num_batches = 0
    last_s = 0.0
    asked_at_s = -1.0  # when the newest ASK is due: others are out of date
    while events and events[0][0] <= until_s:
        clock.now_s, _, kind, what = heapq.heappop(events)
        if kind == ASK and clock.now_s != asked_at_s:
            continue
        if kind == ARRIVAL:
            replica.arrive(what)
        elif kind == ENDED:
            replica.ended(*what)
        elif kind == FINISH:
            batch, spans = what
            meter.finished(batch.step)
            del returning_s[batch.step]
            for got in replica.finish(batch, [span.end_s - span.begin_s for span in spans]):
                lives[got].tokens_s.append(clock.now_s)
                last_s = clock.now_s
        while (batch := replica.schedule()) is not None:
            tokens_s = -math.inf if batch.after is None else returning_s[batch.after]
            spans = stages.send(batch.shape, clock.now_s, tokens_s)
            returning_s[batch.step] = spans[-1].end_s
            num_batches += 1
            for first in batch.started:
                lives[first].started_s = clock.now_s
            if measure_s[0] <= clock.now_s < measure_s[1]:
                meter.planned(batch.step, clock.now_s, batch.shape, replica.decode_s(batch.shape), batch.after)
                for stage, span in enumerate(spans):
                    meter.ran(batch.step, stage, span)
            for stage, span in enumerate(spans):  # the last one is beside the scheduler
                told_s = span.end_s + (hardware.plan_s if stage < len(spans) - 1 else 0.0)
                push(told_s, ENDED, (batch, stage, span.end_s))
            push(spans[-1].end_s + hardware.return_s, FINISH, (batch, spans))
        cause = replica.found_nothing()
        if cause is not None:
            meter.nothing(clock.now_s, cause)
        ask_at_s = clock.now_s + max(replica.ask_again_s(), 1e-6)
        if ask_at_s < math.inf and not clock.now_s < asked_at_s <= ask_at_s:
            asked_at_s = ask_at_s
            push(ask_at_s, ASK)
    return Run(lives, meter, last_s, num_batches)


def errors(measured: Mapping[str, float], predicted: Mapping[str, float]) -> dict[str, float]:
    """How far off a simulation was, of each workload that was measured too: (predicted - measured) / measured. A
    simulation is worth what it says of workloads on which nothing was fitted."""
    return {name: predicted[name] / value - 1.0 for name, value in measured.items() if name in predicted}
