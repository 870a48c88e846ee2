"""Rounds of faults."""

from itertools import islice
from random import Random

import pytest

from bench.chaos.faults import FAULTS, order


@pytest.mark.parametrize("seed", range(5))
def test_each_round_has_every_fault_once_and_adds_a_replica_before_it_takes_one(seed: int) -> None:
    for names in islice(order(list(FAULTS), Random(seed)), 20):
        assert sorted(names) == sorted(FAULTS)
        assert names.index("scaled_up") < names.index("scaled_down")


def test_a_seed_gives_an_order_and_another_one_another() -> None:
    first, again, other = (list(islice(order(list(FAULTS), Random(seed)), 3)) for seed in (1, 1, 2))
    assert first == again != other


def test_some_faults_alone() -> None:
    assert next(order(["rank_killed"], Random(0))) == ["rank_killed"]
    assert next(order(["scaled_down"], Random(0))) == ["scaled_down"]
