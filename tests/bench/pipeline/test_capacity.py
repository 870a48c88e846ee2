"""The search for the highest rate that holds."""

import pytest

from bench.pipeline.capacity import capacity


@pytest.mark.parametrize("most", [0.31, 1.0, 7.9])
@pytest.mark.parametrize("guess", [0.1, 1.0, 5.0])
def test_bisection_finds_the_highest_rate(most, guess):
    asked = []

    def holds(rate):
        asked.append(rate)
        return rate <= most

    assert most / 1.02 <= capacity(holds, guess, 100.0) <= most
    assert len(asked) == len(set(asked)) < 20


def test_a_search_from_near_by_is_short():
    asked = []

    def holds(rate):
        asked.append(rate)
        return rate <= 2.0

    assert 1.9 < capacity(holds, 1.95, 8.0, 0.05, step=1.1) <= 2.0 and len(asked) <= 3
    asked.clear()
    assert 1.9 < capacity(holds, 2.05, 8.0, 0.05, step=1.1) <= 2.0 and len(asked) <= 3


def test_what_is_less_than_the_least_is_not_looked_for():
    asked = []

    def holds(rate):
        asked.append(rate)
        return rate <= 0.1

    assert capacity(holds, 0.2, 8.0, least=0.5) == 0.0 and asked == [0.5]
    asked.clear()
    assert capacity(holds, 1.0, 8.0, least=0.5) == 0.0 and min(asked) == 0.5
    assert capacity(holds, 1.0, 8.0, 0.05, least=0.09) == pytest.approx(0.1, rel=0.05)


def test_a_search_ends_where_there_is_nothing_to_find():
    assert capacity(lambda rate: False, 1.0, 10.0) == 0.0
    assert capacity(lambda rate: True, 1.0, 10.0) == 10.0
