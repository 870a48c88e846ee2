"""Causes of missed hits on bursts, where they are known, and what all hits would cost there."""

import numpy as np
import pytest

from bench.fleet.capacity import capacity
from bench.fleet.hardware import ReplicaHardware
from bench.fleet.missed_hits import PARTS, figures, least_slowdown, missed, placing
from bench.fleet.workloads import MADE, FleetRequest, at_rate
from router import fleet, popularity
from router.placement import rank

HARDWARE, REPLICAS = ReplicaHardware(), 4


@pytest.fixture(scope="module")
def requests() -> list[FleetRequest]:
    made = MADE["bursts"](np.random.default_rng(0), 40 * REPLICAS, REPLICAS)
    return at_rate(made, 0.5 * capacity(made, HARDWARE, REPLICAS))


def test_a_burst_misses_only_what_is_being_computed(requests: list[FleetRequest]):
    found = missed(requests, HARDWARE, REPLICAS, seed=0)
    assert found["computing"] > 0.05 and found["held"] < 0.01 and found["evicted"] < 0.01
    hits = found["hit_rate"] / found["ideal_hit_rate"]
    assert hits + sum(found[part] for part in PARTS) - found["beyond"] == pytest.approx(1)
    assert found["slowdown_p99"] > least_slowdown(HARDWARE, REPLICAS)


def test_most_hits_are_not_the_least_slowdown(requests: list[FleetRequest]):
    ours = missed(requests, HARDWARE, REPLICAS, seed=0)
    with placing("most_cached"):
        most = missed(requests, HARDWARE, REPLICAS, seed=0)
    assert most["hit_rate"] > ours["hit_rate"] and most["slowdown_p99"] > ours["slowdown_p99"]
    assert fleet.PLACEMENTS["cache_aware"] is rank and popularity.SPARE > 1


def test_the_least_slowdown_grows_with_the_hits_that_are_asked_for():
    assert 1 < least_slowdown(HARDWARE, 64) < least_slowdown(HARDWARE, 64, 0.8) < least_slowdown(HARDWARE, 64, 0.95)
    alone_s = HARDWARE.alone_s(512, 3072)
    assert least_slowdown(HARDWARE, 64, 1.0) < (HARDWARE.alone_s(3584, 0) + 125 * alone_s) / alone_s


def test_figures_are_by_level_rule_and_part(requests: list[FleetRequest]):
    found = missed(requests, HARDWARE, REPLICAS, seed=0)
    made = {
        figure.name: figure.value for figure in figures("fleet.missed.bursts", "bursts", {"0.5": {"shoal": found}}, 4)
    }
    assert made["fleet.missed.bursts.50.shoal.computing"] == found["computing"]
    assert made["fleet.missed.bursts.least_slowdown"] == least_slowdown(HARDWARE, 4)
