"""Causes of missed hits: why a fleet misses what one cache of all its pages would have, and what hitting it would take.

    python -m bench.fleet.missed_hits --load mooncake --trace mooncake_conversation.jsonl --levels 0.8 1.1
    python -m bench.fleet.missed_hits --load bursts --replicas 16 --rules shoal no_copies most_cached

| rule | places |
| --- | --- |
| `shoal` | as the router does |
| `no_copies` | the same, but no prefix is wanted anywhere: a copy is made only where waiting would take longer |
| `most_cached` | where most of the prompt is cached or about to be, at any load; of equal ones the cheapest |

Tokens that one cache would have had, and the chosen replica had not, as parts of what one cache would have had:

held       another replica had them when the request came
computing  no replica had them yet; a request ahead of this one was to compute them
evicted    no replica had them any more: copies take room, and each replica evicts for itself
hits       the rest, and what replicas had beyond what one cache would have had

Results are fleet.missed.LOAD. That of bursts also has, from the cost model alone, the least that the 99th percentile of
the slowdown can be with any placement (`least_slowdown`), and the least with 0.95 of one cache's hits.
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench import results
from bench.fleet.capacity import capacity
from bench.fleet.command import make_requests
from bench.fleet.hardware import ReplicaHardware
from bench.fleet.replica import StepResult
from bench.fleet.shoal_router import ShoalRule
from bench.fleet.simulation import FleetSimulation
from bench.fleet.workloads import (
    BURST_OWN,
    BURST_SHARED,
    BURST_SIZE,
    LOADS,
    FleetRequest,
    at_rate,
    common_tokens,
    token_ids,
)
from bench.results import Figure
from pipeline.shape import BatchShape
from radix.index import PrefixIndex
from radix.node import pack
from router import fleet, popularity
from router.placement import Candidates, Weights, cost_s
from worker.messages import CacheEvents, ReplicaLoad

RULES = ("shoal", "no_copies", "most_cached")
PARTS = ("held", "computing", "evicted")


def most_cached(candidates: Candidates, num_prompt_tokens: int, weights: Weights, turn: int) -> NDArray[np.intp]:
    """The candidates' indices, those with the longest cached prefix first, of equal ones the cheapest."""
    cached = candidates["cached_tokens"]
    return np.lexsort((cost_s(candidates, cached, num_prompt_tokens, weights), -cached))


class WatchedFleet(FleetSimulation):
    """A run that also notes, of each request, what any replica had of its prompt as it came (`held`), and what requests
    without a first token had in common with it (`coming`), in tokens by number."""

    def __init__(self, requests: list[FleetRequest], hardware: list[ReplicaHardware], seed: int) -> None:
        super().__init__(requests, [ShoalRule(len(hardware), seed=seed)], hardware, seed)
        self.held: dict[int, int] = {}
        self.coming: dict[int, int] = {}
        self._index = PrefixIndex(hardware[0].page_size)
        self._caches = [self._index.add() for _ in hardware]
        self._without_token: dict[int, FleetRequest] = {}

    def _arrive(self, request: FleetRequest) -> None:
        self.held[request.number] = int(self._index.match(pack(token_ids(request.spans))).max())
        ahead = self._without_token.values()
        self.coming[request.number] = max((common_tokens(request, other) for other in ahead), default=0)
        self._without_token[request.number] = request
        super()._arrive(request)

    def _tell(
        self,
        index: int,
        events: CacheEvents | None,
        load: ReplicaLoad | None,
        seen: tuple[int, ...],
        result: StepResult,
    ) -> None:
        for request in result.first:
            del self._without_token[request.number]
        for event in events.events if events is not None else ():
            self._caches[index].apply(event)
        super()._tell(index, events, load, seen, result)


@contextmanager
def placing(rule: str) -> Iterator[None]:
    """The router places by `rule` meanwhile."""
    rank, spare = fleet.PLACEMENTS["cache_aware"], popularity.SPARE
    if rule == "most_cached":
        fleet.PLACEMENTS["cache_aware"] = most_cached
    if rule != "shoal":
        popularity.SPARE = 0.0
    try:
        yield
    finally:
        fleet.PLACEMENTS["cache_aware"], popularity.SPARE = rank, spare


