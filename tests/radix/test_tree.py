import numpy as np
import pytest

from radix.events import Removed, Split, Stored
from radix.node import pack
from radix.pages import PagePool
from radix.tree import Tree


def test_an_empty_tree_matches_nothing(new_cache):
    cache = new_cache(4, 2)
    match = cache.tree.match([1, 2, 3])
    assert match.node is cache.tree.root
    assert match.num_tokens == 0 and match.pages.dtype == np.int32 and match.pages.size == 0
    assert cache.tree.match([]).num_tokens == 0


def test_matches_the_longest_prefix_in_whole_pages(new_cache):
    cache = new_cache(8, 4)
    pages = cache.allocate(3)
    cache.tree.insert(list(range(12)), pages)
    cache.held.clear()
    match = cache.tree.match([*range(7), 99, 100])
    assert match.num_tokens == 4
    assert match.pages.tolist() == pages[:1].tolist()
    assert cache.tree.match([*range(11)]).num_tokens == 8
    assert cache.tree.match(np.arange(40, dtype=np.int32)).pages.tolist() == pages.tolist()
    assert cache.tree.match([0, 1, 2]).num_tokens == 0


def test_a_match_inside_a_node_splits_it_there(new_cache):
    cache = new_cache(4, 1)
    leaf = cache.insert([1, 2, 3, 4]).node
    cache.tree.lock(leaf)
    match = cache.tree.match([1, 2, 9])
    assert match.node is leaf.parent and match.node.num_tokens == 2
    assert cache.events == [Stored(1, 0, pack([1, 2, 3, 4])), Split(1, 2, 2)]
    assert cache.tree.num_evictable == 0, "who locked the leaf holds its upper half too"
    cache.tree.unlock(leaf)
    assert cache.tree.num_evictable == 4


def test_matched_pages_are_a_copy(new_cache):
    cache = new_cache(2, 1)
    cache.insert([1, 2])
    cache.tree.match([1, 2]).pages[:] = 77
    cache.tree.check_integrity()


def test_pages_already_present_stay_the_callers(new_cache):
    cache = new_cache(8, 2)
    first = cache.allocate(2)
    cache.tree.insert([1, 2, 3, 4], first)
    cache.held.difference_update(first.tolist())
    second = cache.allocate(3)
    inserted = cache.tree.insert([1, 2, 3, 4, 5, 6], second)
    assert inserted.num_present == 4
    cache.held.remove(int(second[2]))
    cache.tree.check_integrity(cache.held)
    cache.free(second[:2])
    assert cache.tree.match([1, 2, 3, 4, 5, 6]).pages.tolist() == [*first.tolist(), int(second[2])]


def test_inserting_what_is_there_changes_nothing_but_may_split(new_cache):
    cache = new_cache(4, 1)
    long = cache.insert([1, 2, 3]).node
    pages = cache.tree.match([1, 2]).pages
    inserted = cache.tree.insert([1, 2], pages)
    assert inserted.num_present == 2 and inserted.node is long.parent
    assert cache.tree.insert([], np.empty(0, dtype=np.int32)).node is cache.tree.root


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(3, 1), (4, 1), (4, 3), (1, 0), (0, 1)])
def test_only_whole_pages_are_inserted(new_cache, num_tokens, num_pages):
    cache = new_cache(4, 2)
    pages = cache.allocate(num_pages)
    with pytest.raises(ValueError, match="whole pages"):
        cache.tree.insert(list(range(num_tokens)), pages)
    assert cache.events == []


@pytest.mark.parametrize("tokens", [[2**31], ["a"], [1.5], np.zeros((1, 2), dtype=np.int32), np.array([2**40])])
def test_tokens_must_be_integers_of_32_bits(new_cache, tokens):
    with pytest.raises(ValueError, match=r"integers|32 bits"):
        new_cache(4, 1).tree.match(tokens)


def test_evicts_the_least_recently_used_leaf_first(new_cache):
    cache = new_cache(6, 1)
    cache.insert([1, 1])
    cache.insert([2, 2])
    cache.insert([3, 3])
    cache.tree.match([1, 1])
    assert cache.tree.evict(2) == 2
    assert [cache.tree.match([k, k]).num_tokens for k in (1, 2, 3)] == [2, 0, 2]


