import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix.pages import PagePool


def test_hands_out_every_page_once_and_then_none():
    pool = PagePool(8, 16)
    first, second = pool.allocate(5), pool.allocate(3)
    assert first.dtype == np.int32
    assert sorted([*first, *second]) == list(range(8))
    assert pool.num_free == 0
    assert pool.allocate(1) is None
    assert pool.allocate(0).size == 0


def test_a_refused_allocation_changes_nothing():
    pool = PagePool(4, 1)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    pool.check_integrity()


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ([0, 0], "twice"),
        ([3], "free already"),
        ([0, 3], "free already"),
        ([4], "not of this pool"),
        ([-1], "not of this pool"),
    ],
)
def test_a_wrong_free_is_an_error_that_changes_nothing(pages, says):
    pool = PagePool(4, 1)
    assert pool.allocate(2).tolist() == [0, 1]
    with pytest.raises(ValueError, match=says):
        pool.free(np.array(pages, dtype=np.int32))
    assert pool.num_free == 2
    pool.check_integrity()


def test_pages_must_be_integers_of_one_dimension():
    pool = PagePool(4, 1)
    with pytest.raises(ValueError, match="integers"):
        pool.free(np.array([0.5]))
    with pytest.raises(ValueError, match="integers"):
        pool.free(np.zeros((1, 1), dtype=np.int32))


def test_bad_sizes_are_errors():
    with pytest.raises(ValueError, match="-1 pages"):
        PagePool(-1, 1)
    with pytest.raises(ValueError, match="1 to 64"):
        PagePool(1, 0)
    with pytest.raises(ValueError, match="1 to 64"):
        PagePool(1, 65)
    with pytest.raises(ValueError, match="allocate -1"):
        PagePool(1, 1).allocate(-1)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_agrees_with_a_set(steps):
    pool, held = PagePool(16, 4), []
    for is_allocation, amount in steps:
        if is_allocation:
            pages = pool.allocate(amount)
            assert (pages is None) == (amount > 16 - len(held))
            fresh = [] if pages is None else pages.tolist()
            assert not set(fresh) & set(held)
            held += fresh
        else:
            pool.free(np.array(held[:amount], dtype=np.int32))
            held = held[amount:]
        assert pool.num_free == 16 - len(held)
        assert set(pool.free_pages().tolist()) == set(range(16)) - set(held)
        pool.check_integrity()
