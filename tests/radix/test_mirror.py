import numpy as np
import pytest

from radix.events import Removed, Split, Stored
from radix.mirror import Mirror


def test_matches_without_changing_anything():
    mirror = Mirror(2)
    mirror.apply(Stored(1, 0, [1, 2, 3, 4]))
    assert mirror.match([1, 2, 3]) == 2
    assert mirror.match(np.array([1, 2, 3, 4, 5], dtype=np.int64)) == 4
    assert mirror.match([9]) == 0
    assert mirror.snapshot() == [Stored(1, 0, [1, 2, 3, 4])]
    assert mirror.num_tokens == 4


def test_follows_a_tree_that_is_trimmed(new_cache):
    cache = new_cache(20, 4)
    cache.insert(list(range(80)))
    cache.tree.evict(7)
    assert cache.mirror.match(list(range(80))) == 52


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Stored(1, 0, [7, 8]), "there already"),
        (Stored(0, 1, [7, 8]), "there already"),
        (Stored(5, 0, [1, 2, 9, 9]), "begins like"),
        (Stored(5, 9, [1, 2]), "node 9 is not known"),
        (Stored(5, 0, [1]), "whole pages"),
        (Stored(5, 0, []), "whole pages"),
        (Stored(5, 0, [2**31, 1]), "32 bits"),
        (Split(9, 5, 2), "node 9 is not known"),
        (Split(1, 2, 2), "there already"),
        (Split(1, 5, 1), "cannot be split"),
        (Split(1, 5, 0), "cannot be split"),
        (Split(1, 5, 4), "cannot be split"),
        (Split(0, 5, 2), "cannot be split"),
        (Removed(9), "node 9 is not known"),
        (Removed(1), "no leaf"),
        (Removed(0), "no leaf"),
    ],
)
def test_an_event_that_does_not_fit_is_an_error_that_changes_nothing(event, says):
    mirror = Mirror(2)
    mirror.apply(Stored(1, 0, [1, 2, 3, 4]))
    mirror.apply(Stored(2, 1, [5, 6]))
    before = mirror.snapshot()
    with pytest.raises(ValueError, match=says):
        mirror.apply(event)
    assert mirror.snapshot() == before and mirror.num_tokens == 6


def test_the_page_size_is_checked():
    with pytest.raises(ValueError, match="1 to 64"):
        Mirror(0)
