"""Placement, by tables, by properties, and on fleets in simulated time."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement import Candidate, Weights, least_load, rank, round_robin, uncached_weight
from tests.router.simulated_fleet import Served, conversations, shared_prefixes, simulate

WEIGHTS = Weights()


def best(candidates: list[Candidate], num_prompt_tokens: int = 1000, turn: int = 0) -> str:
    return rank(candidates, num_prompt_tokens, WEIGHTS, turn)[0]


def test_goes_where_the_prefix_is():
    assert best([Candidate("a"), Candidate("b", cached_tokens=512), Candidate("c", cached_tokens=256)]) == "b"


@pytest.mark.parametrize(
    "load", [{"waiting_tokens": 3000}, {"context_tokens": 50_000}, {"running": 40}, {"waiting": 40}]
)
def test_affinity_yields_to_load(load):
    """Where as much waits everywhere that the fleet is busy, 512 cached tokens are worth 2048 that wait; each of these
    is worth more."""
    busy = {"waiting_tokens": 500}
    crowded = busy | load | {"waiting_tokens": 500 + load.get("waiting_tokens", 0)}
    assert best([Candidate("a", **busy), Candidate("b", cached_tokens=512, **crowded)]) == "a"
    assert best([Candidate("a", **busy), Candidate("b", cached_tokens=900, **crowded)]) == "b"


def test_what_must_be_computed_counts_for_more_the_more_waits_everywhere():
    def weight(*waiting: int) -> float:
        return uncached_weight([Candidate(str(i), waiting_tokens=w) for i, w in enumerate(waiting)], 1000, WEIGHTS)

    assert weight(0, 0, 10**6) == weight() == 1
    assert weight(0, 250, 10**6) == 2.5
    assert weight(500, 500, 0) == weight(10**6, 10**6, 10**6) == 4
    idle = [Candidate("a"), Candidate("b", cached_tokens=512, waiting_tokens=800)]
    assert best(idle) == "a"  # soon done, and then two have the prefix
    assert best([replace(candidate, waiting_tokens=candidate.waiting_tokens + 500) for candidate in idle]) == "b"


def test_one_overloaded_replica_does_not_turn_affinity_off_for_the_others():
    crowded = Candidate("a", waiting_tokens=10**6)
    assert best([crowded, Candidate("b"), Candidate("c", cached_tokens=512, waiting_tokens=100)]) == "c"


def test_a_miss_goes_to_the_least_loaded():
    loads = [Candidate("a", waiting_tokens=50), Candidate("b", context_tokens=10), Candidate("c", running=2)]
    for turn in range(3):
        assert best(loads, turn=turn) == "b"


def test_recent_work_outweighs_a_prefix_that_everybody_shares_but_not_a_conversation():
    shared = Candidate("a", cached_tokens=100, recent_tokens=20_000)
    assert best([shared, Candidate("b", recent_tokens=5_000)], 4000) == "b"
    assert best([replace(shared, cached_tokens=3000), Candidate("b", recent_tokens=5_000)], 4000) == "a"


@pytest.mark.parametrize("place", [rank, least_load, round_robin])
def test_equals_take_turns(place):
    candidates = [Candidate(name) for name in "abc"]
    assert [place(candidates, 100, WEIGHTS, turn)[0] for turn in range(6)] == list("abcabc")
    assert place(candidates, 100, WEIGHTS, 1) == ["b", "c", "a"]


def test_least_load_is_blind_to_caches_and_round_robin_to_load_too():
    candidates = [Candidate("a", cached_tokens=900, waiting_tokens=200), Candidate("b", waiting_tokens=100)]
    assert least_load(candidates, 1000, WEIGHTS, 0) == ["b", "a"]
    assert round_robin(candidates, 1000, WEIGHTS, 0) == ["a", "b"]


def test_no_candidates():
    assert rank([], 10, WEIGHTS, 3) == []


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.just(""),
        st.integers(0, 10_000),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
        st.integers(0, 300),
        st.integers(0, 300),
        st.floats(0, 10**6),
    ),
    min_size=1,
    max_size=8,
).map(lambda found: [replace(candidate, replica_id=str(index)) for index, candidate in enumerate(found)])


@settings(deadline=None, max_examples=100)
@given(CANDIDATES, st.integers(1, 10_000), st.integers(0, 100), st.data())
def test_names_all_and_never_punishes_a_longer_prefix_or_a_smaller_load(candidates, num_tokens, turn, data):
    order = rank(candidates, num_tokens, WEIGHTS, turn)
    assert sorted(order) == sorted(candidate.replica_id for candidate in candidates)
    index = data.draw(st.integers(0, len(candidates) - 1))
    chosen = candidates[index]
    better = replace(chosen, cached_tokens=chosen.cached_tokens + 64, waiting_tokens=chosen.waiting_tokens // 2)
    after = rank([*candidates[:index], better, *candidates[index + 1 :]], num_tokens, WEIGHTS, turn)
    assert after.index(chosen.replica_id) <= order.index(chosen.replica_id)


# ---------------------------------------------------------------- fleets in simulated time

FIXED_1, FIXED_4 = Weights(uncached=1, uncached_busy=1), Weights(uncached=4, uncached_busy=4)


def show(**served: Served) -> None:
    """For whoever asks pytest for the output."""
    for name, s in served.items():
        ttft, p99, tpot = (f"{1e3 * time_s:.0f}" for time_s in (s.ttft_mean_s, s.ttft_p99_s, s.tpot_mean_s))
        print(f"{name}: hit rate {s.hit_rate:.3f}, TTFT {ttft}, P99 {p99}, TPOT {tpot} ms, {s.replicas_used} used")


@pytest.mark.parametrize("num_replicas", [8, 64])
def test_a_prefix_that_all_share_is_served_by_many_replicas(num_replicas):
    requests = shared_prefixes(2.5 * num_replicas, 12.0, 1, prefix_tokens=8192, own_tokens=2048)
    ours = simulate(rank, requests, num_replicas, read_once=True)
    fixed = simulate(rank, requests, num_replicas, FIXED_4, read_once=True)
    show(ours=ours, fixed=fixed)
    assert ours.ttft_p99_s < 0.5 * fixed.ttft_p99_s and ours.tpot_mean_s < 0.6 * fixed.tpot_mean_s
    assert ours.replicas_used >= max(2 * fixed.replicas_used, 0.5 * num_replicas)


@pytest.mark.slow
def test_prefixes_of_every_popularity_on_many_replicas():
    requests = shared_prefixes(640.0, 8.0, 2000, prefix_tokens=4096, own_tokens=1024)
    ours, fixed = simulate(rank, requests, 64), simulate(rank, requests, 64, FIXED_4)
    show(ours=ours, fixed=fixed)
    assert ours.ttft_p99_s < 0.75 * fixed.ttft_p99_s and ours.ttft_mean_s < 0.95 * fixed.ttft_mean_s
    assert ours.tpot_mean_s <= 1.02 * fixed.tpot_mean_s


@pytest.mark.slow
def test_a_full_fleet_computes_nothing_that_is_cached_elsewhere():
    """At what 8 replicas can just do: with prefixes copied as on an idle fleet, requests wait for twice as long."""
    requests = shared_prefixes(160.0, 45.0, 200, prefix_tokens=4096, own_tokens=1024)
    ours, fixed, eager = (simulate(rank, requests, 8, weights) for weights in (Weights(), FIXED_4, FIXED_1))
    show(ours=ours, fixed=fixed, eager=eager)
    assert ours.ttft_mean_s < 1.1 * fixed.ttft_mean_s < 0.7 * eager.ttft_mean_s
    assert ours.hit_rate > fixed.hit_rate - 0.005


@pytest.mark.parametrize("rate_s", [0.05, 1.0, 2.0, 4.0], ids=["idle", "light", "busy", "overloaded"])
def test_conversations_stay_where_they_are_cached_and_no_replica_is_crowded(rate_s):
    requests = conversations(sessions=400, rate_s=rate_s)
    ours, blind = (simulate(place, requests, 4, cache_tokens=600_000) for place in (rank, round_robin))
    show(ours=ours, blind=blind)
    assert ours.hit_rate >= 2 * blind.hit_rate
    assert ours.computed <= 1.5
