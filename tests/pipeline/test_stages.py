"""Layers over stages."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.roofline import MODELS
from pipeline.stages import split_costs, split_layers


def sizes(layers, stages, head):
    return [len(part) for part in split_layers(layers, stages, head)]


def loss(counts, head):
    """By definition: decodes and prompts, each relative to an even share."""
    layers, stages = sum(counts), len(counts)
    decodes = max(*counts[:-1], counts[-1] + head) if stages > 1 else layers + head
    return decodes / ((layers + head) / stages) + max(counts) / (layers / stages)


def test_ranges_follow_each_other():
    assert split_layers(80, 4, 0.0) == [range(20), range(20, 40), range(40, 60), range(60, 80)]


def test_what_is_left_over_does_not_pile_up():
    """One stage must take a layer more: the others stay even, and it is not the one with the head."""
    assert sizes(33, 4, 0.5) == [9, 8, 8, 8]
    assert sizes(34, 4, 0.0) == [9, 9, 8, 8]


def test_a_head_takes_layers_off_the_last_stage_where_decodes_gain_more_than_prompts_lose():
    assert sizes(80, 4, 1.2) == [20, 20, 20, 20]
    assert sizes(64, 4, 3.5) == [17, 17, 17, 13]
    assert sizes(126, 4, 0.6) == [32, 32, 31, 31]  # a layer more on others costs nobody anything


def test_models_are_cut_evenly():
    for name, stages in (("llama-70b", 2), ("llama-70b", 4), ("llama-8b", 2), ("falcon-180b", 2)):
        model = MODELS[name]
        assert len(set(sizes(model.layers, stages, model.head_weights / model.layer_weights))) == 1, name


@given(layers=st.integers(1, 12), stages=st.integers(1, 5), head=st.floats(0, 20))
def test_no_cut_is_better(layers, stages, head):
    if stages > layers:
        with pytest.raises(ValueError, match="cannot be cut"):
            split_layers(layers, stages, head)
        return
    ranges = split_layers(layers, stages, head)
    assert [i for part in ranges for i in part] == list(range(layers)) and all(ranges)
    found = [len(part) for part in ranges]
    every = []
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        every.append([b - a for a, b in itertools.pairwise([0, *cuts, layers])])
    assert loss(found, head) == pytest.approx(min(loss(counts, head) for counts in every))


def costliest(counts, read, multiplied, head):
    """By definition: the sum of a stage's shares of all decodes' and all prompts' costs."""
    ends = list(itertools.accumulate(counts))
    shares = []
    for begin, end in itertools.pairwise([0, *ends]):
        reads = sum(read[begin:end]) + (head if end == ends[-1] else 0.0)
        shares.append(reads / (sum(read) + head) + sum(multiplied[begin:end]) / sum(multiplied))
    return max(shares)


@given(
    costs=st.lists(st.tuples(st.floats(1, 30), st.floats(1, 5)), min_size=1, max_size=9),
    stages=st.integers(1, 4),
    head=st.floats(0, 60),
)
def test_no_cut_of_unequal_layers_is_better(costs, stages, head):
    read, multiplied = [r for r, _ in costs], [m for _, m in costs]
    if stages > len(costs):
        with pytest.raises(ValueError, match="cannot be cut"):
            split_costs(read, multiplied, stages, head)
        return
    if len(set(costs)) == 1:
        assert split_costs(read, multiplied, stages, head) == split_layers(len(costs), stages, head / read[0])
        return
    ranges = split_costs(read, multiplied, stages, head)
    assert [i for part in ranges for i in part] == list(range(len(costs))) and all(ranges)
    every = []
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        every.append([b - a for a, b in itertools.pairwise([0, *cuts, len(costs)])])
    least = min(costliest(counts, read, multiplied, head) for counts in every)
    assert costliest([len(part) for part in ranges], read, multiplied, head) == pytest.approx(least)


def test_a_negative_head_is_refused():
    with pytest.raises(ValueError, match="negative"):
        split_layers(4, 1, -1.0)
