"""A tree with checkpoints, case by case. `test_properties.py` has any history against a model without a tree."""

from collections.abc import Callable

import pytest

from radix.checkpoints import StateComponent
from radix.events import Dropped, Removed, Saved, Split, Stored
from radix.index import PrefixIndex
from radix.node import pack
from radix.pages import PagePool
from radix.tree import Tree


def test_a_match_ends_at_the_deepest_checkpoint(new_cache: Callable):
    cache = new_cache(16, 2, 4)
    short = cache.insert([1, 2, 3, 4]).node
    long = cache.insert([1, 2, 3, 4, 5, 6, 7, 8]).node
    events = list(cache.events)
    match = cache.tree.match([1, 2, 3, 4, 5, 6, 9, 9])
    assert match.node is short and match.num_tokens == 4 and len(match.pages) == 2
    assert cache.tree.num_present([1, 2, 3, 4, 5, 6, 9, 9]) == 6
    assert cache.tree.match([1, 2, 3, 4, 5, 6, 7, 8, 9]).node is long
    assert cache.tree.match([1, 2, 9, 9]).node is cache.tree.root
    assert cache.events == events, "a match splits nothing"


def test_an_insertion_inside_a_node_gives_it_a_checkpoint_there(new_cache: Callable):
    cache = new_cache(16, 2, 4)
    cache.insert([1, 2, 3, 4, 5, 6])
    fresh, row = cache.allocate(1), cache.allocate_row()
    inserted = cache.tree.insert([1, 2], fresh, [row])
    assert inserted.num_present == 2 and cache.parts[inserted.node] == row
    cache.free(fresh)
    stored = Stored(1, 0, pack([1, 2, 3, 4, 5, 6]))
    assert cache.events == [Saved(0), stored, Saved(1), Split(1, 2, 2), Saved(2)]
    assert cache.tree.match([1, 2, 3, 4]).num_tokens == 2


def test_a_checkpoint_that_is_there_already_is_kept(new_cache: Callable):
    cache = new_cache(8, 1, 2)
    node = cache.insert([1, 2]).node
    row = cache.parts[node]
    assert cache.insert([1, 2]).node is node and cache.parts == {node: row}
    assert cache.component.pool.num_free == 1


def test_a_node_without_a_checkpoint_stays_on_the_way_to_a_deeper_one(new_cache: Callable):
    cache = new_cache(16, 1, 3)
    upper, lower = cache.insert([1, 2]).node, cache.insert([1, 2, 3, 4]).node
    cache.tree.match([1, 2, 3, 4])
    assert cache.evict_point()
    assert cache.events[-1] == Dropped(upper.number) and cache.tree.num_cached == 4
    assert cache.tree.match([1, 2, 9]).num_tokens == 0 and cache.tree.match([1, 2, 3, 4]).num_tokens == 4
    assert cache.evict_point()
    assert cache.events[-2:] == [Removed(lower.number), Removed(upper.number)], "nothing leads through it any more"
    assert cache.tree.num_cached == 0 and cache.pool.num_free == 16 and not cache.evict_point()
    assert cache.tree.num_points_evicted == 2


def test_a_pin_keeps_the_checkpoint_of_its_own_node(new_cache: Callable):
    cache = new_cache(16, 1, 2)
    upper, lower = cache.insert([1, 2]).node, cache.insert([1, 2, 3]).node
    cache.tree.lock(lower)
    cache.tree.pin(lower)
    assert cache.evict_point() and upper not in cache.parts
    assert not cache.evict_point()
    taken = cache.allocate_row()
    assert taken is not None and cache.allocate_row() is None, "a pinned row is not given away"
    cache.component.pool.free_one(taken)
    assert cache.tree.evict(3) == 0
    cache.tree.unpin(lower)
    cache.tree.unlock(lower)
    assert cache.tree.evict(1) == 3, "a leaf goes whole, and what led to it alone"


def test_those_that_nothing_went_on_from_are_evicted_first(new_cache: Callable):
    """Of four rows at most two are kept for others: of the first three that were used again, the first is not."""
    cache = new_cache(16, 1, 4)
    nodes = [cache.insert([token]).node for token in range(4)]
    for token in range(3):
        cache.tree.match([token, 9])
    assert [*cache.component.eviction_order()] == [nodes[3], nodes[0], nodes[1], nodes[2]]
    cache.insert([7])
    assert nodes[3].parent is None and nodes[0] in cache.parts


