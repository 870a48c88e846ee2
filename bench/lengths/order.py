"""Latency per token when short outputs start first, against first come, first served, in the simulator.

    python -m bench.lengths.order --trace azure_conv_2023.csv --tau 0.375

The requests are those of a trace, with Poisson arrivals. The replica's scheduler is the real one, in the virtual time
of `bench.pipeline.simulator`: an 8B model on one H200, or a 70B model in four stages on four. Outputs end where the
trace says, which the scheduler does not know. In the place of its predictor there is one whose predictions are the real
logarithms with noise, so much that Kendall's tau is --tau. With --tau 0.999 the order is that of the real lengths.

Levels are fractions of the requests per second that are served if all come at once. Beyond the capacity the queue grows
as long as the load lasts, and with it the worth of an order. So the number of requests counts: 3,000 take two minutes
at 1.2 of the capacity of an 8B model, and 9,000 take six. A shorter overload mostly measures the time to decode, which
no order changes.

| figure, for each level | meaning |
| --- | --- |
| `latency_vs_fcfs` | latency per token: from arrival to last token, over the output tokens; mean of the requests |
| `wait_p99_vs_fcfs` | time until a request starts, over its own output tokens; 99th percentile |
| `throughput_vs_fcfs` | output tokens per second |

Each is divided by that of `scheduling_policy: fcfs`.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.load.options import count
from bench.load.trace import read
from bench.pipeline.layout import ParallelLayout
from bench.pipeline.simulated_replica import SimulatedReplica
from bench.pipeline.simulated_site import PLANS, Machines
from bench.pipeline.simulator import Request, Run, SimulatedClock, simulate
from bench.results import Figure, add_options, publish
from pipeline.cost import CostModel
from pipeline.padding import PaddedSizes
from pipeline.roofline import DEVICES, LINKS, MODELS
from shoal.help import Parser
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore
from worker.lengths import LengthEstimate, OutputLengthPredictor, PredictedLength, kendall_tau
from worker.messages import Generate, SamplingParams
from worker.scheduler.scheduled_step import ScheduledStep

TOKEN_BUDGET = 8192  # a replica's default on a GPU
MAX_OUTPUT_TOKENS = 4096  # limit of all requests, and of the trace's outputs
MAX_PROMPT_TOKENS = 32_768
TEXT, END = 0, 1  # sampled tokens
SETTINGS = {name: {"schedule": "uniform", "scheduling_policy": name} for name in ("fcfs", "shortest")}
SITES = {
    "llama-8b": (Machines(MODELS["llama-8b"], DEVICES["h200"], LINKS["nvlink"], LINKS["sockets"], 1, 1), 1),
    "llama-70b": (PLANS["llama-70b"], 4),
}


class NoisyPredictor(OutputLengthPredictor):
    """Predicts the real lengths with noise. `logs`: the noisy logarithm of each request's length, by request id;
    `mean`, `spread`, `share`: of the real logarithms, and the part of their variance that the noisy ones know."""

    def __init__(self, logs: dict[str, float], mean: float, spread: float, share: float) -> None:
        super().__init__()
        self._logs, self._center, self._known = logs, mean, share
        self._left = max(0.05, spread * math.sqrt(1 - share))

    def arrived(self, request: Generate) -> PredictedLength:
        log_mean = self._center + self._known * (self._logs[request.request_id] - self._center)
        return PredictedLength(np.zeros(1, dtype=np.uint16), LengthEstimate(log_mean, self._left))

    def again(self, length: PredictedLength) -> PredictedLength:
        return length


class EndingReplica(SimulatedReplica):
    """A simulated replica whose outputs end with a token that the scheduler does not foresee."""

    def __init__(
        self, config: WorkerConfig, costs: CostStore, clock: SimulatedClock, lengths: OutputLengthPredictor
    ) -> None:
        super().__init__(config, costs, clock, prompt_of, eos_token_ids=[END], lengths=lengths)
        self._to_come: dict[str, int] = {}

    def sampling(self, request: Request) -> SamplingParams:
        self._to_come[str(request.number)] = request.output
        return SamplingParams(max_tokens=MAX_OUTPUT_TOKENS, temperature=0.0)

    def tokens_of(self, step: ScheduledStep, chosen: np.ndarray) -> np.ndarray:
        tokens = np.full(len(chosen), TEXT, dtype=np.int64)
        for i, chunk in enumerate(chosen.tolist()):
            name = step.sequences[chunk].request_id
            self._to_come[name] -= 1
            if not self._to_come[name]:
                tokens[i] = END
        return tokens


def noise_for(tau: float, logs: np.ndarray, rng: np.random.Generator) -> float:
    """The standard deviation of normal noise with which Kendall's tau of `logs` [n] is `tau`: by bisection."""
    sample, normal = logs[:1000], rng.normal(size=min(1000, len(logs)))
    low, high = 0.0, 100.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if kendall_tau(sample + middle * normal, sample) > tau else (low, middle)
    return high


