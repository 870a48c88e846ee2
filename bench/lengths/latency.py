"""Latency per token when short outputs start first, against first come, first served, on a CPU with a model's own
outputs.

    python -m bench.lengths.latency --packages DIR

Prompts are those of `bench.lengths.prompts`, as chats at temperature 1. There are two replicas in this process, one for
each policy, and one runs at a time.

1. The replica that orders by predicted lengths answers the first prompts all at once. So it learns, and its requests
   per second are the capacity.
2. At each level, a fraction of that capacity, both replicas get the same new requests with the same Poisson arrivals,
   one replica after the other. A level beyond the capacity needs many requests: the queue is only the part of the
   arrivals that is too many, and without a queue there is no order.

| figure, for each level | meaning |
| --- | --- |
| `latency_vs_fcfs` | latency per token: from arrival to last token, over the output tokens; mean of the requests |
| `wait_p99_of_bound` | time until a request starts, over the most that its work allows (`starvation_s` and `PATIENCE_S` for each step of its work); 99th percentile |
| `throughput_vs_fcfs` | output tokens per second, until the last request has ended |

The first and the last are divided by those of `scheduling_policy: fcfs`. `ranks.cpu.tau` is Kendall's tau between the
lengths that were predicted on arrival at all levels and the real ones.
"""  # noqa: E501

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.lengths.accuracy import tokenized
from bench.lengths.prompts import fetch, prompts
from bench.load.options import count
from bench.results import FOLDER, Figure, write
from shoal.help import Parser
from worker.config import WorkerConfig
from worker.engine.engine import Engine, frozen_heap
from worker.lengths import kendall_tau
from worker.messages import Generate, SamplingParams
from worker.scheduler.waiting_queue import PATIENCE_S, PROMPT_TOKENS_A_STEP

POLICIES = ("fcfs", "shortest")


@dataclass
class Served:
    """A request that a replica has served. Times are in seconds since the run's begin; `queue_s`: it waited so long."""

    prompt_tokens: int
    arrived_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    output_tokens: int = 0
    queue_s: float = 0.0


def serve(engine: Engine, asked: Sequence[list[int]], arrivals_s: Sequence[float], max_tokens: int) -> list[Served]:
    """Runs prompts that arrive at these seconds after now, ascending, to their ends."""
    served = [Served(len(ids), at_s) for ids, at_s in zip(asked, arrivals_s, strict=True)]
    began_s, arrived, ended = time.monotonic(), 0, 0
    with frozen_heap():
        while ended < len(asked):
            now_s = time.monotonic() - began_s
            while arrived < len(asked) and arrivals_s[arrived] <= now_s:
                sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=arrived)
                engine.add(Generate(request_id=str(arrived), prompt_ids=asked[arrived], sampling=sampling))
                arrived += 1
            if not engine.has_work:
                time.sleep(max(0.0, arrivals_s[arrived] - now_s))
                continue
            outputs = engine.step()
            now_s = time.monotonic() - began_s
            for output in outputs:
                request = served[int(output.request_id)]
                if output.failure is not None:
                    raise RuntimeError(f"a request failed: {output.failure.message}")
                if output.queue_s is not None:
                    request.queue_s, request.first_s = output.queue_s, now_s
                request.output_tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    request.last_s, ended = now_s, ended + 1
    return served


def summary(served: Sequence[Served], starvation_s: float) -> dict[str, float]:
    """The figures of one run."""
    output = np.array([request.output_tokens for request in served])
    latency_s = np.array([request.last_s - request.arrived_s for request in served])
    steps = output + np.array([request.prompt_tokens for request in served]) / PROMPT_TOKENS_A_STEP
    waited_s = np.array([request.queue_s for request in served])
    return {
        "latency": float((latency_s / output).mean()),
        "wait_p99_of_bound": float(np.quantile(waited_s / (starvation_s + PATIENCE_S * steps), 0.99)),
        "longest_wait_s": float(waited_s.max()),
        "ttft_p50_s": float(np.median([request.first_s - request.arrived_s for request in served])),
        "throughput": float(output.sum() / max(request.last_s for request in served)),
    }


def figures(level: float, runs: dict[str, dict[str, float]]) -> list[Figure]:
    """The figures of one level, from the summaries of both policies."""
    title, fcfs, shortest = f"ranks.cpu.{level:.0%}".rstrip("%"), runs["fcfs"], runs["shortest"]
    return [
        Figure(f"{title}.latency_vs_fcfs", shortest["latency"] / fcfs["latency"], "ratio", False),
        Figure(f"{title}.wait_p99_of_bound", shortest["wait_p99_of_bound"], "ratio", False),
        Figure(f"{title}.throughput_vs_fcfs", shortest["throughput"] / fcfs["throughput"], "ratio", True),
    ]


