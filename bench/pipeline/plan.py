"""How many replicas, of which layout, carry a traffic within its limits: by simulation, before any GPU is rented.

    shoal plan --model ./Llama-3.1-8B --device "NVIDIA H200" --gpus 8 --traffic requests.csv
    shoal plan --model ./Llama-3.1-8B --gpus 8 --traffic requests.csv --rate 60 --slo-tbt 0.05
    shoal plan --model SmolLM2-135M-Instruct --device cpu --traffic requests.csv --measure

The model needs its config.json alone. The traffic is a trace: Azure's CSV, Mooncake's JSON lines or Vidur's CSV of
lengths; requests that are longer than the model's context are left out. A layout carries a rate if 99% of the requests
get their first token within --slo-ttft and 99% of their further tokens within --slo-tbt. All decisions of a replica are
made by its own code, in virtual time; steps take as long as replicas have measured on this machine for this model,
device and layout, else as long as the device's rates say. Not simulated: HTTP, the router, drafts, windows of
attention, and the prefixes that replicas share with each other.

--measure starts a server of the first layout here, and looks for the rate that it carries: `NAME.error` is the
simulated rate by the measured one, less 1.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import results
from bench.load import metrics, options
from bench.load.metrics import Sample
from bench.load.workload import Session, Vocabulary
from bench.pipeline.capacity import capacity
from bench.pipeline.layout import ParallelLayout
from bench.pipeline.simulated_replica import SimulatedReplica
from bench.pipeline.simulator import Hardware, Request, SimulatedClock, simulate
from bench.replica.online import put
from bench.replica.over_http import flags as as_flags
from bench.replica.server_process import ServerFailed, server
from bench.results import Figure, number
from cluster import models
from cluster.conversion import ModelError
from pipeline.roofline import DEVICES, LINKS, DeviceSpec
from shoal import flags
from shoal.help import Parser
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore, known_device, rows_of, stage_spec
from worker.executor.gpu_defaults import on_gpu
from worker.executor.memory_budget import KVBudget, cpu_tokens, token_bytes
from worker.folders import cache_folder
from worker.models.config import DecoderConfig, decoder_config, in_memory, read_config
from worker.models.sharding import Shard

GOOD = 0.99  # share of the requests that must be within the limits
PRECISION = 0.03  # of a rate
TOKEN_RANGE = 1000, 30_000  # of prompts' ids
MAX_RATE_FACTOR = 4.0  # times the requests per second when all arrive at once
JITTER = 0.02  # relative standard deviation of the times of steps
LAYOUT = ("tp", "pp", "device")  # settings that are this command's own options


class NoPlan(Exception):
    """Nothing can be planned. The message is for the user."""


def parser() -> argparse.ArgumentParser:
    """The command line. Settings of a replica are flags."""
    p = Parser("shoal plan", __doc__)
    p.add_argument("--model", required=True, metavar="MODEL", help="as for `shoal serve`; weights are not read")
    p.add_argument(
        "--device", dest="device_name", metavar="NAME", help="cpu, or a GPU's name (default: this machine's)"
    )
    p.add_argument("--gpus", type=options.count, default=1, metavar="N", help="GPUs there are; on CPUs, replicas")
    p.add_argument("--per-node", type=options.count, default=8, metavar="N", help="GPUs of a machine (default: 8)")
    p.add_argument("--link", choices=sorted(LINKS), default="ethernet_100g", help="between machines (%(default)s)")
    p.add_argument("--tp", type=options.count, metavar="N", help="only this size (default: all that fit)")
    p.add_argument("--pp", type=options.count, metavar="N", help="only this size (default: all that fit)")
    p.add_argument("--traffic", type=Path, required=True, metavar="FILE", help="trace of requests")
    p.add_argument("--rate", type=options.positive, metavar="R", help="requests per second (default: the trace's)")
    p.add_argument("--requests", type=options.count, default=500, metavar="N", help="of the trace (default: 500)")
    p.add_argument("--slo-ttft", type=options.positive, default=1.0, metavar="S", help="default: %(default)s s")
    p.add_argument("--slo-tbt", type=options.positive, default=0.1, metavar="S", help="default: %(default)s s")
    p.add_argument("--measure", action="store_true", help="measure here what the first layout carries")
    results.add_options(p, "none")
    flags.add(p, WorkerConfig, LAYOUT)
    return p


@dataclass(frozen=True)
class Load:
    """The traffic, and the limits within which it is to be served."""

    trace: Path
    requests: int
    slo_ttft_s: float
    slo_tbt_s: float
    most_tokens: int  # of a prompt, which is cut to it

    def options(self, rate: float, attempt: int = 0) -> list[str]:
        """The options of `shoal bench serve` for this load at a rate. Attempts differ in their prompts alone: a server
        has those that it has seen in its cache."""
        ids = ":".join(str(end + attempt) for end in TOKEN_RANGE)
        limits = ["--slo-ttft", str(self.slo_ttft_s), "--slo-tbt", str(self.slo_tbt_s)]
        cut = ["--max-prompt", str(self.most_tokens)]
        what = ["--trace", str(self.trace), "--requests", str(self.requests), "--token-range", ids]
        return [*what, "--rate", f"{rate:.4g}", *cut, *limits]

    def at(self, rate: float) -> list[Session]:
        """The requests, which arrive as a Poisson process."""
        return options.plan(options.parser().parse_args(self.options(rate)))


@dataclass(frozen=True)
class Simulated:
    """A replica of one layout.

    | field | meaning |
    | --- | --- |
    | `config` | its settings, with `kv_tokens` and `context_length` |
    | `costs` | makes cost models for a run, which learn from it |
    | `hardware` | its stages |
    | `is_measured` | whether replicas have measured all of its stages on this machine |
    """

    layout: ParallelLayout
    config: WorkerConfig
    costs: Callable[[], CostStore]
    hardware: Hardware
    is_measured: bool

    def serve(self, sessions: Sequence[Session], load: Load) -> dict[str, Any]:
        """The summary (`bench.load.metrics.summarise`) of requests of one turn each, in order of arrival."""
        vocabulary, clock = Vocabulary(0, 0, 10_000), SimulatedClock()
        requests = [
            Request(i, session.arrival_s or 0.0, session.turns[0].prompt_tokens, session.turns[0].output_tokens)
            for i, session in enumerate(sessions)
        ]
        replica = SimulatedReplica(
            self.config, self.costs(), clock, lambda asked: vocabulary.ids(sessions[asked.number].turns[0].spans)
        )
        samples = []
        for life in simulate(requests, replica, self.hardware, clock).lives:
            asked = life.request
            sample = Sample(asked.arrived_s, asked.output, sent_s=asked.arrived_s, end_s=life.tokens_s[-1])
            sample.chunk_s, sample.output_tokens = life.tokens_s, len(life.tokens_s)
            sample.prompt_tokens = asked.prompt
            samples.append(sample)
        return metrics.summarise(samples, load.slo_ttft_s, load.slo_tbt_s)


@dataclass(frozen=True)
class Carrying:
    """A layout and its rate. `rate`: requests per second of one replica; `at_rate`: summary of a replica's part of the
    traffic, None where no rate is within the limits."""

    replica: Simulated
    rate: float
    replicas: int
    at_rate: dict[str, Any] | None

    @property
    def gpus(self) -> int:
        return self.replicas * self.replica.layout.devices


def carried_rate(serve: Callable[[float], dict[str, Any]], guess: float, most: float) -> float:
    """The highest rate at which the summary that `serve` returns is within the limits; 0 if none is."""
    return capacity(lambda rate: serve(rate)["attained"] >= GOOD, guess, most, PRECISION)


def simulated(args: argparse.Namespace, layout: ParallelLayout, folder: Path, longest: int) -> Simulated:
    """A replica of a layout for requests of up to `longest` tokens. Raises NoPlan if it cannot hold them, and
    ValueError for a layout that the model does not allow."""
    device = torch.device("cpu" if args.device_name == "cpu" else "cuda")
    config = WorkerConfig.model_validate(flags.given(args, WorkerConfig) | {"tp": layout.tp, "pp": layout.pp})
    spec = known_device(args.device_name)
    if spec is None:
        raise NoPlan(f"the rates of {args.device_name!r} are not known: known are {', '.join(DEVICES)}")
    model = decoder_config(read_config(folder))
    if device.type == "cuda":  # its defaults, also where this machine has no GPU
        config = on_gpu(config, model, int(spec.memory_bytes))
    whole = in_memory(model, device.type, config.dtype, config.dequantize)
    shards = [Shard(whole, 0, layout.tp, stage, layout.pp, config.cut) for stage in range(layout.pp)]
    tokens = config.kv_tokens or min(_kv_tokens(shard, config, spec, longest, device) for shard in shards)
    tokens -= tokens % config.page_size
    if tokens < longest:
        room = f"{tokens:,} tokens of KV" if tokens > 0 else "no KV next to its weights"
        raise NoPlan(f"{layout} has room for {room}, and requests have up to {longest:,} tokens")

    def costs() -> CostStore:
        return CostStore.load(folder, config, device, cache_folder() / "costs", args.device_name)

    rows = rows_of(config, device)
    priors = [stage_spec(folder.name, shard, config, spec.sustained(), rows) for shard in shards]
    known = costs().models
    stages = [
        model.predict if model.num_observed else prior.seconds for model, prior in zip(known, priors, strict=True)
    ]
    link = LINKS["nvlink" if layout.devices <= args.per_node else args.link] if layout.pp > 1 else None
    hardware = Hardware(stages, link, whole.hidden_size * 2, jitter=JITTER)
    settings = {"kv_tokens": tokens, "context_length": longest, "max_waiting": max(config.max_waiting, args.requests)}
    config = config.model_copy(update=settings)
    return Simulated(layout, config, costs, hardware, all(model.num_observed for model in known))


def _kv_tokens(shard: Shard, config: WorkerConfig, spec: DeviceSpec, longest: int, device: torch.device) -> int:
    """Tokens whose KV a rank holds."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    budget = KVBudget(shard.whole, shard.config, dtype, config, longest)
    if device.type == "cpu":
        return cpu_tokens(budget.bytes_per_token, config.kv_memory_fraction, budget.fixed_bytes)
    stage = stage_spec("", shard, config, spec, rows_of(config, device))
    used = {} if config.kv_memory_fraction is None else {"used": config.kv_memory_fraction}
    return stage.kv_tokens(**used) * token_bytes(shard.config, dtype) // max(1, budget.bytes_per_token)


