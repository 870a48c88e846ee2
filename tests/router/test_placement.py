"""Placement, by tables, by properties, and by a toy fleet that serves conversations with finite caches."""

import random
from collections import OrderedDict
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.placement import Candidate, Placement, Weights, least_load, rank, round_robin

WEIGHTS = Weights()


def best(candidates: list[Candidate], num_prompt_tokens: int = 1000, turn: int = 0) -> str:
    return rank(candidates, num_prompt_tokens, WEIGHTS, turn)[0]


def test_goes_where_the_prefix_is():
    assert best([Candidate("a"), Candidate("b", cached_tokens=512), Candidate("c", cached_tokens=256)]) == "b"


@pytest.mark.parametrize(
    "load", [{"waiting_tokens": 3000}, {"context_tokens": 50_000}, {"running": 40}, {"waiting": 40}]
)
def test_affinity_yields_to_load(load):
    """The 512 cached tokens are worth 2048 that wait; each of these is worth more."""
    assert best([Candidate("a"), Candidate("b", cached_tokens=512, **load)]) == "a"
    assert best([Candidate("a"), Candidate("b", cached_tokens=900, **load)]) == "b"


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


# ---------------------------------------------------------------- a toy fleet

BLOCK = 64  # tokens


@dataclass(frozen=True)
class Request:
    """`blocks` name the prompt's blocks, so that equal names in equal places are a shared prefix."""

    at_s: float
    blocks: tuple[tuple[int, ...], ...]
    output_tokens: int


@dataclass
class Replica:
    """Prefill first come first served, decode at a fixed rate, a cache of `cache_blocks` blocks with LRU eviction."""

    cache_blocks: int
    prefill_tokens_s: float
    busy_until_s: float = 0.0
    cache: OrderedDict = field(default_factory=OrderedDict)
    running: list = field(default_factory=list)  # (begins decoding, ends, context tokens)
    recent_tokens: float = 0.0
    served_tokens: int = 0

    def cached_tokens(self, request: Request) -> int:
        hits = 0
        while hits < len(request.blocks) and request.blocks[hits] in self.cache:
            hits += 1
        return hits * BLOCK

    def candidate(self, name: str, request: Request) -> Candidate:
        now = request.at_s
        self.running = [entry for entry in self.running if entry[1] > now]
        decoding = [context for begins, _, context in self.running if begins <= now]
        return Candidate(
            name,
            cached_tokens=self.cached_tokens(request),
            waiting_tokens=int(max(0.0, self.busy_until_s - now) * self.prefill_tokens_s),
            context_tokens=sum(decoding),
            running=len(decoding),
            waiting=len(self.running) - len(decoding),
            recent_tokens=self.recent_tokens,
        )

    def serve(self, request: Request) -> int:
        """Returns how many tokens of the prompt were cached."""
        cached, total = self.cached_tokens(request), len(request.blocks) * BLOCK
        self.recent_tokens += total - cached
        self.busy_until_s = max(self.busy_until_s, request.at_s) + (total - cached) / self.prefill_tokens_s
        self.running.append((self.busy_until_s, self.busy_until_s + 0.02 * request.output_tokens, total))
        self.served_tokens += total - cached + request.output_tokens
        for block in reversed(request.blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.cache_blocks:
            self.cache.popitem(last=False)
        return cached


def conversations(seed: int, sessions: int, rate_s: float) -> list[Request]:
    """Sessions begin at random with one of four system prompts, the first of which two thirds use; each turn's prompt
    is the last one's, its answer and a question more, some seconds later."""
    rng = random.Random(seed)
    requests, at_s = [], 0.0
    for session in range(sessions):
        at_s += rng.expovariate(rate_s)
        system = rng.choices(range(4), [8, 2, 1, 1])[0]
        blocks = [(-1, system, index) for index in range(6)]
        turn_s = at_s
        for _ in range(rng.randint(1, 7)):
            blocks += [(session, index) for index in range(len(blocks), len(blocks) + rng.randint(4, 40))]
            requests.append(Request(turn_s, tuple(blocks), rng.randint(16, 256)))
            turn_s += rng.uniform(5.0, 30.0)
    return sorted(requests, key=lambda request: request.at_s)


def simulate(place: Placement, requests: list[Request]) -> tuple[float, float]:
    """(hit rate, the most that a replica computed over the mean) with four replicas."""
    replicas = {name: Replica(cache_blocks=2500, prefill_tokens_s=8000.0) for name in "abcd"}
    cached = 0
    for turn, request in enumerate(requests):
        candidates = [replica.candidate(name, request) for name, replica in replicas.items()]
        order = place(candidates, len(request.blocks) * BLOCK, WEIGHTS, turn)
        for replica in replicas.values():
            replica.recent_tokens *= 1 - 1 / 64
        cached += replicas[order[0]].serve(request)
    served = [replica.served_tokens for replica in replicas.values()]
    return cached / sum(len(request.blocks) * BLOCK for request in requests), max(served) * len(served) / sum(served)


@pytest.mark.parametrize("rate_s", [0.05, 1.0, 4.0, 8.0], ids=["idle", "light", "busy", "overloaded"])
def test_conversations_stay_where_they_are_cached_and_no_replica_is_crowded(rate_s):
    requests = conversations(seed=7, sessions=400, rate_s=rate_s)
    hit_rate, imbalance = simulate(rank, requests)
    blind, _ = simulate(round_robin, requests)
    print(f"rate {rate_s}: hit rate {hit_rate:.3f} against {blind:.3f}, imbalance {imbalance:.2f}")
    assert hit_rate >= 2 * blind
    assert imbalance <= 1.5
