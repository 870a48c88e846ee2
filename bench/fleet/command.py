"""Placement rules on a simulated fleet: the router's own code and other systems' rules, on the same requests.

    shoal bench fleet --load zipf --replicas 64
    shoal bench fleet --load mooncake --trace mooncake_conversation.jsonl --levels 0.95 1.1
    shoal bench fleet --load zipf --routers 32 --rules shoal --levels 0.8 --step-ms 200 --name fleet.sim.routers32
    shoal bench fleet --summary
    shoal bench fleet --decision --replicas 64
    shoal bench fleet --fair --levels 0.5 0.8 0.95 1.1
    shoal bench fleet --death --replicas 8

Every replica is an 8B model on an H200. Levels are fractions of the rate that the fleet can just serve if each prompt
has as much cached as one cache of all pages would have (`capacity.py`).

slowdown                time to first token, divided by that on an idle replica which has what one cache would have
slowdown_vs_best_other  99th percentile of our slowdown, divided by that of the best of all other rules
tpot_vs_least_load      median time between tokens, divided by that of our placement least_load
hit_rate_vs_one_cache   hit rate, divided by that of one cache of all pages
replicas_used           fraction of the replicas that got a request
routers_vs_1            99th percentile of our TTFT with --routers, divided by that with one router
routersN_vs_1           the largest of these over all levels

Requests of the first third warm the fleet up and do not count. --summary writes fleet.sim, with the worst and the
median of slowdown_vs_best_other over the results of all loads.

--decision writes fleet.decision: the CPU time of a placement, with prompts of 4,096 tokens and caches of 10 million
tokens together.

--fair writes fleet.fair: two clients, one of which sends 10 times as many requests as the other, with prompts as zipf.

quiet_client_ttft_vs_alone  mean TTFT of the quiet client, divided by that with the fleet to itself; the worst level
throughput_vs_fcfs          tokens served a second, divided by those where requests go by arrival; the worst level

--death writes fleet.death: a replica dies in the midst of load zipf, and its streams go on elsewhere at the router's
pace. Levels are fractions of the capacity before.

tbt_p99_vs_before   99th percentile of the other streams' time between tokens, until each lost stream has its next
                    token, divided by that before the death; the worst level
tbt_mean_vs_before  the same of the mean
took_s              from the death until the last lost stream has its next token
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import results
from bench.fleet.capacity import capacity
from bench.fleet.deaths import deaths
from bench.fleet.deaths import figures as death_figures
from bench.fleet.decision import decision_cpu_s
from bench.fleet.fairness import fairness
from bench.fleet.fairness import figures as fair_figures
from bench.fleet.hardware import ReplicaHardware
from bench.fleet.other_rules import OTHER_RULES
from bench.fleet.shoal_router import ShoalRule
from bench.fleet.simulation import FleetSimulation, PlacementRule
from bench.fleet.workloads import LOADS, MADE, FleetRequest, at_rate, from_trace
from bench.load import trace
from bench.results import Figure
from shoal.help import Parser

OURS, LEAST, ONE_ROUTER = "shoal", "least_load", "shoal_one_router"
BETTER = "slowdown_vs_best_other"
# Requests for each replica: enough that the run lasts for some seconds after the caches are warm.
REQUESTS = {"zipf": 100, "hot_prefix": 100, "bursts": 120, "agents": 150}
REPLICAS = 64
CACHED_TOKENS, DECISIONS = 10_000_000, 4000
RULES: dict[str, Callable[..., PlacementRule]] = {
    OURS: ShoalRule,
    LEAST: lambda num_replicas, **options: ShoalRule(num_replicas, "least_load", **options),
    **OTHER_RULES,
}


def make_requests(args: argparse.Namespace) -> list[FleetRequest]:
    """The requests of a load. Raises ValueError or OSError if the trace cannot be used."""
    if args.load == "mooncake":
        if args.trace is None:
            raise ValueError("load mooncake needs --trace, the file of Mooncake's conversations")
        return from_trace(trace.read(args.trace, args.requests and args.requests * args.replicas))
    count = (args.requests or REQUESTS[args.load]) * args.replicas
    return MADE[args.load](np.random.default_rng(args.seed), count, args.replicas)


def run(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The summaries of all runs, by level and rule."""
    hardware = ReplicaHardware(kv_tokens=args.kv_tokens, step_s=args.step_ms / 1e3)
    requests = make_requests(args)
    rate_s = capacity(requests, hardware, args.replicas)
    print(f"{args.load}: {args.replicas} replicas can serve {rate_s:.1f} requests/s", flush=True)
    runs: dict[str, dict[str, Any]] = {}
    for level in args.levels:
        timed = at_rate(requests, level * rate_s)
        more = [ONE_ROUTER] if args.routers > 1 and OURS in args.rules else []
        for rule in [*args.rules, *more]:
            began_s, routers = time.monotonic(), 1 if rule == ONE_ROUTER else args.routers
            make = RULES[OURS if rule == ONE_ROUTER else rule]
            named = rule not in OTHER_RULES
            rules = [
                make(args.replicas, seed=args.seed + router, **({"name": str(router)} if named else {}))
                for router in range(routers)
            ]
            outcome = FleetSimulation(timed, rules, [hardware] * args.replicas, args.seed).run().summary()
            runs.setdefault(f"{level:g}", {})[rule] = outcome
            print(
                f"  {level:4.0%} {rule:20} slowdown {outcome['slowdown_p50']:6.2f}, P99 {outcome['slowdown_p99']:7.2f}"
                f"  TTFT P99 {1e3 * outcome['ttft_p99_s']:8.0f} ms  TPOT P50 {1e3 * outcome['tpot_p50_s']:5.1f} ms"
                f"  hit rate {outcome['hit_rate']:.3f} of {outcome['ideal_hit_rate']:.3f}"
                f"  held {outcome['imbalance']:.2f}  used {outcome['replicas_used']:.2f}"
                f"  ({time.monotonic() - began_s:.0f} s)",
                flush=True,
            )
    return runs