def predictor(requests: Sequence[Request], tau: float, seed: int) -> OutputLengthPredictor:
    """A predictor of these requests' outputs with this tau."""
    rng = np.random.default_rng(seed)
    logs = np.log([request.output for request in requests])
    noise = noise_for(tau, logs, rng)
    noisy = logs + rng.normal(0, noise, len(logs))
    variance = float(logs.var())
    share = variance / (variance + noise**2)
    named = {str(request.number): value for request, value in zip(requests, noisy.tolist(), strict=True)}
    return NoisyPredictor(named, float(logs.mean()), float(logs.std()), share)


def run(
    model: str, requests: Sequence[Request], own: Mapping[str, Any], max_running: int, tau: float, seed: int
) -> Run:
    """Simulates the requests on a new replica with its `own` settings."""
    machines, stages = SITES[model]
    layout = ParallelLayout(tp=1, pp=stages)
    rows = PaddedSizes.of_graphs(max_running, TOKEN_BUDGET)
    hardware = machines.hardware(layout, rows)
    settings = {
        "pp": stages,
        "max_running": max_running,
        "context_length": 1 << 20,
        "kv_tokens": machines.kv_tokens(layout),
        "max_waiting": len(requests),
        "token_budget": TOKEN_BUDGET,
        **own,
    }
    clock = SimulatedClock()
    costs = CostStore([CostModel(seconds_of, rows=rows) for seconds_of in hardware.stages])
    config = WorkerConfig.model_validate(settings)
    replica = EndingReplica(config, costs, clock, predictor(requests, tau, seed))
    return simulate(requests, replica, hardware, clock)


def prompt_of(request: Request) -> list[int]:
    """A prompt that has nothing in common with another one."""
    return np.random.default_rng(request.number).integers(0, 30_000, request.prompt).tolist()


def summary(outcome: Run) -> dict[str, float]:
    output = np.array([life.request.output for life in outcome.lives])
    latency_s = np.array([life.tokens_s[-1] - life.request.arrived_s for life in outcome.lives])
    return {
        "latency": float((latency_s / output).mean()),
        "wait_p99": float(np.quantile(outcome.values("delay") / output, 0.99)),
        "longest_wait_s": float(outcome.values("delay").max()),
        "ttft_p50_s": outcome.quantile("ttft", 0.5),
        "ttft_p99_s": outcome.quantile("ttft", 0.99),
        "throughput": outcome.output_tokens_per_s(),
    }


def at_rate(requests: Sequence[Request], rate_s: float, seed: int) -> list[Request]:
    """The requests with Poisson arrivals at this rate."""
    at_s = np.cumsum(np.random.default_rng(seed).exponential(1 / rate_s, len(requests)))
    return [request._replace(arrived_s=float(when)) for request, when in zip(requests, at_s, strict=True)]


def main(argv: list[str] | None = None) -> int:
    """Simulates, prints a line for each run, writes the result."""
    p = Parser("python -m bench.lengths.order", __doc__)
    p.add_argument("--trace", type=Path, required=True, metavar="FILE", help="its lengths, in their order")
    p.add_argument("--model", choices=sorted(SITES), default="llama-8b", help="default: %(default)s")
    p.add_argument("--requests", type=count, default=9000, metavar="N", help="default: %(default)s")
    p.add_argument("--max-running", type=count, default=256, metavar="N", help="default: %(default)s")
    p.add_argument("--tau", type=float, default=0.375, help="default: %(default)s")
    p.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    p.add_argument("--levels", type=float, nargs="+", default=[0.5, 0.9, 1.2], help="default: 0.5 0.9 1.2")
    add_options(p, None, "ranks.sim.MODEL.tau_TAU")
    args = p.parse_args(argv)
    try:
        rows = [row for row in read(args.trace) if row.prompt_tokens <= MAX_PROMPT_TOKENS][: args.requests]
    except (ValueError, OSError) as error:
        p.error(str(error))
    whole = [
        Request(i, 0.0, row.prompt_tokens, min(row.output_tokens, MAX_OUTPUT_TOKENS)) for i, row in enumerate(rows)
    ]
    title = args.name or f"ranks.sim.{args.model}.tau_{args.tau:g}"
    simulated = partial(run, args.model, max_running=args.max_running, tau=args.tau, seed=args.seed)
    capacity_s = len(whole) / simulated(whole, own=SETTINGS["fcfs"]).seconds
    print(f"{args.model}: {capacity_s:.1f} requests/s if all {len(whole)} come at once", flush=True)
    raw: dict[str, dict[str, dict[str, float]]] = {}
    figures = []
    for level in args.levels:
        timed = at_rate(whole, level * capacity_s, args.seed)
        found = raw[f"{level:g}"] = {name: summary(simulated(timed, own=own)) for name, own in SETTINGS.items()}
        for policy, values in found.items():
            print(f"  {level:4.0%} {policy:8}", *(f"{name} {value:.4g}" for name, value in values.items()), flush=True)
        for name, higher in (("latency", False), ("wait_p99", False), ("throughput", True)):
            ratio = found["shortest"][name] / found["fcfs"][name]
            figures.append(Figure(f"{title}.{level:.0%}".rstrip("%") + f".{name}_vs_fcfs", ratio, "ratio", higher))
    about = {"capacity_s": capacity_s, "levels": raw, "trace": args.trace.name, "requests": len(whole)}
    publish(title, figures, about, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
