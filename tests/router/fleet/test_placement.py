"""Placement by tables and by properties. Fleets in virtual time are in tests/bench/fleet/test_shoal_router.py."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.placement import Candidate, Weights, candidates_of, cost_s, least_load, rank, round_robin

WEIGHTS = Weights()
IDLE = Candidate()


def order(*candidates: Candidate, tokens: int = 1000, turn: int = 0) -> list[int]:
    return rank(candidates_of(candidates), tokens, WEIGHTS, turn).tolist()


def seconds(candidate: Candidate, tokens: int = 1000) -> float:
    return float(cost_s(candidates_of([candidate]), np.array([candidate.cached_tokens]), tokens, WEIGHTS)[0])


def test_goes_where_the_prefix_is():
    assert order(IDLE, Candidate(cached_tokens=512), Candidate(cached_tokens=256)) == [1, 2, 0]


@pytest.mark.parametrize(
    "load",
    [
        {"waiting_tokens": 900},
        {"waiting_products": 3 * 10**7},
        {"context_tokens": 50_000, "running": 10},
        {"waiting": 9},
    ],
)
def test_affinity_yields_to_load(load: dict[str, float]):
    """What there is to do costs more than 512 cached tokens save, and less than 8,192 of a longer prompt do."""
    loaded = Candidate(cached_tokens=512, waiting=load.pop("waiting", 1), **load)
    assert order(IDLE, loaded, tokens=1000) == [0, 1]
    assert order(IDLE, replace(loaded, cached_tokens=8192), tokens=9000) == [1, 0]


def test_on_a_busy_fleet_a_prompt_waits_for_its_prefix_that_an_idle_fleet_computes_again():
    holder, other = Candidate(cached_tokens=3000, waiting_tokens=5000, waiting=3), IDLE
    assert order(holder, other, tokens=4000) == [1, 0]
    busy = {"requests_s": 15.0, "tokens_s": 20_000.0}
    assert order(replace(holder, **busy), replace(other, **busy, waiting_tokens=2000, waiting=2), tokens=4000) == [0, 1]


def test_a_replica_to_which_more_requests_come_counts_as_busier_than_it_is_now():
    assert order(Candidate(requests_s=5.0, tokens_s=10_000.0), IDLE) == [1, 0]
    assert order(Candidate(requests_s=5.0, tokens_s=1e9), Candidate(requests_s=50.0, tokens_s=10_000.0)) == [0, 1]


def test_a_wanted_copy_costs_no_more_than_one_that_is_there():
    loaded = Candidate(cached_tokens=900, waiting_tokens=100, waiting=1)
    assert order(loaded, IDLE) == [0, 1]
    assert order(loaded, Candidate(wanted_tokens=900)) == [1, 0]


@pytest.mark.parametrize(("cached", "tokens"), [(0, 1), (0, 1000), (400, 1000), (999, 1000), (0, 9000), (1000, 1000)])
def test_a_prompt_takes_its_missing_tokens_and_for_each_those_before_it(cached: int, tokens: int):
    """As one that waits, of which the replica tells both."""
    bare = Candidate(cached_tokens=cached, step_s=0, decode_s=0, context_s=0, token_s=1e-4, product_s=1e-6)
    missing, products = tokens - cached, (tokens**2 - cached**2) / 2
    ahead = replace(bare, waiting_tokens=missing, waiting_products=products)
    costs = [cost_s(candidates_of([one]), np.array([cached]), tokens, Weights(0, 0, 0))[0] for one in (bare, ahead)]
    assert costs == pytest.approx([missing * 1e-4 + products * 1e-6, 2 * costs[0]])


def test_a_slow_replica_counts_as_what_it_is():
    slow = Candidate(step_s=1e-2, token_s=4.8e-5, product_s=2e-9, decode_s=2e-5, context_s=7e-8, full_s=0.046)
    assert order(slow, IDLE) == [1, 0]
    work = {"waiting_tokens": 9000, "waiting": 3}
    assert order(slow, replace(IDLE, **work)) == [0, 1]
    assert order(replace(slow, **work), replace(IDLE, **work)) == [1, 0]
    decodes = {"running": 100, "context_tokens": 200_000}
    assert seconds(replace(slow, **decodes)) > 1.9 * seconds(replace(IDLE, **decodes))


def test_prompts_take_longer_beside_decodes_and_a_step_is_never_all_decodes():
    decodes = Candidate(running=200, context_tokens=800_000)
    alone, beside = (seconds(c, 9000) - seconds(c, 1000) for c in (IDLE, decodes))
    assert beside > 2 * alone
    assert np.isfinite(seconds(replace(decodes, context_tokens=10**9)))


def test_a_request_with_a_short_limit_does_not_mind_long_steps():
    """A long output would go where fewer decode; a short one goes where its prefix is."""
    holder = Candidate(cached_tokens=900, running=50, context_tokens=100_000)
    idle = Candidate(output_tokens=5000)
    assert order(holder, idle) == [1, 0]
    assert order(*(replace(candidate, output_limit=1) for candidate in (holder, idle))) == [0, 1]


def test_a_full_cache_makes_a_request_wait_until_others_have_ended():
    held = {"running": 20, "context_tokens": 99_000}
    roomy, full = Candidate(kv_tokens=200_000, **held), Candidate(kv_tokens=100_000, **held)
    assert order(full, roomy, tokens=4000) == [1, 0]
    assert order(full, replace(roomy, kv_tokens=0), tokens=4000) == [1, 0]  # not known: as if there were room
    assert seconds(replace(full, output_tokens=400), 4000) > seconds(full, 4000)


def test_least_load_is_blind_to_caches_and_round_robin_to_load_too():
    candidates = candidates_of([Candidate(cached_tokens=900, waiting_tokens=200), Candidate(waiting_tokens=100)])
    assert rank(candidates, 1000, WEIGHTS, 0).tolist() == [0, 1]
    assert least_load(candidates, 1000, WEIGHTS, 0).tolist() == [1, 0]
    assert round_robin(candidates, 1000, WEIGHTS, 0).tolist() == [0, 1]


@pytest.mark.parametrize("place", [rank, least_load, round_robin])
def test_equals_take_turns(place):
    candidates = candidates_of([IDLE] * 3)
    assert [int(place(candidates, 100, WEIGHTS, turn)[0]) for turn in range(6)] == [0, 1, 2, 0, 1, 2]
    assert place(candidates, 100, WEIGHTS, 1).tolist() == [1, 2, 0]
    assert place(candidates_of([]), 100, WEIGHTS, 3).tolist() == []


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        cached_tokens=st.integers(0, 10_000),
        waiting_tokens=st.integers(0, 10**6),
        context_tokens=st.integers(0, 10**6),
        running=st.integers(0, 300),
        waiting=st.integers(0, 300),
        kv_tokens=st.sampled_from([0, 800_000]),
        requests_s=st.floats(0, 100),
        tokens_s=st.floats(0, 10**5),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=100)
@given(CANDIDATES, st.integers(1, 10_000), st.integers(0, 100), st.data())
def test_names_all_and_never_punishes_a_longer_prefix_or_a_smaller_load(candidates, num_tokens, turn, data):
    before = order(*candidates, tokens=num_tokens, turn=turn)
    assert sorted(before) == list(range(len(candidates)))
    index = data.draw(st.integers(0, len(candidates) - 1))
    chosen = candidates[index]
    better = replace(
        chosen,
        cached_tokens=chosen.cached_tokens + 64,
        waiting_tokens=chosen.waiting_tokens // 2,
        context_tokens=chosen.context_tokens // 2,
    )
    after = order(*candidates[:index], better, *candidates[index + 1 :], tokens=num_tokens, turn=turn)
    assert after.index(index) <= before.index(index)


def test_what_a_replica_wrote_before_says_nothing_of_this_output() -> None:
    """Of two idle replicas, the one with the prefix is chosen, however long its outputs were."""
    idle = [Candidate(output_tokens=20), Candidate(output_tokens=900, cached_tokens=16)]
    assert rank(candidates_of(idle), 23, Weights(), turn=0).tolist() == [1, 0]


def test_spread_chooses_among_near_costs_only_and_each_in_its_turn():
    alike = candidates_of([Candidate(waiting_tokens=10 * n) for n in range(4)] + [Candidate(waiting_tokens=10**6)])
    weights = Weights(spread=0.3)
    first = [int(rank(alike, 1000, weights, turn)[0]) for turn in range(200)]
    assert set(first) == {0, 1, 2, 3} and min(first.count(n) for n in range(4)) > 20
    assert first == [int(rank(alike, 1000, weights, turn)[0]) for turn in range(200)]
    assert {int(rank(alike, 1000, Weights(), turn)[0]) for turn in range(200)} == {0}
    assert rank(candidates_of([]), 10, weights, 3).tolist() == []