def test_what_is_left_of_a_trimmed_leaf_was_used_when_the_leaf_was(new_cache):
    """So an older leaf goes first, when it may go again."""
    cache = new_cache(6, 1)
    older = cache.insert([1, 1]).node
    cache.insert([2, 2, 2, 2])
    cache.tree.lock(older)
    assert cache.tree.evict(1) == 1
    cache.tree.unlock(older)
    assert cache.tree.evict(2) == 2
    assert [cache.tree.match([k] * 4).num_tokens for k in (1, 2)] == [0, 3]


def test_children_go_before_their_parents(new_cache):
    cache = new_cache(6, 1)
    cache.insert([1, 2])
    cache.insert([1, 2, 3, 4])
    cache.insert([1, 2, 5])
    assert cache.tree.evict(3) == 3
    assert cache.tree.match([1, 2, 3, 4]).num_tokens == 2
    assert cache.tree.evict(2) == 2
    assert cache.tree.num_cached == 0 and cache.pool.num_free == 6


def test_a_long_leaf_loses_only_its_tail(new_cache):
    cache = new_cache(100, 2)
    cache.insert(list(range(200)))
    assert cache.tree.evict(1) == 1
    assert cache.tree.num_cached == 99 and cache.pool.num_free == 1
    assert cache.tree.match(list(range(200))).num_tokens == 198
    assert cache.events[1:] == [Split(1, 2, 198), Removed(1)]


def test_locked_nodes_stay(new_cache):
    cache = new_cache(6, 1)
    node = cache.insert([1, 2, 3]).node
    cache.insert([1, 2, 4, 5])
    cache.tree.lock(node)
    cache.tree.lock(node)
    assert cache.tree.num_evictable == 2
    assert cache.tree.evict(10) == 2
    cache.tree.unlock(node)
    assert cache.tree.evict(10) == 0
    cache.tree.unlock(node)
    assert cache.tree.evict(10) == 3
    with pytest.raises(ValueError, match="not locked"):
        cache.tree.unlock(node)
    with pytest.raises(ValueError, match="was evicted"):
        cache.tree.lock(node)


def test_the_root_can_be_locked_for_a_match_of_nothing(new_cache):
    cache = new_cache(2, 1)
    root = cache.tree.match([5]).node
    cache.tree.lock(root)
    cache.insert([1, 2])
    assert cache.tree.num_evictable == 2
    cache.tree.unlock(root)


def test_reset_forgets_everything_unless_locked(new_cache):
    cache = new_cache(8, 2)
    node = cache.insert([1, 2, 3, 4]).node
    cache.insert([1, 2, 5, 6])
    cache.tree.lock(node)
    with pytest.raises(ValueError, match="2 pages are locked"):
        cache.tree.reset()
    assert cache.tree.num_cached == 3
    cache.tree.unlock(node)
    cache.tree.reset()
    assert cache.pool.num_free == 8 and cache.tree.snapshot() == [] and cache.indexed.num_tokens == 0


def test_the_tree_and_the_pool_must_agree_on_the_page_size():
    with pytest.raises(ValueError, match="page_size is 2, the pool's 4"):
        Tree(2, PagePool(4, 4))


def test_a_tree_of_thousands_of_levels_needs_no_recursion(new_cache):
    depth = 3000
    cache = new_cache(depth + 1, 1)
    tokens = np.arange(depth, dtype=np.int32)
    for n in range(1, depth + 1, 3):
        cache.tree.insert(tokens[:n], np.arange(n, dtype=np.int32))
    cache.held.update(range(depth - 2, depth + 1))
    cache.pool.allocate(depth + 1)
    cache.tree.lock(cache.tree.match(tokens).node)
    cache.tree.unlock(cache.tree.match(tokens).node)
    cache.check()
    assert cache.tree.evict(depth) == depth - 2


def test_eviction_does_not_walk_the_tree(new_cache):
    """Counts how often the policy is asked: a walk would ask for each of a thousand leaves."""
    asked = []
    pool = PagePool(1000, 1)
    tree = Tree(1, pool, policy=lambda node: asked.append(node.number) or node.last_used)
    for token in range(1000):
        tree.insert([token], pool.allocate(1))
    asked.clear()
    assert tree.evict(3) == 3
    assert len(asked) <= 3
    tree.check_integrity()


def test_the_heap_holds_each_node_once_however_often_it_is_used(new_cache):
    cache = new_cache(4, 1)
    for _ in range(100):
        node = cache.insert([1, 2]).node
        cache.tree.lock(node)
        cache.insert([3, 4])
        cache.tree.unlock(node)
    assert len(cache.tree.heap) == 2