def missed(requests: list[FleetRequest], hardware: ReplicaHardware, replicas: int, seed: int) -> dict[str, float]:
    """The summary of a run, with the parts that were missed, and with `beyond`: what replicas had and one cache would
    not have had, as a part of the same."""
    watched = WatchedFleet(requests, [hardware] * replicas, seed)
    outcome = watched.run()
    numbers = np.flatnonzero(outcome.measured)
    ideal, cached = outcome.ideal[numbers], outcome.cached[numbers]
    held = np.minimum(ideal, [watched.held[number] for number in numbers.tolist()])
    coming = np.minimum(ideal, [watched.coming[number] for number in numbers.tolist()])
    had = np.minimum(ideal, cached)
    known = np.maximum(had, held)
    whole = np.maximum(known, coming)
    parts = dict(zip(PARTS, (known - had, whole - known, ideal - whole), strict=True))
    found = {name: float(tokens.sum() / ideal.sum()) for name, tokens in parts.items()}
    return {**outcome.summary(), **found, "beyond": float((cached - had).sum() / ideal.sum())}


def least_slowdown(hardware: ReplicaHardware, replicas: int, hits: float = 0.0) -> float:
    """The least that the 99th percentile of the slowdown on load bursts can be with any placement, if hits of a burst
    are at least `hits` of those of one cache. Each replica that serves it computes its prefix. One of them serves
    at least the mean of the requests that are not among the latest 1%, and computes them in one step at best."""
    size = BURST_SIZE * replicas
    in_time = size - 2 * size // 100  # as many requests come one by one, and may all be quicker
    copies = max(n for n in range(1, replicas + 1) if size - n >= hits * (size - 1))
    others = [(BURST_SHARED, BURST_OWN)] * (math.ceil(in_time / copies) - 1)
    step_s = hardware.costs.predict(BatchShape([(0, BURST_SHARED + BURST_OWN), *others]))
    return step_s / hardware.alone_s(BURST_OWN, BURST_SHARED)


def figures(name: str, load: str, runs: dict[str, dict[str, dict[str, float]]], replicas: int) -> list[Figure]:
    """The figures of the result `name`."""
    made = []
    for level, by_rule in runs.items():
        for rule, found in by_rule.items():
            own = f"{name}.{float(level):.0%}".rstrip("%") + f".{rule}"
            made.append(Figure(f"{own}.slowdown_p99", found["slowdown_p99"], "ratio", False))
            made.append(Figure(f"{own}.hits", found["hit_rate"] / found["ideal_hit_rate"], "ratio", True))
            made += [Figure(f"{own}.{part}", found[part], "ratio", False) for part in PARTS]
    if load == "bursts":
        hardware = ReplicaHardware()
        made.append(Figure(f"{name}.least_slowdown", least_slowdown(hardware, replicas), "ratio", False))
        at_95 = least_slowdown(hardware, replicas, 0.95)
        made.append(Figure(f"{name}.least_slowdown_with_95_of_hits", at_95, "ratio", False))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=LOADS, default="bursts")
    parser.add_argument("--trace", type=Path, help="Mooncake's JSON lines, for load mooncake")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--requests", type=int, help="requests for each replica (default: by load)")
    parser.add_argument("--levels", type=float, nargs="+", default=[0.8, 1.1])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the result")
    options = parser.parse_args()
    hardware, requests = ReplicaHardware(), make_requests(options)
    rate_s, runs = capacity(requests, hardware, options.replicas), dict[str, dict[str, dict[str, float]]]()
    for level in options.levels:
        for rule in options.rules:
            with placing(rule):
                found = missed(at_rate(requests, level * rate_s), hardware, options.replicas, options.seed)
            runs.setdefault(f"{level:g}", {})[rule] = found
    name = f"fleet.missed.{options.load}"
    made = figures(name, options.load, runs, options.replicas)
    for figure in made:
        print(f"{figure.name}: {figure.value:.3f}")
    about = {key: getattr(options, key) for key in ("load", "replicas", "requests", "seed")}
    results.write(name, made, {"about": about, "runs": runs}, folder=options.out)


if __name__ == "__main__":
    main()
