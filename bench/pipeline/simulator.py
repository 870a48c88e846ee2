"""Simulator of a pipeline in virtual time: the effect of a schedule on requests, stages and links.

The scheduler is the real one, behind the protocol `SimulatedScheduler`. The caller supplies it
(`bench.pipeline.simulated_replica`). It reads `SimulatedClock` instead of the time, and makes micro-batches with the
same policies and cost models as on devices. Stages are servers that take micro-batches in order, for as long as
`Hardware` says. Links have latency and bandwidth.

    clock = SimulatedClock()
    # replica: a bench.pipeline.simulated_replica.SimulatedReplica on the same clock
    run = simulate(requests, replica, hardware, clock)
    run.output_tokens_per_s(), run.quantile("tbt", 0.99), run.meter.fractions()
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipeline.meter import Meter, Span
from pipeline.roofline import LinkSpec
from pipeline.shape import BatchShape


class SimulatedClock:
    """The virtual time, in seconds. Callable like `time.monotonic`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Request(NamedTuple):
    """A request: its arrival, and its numbers of prompt and output tokens. `number`: its index in the list of all."""

    number: int
    arrived_s: float
    prompt: int
    output: int


@dataclass
class MicroBatch:
    """A micro-batch that a replica sends.

    - `step`: ascends.
    - `started`: numbers of the requests that are in a micro-batch for the first time.
    - `after`: a step in flight whose tokens it takes from the last stage, on the device.
    - `plan`: private to the replica.
    """

    step: int
    shape: BatchShape
    started: list[int]
    after: int | None = None
    plan: Any = None


class SimulatedScheduler(Protocol):
    """A scheduler with its policy, as the simulator drives it."""

    def arrive(self, request: Request) -> None:
        """Adds a request."""

    def schedule(self) -> MicroBatch | None:
        """The next micro-batch, or None if none is to be sent now. Called until it returns None."""

    def ask_again_s(self) -> float:
        """Seconds after which to call `schedule` again if nothing else happens, after it has just returned None."""

    def idle_reason(self) -> str | None:
        """The cause, as named by `Meter`, if `schedule` has just returned None because there was nothing to send."""

    def ended(self, batch: MicroBatch, stage: int, at_s: float) -> None:
        """Reports that a stage finished a micro-batch at `at_s`."""

    def finish(self, batch: MicroBatch, seconds: list[float]) -> Iterable[int]:
        """Reports that the tokens of the oldest micro-batch are back. `seconds`: its time on each stage. Returns the
        numbers of the requests that got a token."""

    def decode_s(self, shape: BatchShape) -> float:
        """Predicted part of a micro-batch's time that its decodes cause."""


@dataclass
class Hardware:
    """Stages and links.

    | field | meaning |
    | --- | --- |
    | `stages` | for each stage, the seconds that it takes for a micro-batch |
    | `link` | link between consecutive stages; None takes no time |
    | `token_bytes` | bytes that a token sends from stage to stage |
    | `overlap` | whether a stage computes while it sends; otherwise it waits until the send is through |
    | `plan_s` | from the scheduler's decision to the plan's arrival at the first stage |
    | `return_s` | from the end of the last stage to the arrival of the tokens at the scheduler |
    | `jitter` | relative standard deviation of each stage's times |

    Tokens that go to the first stage on the devices take the latency of a link instead of `return_s`.
    """

    stages: Sequence[Callable[[BatchShape], float]]
    link: LinkSpec | None = None
    token_bytes: int = 0
    overlap: bool = True
    plan_s: float = 5e-4
    return_s: float = 3e-4
    jitter: float = 0.0
    seed: int = 0

    def exposed_s(self, tokens: int = 1) -> float:
        """Seconds that a micro-batch spends on its way without being computed."""
        way = self.link.send_s(tokens * self.token_bytes) if self.link is not None else 0.0
        return self.plan_s + self.return_s + (len(self.stages) - 1) * way

    def changes(self) -> Iterator[tuple[str, "Hardware"]]:
        """Variants with one improvement each, by name."""
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
    """The outcome of a request."""

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
        """A metric of all requests that got far enough, in seconds: `delay` (until first scheduled), `ttft`, or `tbt`
        (every time between two tokens)."""
        if what == "delay":
            return np.array([life.started_s - life.request.arrived_s for life in self.lives])
        begun = [life for life in self.lives if life.tokens_s]
        if what == "ttft":
            return np.array([life.ttft_s for life in begun])
        return np.concatenate([np.diff(life.tokens_s) for life in begun] or [np.empty(0)])

    def quantile(self, what: str, q: float) -> float:
        """A quantile of `values`. Infinite if it falls on requests that never got far enough, NaN without any
        values."""
        values = np.sort(np.nan_to_num(self.values(what), nan=math.inf))
        return float(values[max(0, math.ceil(q * len(values)) - 1)]) if len(values) else math.nan

    def output_tokens_per_s(self) -> float:
        return sum(len(life.tokens_s) for life in self.lives) / self.seconds

    def input_tokens_per_s(self) -> float:
        return sum(life.request.prompt for life in self.lives if life.tokens_s) / self.seconds


class _Stages:
    """The time lines of stages and links. Micro-batches never overtake, so the times of each are known when it is
    sent."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.free_s = [0.0] * len(hardware.stages)
        self.link_free_s = [0.0] * len(hardware.stages)
        self.random = np.random.default_rng(hardware.seed)

    def send(self, shape: BatchShape, now_s: float, tokens_s: float) -> list[Span]:
        """The spans of a micro-batch on all stages. `tokens_s`: when the tokens that it waits for leave the last
        stage."""
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
    replica: SimulatedScheduler,
    hardware: Hardware,
    clock: SimulatedClock,
    until_s: float = math.inf,
    measure_s: tuple[float, float] = (0.0, math.inf),
) -> Run:
    """Runs `requests`, in the order of their arrival, to their end or up to `until_s`.

    The meter counts micro-batches that are planned at or after the first time of `measure_s` and before the second.
    """
    stages, meter = _Stages(hardware), Meter(len(hardware.stages))
    lives = [Life(request) for request in requests]
    events: list[tuple[float, int, int, Any]] = []
    number = 0  # of an event; events at the same time run in the order in which they were made

    def push(at_s: float, kind: int, what: Any = None) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (at_s, number, kind, what))

    for request in requests:
        push(request.arrived_s, ARRIVAL, request)
    returning_s: dict[int, float] = {}  # when the last stage is done with each step in flight
    num_batches = 0
    last_s = 0.0
    asked_at_s = -1.0  # when the newest ASK is due; older ones are ignored
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
            for stage, span in enumerate(spans):  # the last stage runs with the scheduler
                told_s = span.end_s + (hardware.plan_s if stage < len(spans) - 1 else 0.0)
                push(told_s, ENDED, (batch, stage, span.end_s))
            push(spans[-1].end_s + hardware.return_s, FINISH, (batch, spans))
        cause = replica.idle_reason()
        if cause is not None:
            meter.nothing(clock.now_s, cause)
        ask_at_s = clock.now_s + max(replica.ask_again_s(), 1e-6)
        if ask_at_s < math.inf and not clock.now_s < asked_at_s <= ask_at_s:
            asked_at_s = ask_at_s
            push(ask_at_s, ASK)
    return Run(lives, meter, last_s, num_batches)


def errors(measured: Mapping[str, float], predicted: Mapping[str, float]) -> dict[str, float]:
    """Relative errors of a simulation, (predicted - measured) / measured, by workload. Only workloads on which nothing
    was fitted validate it."""
    return {name: predicted[name] / value - 1.0 for name, value in measured.items() if name in predicted}
