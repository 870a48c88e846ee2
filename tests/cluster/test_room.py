"""Room on a cluster, on paper: what is missing is named by resource and by how much, and what to do."""

from typing import Any

import pytest

from cluster.app import settle
from cluster.config import Config, load
from cluster.room import machines_of, shortage, told

CPUS_4 = {"CPU": 4.0, "memory": 1e9, "node:10.0.0.1": 1.0}
GPUS_8 = {"CPU": 64.0, "GPU": 8.0}


def config(**settings: Any) -> Config:
    return settle(load(overrides=settings), gpus=0)[0]


def machines(*resources: dict[str, float]) -> dict[str, dict[str, float]]:
    return {f"10.0.0.{number}": each for number, each in enumerate(resources, 1)}


@pytest.mark.parametrize(
    ("settings", "there", "routers", "words"),
    [
        (
            {"replicas": 40},
            [CPUS_4],
            1,
            ["room for 2 of replicas=40 only", "37.4 CPUs are missing (40.4 are needed, 1 machine has 3 that", "to 2"],
        ),
        (
            {"replicas": 2, "device": "cuda"},
            [CPUS_4, CPUS_4],
            0,
            ["room for 0 of replicas=2", "2 GPUs are missing (2 are needed, 2 machines have 0)", "lower replicas"],
        ),
        (
            {"replicas": 3, "device": "cuda", "tp": 8},
            [GPUS_8, GPUS_8],
            0,
            ["room for 2 of replicas=3 only: 8 GPUs are missing (24 are needed, 2 machines have 16)", "replicas to 2"],
        ),
        (
            {"replicas": 2, "tp": 3, "cpus_per_rank": 1},
            [CPUS_4, {"CPU": 2.0}, {"CPU": 2.0}],
            0,
            ["room for 1 of replicas=2", "too little on one: a stage takes 3 CPUs", "replicas to 1 or tp"],
        ),
        (
            {"models": [{"name": "a", "model": "org/a", "replicas": 1}, {"name": "b", "model": "org/b", "tp": 9}]},
            [CPUS_4],
            0,
            ["room for 0 of replicas=2 of b only", "15.03 CPUs", "lower replicas of b or cpus_per_rank"],
        ),
    ],
)
def test_what_is_missing_is_named(
    settings: dict[str, Any], there: list[dict[str, float]], routers: int, words: list[str]
) -> None:
    wanted = config(**settings)
    short = shortage(wanted, machines(*there), {"10.0.0.1": routers, "10.0.0.9": 7})
    assert short is not None
    line = told(short, wanted)
    assert "\n" not in line and "start when machines join, by hand or by Ray's autoscaler" in line
    assert [word for word in words if word not in line] == [], line


@pytest.mark.parametrize(
    ("settings", "there"),
    [
        ({"replicas": 2}, [CPUS_4]),
        ({"replicas": 64, "device": "cuda"}, [GPUS_8] * 8),
        ({"replicas": 64, "device": "cuda", "tp": 8}, [GPUS_8] * 64),
        ({"replicas": 16, "device": "cuda", "tp": 8, "pp": 2}, [GPUS_8] * 32),
        ({"replicas": 4, "device": "cuda", "gpus_per_rank": 0.5}, [{"CPU": 8.0, "GPU": 2.0}]),
        ({"models": [{"name": "far", "upstream": {"url": "http://a/v1"}}]}, [{}]),
    ],
)
def test_nothing_is_missing_where_all_find_room(settings: dict[str, Any], there: list[dict[str, float]]) -> None:
    assert shortage(config(**settings), machines(*there), {}) is None


def test_what_autoscaling_may_start_is_looked_at_by_itself() -> None:
    wanted = config(replicas=1, max_replicas=9)
    assert shortage(wanted, machines(CPUS_4), {}) is None
    short = shortage(wanted, machines(CPUS_4), {}, most=True)
    assert short is not None and "room for 3 of max_replicas=9 only: 5.09 CPUs" in told(short, wanted, most=True)


def test_those_at_the_start_have_their_place_before_autoscaling_adds_any() -> None:
    grows = {"name": "grows", "model": "org/a", "replicas": 1, "max_replicas": 9}
    wanted = config(models=[grows, {"name": "stays", "model": "org/b", "replicas": 2}])
    assert shortage(wanted, machines(CPUS_4), {}) is None
    short = shortage(wanted, machines(CPUS_4), {}, most=True)
    assert short is not None and short.placed == {"grows": 1, "stays": 2}
    line = told(short, wanted, most=True)
    assert "room for 1 of max_replicas=9 of grows only" in line and "lower max_replicas of grows or" in line


def test_only_a_model_that_is_scaled_has_a_number_at_most() -> None:
    grows = {"name": "grows", "model": "org/a", "replicas": 1, "max_replicas": 9}
    wanted = config(models=[grows, {"name": "stays", "model": "org/b", "replicas": 5}])
    short = shortage(wanted, machines(CPUS_4), {}, most=True)
    assert short is not None
    line = told(short, wanted, most=True)
    assert "room for 1 of max_replicas=9 of grows and 2 of replicas=5 of stays only" in line
    assert "lower max_replicas of grows or replicas of stays" in line


def test_machines_that_are_gone_have_no_room() -> None:
    nodes = [
        {"Alive": alive, "NodeManagerAddress": f"10.0.0.{number}", "Resources": CPUS_4}
        for number, alive in enumerate([True, False], 1)
    ]
    assert machines_of(nodes) == {"10.0.0.1": CPUS_4}
