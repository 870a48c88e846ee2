"""The prefixes that many requests have, and the copies of them that a fleet can use."""

import numpy as np
import pytest

from router.fleet.popularity import MAX_WINDOW_REQUESTS, MIN_REQUESTS, WINDOW_REQUESTS, Popularity

REPLICAS = 8
FULL = WINDOW_REQUESTS * REPLICAS


def wanted(popularity: Popularity, hashes: list[int], cached: list[float]) -> list[float]:
    """Of a prompt with marks at 100, 200, ... tokens."""
    ends = [100 * (place + 1) for place in range(len(hashes))]
    return popularity.wanted_tokens(hashes, ends, np.array(cached, dtype=float)).tolist()


def counted(**shares: float) -> Popularity:
    """A full window in which prefix `p1` has the share that `p1` says."""
    popularity = Popularity()
    for number in range(FULL):
        popularity.add([int(name[1:]) for name, share in shares.items() if number < share * FULL], REPLICAS)
    return popularity


def test_what_all_requests_begin_with_is_wanted_everywhere_and_what_one_has_nowhere():
    popularity = counted(p1=1.0, p2=1 / FULL)
    assert wanted(popularity, [1, 2], [0, 0, 200, 0]) == [100, 100, 0, 100]
    assert wanted(popularity, [1, 3], [0, 0, 0, 0]) == [100] * 4
    assert wanted(counted(p1=1.0, p2=1.0), [1, 2], [0, 100, 200, 200]) == [200, 100, 0, 0]


@pytest.mark.parametrize(("holders", "tokens"), [(0, 100), (1, 100), (2, 50), (3, 0), (4, 0)])
def test_as_many_copies_are_wanted_as_have_a_share_of_the_work(holders: int, tokens: float):
    """A quarter of the requests is the work of two of eight replicas; half as many more leave a choice."""
    found = wanted(counted(p1=0.25), [1], [100] * holders + [0] * (REPLICAS - holders))
    assert found == pytest.approx([0] * holders + [tokens] * (REPLICAS - holders))


def test_only_the_newest_requests_count():
    popularity = counted(p1=1.0)
    for _ in range(FULL):
        popularity.add([2], REPLICAS)
    assert wanted(popularity, [1], [0, 0]) == [0, 0] and wanted(popularity, [2], [0, 0]) == [100, 100]
    assert len(popularity) == FULL
    for _ in range(MAX_WINDOW_REQUESTS):
        popularity.add([3], 10**6)
    assert len(popularity) == MAX_WINDOW_REQUESTS
    popularity.add([3], 1)
    assert len(popularity) == WINDOW_REQUESTS


def test_the_first_requests_make_no_prefix_popular():
    popularity = Popularity()
    popularity.add([1], REPLICAS)
    popularity.add([1], REPLICAS)
    assert wanted(popularity, [1], [0] * REPLICAS) == [0] * REPLICAS
    for _ in range(REPLICAS * MIN_REQUESTS):
        popularity.add([1], REPLICAS)
    assert wanted(popularity, [1], [0] * REPLICAS) == [100] * REPLICAS


def test_part_of_a_mark_that_is_cached_is_not_wanted_again():
    assert wanted(counted(p1=1.0), [1], [40, 100]) == [60, 0]
    assert Popularity().wanted_tokens([], [], np.array([0.0, 5.0])).tolist() == [0, 0]
