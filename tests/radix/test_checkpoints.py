"""A tree with checkpoints, case by case. `test_properties.py` has any history against a model without a tree."""

from collections.abc import Callable

import numpy as np
import pytest

from radix.checkpoints import CheckpointTree
from radix.events import Dropped, Removed, Saved, Split, Stored
from radix.index import PrefixIndex
from radix.node import pack
from radix.pages import PagePool


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
    fresh, row = cache.allocate(1), cache.tree.allocate_row()
    inserted = cache.tree.insert([1, 2], fresh, row)
    assert inserted.num_present == 2 and cache.tree.checkpoints[inserted.node] == row
    cache.free(fresh)
    stored = Stored(1, 0, pack([1, 2, 3, 4, 5, 6]))
    assert cache.events == [Saved(0), stored, Saved(1), Split(1, 2, 2), Saved(2)]
    assert cache.tree.match([1, 2, 3, 4]).num_tokens == 2


def test_a_checkpoint_that_is_there_already_is_kept(new_cache: Callable):
    cache = new_cache(8, 1, 2)
    node = cache.insert([1, 2]).node
    row = cache.tree.checkpoints[node]
    assert cache.insert([1, 2]).node is node and cache.tree.checkpoints == {node: row}
    assert cache.tree.rows.num_free == 1


def test_a_node_without_a_checkpoint_stays_on_the_way_to_a_deeper_one(new_cache: Callable):
    cache = new_cache(16, 1, 3)
    upper, lower = cache.insert([1, 2]).node, cache.insert([1, 2, 3, 4]).node
    cache.tree.match([1, 2, 3, 4])
    assert cache.tree.evict_checkpoint()
    assert cache.events[-1] == Dropped(upper.number) and cache.tree.num_cached == 4
    assert cache.tree.match([1, 2, 9]).num_tokens == 0 and cache.tree.match([1, 2, 3, 4]).num_tokens == 4
    assert cache.tree.evict_checkpoint()
    assert cache.events[-2:] == [Removed(lower.number), Removed(upper.number)], "nothing leads through it any more"
    assert cache.tree.num_cached == 0 and cache.pool.num_free == 16 and not cache.tree.evict_checkpoint()
    assert cache.tree.num_checkpoints_evicted == 2


def test_a_lock_keeps_the_checkpoint_of_its_own_node(new_cache: Callable):
    cache = new_cache(16, 1, 2)
    upper, lower = cache.insert([1, 2]).node, cache.insert([1, 2, 3]).node
    cache.tree.lock(lower)
    assert cache.tree.evict_checkpoint() and upper not in cache.tree.checkpoints
    assert not cache.tree.evict_checkpoint()
    taken = cache.tree.allocate_row()
    assert taken is not None and cache.tree.allocate_row() is None, "a locked row is not given away"
    cache.tree.free_row(taken)
    assert cache.tree.evict(3) == 0
    cache.tree.unlock(lower)
    assert cache.tree.evict(1) == 3, "a leaf goes whole, and what led to it alone"


def test_those_that_nothing_went_on_from_are_evicted_first(new_cache: Callable):
    """Of four rows at most two are kept for others: of the first three that were used again, the first is not."""
    cache = new_cache(16, 1, 4)
    nodes = [cache.insert([token]).node for token in range(4)]
    for token in range(3):
        cache.tree.match([token, 9])
    assert [*cache.tree.eviction_order()] == [nodes[3], nodes[0], nodes[1], nodes[2]]
    cache.insert([7])
    assert nodes[3].parent is None and nodes[0] in cache.tree.checkpoints


def test_a_lease_of_its_own_keeps_a_checkpoint_longer(new_cache: Callable):
    """Those with one go after all others, in the same order."""
    cache = new_cache(16, 1, 3)
    first, second, other = (cache.insert([token]).node for token in (1, 2, 3))
    leases = [cache.tree.lease(node) for node in (first, second)]
    for left in ([first, second], [second], []):
        assert cache.tree.evict_checkpoint() and [*cache.tree.checkpoints] == left
    assert other.parent is None and not cache.tree.evict_checkpoint()
    for lease in leases:
        cache.tree.end_lease(lease)


@pytest.mark.parametrize(("tokens", "row"), [([1, 2], -1), ([], 0)])
def test_what_ends_at_no_checkpoint_is_refused(tokens: list[int], row: int):
    tree = CheckpointTree(1, PagePool(4, 1), PagePool(2, 1))
    with pytest.raises(ValueError, match="insert what ends at a checkpoint"):
        tree.insert(tokens, tree.pool.allocate(len(tokens)), row)
    assert tree.num_cached == 0


def lose_a_row(tree: CheckpointTree) -> None:
    tree.rows.allocate(1)


def free_a_row_in_use(tree: CheckpointTree) -> None:
    tree.free_row(next(iter(tree.checkpoints.values())))


def leave_a_leaf_without(tree: CheckpointTree) -> None:
    tree._free_checkpoint([*tree.checkpoints][-1])


def keep_a_dead_one(tree: CheckpointTree) -> None:
    node = tree.match([1, 2, 3]).node
    row = tree.checkpoints[node]
    tree.evict(1)
    tree.rows.allocate(1)
    tree.checkpoints[node] = row


def save_the_root(tree: CheckpointTree) -> None:
    tree.checkpoints[tree.root] = tree.allocate_row()


def lock_without_a_checkpoint(tree: CheckpointTree) -> None:
    upper = tree.match([1]).node
    tree._free_checkpoint(upper)
    tree.lock(upper)


def evict_one_never(tree: CheckpointTree) -> None:
    tree._used_once.clear()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lose_a_row, "row 2: free 0 times, held by requests 0 times, in the tree 0"),
        (free_a_row_in_use, "row 0: free 1 times, held by requests 0 times, in the tree 1"),
        (leave_a_leaf_without, "is a leaf without a checkpoint"),
        (keep_a_dead_one, "has a checkpoint and is gone"),
        (save_the_root, "the root has a checkpoint"),
        (lock_without_a_checkpoint, "its checkpoint was not kept"),
        (evict_one_never, "2 checkpoints are there, 0 can be evicted"),
    ],
)
def test_damage_is_found(damage: Callable[[CheckpointTree], None], says: str):
    tree = CheckpointTree(1, PagePool(6, 1), PagePool(4, 1))
    pages = tree.pool.allocate(3)
    tree.insert([1], pages[:1], tree.allocate_row())
    tree.insert([1, 2, 3], np.concatenate([pages[:1], pages[1:]]), tree.allocate_row())
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