def parser() -> Parser:
    p = Parser("python -m bench.lengths.latency", __doc__)
    p.add_argument("--model", default="SmolLM2-135M-Instruct", help="default: %(default)s")
    p.add_argument("--packages", type=Path, metavar="DIR", help="folder for the packages; default: a new one")
    p.add_argument("--learn", type=count, default=160, metavar="N", help="first prompts (default %(default)s)")
    p.add_argument("--levels", type=float, nargs="+", default=[0.5, 0.9, 1.2], help="default: 0.5 0.9 1.2")
    p.add_argument(
        "--requests", type=count, nargs="+", default=[48], metavar="N", help="of each level, or of all (default 48)"
    )
    p.add_argument("--max-tokens", type=count, default=160, help="limit of an output (default %(default)s)")
    p.add_argument("--max-running", type=count, default=8, metavar="N", help="slots (default %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default %(default)s)")
    p.add_argument("--name", default="ranks.cpu", help="of the result (default %(default)s)")
    p.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="folder of the result")
    return p


def measure(args: argparse.Namespace, asked: Sequence[list[int]], model: Path) -> tuple[list[Figure], dict]:
    """The figures of all levels, and the summaries of all runs."""
    settings = {"device": "cpu", "max_running": args.max_running}
    configs = {name: WorkerConfig.model_validate({**settings, "scheduling_policy": name}) for name in POLICIES}
    engines = {name: Engine(model, config) for name, config in configs.items()}
    rng, made, raw = np.random.default_rng(args.seed), list[Figure](), dict[str, object]()
    try:
        engines["fcfs"].generate([asked[0]], SamplingParams(max_tokens=8))  # what happens once counts for neither
        first = serve(engines["shortest"], asked[: args.learn], [0.0] * args.learn, args.max_tokens)
        capacity_s = args.learn / max(request.last_s for request in first)
        print(f"{capacity_s:.2f} requests/s if all {args.learn} come at once", flush=True)
        done, predicted, real = args.learn, list[float](), list[int]()
        for level, number in zip(args.levels, args.requests, strict=True):
            batch = asked[done : done + number]
            arrivals_s = np.cumsum(rng.exponential(1 / (level * capacity_s), len(batch))).tolist()
            lengths = engines["shortest"].scheduler.lengths
            estimates = [
                lengths.arrived(
                    Generate(request_id="", prompt_ids=ids, sampling=SamplingParams(max_tokens=args.max_tokens))
                )
                for ids in batch
            ]
            predicted += [length.estimate.log_mean for length in estimates if length.estimate is not None]
            runs = {}
            for name, engine in engines.items():
                served = serve(engine, batch, arrivals_s, args.max_tokens)
                runs[name] = summary(served, configs[name].starvation_s)
                print(f"  {level:4.0%} {name:8}", *(f"{key} {x:.4g}" for key, x in runs[name].items()), flush=True)
            real += [request.output_tokens for request in served]
            done, raw[f"{level:g}"] = done + number, runs
            made += figures(level, runs)
        if len(predicted) == len(real):
            made.append(Figure("ranks.cpu.tau", kendall_tau(np.array(predicted), np.array(real)), "tau", True))
    finally:
        for engine in engines.values():
            engine.close()
    return made, {"capacity_s": capacity_s, "levels": raw}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the figures, writes the result."""
    p = parser()
    args = p.parse_args(argv)
    if len(args.requests) == 1:
        args.requests *= len(args.levels)
    if len(args.requests) != len(args.levels):
        p.error(f"--requests has {len(args.requests)} numbers, and --levels {len(args.levels)}")
    from cluster.models import ModelError, resolve

    with tempfile.TemporaryDirectory() as scratch:
        packages = args.packages or Path(scratch)
        packages.mkdir(parents=True, exist_ok=True)
        fetch(packages)
        needed = args.learn + sum(args.requests)
        asked = prompts(packages, args.seed)[:needed]
    if len(asked) < needed:
        p.error(f"there are {len(asked)} prompts, and --learn, --requests and --levels need {needed}")
    try:
        model = resolve(args.model)
    except ModelError as error:
        p.error(str(error))
    made, raw = measure(args, tokenized(asked, args.model), model)
    for figure in made:
        print(f"{figure.name:40} {figure.value:.3f} {figure.unit}")
    about = {
        key: getattr(args, key) for key in ("model", "learn", "requests", "max_tokens", "max_running", "seed")
    } | raw
    print(f"written: {write(args.name, made, about, folder=args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
