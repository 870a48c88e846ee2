"""Leases with owners and ends, against a list of what was granted."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radix.leases import Leases

from .conftest import Cache

NUM_PAGES, MOST_PAGES = 16, 8
OWNERS, NAMES = st.sampled_from("pq"), st.sampled_from("abc")


class Model(RuleBasedStateMachine):
    """Disjoint paths of 1 to 4 pages, one for each branch, so that every lease counts for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(NUM_PAGES, 1)
        self.leases = Leases(self.cache.tree, MOST_PAGES)
        self.now = 0.0
        self.renewed: dict[str, float] = {}
        self.since: list[str] = []  # owners, the one that has had leases for the longest time first
        self.granted: dict[tuple[str, str], tuple[int, float]] = {}  # pages and seconds
        self.number = 0

    def ends(self, key: tuple[str, str]) -> float:
        return self.renewed[key[0]] + self.granted[key][1]

    @rule(owner=OWNERS, name=NAMES, pages=st.integers(1, 4), seconds=st.sampled_from([0, 5, 10, 60]))
    def grant(self, owner: str, name: str, pages: int, seconds: float) -> None:
        missing = pages - self.cache.pool.num_free
        if missing > 0:
            unleased = self.cache.tree.num_cached - self.cache.tree.num_leased
            if missing > unleased:
                return
            self.cache.tree.evict(missing)
        self.number += 1
        node = self.cache.insert([100 * self.number + page for page in range(pages)]).node
        self.leases.grant(owner, name, node, seconds, self.now)
        self.renewed[owner] = self.now
        self.granted.pop((owner, name), None)
        if seconds:
            self.granted[owner, name] = (pages, seconds)
        self.since_now()
        total = sum(pages for pages, _ in self.granted.values())
        gone = {key: pages for key, (pages, _) in self.granted.items() if not self.is_leased(key)}
        assert bool(gone) == (total > MOST_PAGES)
        if gone:
            order = sorted(self.granted, key=lambda key: self.since.index(key[0]))  # then by grant
            assert list(gone) == [key for key in order if key in gone]
            assert set(order[-len(gone) :]) == set(gone), "others than the latest of the newest"
            assert total - sum(gone.values()) + gone[order[-len(gone)]] > MOST_PAGES, "no more than had to"
        self.granted = {key: value for key, value in self.granted.items() if key not in gone}
        self.since_now()

    def since_now(self) -> None:
        owners = list(dict.fromkeys(owner for owner, _ in self.granted))
        self.since = [owner for owner in self.since if owner in owners]
        self.since += [owner for owner in owners if owner not in self.since]

    def is_leased(self, key: tuple[str, str]) -> bool:
        owner = self.leases._owners.get(key[0])
        return owner is not None and key[1] in owner.grants

    @rule(owner=OWNERS)
    def renew(self, owner: str) -> None:
        self.leases.renew(owner, self.now)
        self.renewed[owner] = self.now

    @rule(owners=st.lists(st.sampled_from("pqx"), max_size=2))
    def release(self, owners: list[str]) -> None:
        self.leases.release(owners)
        self.granted = {key: value for key, value in self.granted.items() if key[0] not in owners}
        self.since_now()

    @rule(seconds=st.sampled_from([1, 5, 30]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.leases.expire(self.now)
        self.granted = {key: value for key, value in self.granted.items() if self.ends(key) > self.now}
        self.since_now()

    @invariant()
    def sound(self) -> None:
        self.leases.check_integrity()
        self.cache.check()
        assert {key for key in self.granted if self.is_leased(key)} == set(self.granted)
        assert len(self.leases) == len(self.granted)
        assert self.cache.tree.num_leased == sum(pages for pages, _ in self.granted.values())


TestModel = pytest.mark.slow(Model.TestCase)
TestModel.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)


def test_a_leased_path_outlives_newer_ones(new_cache: Callable[[int, int], Cache]) -> None:
    cache = new_cache(4, 1)
    leases = Leases(cache.tree, 2)
    leases.grant("program", "branch", cache.insert([1, 2]).node, 10, now_s=0)
    cache.insert([3, 4])
    assert cache.tree.evict(1) == 1
    assert (cache.tree.match([1, 2]).num_tokens, cache.tree.match([3, 4]).num_tokens) == (2, 1)
    assert cache.tree.evict(2) == 2  # a lease holds nothing back
    assert (cache.tree.match([1, 2]).num_tokens, cache.tree.num_leased) == (1, 1)
    leases.expire(10)
    assert (cache.tree.num_leased, len(leases)) == (0, 0)


@pytest.mark.parametrize(
    ("owner", "name", "seconds", "left"),
    [
        ("program", "other", 3, 1),
        ("program", "other", 0, 1),
        ("program", "missing", 0, 1),
        ("program", "branch", 10, 1),
        ("program", "branch", 0, 0),
        ("another", "branch", 3, 0),
    ],
)
def test_whoever_leases_renews_all_its_leases(
    new_cache: Callable[[int, int], Cache], owner: str, name: str, seconds: float, left: int
) -> None:
    """Also by ending one, and by asking for the end of none. `left`: leases after 11 seconds, when one of 10 seconds is
    there if it was renewed after two."""
    cache = new_cache(4, 1)
    leases = Leases(cache.tree, 4)
    leases.grant("program", "branch", cache.insert([1]).node, 10, now_s=0)
    leases.grant("program", "other", cache.insert([2]).node, 3, now_s=0)
    leases.grant(owner, name, cache.insert([3]).node, seconds, now_s=2)
    leases.expire(11)
    assert len(leases) == left
    leases.expire(12)
    assert (len(leases), cache.tree.num_leased) == (0, 0)


def test_a_branch_that_is_too_long_is_not_leased(new_cache: Callable[[int, int], Cache]) -> None:
    cache = new_cache(4, 1)
    leases = Leases(cache.tree, 2)
    leases.grant("program", "branch", cache.insert([1, 2, 3]).node, 10, now_s=0)
    assert (cache.tree.num_leased, len(leases)) == (0, 0)


def test_forks_share_what_they_have_in_common(new_cache: Callable[[int, int], Cache]) -> None:
    cache = new_cache(8, 1)
    leases = Leases(cache.tree, 4)
    leases.grant("program", "a", cache.insert([1, 2, 3]).node, 10, now_s=0)
    leases.grant("program", "b", cache.insert([1, 2, 4]).node, 10, now_s=0)
    assert cache.tree.num_leased == 4
    leases.grant("program", "b", cache.tree.root, 0, now_s=0)
    assert cache.tree.num_leased == 3


def test_a_leased_leaf_that_got_a_child_falls_with_the_lease_on_the_child(
    new_cache: Callable[[int, int], Cache],
) -> None:
    cache = new_cache(4, 1)
    first = cache.tree.lease(cache.insert([1]).node)
    cache.insert([3])
    assert cache.tree.evict(1) == 1  # [3]: the leased leaf was passed over, and queued again with its lease
    second = cache.tree.lease(cache.insert([1, 2]).node)
    cache.tree.end_lease(first)
    cache.tree.end_lease(second)
    cache.check()
    cache.insert([4])
    assert cache.tree.evict(2) == 2
    assert cache.tree.match([4]).num_tokens == 1


def test_leases_end_once(new_cache: Callable[[int, int], Cache]) -> None:
    cache = new_cache(2, 1)
    lease = cache.tree.lease(cache.insert([1]).node)
    cache.tree.end_lease(lease)
    with pytest.raises(KeyError):
        cache.tree.end_lease(lease)


def test_a_node_that_is_gone_cannot_be_leased(new_cache: Callable[[int, int], Cache]) -> None:
    cache = new_cache(2, 1)
    node = cache.insert([1]).node
    cache.tree.evict(1)
    with pytest.raises(ValueError, match="was evicted"):
        cache.tree.lease(node)


def test_leases_that_come_and_go_leave_the_heaps_small(new_cache: Callable[[int, int], Cache]) -> None:
    cache = new_cache(4, 1)
    leases = Leases(cache.tree, 4)
    cache.insert([3, 4])
    for number in range(1000):
        node = cache.insert([1, 2]).node
        cache.tree.lock(node)
        leases.grant("program", str(number % 2), node, 3600, now_s=0)
        cache.tree.unlock(node)  # queued with its lease
        leases.grant("program", str(number % 2), node, 0, now_s=0)
    assert len(cache.tree.heap) <= 4
    assert len(leases._ends) <= 66
