"""The index over the trees of several replicas, against a set of prefixes for each."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radix.events import Event, Removed, Split, Stored
from radix.index import IndexedCache, PrefixIndex, set_slots
from radix.node import pack
from radix.pages import PagePool
from radix.snapshot import SnapshotWalk

from .conftest import Listener, make_tree, sorted_events

NUM_PAGES = 16
PROMPTS = st.lists(st.integers(0, 1), max_size=16)
REPLICAS = st.integers(0, 5)


def found(index: PrefixIndex, tokens: list[int]) -> list[float]:
    return index.match(pack(tokens)).tolist()


def test_one_walk_finds_what_each_replica_has():
    index = PrefixIndex(2)
    caches = [index.add() for _ in range(3)]
    caches[0].apply(Stored(1, 0, pack([1, 2, 3, 4, 5, 6])))
    caches[2].apply(Stored(1, 0, pack([1, 2])))
    caches[2].apply(Stored(2, 1, pack([3, 4, 9, 9])))
    assert found(index, [1, 2, 3, 4, 5, 6, 7]) == [6, 0, 4, 0]
    assert found(index, [1, 2, 3]) == [2, 0, 2, 0]
    assert found(index, [1, 2, 3, 4, 9, 9]) == [4, 0, 6, 0]
    assert found(index, [9]) == found(index, []) == [0, 0, 0, 0]
    assert [cache.num_tokens for cache in caches] == [6, 0, 6]
    assert index.match(pack(np.array([1, 2, 3, 4], dtype=np.int64))).tolist() == [4, 0, 4, 0]


def test_what_many_replicas_share_is_there_once():
    index = PrefixIndex(4)
    for _ in range(100):
        index.add().apply(Stored(1, 0, pack(list(range(40)))))
    assert index.num_nodes == 1
    assert found(index, list(range(40))) == [40.0] * 100 + [0]


def test_a_dropped_cache_is_gone_at_once_and_its_nodes_little_by_little():
    index = PrefixIndex(1)
    caches = [index.add() for _ in range(2)]
    for number in range(10):
        for cache in caches:
            cache.apply(Stored(number + 1, number, pack([number])))
    index.drop(caches[0])
    assert found(index, list(range(10))) == [0, 10, 0]
    assert index.add().slot == 2, "the bit is still on nodes"
    index.tidy(6)
    index.tidy(4)
    assert index.add().slot == 3
    index.tidy(2)
    assert index.add().slot == 0
    index.drop(caches[1])
    index.tidy(100)
    assert index.num_nodes == 0 and found(index, [0, 1]) == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("cuts", itertools.permutations((1, 2, 3)))
def test_a_dropped_path_goes_whole_in_whatever_order_it_was_split(cuts: tuple[int, ...]):
    """Its nodes are taken out in that order, so that some lose their last holder before their children do."""
    index, pool = PrefixIndex(1), PagePool(4, 1)
    cache = index.add()
    tree = make_tree(1, pool, None, cache.apply)
    tree.insert([1, 2, 3, 4], pool.allocate(4))
    for cut in cuts:
        tree.match([1, 2, 3, 4][:cut])
    assert index.num_nodes == 4
    index.drop(cache)
    index.tidy(4)
    assert index.num_nodes == 0


def with_events(*events: Event) -> IndexedCache:
    cache = PrefixIndex(2).add()
    for event in events:
        cache.apply(event)
    return cache


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Stored(1, 0, pack([7, 8])), "there already"),
        (Stored(0, 1, pack([7, 8])), "there already"),
        (Stored(5, 0, pack([1, 2, 9, 9])), "begins like"),
        (Stored(5, 9, pack([1, 2])), "node 9 is not known"),
        (Stored(5, 0, pack([1])), "whole pages"),
        (Stored(5, 0, b"123"), "whole pages"),
        (Stored(5, 0, b""), "whole pages"),
        (Split(9, 5, 2), "node 9 is not known"),
        (Split(1, 2, 2), "there already"),
        (Split(1, 5, 1), "cannot be split"),
        (Split(1, 5, 0), "cannot be split"),
        (Split(1, 5, 4), "cannot be split"),
        (Split(0, 5, 2), "cannot be split"),
        (Removed(9), "node 9 is not known"),
        (Removed(1), "not a leaf"),
        (Removed(0), "not a leaf"),
    ],
)
def test_an_event_that_does_not_fit_is_an_error_that_changes_nothing(event: Event, says: str):
    cache = with_events(Stored(1, 0, pack([1, 2, 3, 4])), Stored(2, 1, pack([5, 6])))
    with pytest.raises(ValueError, match=says):
        cache.apply(event)
    assert found(cache.index, [1, 2, 3, 4, 5, 6]) == [6, 0] and cache.num_tokens == 6
    assert found(cache.index, [7, 8]) == [0, 0]
    cache.apply(Removed(2))
    cache.apply(Removed(1))
    assert cache.index.num_nodes == 0 and cache.num_tokens == 0


def test_a_node_of_one_replica_may_be_many_of_the_index():
    long, cuts = list(range(12)), [2, 4, 8]
    index = PrefixIndex(2)
    one, other = index.add(), index.add()
    one.apply(Stored(1, 0, pack(long)))
    for number, cut in enumerate(cuts):
        other.apply(Stored(10 + number, 0, pack(long[:cut]))) if not number else other.apply(
            Stored(10 + number, 9 + number, pack(long[cuts[number - 1] : cut]))
        )
    one.apply(Split(1, 2, 4))
    one.apply(Split(1, 3, 2))
    assert found(index, long) == [12, 8, 0]
    one.apply(Removed(1))
    assert found(index, long) == [6, 8, 0]
    one.apply(Removed(3))
    one.apply(Removed(2))
    assert found(index, long) == [0, 8, 0]


def test_what_comes_again_and_is_split_during_a_snapshot_is_told_once(new_cache: Callable):
    """By its events: the walk, which has still to come by there, has nothing to add."""
    cache, listener = new_cache(3, 1), Listener(1)
    cache.insert([1, 2, 3])
    walk, known = cache.tree.snapshot_walk(), len(cache.events)
    cache.tree.evict(3)
    cache.insert([1, 2, 3])
    cache.tree.match([1, 2])
    for event in filter(walk.follows, cache.events[known:]):
        listener.apply(event)
    assert sorted_events(listener.events()) == sorted_events(cache.tree.snapshot())
    assert walk.piece(10, 1000) == [] and walk.is_done


def test_the_page_size_is_checked():
    with pytest.raises(ValueError, match="page_size"):
        PrefixIndex(0)


@pytest.mark.parametrize("slots", [[], [0], [3, 70], list(range(9)), list(range(0, 130, 2))])
def test_set_slots(slots: list[int]):
    values = np.zeros(131)
    set_slots(values, sum(1 << slot for slot in slots), 7)
    assert values.nonzero()[0].tolist() == slots and set(values[slots].tolist()) <= {7}


class Replica:
    """A tree, what it told, and its cache in the index: at first a snapshot in pieces, then its events."""

    num_rows: int | None = None

    def __init__(self, index: PrefixIndex, tokens: list[list[int]]) -> None:
        self.pool = PagePool(NUM_PAGES, index.page_size)
        self.listener = Listener(index.page_size)
        self.cache: IndexedCache | None = None
        self.tree = make_tree(index.page_size, self.pool, self.num_rows, self.tell)
        for each in tokens:
            self.store(each)
        self.listen(index)

    def listen(self, index: PrefixIndex) -> None:
        self.cache, self.walk = index.add(), self.tree.snapshot_walk()

    def tell(self, event: Event) -> None:
        self.listener.apply(event)
        if self.cache is not None and self.walk.follows(event):
            self.cache.apply(event)

    def store(self, tokens: list[int]) -> None:
        whole = self.whole_pages(tokens)
        match = self.tree.match(whole)
        fresh = self.pool.allocate(len(whole) // self.tree.page_size - len(match.pages))
        if fresh is not None:
            self.tree.insert(whole, np.concatenate([match.pages, fresh]))

    def whole_pages(self, tokens: list[int]) -> list[int]:
        return tokens[: len(tokens) // self.tree.page_size * self.tree.page_size]


class ReplicaWithCheckpoints(Replica):
    """The same with a tree of checkpoints."""

    num_rows = 5

    def store(self, tokens: list[int]) -> None:
        whole = self.whole_pages(tokens)
        states = self.tree.components[0]
        rows, match = self.tree.allocate_part(states, 1), self.tree.match(whole)
        fresh = self.pool.allocate(len(whole) // self.tree.page_size - len(match.pages))
        if fresh is None or not whole:
            states.pool.free(rows)
            return
        inserted = self.tree.insert(whole, np.concatenate([match.pages, fresh]), rows.tolist())
        if states.parts[inserted.node] != rows[0]:
            states.pool.free(rows)
        self.pool.free(fresh[: inserted.num_present // self.tree.page_size - len(match.pages)])


class Fleet(RuleBasedStateMachine):
    """Any history of stores, evictions, gaps, snapshots in pieces between them, and replicas that come and go."""

    kind = Replica

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def start(self, page_size: int) -> None:
        self.index = PrefixIndex(page_size)
        self.replicas: list[Replica] = [self.kind(self.index, []) for _ in range(3)]

    def replica(self, number: int) -> Replica:
        return self.replicas[number % len(self.replicas)]

    @rule(number=REPLICAS, tokens=PROMPTS)
    def store(self, number: int, tokens: list[int]) -> None:
        self.replica(number).store(tokens)

    @rule(number=REPLICAS, tokens=PROMPTS)
    def look(self, number: int, tokens: list[int]) -> None:
        self.replica(number).tree.match(tokens)  # splits

    @rule(number=REPLICAS, num_pages=st.integers(1, 6))
    def evict(self, number: int, num_pages: int) -> None:
        self.replica(number).tree.evict(num_pages)

    @rule(number=REPLICAS, most_nodes=st.integers(1, 4), most_bytes=st.sampled_from([4, 1000]))
    def piece(self, number: int, most_nodes: int, most_bytes: int) -> None:
        replica = self.replica(number)
        events = replica.walk.piece(most_nodes, most_bytes)
        assert len(events) <= most_nodes + (self.kind is ReplicaWithCheckpoints)
        for event in events:
            replica.cache.apply(event)

    @rule(number=REPLICAS)
    def gap(self, number: int) -> None:
        replica = self.replica(number)
        self.index.drop(replica.cache)
        replica.listen(self.index)

    @rule(tokens=st.lists(PROMPTS, max_size=3))
    def join(self, tokens: list[list[int]]) -> None:
        self.replicas.append(self.kind(self.index, tokens))

    @precondition(lambda self: len(self.replicas) > 1)
    @rule(number=REPLICAS)
    def leave(self, number: int) -> None:
        replica = self.replica(number)
        self.index.drop(replica.cache)
        self.replicas.remove(replica)

    @rule(most=st.integers(1, 9))
    def tidy(self, most: int) -> None:
        self.index.tidy(most)

    @rule(tokens=PROMPTS)
    def match(self, tokens: list[int]) -> None:
        lengths, page_size = found(self.index, tokens), self.index.page_size
        assert len(lengths) == self.index.num_slots + 1 and lengths[-1] == 0
        known = {replica.cache.slot: replica for replica in self.replicas}
        assert len(known) == len(self.replicas)
        for slot, length in enumerate(lengths):
            if slot not in known:
                assert length == 0
                continue
            exact = known[slot].listener.match(tokens)
            assert length == exact if known[slot].walk.is_done else length <= exact
            assert length % page_size == 0

    @invariant()
    def counts_tokens(self) -> None:
        for replica in getattr(self, "replicas", []):
            exact = replica.tree.num_cached * replica.tree.page_size
            assert replica.cache.num_tokens == exact if replica.walk.is_done else replica.cache.num_tokens <= exact

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        for replica in self.replicas:
            while not replica.walk.is_done:
                for event in replica.walk.piece(2, 1000):
                    replica.cache.apply(event)
            for tokens in replica.listener.paths.values():
                assert self.index.match(tokens)[replica.cache.slot] == replica.listener.continued(tokens)
            assert replica.cache.num_tokens == replica.tree.num_cached * replica.tree.page_size
            self.index.drop(replica.cache)
        self.index.tidy(10**6)
        assert self.index.num_nodes == 0
        assert sorted(self.index.add().slot for _ in range(self.index.num_slots)) == list(range(self.index.num_slots))


class FleetWithCheckpoints(Fleet):
    """The same of a model with recurrent states."""

    kind = ReplicaWithCheckpoints

    @rule(number=REPLICAS)
    def evict_checkpoint(self, number: int) -> None:
        tree = self.replica(number).tree
        tree.evict_point(tree.components[0])


TestFleet = Fleet.TestCase
TestFleet.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestFleetWithCheckpoints = FleetWithCheckpoints.TestCase
TestFleetWithCheckpoints.settings = TestFleet.settings


def test_a_piece_looks_at_few_nodes_even_if_there_is_nothing_to_tell(new_cache: Callable):
    """Children of one node that were evicted while the walk stood before them."""
    cache = new_cache(400, 1)
    for token in range(300):
        cache.insert([token])
    walk = SnapshotWalk(cache.tree.root)
    cache.tree.evict(290)
    sizes = []
    while not walk.is_done:
        sizes.append(len(walk.piece(10, 10**6)))
    assert len(sizes) >= 7 and sum(sizes) == 10
