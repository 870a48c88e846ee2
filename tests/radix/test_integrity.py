"""Each kind of damage is found and named."""

import numpy as np
import pytest

from radix.pages import PagePool
from radix.tree import Tree


@pytest.fixture
def tree():
    """Leaves [3, 4] (locked) and [5, 6] under [1, 2]; the tree has pages 0 to 5, a request 6 and 7."""
    pool = PagePool(10, 1)
    tree = Tree(1, pool)
    pages = pool.allocate(8)
    tree.insert([1, 2, 3, 4], pages[:4])
    tree.lock(tree.match([1, 2, 3, 4]).node)
    tree.insert([1, 2, 5, 6], np.concatenate([pages[:2], pages[4:6]]))
    tree.check_integrity([6, 7])
    return tree


def parts(tree):
    (upper,) = tree.root.children.values()
    locked, free = upper.children.values()
    return upper, locked, free


def lose_a_page(tree):
    tree.pool.allocate(1)


def free_a_cached_page(tree):
    tree.pool.free(np.array([0], dtype=np.int32))


def own_a_held_page(tree):
    parts(tree)[2].pages[0] = 6


def own_a_page_twice(tree):
    parts(tree)[2].pages[0] = 0


def own_a_foreign_page(tree):
    parts(tree)[2].pages[0] = 99


def name_a_page_free_twice(tree):
    tree.pool._stack[0] = tree.pool._stack[1]


def mark_a_page_free(tree):
    tree.pool._is_free[0] = True


def lose_a_child(tree):
    upper, _, free = parts(tree)
    del upper.children[free.edge[:4]]


def change_a_key(tree):
    upper, _, free = parts(tree)
    upper.children[b"\0" * 4] = upper.children.pop(free.edge[:4])


def change_a_parent(tree):
    parts(tree)[2].parent = tree.root


def orphan(tree):
    parts(tree)[2].parent = None


def make_a_cycle(tree):
    upper, _, free = parts(tree)
    free.children[upper.edge[:4]] = upper


def give_the_root_tokens(tree):
    tree.root.edge = b"\0" * 4


def cut_an_edge(tree):
    free = parts(tree)[2]
    free.edge = free.edge[:4]


def use_a_child_after_its_parent(tree):
    parts(tree)[1].last_used = 1000


def count_a_lock_too_many(tree):
    parts(tree)[0].locks += 1


def lose_a_lock_on_the_path(tree):
    tree.root.locks -= 1


def unlock_too_often(tree):
    for node in (parts(tree)[2], parts(tree)[0], tree.root):
        node.locks -= 1
    parts(tree)[2].own_locks -= 1


def miscount_cached(tree):
    tree._num_cached += 1


def miscount_evictable(tree):
    tree._num_evictable -= 1


def lose_a_leaf_in_the_heap(tree):
    free = parts(tree)[2]
    tree.heap[:] = [entry for entry in tree.heap if entry[2] is not free]
    free.queued = None


def forget_a_mark(tree):
    parts(tree)[2].queued = None


def mark_what_is_not_listed(tree):
    tree.root.queued = (False, 1.0)


def queue_twice(tree):
    tree.heap.append(tree.heap[-1])


def queue_a_dead_node(tree):
    pages = tree.pool.allocate(1)
    dead = tree.insert([9], pages).node
    tree.evict(3)
    tree.pool.allocate(1)
    dead.queued = (False, 10**6)
    tree.heap.append((dead.queued, 10**6, dead))


def disorder_the_heap(tree):
    for token in (7, 8):
        tree.insert([token], tree.pool.allocate(1))
    tree.heap.reverse()


def lower_a_value(tree):
    parts(tree)[2].last_used = 0


def count_a_lease_too_many(tree):
    tree.root.leases["a"] = 1


def lose_a_lease_on_the_path(tree):
    tree.lease(parts(tree)[1], "a")
    tree.root.leases.clear()


def lease_another_node(tree):
    tree.lease(parts(tree)[1]).node = parts(tree)[2]


def miscount_leased(tree):
    tree._num_leased += 1


def miscount_a_client(tree):
    tree._leased_by["a"] = 1


def miscount_reserved(tree):
    tree._num_reserved += 1


def end_a_lease_without_queueing(tree):
    free = parts(tree)[2]
    lease = tree.lease(free)
    tree.evict(0)
    free.queued = (True, free.last_used)
    tree.heap[:] = [(free.queued, 0, free)]
    free.own_leases.remove(lease)
    for node in (free, parts(tree)[0], tree.root):
        node.leases.clear()
    tree._num_leased = tree._num_reserved = 0
    tree._leased_by.clear()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lose_a_page, "page 8: free 0 times, held by requests 0 times, in the tree 0"),
        (free_a_cached_page, "page 0: free 1 times, held by requests 0 times, in the tree 1"),
        (own_a_held_page, "not exactly one owner"),
        (own_a_page_twice, "page 0: free 0 times, held by requests 0 times, in the tree 2"),
        (own_a_foreign_page, r"the tree owns pages \[99\]"),
        (name_a_page_free_twice, "names a page twice"),
        (mark_a_page_free, "2 pages are listed as free, 3 are marked"),
        (lose_a_child, "num_cached is 6, the nodes hold 4"),
        (change_a_key, "filed under tokens that it does not begin with"),
        (change_a_parent, "names another parent"),
        (orphan, "names another parent"),
        (make_a_cycle, "cycle"),
        (give_the_root_tokens, "root that has some"),
        (cut_an_edge, "does not fill its pages"),
        (use_a_child_after_its_parent, "its parent"),
        (count_a_lock_too_many, "counts 1 locks, but has 0 and its children 2"),
        (lose_a_lock_on_the_path, "counts 0 locks"),
        (unlock_too_often, "unlocked more often"),
        (miscount_cached, "num_cached is 7"),
        (miscount_evictable, "num_evictable is 1"),
        (lose_a_leaf_in_the_heap, "eviction cannot find"),
        (forget_a_mark, "has 1 stale entries"),
        (mark_what_is_not_listed, "but listed=False"),
        (queue_twice, "twice"),
        (queue_a_dead_node, "which is gone"),
        (disorder_the_heap, "out of order"),
        (lower_a_value, "has fallen"),
        (count_a_lease_too_many, r"counts leases \{'a': 1\}, but there are \{\}"),
        (lose_a_lease_on_the_path, r"counts leases \{\}, but there are \{'a': 1\}"),
        (lease_another_node, "a lease on node"),
        (miscount_leased, "num_leased is 1"),
        (miscount_a_client, "leased_by is"),
        (miscount_reserved, "num_reserved is 1"),
        (end_a_lease_without_queueing, "has fallen"),
    ],
)
def test_damage_is_found(tree, damage, says):
    damage(tree)
    with pytest.raises(AssertionError, match=says):
        tree.check_integrity([6, 7])


def test_a_request_cannot_hold_a_page_that_is_not_there(tree):
    with pytest.raises(AssertionError, match=r"a request owns pages \[-1\]"):
        tree.check_integrity([6, 7, -1])


def test_a_page_held_by_two_requests_is_found(tree):
    with pytest.raises(AssertionError, match="held by requests 2 times"):
        tree.check_integrity([6, 7, 7])