def figures(load: str, runs: dict[str, dict[str, Any]]) -> list[Figure]:
    """The figures of one load, for the levels at which our rule ran."""
    made = []
    for level, by_rule in runs.items():
        if OURS not in by_rule:
            continue
        name, ours = f"fleet.sim.{load}.{float(level):.0%}".rstrip("%"), by_rule[OURS]
        others = [by_rule[rule]["slowdown_p99"] for rule in by_rule if rule in OTHER_RULES or rule == LEAST]
        if others:
            made.append(Figure(f"{name}.{BETTER}", ours["slowdown_p99"] / min(others), "ratio", False))
        if ONE_ROUTER in by_rule:
            ratio = ours["ttft_p99_s"] / by_rule[ONE_ROUTER]["ttft_p99_s"]
            made.append(Figure(f"{name}.routers_vs_1", ratio, "ratio", False))
        if LEAST in by_rule:
            ratio = ours["tpot_p50_s"] / by_rule[LEAST]["tpot_p50_s"]
            made.append(Figure(f"{name}.tpot_vs_least_load", ratio, "ratio", False))
        hits = ours["hit_rate"] / ours["ideal_hit_rate"]
        made.append(Figure(f"{name}.hit_rate_vs_one_cache", hits, "ratio", True))
        made.append(Figure(f"{name}.slowdown_p99", ours["slowdown_p99"], "ratio", False))
        made.append(Figure(f"{name}.replicas_used", ours["replicas_used"], "ratio", True))
    return made


def summary(folder: Path) -> list[Figure]:
    """The figures over all loads that have a result in the folder. Raises ValueError if there is none."""
    paths = [folder / f"fleet.sim.{load}.json" for load in LOADS]
    found = [json.loads(path.read_text())["runs"] for path in paths if path.exists()]
    ratios = [figure.value for runs in found for figure in figures("any", runs) if figure.name.endswith(BETTER)]
    if not ratios:
        raise ValueError(f"{folder} has no result of a load with rule {OURS} and others: measure the loads first")
    return [
        Figure("fleet.sim.worst_vs_best_other", max(ratios), "ratio", False),
        Figure("fleet.sim.median_vs_best_other", median(ratios), "ratio", False),
    ]


def decision_name(num_replicas: int) -> str:
    """The name of the result, and of its figures."""
    return "fleet.decision" if num_replicas == REPLICAS else f"fleet.decision.replicas{num_replicas}"


