"""How many replicas there should be: by table, and what holds for any demand."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import Config, ConfigError, load
from cluster.scaling import MAX_BUSY_SHARE, MAX_GROWTH, Scaling, Trend, wanted
from router.fleet.demand import Demand

SCALING = Scaling(min_replicas=0, max_replicas=8, target_wait_s=2.0, downscale_delay_s=60.0)


def looks(demand: Callable[[int, int], Demand], number: int, seconds: int, scaling: Scaling = SCALING) -> list[int]:
    """The numbers after each of so many looks, one a second. `demand` gets the second and the number by then."""
    trend, numbers = Trend(), []
    for second in range(seconds):
        (number, _), trend = wanted(scaling, number, demand(second, number), trend, 1.0)
        numbers.append(number)
    return numbers


def busy(number: int, load: float, wait_s: float = 0.0) -> Demand:
    return Demand(ready=number, load=load, wait_s=wait_s, is_idle=False)


IDLE = Demand(ready=1)


@pytest.mark.parametrize(
    ("number", "demand", "seconds", "after", "why"),
    [
        (9, IDLE, 1, 8, "bounds"),
        (0, Demand(), 1000, 0, "steady"),
        (0, Demand(waiting=3, is_idle=False), 1, 1, "request"),
        (1, busy(1, 1.0, wait_s=1.9), 1000, 1, "steady"),
        (1, busy(1, 1.0, wait_s=2.1), 1, 1, "steady"),  # it may be over before a replica could start
        (1, busy(1, 1.0, wait_s=2.1), 2, 2, "queue"),
        (2, busy(2, 2.0, wait_s=3.0), 2, 3, "queue"),
        (2, busy(2, 2.0, wait_s=60.0), 2, 4, "queue"),  # twice as many at once
        (8, busy(8, 8.0, wait_s=60.0), 1000, 8, "steady"),
        (2, busy(1, 1.0, wait_s=60.0), 1000, 2, "steady"),  # one of them still starts
        (1, Demand(waiting=5, is_idle=False), 1000, 1, "steady"),  # the only one does
        (1, IDLE, 59, 1, "steady"),
        (1, IDLE, 60, 0, "idle"),
        (1, Demand(), 1000, 1, "steady"),  # it has not been there yet
        (1, busy(1, 0.001), 1000, 1, "steady"),
        (2, busy(2, 0.5), 60, 1, "idle"),
        (2, busy(2, 0.7), 1000, 2, "steady"),
        (2, busy(2, 0.5, wait_s=1.1), 1000, 2, "steady"),
    ],
)
def test_the_number_that_is_wanted(number: int, demand: Demand, seconds: int, after: int, why: str) -> None:
    trend, before = Trend(), number
    for _ in range(seconds):
        assert number == before
        (number, reason), trend = wanted(SCALING, number, demand, trend, 1.0)
    assert (number, reason) == (after, why)


def test_a_long_calm_takes_one_after_the_other() -> None:
    numbers = looks(lambda second, number: Demand(ready=number), number=4, seconds=241)
    assert [numbers.index(number) + 1 for number in (3, 2, 1, 0)] == [60, 120, 180, 240]


def test_a_request_keeps_the_last_one_and_prompts_count_by_their_time() -> None:
    assert looks(lambda second, number: busy(1, 0.1) if second == 59 else IDLE, 1, 119)[-1] == 1
    # Prompts are computed in every other second, on one replica of two: half of one is enough.
    assert looks(lambda second, number: busy(number, second % 2), 2, 200)[-1] == 1
    # In three of four seconds: it would be too busy alone.
    assert looks(lambda second, number: busy(number, float(second % 4 > 0)), 2, 1000)[-1] == 2


@given(
    bounds=st.tuples(st.integers(0, 5), st.integers(1, 5)),
    number=st.integers(0, 12),
    demands=st.lists(
        st.builds(
            Demand,
            waiting=st.integers(0, 3),
            ready=st.integers(0, 12),
            wait_s=st.floats(0, 1e6),
            load=st.floats(0, 12),
            is_idle=st.booleans(),
        ),
        min_size=1,
        max_size=40,
    ),
)
def test_any_demand_keeps_the_bounds_and_changes_little_at_once(
    bounds: tuple[int, int], number: int, demands: list[Demand]
) -> None:
    scaling = Scaling(min(bounds), max(bounds), target_wait_s=1.5, downscale_delay_s=5.0)
    trend = Trend()
    for demand in demands:
        (after, reason), trend = wanted(scaling, number, demand, trend, 1.0)
        assert scaling.min_replicas <= after <= scaling.max_replicas
        if reason != "bounds":
            assert number - 1 <= after <= max(1, MAX_GROWTH * number)
        assert (after == number) == (reason == "steady")
        number = after


@given(work=st.floats(0.0, 6.0), number=st.integers(1, 8))
def test_an_even_load_comes_to_rest(work: float, number: int) -> None:
    """Replicas that are there at once, and share an even load: with more work than they can do, they have a queue."""
    scaling = Scaling(min_replicas=1, max_replicas=8, target_wait_s=2.0, downscale_delay_s=20.0)

    def shared(second: int, number: int) -> Demand:
        return busy(number, min(work, number), wait_s=10.0 if work >= number else 0.0)

    numbers = looks(shared, number, seconds=400, scaling=scaling)
    rest = numbers[-1]
    assert set(numbers[200:]) == {rest}
    assert rest > work or rest == 8
    assert rest == 1 or work > MAX_BUSY_SHARE * (rest - 1) or math.isclose(work, MAX_BUSY_SHARE * (rest - 1))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"min_replicas": 0}, "min_replicas: .*max_replicas"),
        ({"replicas": 3, "max_replicas": 2}, "replicas=3, .*max_replicas=2"),
        ({"replicas": 1, "min_replicas": 2, "max_replicas": 2}, "replicas=1, .*min_replicas=2 .*max_replicas=2"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas=3 .*max_replicas=2"),
    ],
)
def test_bounds_that_do_not_fit_are_refused(settings: dict[str, int], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(overrides=settings)


@pytest.mark.parametrize(("bounds", "start"), [((0, 1), 1), ((1, 1), 1), ((0, 8), 2), ((4, 8), 4), ((2, 2), 2)])
def test_a_number_at_the_start_that_is_not_given_is_one_that_bounds_allow(bounds: tuple[int, int], start: int) -> None:
    """As on Kubernetes, where the number stands apart from the settings. Of several models each has its own."""
    scaling = dict(zip(("min_replicas", "max_replicas"), bounds, strict=True))
    assert [model.replicas for model in load(overrides=scaling).deployments] == [start]
    models = [{"name": "a", "model": "a", **scaling}, {"name": "b", "model": "b"}]
    assert [model.replicas for model in load(overrides={"models": models}).deployments] == [start, 2]


def test_there_are_routers_for_the_most_replicas() -> None:
    config = Config(replicas=1, max_replicas=6, min_replicas=0)
    assert config.num_routers == 3
    (model,) = config.deployments
    assert Scaling.of(model) == Scaling(0, 6, model.target_wait_s, model.downscale_delay_s)
    assert model.may_sleep and not Config().deployments[0].may_sleep
