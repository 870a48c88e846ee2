"""A tree with windows, case by case. `test_properties.py` has any history against a model without a tree."""

from collections.abc import Callable

import numpy as np
import pytest

from radix.events import Dropped, Removed, Saved, Stored
from radix.node import PagedNode, pack
from radix.pages import PagePool
from radix.tree import Inserted, Tree
from radix.windows import WindowComponent

from .conftest import Cache


@pytest.fixture
def windowed(new_cache: Callable) -> Callable[..., Cache]:
    """A cache with pages of a token, and windows of three: pages number n - 2 and n - 1 are before position n."""
    return lambda num_windows=12, num_pages=20: new_cache(num_pages, 1, windows=(num_windows, 3, False))


def insert(cache: Cache, tokens: list[int], shared: list[int] | None = None) -> Inserted:
    """With new window pages after those of `shared`."""
    tree, match = cache.tree, cache.tree.match(tokens)
    pages = np.concatenate([match.pages, cache.pool.allocate(len(tokens) - len(match.pages))])
    new = cache.component.pool.allocate(min(len(tokens), 2) - len(shared or []))
    return tree.insert(tokens, pages, [np.array([*(shared or []), *new], dtype=np.int32)])


def test_a_match_ends_where_a_window_is_whole(windowed: Callable[..., Cache]):
    cache = windowed()
    upper, lower = insert(cache, [1, 2]).node, insert(cache, [1, 2, 3, 4]).node
    assert cache.events == [Saved(0), Stored(1, 0, pack([1, 2])), Saved(1), Stored(2, 1, pack([3, 4])), Saved(2)]
    assert cache.tree.match([1, 2, 3]).node is upper and cache.tree.match([1, 2, 3, 4, 5]).node is lower
    assert cache.tree.num_present([1, 2, 3]) == 3 and cache.tree.match([1, 3]).num_tokens == 0


def test_windows_have_pages_in_common(windowed: Callable[..., Cache]):
    cache = windowed()
    upper = insert(cache, [1, 2, 3]).node
    pages = cache.parts[upper].tolist()
    insert(cache, [1, 2, 3, 4], pages[1:])
    assert cache.component.num_cached == 3 and cache.component.pool.num_free == 9
    assert cache.evict_point() and cache.events[-1] == Dropped(upper.number)
    assert cache.component.num_cached == 2 and cache.component.owns(np.array(pages)).tolist() == [False, True]


def test_a_window_that_is_there_already_is_kept(windowed: Callable[..., Cache]):
    cache = windowed()
    node = insert(cache, [1, 2]).node
    window, new = cache.parts[node].tolist(), cache.component.pool.allocate(2)
    assert cache.tree.insert([1, 2], node.pages, [new]).node is node
    assert cache.parts[node].tolist() == window and not cache.component.owns(new).any()
    cache.component.pool.free(new)


def test_windows_of_nodes_with_one_child_go_first_and_without_the_node(windowed: Callable[..., Cache]):
    cache = windowed()
    other, inner, fork = (insert(cache, tokens).node for tokens in ([7, 8], [1, 2], [5, 6]))
    ends = [insert(cache, tokens).node for tokens in ([1, 2, 3, 4], [5, 6, 1], [5, 6, 2])]
    assert [*cache.component.eviction_order()] == [inner, other, ends[0], ends[1], fork, ends[2]]
    cache.make_room(2)
    assert cache.events[-1] == Dropped(inner.number) and cache.tree.num_cached == 10
    cache.make_room(4)
    assert cache.events[-1] == Removed(other.number), "a leaf goes with its pages"


def test_what_several_have_gone_on_from_goes_last(windowed: Callable[..., Cache]):
    cache = windowed()
    nodes = [insert(cache, [token]).node for token in (1, 2, 3)]
    insert(cache, [2, 5])

    def pin(node: PagedNode) -> None:
        cache.tree.lock(node)
        cache.tree.pin(node)
        cache.tree.unpin(node)
        cache.tree.unlock(node)

    for node in (nodes[0], nodes[0], nodes[1], nodes[1]):
        pin(node)
    order = [*cache.component.eviction_order()]
    assert order[0] is nodes[1] and order[-1] is nodes[0]
    pin(nodes[1])
    assert [*cache.component.eviction_order()][-2:] == nodes[:2]