def decision_figures(num_replicas: int, seed: int) -> list[Figure]:
    """The CPU time of a placement, in milliseconds."""
    name = decision_name(num_replicas)
    spent_ms = 1e3 * decision_cpu_s(num_replicas, CACHED_TOKENS, DECISIONS, seed)[DECISIONS // 4 :]
    return [
        Figure(f"{name}.cpu_p50_ms", float(np.quantile(spent_ms, 0.5)), "ms", False),
        Figure(f"{name}.cpu_p99_ms", float(np.quantile(spent_ms, 0.99)), "ms", False),
    ]


def merged(path: Path, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The runs, with those of other levels and rules that the result at `path` has already."""
    known: dict[str, dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else {}
    for level, by_rule in runs.items():
        known.setdefault(level, {}).update(by_rule)
    return dict(sorted(known.items(), key=lambda entry: float(entry[0])))


def parser() -> Parser:
    p = Parser("shoal bench fleet", __doc__)
    p.add_argument("--load", choices=LOADS, default="zipf", help="the requests (default zipf)")
    p.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's JSON lines, for load mooncake")
    p.add_argument("--replicas", type=int, default=REPLICAS, metavar="N", help="number of replicas (default 64)")
    p.add_argument("--routers", type=int, default=1, metavar="N", help="number of routers (default 1)")
    p.add_argument(
        "--levels",
        type=float,
        nargs="+",
        default=[0.5, 0.8, 0.95, 1.1],
        metavar="F",
        help="fractions of capacity (default 0.5 0.8 0.95 1.1)",
    )
    p.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), help="placement rules (default: all)")
    p.add_argument("--requests", type=int, metavar="N", help="requests for each replica (default: by load)")
    p.add_argument("--kv-tokens", type=int, metavar="N", help="tokens in a replica's cache (default: what fits)")
    p.add_argument("--step-ms", type=float, default=50, metavar="MS", help="the longest step (default 50)")
    p.add_argument("--seed", type=int, default=0, help="seed of requests and ties (default 0)")
    results.add_options(p, None, "fleet.sim.LOAD; none: no result")
    p.add_argument("--summary", action="store_true", help="write the figures over all loads, and run nothing")
    p.add_argument("--decision", action="store_true", help="measure the CPU time of a placement, and nothing else")
    p.add_argument("--fair", action="store_true", help="measure what a client notices of another one that floods")
    p.add_argument("--death", action="store_true", help="measure what others notice of the streams of a dead replica")
    p.add_argument("--add", action="store_true", help="keep the runs of other rules and levels that the result has")
    return p


def _apart(args: argparse.Namespace) -> tuple[str, list[Figure], dict[str, Any]] | None:
    """Name, figures and raw data of a result that is of no load. None if a load is asked for."""
    about = {key: getattr(args, key) for key in ("replicas", "routers", "seed")}
    if args.decision:
        return decision_name(args.replicas), decision_figures(args.replicas, args.seed), {"about": about}
    if args.fair:
        found = fairness(args.levels, args.replicas, args.routers, ReplicaHardware(), args.seed)
        return "fleet.fair", fair_figures(found), {"about": about, "runs": found}
    if args.death:
        found = deaths(args.levels, args.replicas, ReplicaHardware(), args.seed)
        return "fleet.death", death_figures(found), {"about": about, "runs": found}
    return None


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    name = args.name or f"fleet.sim.{args.load}"
    try:
        results.check_name(name)
        if args.summary:
            print(f"written: {results.write('fleet.sim', summary(args.out), {}, folder=args.out).name}")
            return 0
        if own := _apart(args):
            prefix, made, raw = own
            results.publish("none" if args.name == "none" else prefix, made, raw, args.out)
            return 0
        runs = run(args)
    except (ValueError, OSError) as error:
        print(f"shoal bench fleet: {error}", file=sys.stderr)
        return 1
    if name != "none":
        if args.add:
            runs = merged(args.out / f"{name}.json", runs)
        about = {
            key: getattr(args, key)
            for key in ("load", "replicas", "routers", "step_ms", "kv_tokens", "requests", "seed")
        }
        made = figures(args.load, runs)
        if ratios := [figure.value for figure in made if figure.name.endswith(".routers_vs_1")]:
            made.append(Figure(f"fleet.sim.routers{args.routers}_vs_1", max(ratios), "ratio", False))
        path = results.write(name, made, {"about": about, "runs": runs}, folder=args.out)
        print(f"written: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