def test_a_lease_of_its_own_keeps_a_checkpoint_longer(new_cache: Callable):
    """Those with one go after all others, in the same order."""
    cache = new_cache(16, 1, 3)
    first, second, other = (cache.insert([token]).node for token in (1, 2, 3))
    leases = [cache.tree.lease(node) for node in (first, second)]
    for left in ([first, second], [second], []):
        assert cache.evict_point() and [*cache.parts] == left
    assert other.parent is None and not cache.evict_point()
    for lease in leases:
        cache.tree.end_lease(lease)


def states_tree(num_pages: int, num_rows: int) -> Tree:
    return Tree(1, PagePool(num_pages, 1), components=[StateComponent(PagePool(num_rows, 1))])


@pytest.mark.parametrize(
    ("tokens", "rows", "says"),
    [
        ([1, 2], [-1], "insert what ends at a checkpoint"),
        ([1, 2], [2], "insert what ends at a checkpoint"),
        ([], [0], "0 tokens with 1 parts"),
        ([1, 2], [], "2 tokens with 0 parts for 1 components"),
    ],
)
def test_what_ends_at_no_checkpoint_is_refused(tokens: list[int], rows: list[int], says: str):
    tree = states_tree(4, 2)
    with pytest.raises(ValueError, match=says):
        tree.insert(tokens, tree.pool.allocate(len(tokens)), rows)
    assert tree.num_cached == 0


def lose_a_row(tree: Tree) -> None:
    tree.components[0].pool.allocate(1)


def free_a_row_in_use(tree: Tree) -> None:
    tree.components[0].pool.free_one(next(iter(tree.components[0].parts.values())))


def leave_a_leaf_without(tree: Tree) -> None:
    tree._free_point([*tree.points][-1])


def keep_a_dead_one(tree: Tree) -> None:
    node = tree.match([1, 2, 3]).node
    tree.evict(1)
    tree.points[node] = None


def save_the_root(tree: Tree) -> None:
    tree.points[tree.root] = None


def lose_a_part(tree: Tree) -> None:
    tree.components[0].release(tree.match([1]).node)


def pin_what_is_gone(tree: Tree) -> None:
    upper = tree.match([1]).node
    tree.lock(upper)
    tree.pin(upper)
    tree._free_point(upper)


def evict_one_never(tree: Tree) -> None:
    tree.components[0]._used_once.clear()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lose_a_row, "row 2: free 0 times, held by requests 0 times, in the tree 0"),
        (free_a_row_in_use, "row 0: free 1 times, held by requests 0 times, in the tree 1"),
        (leave_a_leaf_without, "is a leaf without a point or a lock"),
        (keep_a_dead_one, "has a point and is gone"),
        (save_the_root, "the root has a point"),
        (lose_a_part, "1 parts are there, and 2 points"),
        (pin_what_is_gone, "is pinned, and its point was not kept"),
        (evict_one_never, "2 points are there, 0 can be evicted"),
    ],
)
def test_damage_is_found(damage: Callable[[Tree], None], says: str):
    tree = states_tree(6, 4)
    pages, rows = tree.pool.allocate(3), tree.components[0].pool.allocate(2).tolist()
    tree.insert([1], pages[:1], rows[:1])
    tree.insert([1, 2, 3], pages, rows[1:])
    tree.check_integrity()
    damage(tree)
    with pytest.raises(AssertionError, match=says):
        tree.check_integrity()


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Saved(9), "node 9 is not known"),
        (Saved(1), "has a checkpoint"),
        (Dropped(2), "has no checkpoint"),
        (Dropped(0), "has no checkpoint"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_an_error_that_changes_nothing(event: Saved | Dropped, says: str):
    cache = PrefixIndex(1).add()
    for known in (Saved(0), Stored(1, 0, pack([1])), Saved(1), Stored(2, 1, pack([2])), Stored(3, 2, pack([3]))):
        cache.apply(known)
    with pytest.raises(ValueError, match=says):
        cache.apply(event)
    assert cache.index.match(pack([1, 2, 3])).tolist() == [1, 0]
