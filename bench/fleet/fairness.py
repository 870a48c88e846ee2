"""A client that floods a fleet, and a quiet one: what the quiet one notices, and what fairness costs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from bench.fleet.capacity import capacity
from bench.fleet.hardware import ReplicaHardware
from bench.fleet.shoal_router import ShoalRule
from bench.fleet.simulation import FleetOutcome, FleetSimulation
from bench.fleet.workloads import QUIET, FleetRequest, at_rate, two_clients
from bench.results import Figure

REQUESTS = 200  # for each replica: at 1.1 of the capacity the queues grow for some 10 s


def fairness(
    levels: Sequence[float], num_replicas: int, num_routers: int, hardware: ReplicaHardware, seed: int
) -> dict[str, dict[str, Any]]:
    """The figures of each level, a fraction of the fleet's capacity that both clients offer together. TTFT in seconds,
    tokens in prompt and output tokens that were served a second."""
    requests = two_clients(np.random.default_rng(seed), REQUESTS * num_replicas, num_replicas)
    rate_s = capacity(requests, hardware, num_replicas)
    return {
        f"{level:g}": _level(at_rate(requests, level * rate_s), num_replicas, num_routers, hardware, seed)
        for level in levels
    }


def _level(
    requests: list[FleetRequest], num_replicas: int, num_routers: int, hardware: ReplicaHardware, seed: int
) -> dict[str, Any]:
    quiet = [request.number for request in requests if request.client == QUIET]
    alone = [replace(requests[number], number=place) for place, number in enumerate(quiet)]

    def run(sent: list[FleetRequest], order: Literal["fair", "fcfs"]) -> FleetOutcome:
        rules = [ShoalRule(num_replicas, seed=seed + router) for router in range(num_routers)]
        return FleetSimulation(sent, rules, [hardware] * num_replicas, seed, order).run()

    outcomes = {"alone": run(alone, "fair"), "fair": run(requests, "fair"), "fcfs": run(requests, "fcfs")}
    summary: dict[str, Any] = {}
    for name, outcome in outcomes.items():
        ttft_s = outcome.first_s - outcome.arrived_s
        is_quiet = np.ones(len(ttft_s), dtype=bool) if name == "alone" else np.isin(np.arange(len(ttft_s)), quiet)
        # The same requests are measured in all runs: those of the last two thirds.
        chosen = ttft_s[is_quiet][len(quiet) // 3 :]
        summary[f"{name}_quiet_ttft_mean_s"] = float(chosen.mean())
        summary[f"{name}_quiet_ttft_p99_s"] = float(np.quantile(chosen, 0.99))
        if name != "alone":
            summary[f"{name}_flood_ttft_mean_s"] = float(ttft_s[~is_quiet].mean())
            summary[f"{name}_hit_rate"] = outcome.hit_rate
            # Until the last arrival: after it, only what is left over runs.
            last_s, tokens = outcome.arrived_s.max(), outcome.prompt + outcome.output
            summary[f"{name}_tokens_s"] = float(tokens[outcome.last_s <= last_s].sum() / last_s)
    return summary


def figures(runs: dict[str, dict[str, Any]]) -> list[Figure]:
    """The worst figures over all levels."""

    def worst(above: str, below: str) -> list[float]:
        return [run[above] / run[below] for run in runs.values()]

    mean = max(worst("fair_quiet_ttft_mean_s", "alone_quiet_ttft_mean_s"))
    return [
        Figure("fleet.fair.quiet_client_ttft_vs_alone", mean, "ratio", False),
        Figure(
            "fleet.fair.quiet_client_ttft_p99_vs_alone",
            max(worst("fair_quiet_ttft_p99_s", "alone_quiet_ttft_p99_s")),
            "ratio",
            False,
        ),
        Figure("fleet.fair.throughput_vs_fcfs", min(worst("fair_tokens_s", "fcfs_tokens_s")), "ratio", True),
    ]
