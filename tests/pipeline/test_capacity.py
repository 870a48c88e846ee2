"""The search for the highest rate that holds."""

import pytest

from pipeline.capacity import capacity


@pytest.mark.parametrize("most", [0.31, 1.0, 7.9])
@pytest.mark.parametrize("guess", [0.1, 1.0, 5.0])
def test_bisection_finds_the_highest_rate(most, guess):
    asked = []

    def holds(rate):
        asked.append(rate)
        return rate <= most

    assert most / 1.02 <= capacity(holds, guess, 100.0) <= most
    assert len(asked) == len(set(asked)) < 20


def test_a_search_ends_where_there_is_nothing_to_find():
    assert capacity(lambda rate: False, 1.0, 10.0) == 0.0
    assert capacity(lambda rate: True, 1.0, 10.0) == 10.0