def layouts(args: argparse.Namespace) -> list[ParallelLayout]:
    """Powers of two that the machines have, fewest GPUs first; or what is given."""

    def sizes(given: int | None, most: int) -> list[int]:
        return [given] if given else [1 << i for i in range(most.bit_length()) if 1 << i <= most]

    if args.device_name == "cpu" and not (args.tp or args.pp):
        return [ParallelLayout(1, 1)]
    made = [
        ParallelLayout(tp, pp)
        for tp in sizes(args.tp, min(args.gpus, args.per_node))
        for pp in sizes(args.pp, args.gpus // tp)
        if args.device_name == "cpu" or tp * pp <= args.gpus
    ]
    return sorted(made, key=lambda layout: (layout.devices, layout.pp))


def carrying(replica: Simulated, load: Load, rate: float) -> Carrying:
    """Tries what a layout carries, and how many replicas are enough for `rate` requests per second."""
    at_once = replica.serve([Session(session.turns, 0.0) for session in load.at(1.0)], load)["requests_per_s"]
    one = carried_rate(lambda tried: replica.serve(load.at(tried), load), at_once, MAX_RATE_FACTOR * at_once)
    if not one:
        return Carrying(replica, 0.0, 0, None)
    replicas = math.ceil(rate / one)
    return Carrying(replica, one, replicas, replica.serve(load.at(rate / replicas), load))


def main(argv: list[str] | None = None) -> int:
    """Plans, prints, and measures if that is asked for. Returns the exit code."""
    args = parser().parse_args(argv)
    args.device_name = args.device_name or (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    try:
        WorkerConfig.model_validate(flags.given(args, WorkerConfig) | {"tp": 1, "pp": 1})
        folder = models.resolve(args.model, weights=args.measure and "load_format" not in vars(args))
        load, longest = _load(args, decoder_config(read_config(folder)))
        rate = args.rate or _own_rate(load)
        made = list(_carrying_layouts(args, folder, load, rate, longest))
    except (NoPlan, ModelError, options.UsageError, ValueError, OSError) as error:
        print(f"shoal plan: {error}", file=sys.stderr)
        return 1
    _print(made, args, rate)
    first, figures, raw = made[0], [], {"carrying": [_row(each) for each in made], "rate": rate}
    figures.append(Figure(f"{args.name}.rate", first.rate, "requests/s", True))
    if args.measure:
        try:
            measured = _measured(first, args, folder, load)
        except ServerFailed as error:
            print(f"shoal plan: {error}", file=sys.stderr)
            return 1
        error_of = first.rate / measured - 1.0
        print(f"measured: {number(measured)} requests/s; the simulation said {number(first.rate)} ({error_of:+.1%})")
        figures.append(Figure(f"{args.name}.measured_rate", measured, "requests/s", True))
        figures.append(Figure(f"{args.name}.error", abs(error_of), "fraction", False))
    if args.name != "none":
        print(f"written: {results.write(args.name, figures, raw, folder=args.out).name}")
    return 0


def _load(args: argparse.Namespace, model: DecoderConfig) -> tuple[Load, int]:
    """The load, and the tokens of its longest request."""
    whole = Load(args.traffic, args.requests, args.slo_ttft, args.slo_tbt, 1 << 30)
    turns = [session.turns[0] for session in whole.at(1.0)]
    context = vars(args).get("context_length") or model.context_length
    outputs = max(turn.output_tokens for turn in turns)
    if outputs >= context:
        raise NoPlan(f"{args.traffic}: outputs of {outputs:,} tokens do not fit a context of {context:,}")
    prompts = min(max(turn.prompt_tokens for turn in turns), context - outputs)
    return Load(args.traffic, len(turns), args.slo_ttft, args.slo_tbt, prompts), prompts + outputs


def _own_rate(load: Load) -> float:
    args = options.parser().parse_args(["--trace", str(load.trace), "--requests", str(load.requests)])
    times = [session.arrival_s for session in options.plan(args)]
    first, last = times[0], times[-1]
    if first is None or last is None or last <= first:
        raise NoPlan(f"{load.trace} has no times: say how many requests come in a second (--rate)")
    return (len(times) - 1) / (last - first)


def _carrying_layouts(args: argparse.Namespace, folder: Path, load: Load, rate: float, longest: int) -> list[Carrying]:
    """All layouts, the best first: enough GPUs, the fewest, the soonest first token. Raises NoPlan if none carries
    anything."""
    made, why = [], []
    for layout in layouts(args):
        try:
            replica = simulated(args, layout, folder, longest)
        except (NoPlan, ValueError) as error:
            why.append(str(error))
            continue
        if sys.stderr.isatty():
            print(f"simulating {layout} ...", file=sys.stderr)
        found = carrying(replica, load, rate)
        if found.at_rate is None:
            why.append(f"{layout} carries no rate within the limits")
        else:
            made.append(found)
    if not made:
        raise NoPlan("; ".join(why) or f"no layout has {args.gpus} GPUs or fewer")
    return sorted(made, key=lambda each: (each.gpus > args.gpus, each.gpus, (each.at_rate or {})["ttft_s"]["p99"]))


def _measured(first: Carrying, args: argparse.Namespace, folder: Path, load: Load) -> float:
    """The rate that one replica carries here. Raises ServerFailed."""
    settings = flags.given(args, WorkerConfig) | {"model": str(folder), "replicas": 1}
    layout = first.replica.layout
    settings |= {"tp": layout.tp, "pp": layout.pp, "device": "cpu" if args.device_name == "cpu" else "cuda"}
    attempts = itertools.count()
    with server(as_flags(settings)) as url:

        def serve(rate: float) -> dict[str, Any]:
            summary = put(url, load.options(rate, next(attempts)))
            if summary["failures"]:
                raise ServerFailed(f"requests failed: {summary['failures']}")
            spread = f"TTFT P99 {number(summary['ttft_s']['p99'])} s"
            print(f"measured {rate:.4g} requests/s: {summary['attained']:.1%} within the limits, {spread}", flush=True)
            return summary

        put(url, load.options(first.rate, next(attempts)))  # does not count
        measured = carried_rate(serve, first.rate, MAX_RATE_FACTOR * first.rate)
    if not measured:
        raise ServerFailed("no rate that was tried is within the limits here")
    return measured


def _row(each: Carrying) -> dict[str, Any]:
    config, summary = each.replica.config, each.at_rate or {}
    return {
        "layout": str(each.replica.layout),
        "kv_tokens": config.kv_tokens,
        "rate_of_one": each.rate,
        "replicas": each.replicas,
        "gpus": each.gpus,
        "ttft_s": summary["ttft_s"],
        "tbt_s": summary["tbt_s"],
        "is_measured": each.replica.is_measured,
    }


def _print(made: Sequence[Carrying], args: argparse.Namespace, rate: float) -> None:
    what = "replicas" if args.device_name == "cpu" else "GPUs"
    print(f"{number(rate)} requests/s of {args.traffic.name} on {args.device_name}\n")
    heads = ("layout", "KV tokens", "one carries", "replicas", what, "TTFT P50/P99", "TBT P99", "steps")
    rows = [heads]
    for each in made:
        summary = each.at_rate or {}
        ttft, tbt = summary["ttft_s"], summary["tbt_s"]
        rows.append(
            (
                str(each.replica.layout),
                f"{each.replica.config.kv_tokens:,}",
                f"{number(each.rate)}/s",
                str(each.replicas),
                str(each.gpus),
                f"{number(ttft['p50'])}/{number(ttft['p99'])} s",
                f"{number(tbt['p99'])} s" if tbt else "-",
                "measured" if each.replica.is_measured else "by rates",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    best = made[0]
    if best.gpus > args.gpus:
        fit = args.gpus // best.replica.layout.devices
        print(f"\n{args.gpus} are too few: {fit} replicas of {best.replica.layout} carry {number(fit * best.rate)}/s")
        return
    layout = best.replica.layout
    sizes = "".join(f" --{name} {size}" for name, size in (("tp", layout.tp), ("pp", layout.pp)) if size > 1)
    print(f"\nshoal serve --model {args.model} --replicas {best.replicas}{sizes}")


if __name__ == "__main__":
    sys.exit(main())
