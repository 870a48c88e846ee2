"""Layers over stages."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stages import split_layers


def stage_costs(costs, ranges, first, last):
    sums = [sum(costs[i] for i in layers) for layers in ranges]
    sums[0] += first
    sums[-1] += last
    return sums


def test_equal_layers_are_cut_evenly():
    assert split_layers([1.0] * 80, 4) == [range(20), range(20, 40), range(40, 60), range(60, 80)]


def test_a_heavy_head_takes_layers_off_the_last_stage():
    ranges = split_layers([1.0] * 12, 3, first=0.1, last=2.5)
    assert [len(layers) for layers in ranges] == [5, 5, 2]


def test_what_is_left_over_does_not_pile_up():
    """One stage must take a layer more: the others stay even."""
    assert sorted(len(layers) for layers in split_layers([1.0] * 33, 4)) == [8, 8, 8, 9]


@given(
    costs=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    stages=st.integers(1, 5),
    first=st.integers(0, 20),
    last=st.integers(0, 20),
)
def test_no_cut_has_a_cheaper_costliest_stage(costs, stages, first, last):
    if stages > len(costs):
        with pytest.raises(ValueError, match="cannot be cut"):
            split_layers(costs, stages, first, last)
        return
    ranges = split_layers(costs, stages, first, last)
    assert [i for layers in ranges for i in layers] == list(range(len(costs))) and all(ranges)
    found = stage_costs(costs, ranges, first, last)
    every = []
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        ends = [0, *cuts, len(costs)]
        every.append(stage_costs(costs, [range(a, b) for a, b in itertools.pairwise(ends)], first, last))
    assert max(found) == min(max(sums) for sums in every)
    least = min(sum(c * c for c in sums) for sums in every if max(sums) == max(found))
    assert sum(c * c for c in found) == least


def test_a_negative_cost_is_refused():
    with pytest.raises(ValueError, match="negative"):
        split_layers([1.0, -1.0], 1)
