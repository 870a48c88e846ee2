"""The death of a replica in a simulated fleet."""

import numpy as np
import pytest

from bench.fleet.capacity import capacity
from bench.fleet.deaths import Death, DeathSimulation, deaths, figures
from bench.fleet.hardware import ReplicaHardware
from bench.fleet.workloads import at_rate, zipf

REPLICAS = 3


def death(level: float, is_paced: bool) -> Death:
    hardware = ReplicaHardware()
    requests = zipf(np.random.default_rng(0), 60 * REPLICAS, REPLICAS)
    timed = at_rate(requests, level * capacity(requests, hardware, REPLICAS))
    return DeathSimulation(timed, hardware, REPLICAS, 0.7 * timed[-1].at_s, is_paced).death()


@pytest.mark.bench
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_lost_streams_go_on_and_others_keep_their_pace(level: float) -> None:
    paced, at_once = death(level, True), death(level, False)
    assert paced.resumed == at_once.resumed >= 3
    assert np.array_equal(paced.before, at_once.before)
    assert paced.took_s > 0 and at_once.took_s > 0
    assert paced.ratio(0.99) <= 2
    assert paced.after.mean() <= at_once.after.mean()


@pytest.mark.bench
def test_the_worst_level_is_the_figure() -> None:
    runs = deaths([0.3, 0.6], REPLICAS, ReplicaHardware(), seed=0)
    values = {figure.name: figure.value for figure in figures(runs)}
    worst = max(by_pace["paced"]["tbt_p99_vs_before"] for by_pace in runs.values())
    assert (
        values["fleet.death.tbt_p99_vs_before"]
        == worst
        == max(values["fleet.death.30.tbt_p99_vs_before"], values["fleet.death.60.tbt_p99_vs_before"])
    )
