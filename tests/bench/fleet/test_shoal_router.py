"""The router's placement on fleets in virtual time: what holds at any load."""

from dataclasses import replace

import numpy as np
import pytest

from bench.fleet.capacity import capacity
from bench.fleet.hardware import ReplicaHardware
from bench.fleet.shoal_router import ShoalRule
from bench.fleet.simulation import FleetOutcome, FleetSimulation
from bench.fleet.workloads import MADE, at_rate

HARDWARE = ReplicaHardware()
REPLICAS = 8


def serve(load: str, level: float, placement: str = "cache_aware", slower: float = 1.0, each: int = 25) -> FleetOutcome:
    """`slower`: factor on the first replica's steps. `each`: requests a replica."""
    requests = MADE[load](np.random.default_rng(3), each * REPLICAS, REPLICAS)
    timed = at_rate(requests, level * capacity(requests, HARDWARE, REPLICAS))
    hardware = [replace(HARDWARE, slower=slower), *[HARDWARE] * (REPLICAS - 1)]
    return FleetSimulation(timed, [ShoalRule(REPLICAS, placement)], hardware).run()


@pytest.mark.bench
@pytest.mark.parametrize("level", [0.3, 0.9])
def test_a_prefix_that_all_share_is_served_by_all_replicas(level: float):
    ours, least = serve("hot_prefix", level), serve("hot_prefix", level, "least_load")
    assert ours.replicas_used == 1.0 and ours.imbalance < 2.0
    assert ours.tpot_s(0.5) < 1.1 * least.tpot_s(0.5) and ours.slowdown(0.99) < 1.2 * least.slowdown(0.99)


@pytest.mark.bench
def test_a_full_fleet_computes_nothing_twice():
    ours = serve("zipf", 1.1)
    assert 1 - ours.hit_rate < 1.1 * (1 - ours.ideal_hit_rate)
    assert ours.slowdown(0.99) < 0.5 * serve("zipf", 1.1, "least_load").slowdown(0.99)


@pytest.mark.bench
def test_conversations_stay_where_they_are_cached():
    ours = serve("agents", 0.8)
    assert ours.hit_rate > 0.97 * ours.ideal_hit_rate
    assert ours.slowdown(0.99) < 0.7 * serve("agents", 0.8, "least_load").slowdown(0.99)


def test_a_replica_at_half_the_speed_gets_less_work():
    ours = serve("zipf", 0.8, slower=2.0)
    given = np.bincount(ours.replica[ours.measured].astype(int), minlength=REPLICAS)
    assert given[0] < 0.7 * given[1:].mean()
    assert ours.slowdown(0.99) < 0.7 * serve("zipf", 0.8, "least_load", slower=2.0).slowdown(0.99)


@pytest.mark.bench
def test_routers_that_tell_each_other_place_as_one():
    """With long steps, after which alone the replicas tell what they were given."""
    requests = MADE["zipf"](np.random.default_rng(3), 25 * REPLICAS, REPLICAS)
    hardware = replace(HARDWARE, step_s=0.2)
    timed = at_rate(requests, 0.8 * capacity(requests, hardware, REPLICAS))

    def ttft_s(routers: int, tells_peers: bool = True) -> float:
        rules = [ShoalRule(REPLICAS, seed=n, name=str(n), tells_peers=tells_peers) for n in range(routers)]
        return FleetSimulation(timed, rules, [hardware] * REPLICAS).run().ttft_s(0.99)

    one, told, alone = ttft_s(1), ttft_s(16), ttft_s(16, tells_peers=False)
    assert told < 1.25 * one and told < 0.9 * alone