def test_a_pin_keeps_a_window_and_a_lock_a_leaf_without(windowed: Callable[..., Cache]):
    cache = windowed(4)
    node = insert(cache, [1, 2, 3]).node
    cache.tree.lock(node)
    cache.tree.pin(node)
    cache.tree.pin(node)
    cache.tree.unpin(node)
    assert cache.component.num_evictable == 0 and not cache.evict_point()
    cache.tree.unpin(node)
    assert cache.component.num_evictable == 2 and cache.evict_point()
    assert cache.events[-1] == Dropped(node.number) and cache.tree.num_cached == 3
    assert cache.tree.match([1, 2, 3]).num_tokens == 0 and cache.tree.evict(3) == 0
    cache.tree.unlock(node)
    assert cache.tree.num_cached == 0 and cache.pool.num_free == 20


def test_a_leaf_without_a_window_is_removed_up_to_what_is_locked(windowed: Callable[..., Cache]):
    cache = windowed()
    nodes = [insert(cache, [1, 2, 3][:length]).node for length in (1, 2, 3)]
    for node in nodes[::2]:
        cache.tree.lock(node)
    while cache.evict_point():
        pass
    assert cache.tree.num_cached == 3
    cache.tree.unlock(nodes[2])
    assert cache.tree.num_cached == 1 and nodes[1].parent is None
    cache.tree.unlock(nodes[0])
    assert cache.tree.num_cached == 0


def windows_tree(num_pages: int) -> Tree:
    return Tree(1, PagePool(num_pages, 1), components=[WindowComponent(PagePool(num_pages, 1), 3)])


@pytest.mark.parametrize("window", [[], [0], [0, 1, 2]])
def test_another_window_is_refused(window: list[int]):
    tree = windows_tree(4)
    with pytest.raises(ValueError, match="insert the whole window"):
        tree.insert([1, 2, 3], tree.pool.allocate(3), [np.array(window, dtype=np.int32)])
    assert tree.num_cached == 0


def test_pins_that_do_not_fit_are_refused(windowed: Callable[..., Cache]):
    cache = windowed()
    node = insert(cache, [1, 2]).node
    cache.tree.pin(cache.tree.root)
    cache.tree.unpin(cache.tree.root)
    with pytest.raises(ValueError, match="has no point or no lock"):
        cache.tree.pin(node)
    with pytest.raises(ValueError, match="is not pinned"):
        cache.tree.unpin(node)


def lose_a_page(tree: Tree) -> None:
    tree.components[0].pool.allocate(1)


def free_a_page_in_use(tree: Tree) -> None:
    tree.components[0].pool.free(next(iter(tree.components[0].parts.values()))[:1])


def count_a_use_twice(tree: Tree) -> None:
    tree.components[0].uses[next(iter(tree.components[0].parts.values()))[0]] += 1


def cut_a_window(tree: Tree) -> None:
    parts = tree.components[0].parts
    node = next(iter(parts))
    parts[node] = parts[node][1:]


def pin_without_a_lock(tree: Tree) -> None:
    tree.pins[next(iter(tree.points))] = 1


def forget_a_pin(tree: Tree) -> None:
    node = next(iter(tree.points))
    tree.lock(node)
    tree.pin(node)
    del tree.pins[node]


def evict_one_never(tree: Tree) -> None:
    tree.components[0]._used_once.clear()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lose_a_page, "window page 4: free 0 times, held by requests 0 times, in the tree 0"),
        (free_a_page_in_use, "window page 0: free 1 times, held by requests 0 times, in the tree 1"),
        (count_a_use_twice, "are counted wrongly"),
        (cut_a_window, "has 1 pages, and needs 2"),
        (pin_without_a_lock, "has 1 pins and 0 locks"),
        (forget_a_pin, "4 window pages are cached and 0 pinned"),
        (evict_one_never, "2 points are there, 0 can be evicted"),
    ],
)
def test_damage_is_found(damage: Callable[[Tree], None], says: str):
    tree = windows_tree(6)
    for tokens in ([1, 2], [5, 6]):
        tree.insert(tokens, tree.pool.allocate(2), [tree.components[0].pool.allocate(2)])
    tree.check_integrity()
    damage(tree)
    with pytest.raises(AssertionError, match=says):
        tree.check_integrity()
