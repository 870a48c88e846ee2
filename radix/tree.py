"""A token-exact radix tree over pages: which prefixes have their KV cached, and in which pages.

Who owns a page, through the life of one request whose first pages were cached (| marks page boundaries):

    match      tree [A|B]                    the request locks the node it got and reads A and B, which stay the tree's
    allocate   tree [A|B]  request [C|D|E]   C, D and a part of E are computed
    insert     tree [A|B|C|D]  request [E]   `insert(tokens of A..D, [A,B,C,D])`: C and D pass to the tree

and when another request with the same prompt inserted [A|B|X] meanwhile, `num_present` says so:

    insert     tree [A|B|X|D]  request [C,E] `num_present` is 3 pages: X is used, C stays the request's, to free

A node that was returned is good until the next `evict` or `reset`, and beyond that while it is locked. Locks count on
the path to the root, so whatever lies below an unlocked node is unlocked too.

A lease is weaker than a lock: leased leaves are evicted last, after all others. When a leased leaf is evicted, its
leases pass to its parent, so the rest of the path stays leased.

A tree may have components (`radix.component`). Then a prefix can be continued from *resume points* only: the ends of
nodes for which every component has its part. Without components, it can be from any page boundary.

- A match ends at the deepest point of the path, and an insertion makes one. So a leaf without a point is locked.
- A point is whole or gone. A component whose pool is empty evicts its first part by its own order, and the point with
  it, those with a lease of their own last.
- A pin keeps a point, a lock the pages of the path alone. A node without a point stays while it is locked, or leads to
  a deeper one. Otherwise its pages are freed with the point.
- Pages run out: leaves are evicted as in any tree, but whole, with their points.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from radix.component import Component
from radix.events import Dropped, Event, Removed, Saved, Split, Stored
from radix.eviction_order import lru
from radix.integrity import check, check_points
from radix.node import (
    TOKEN_BYTES,
    NodeLease,
    PagedNode,
    attach,
    descend,
    detach,
    insert_above,
    pack,
    walk,
    whole_pages,
)
from radix.pages import PagePool
from radix.snapshot import SnapshotWalk


class Match(NamedTuple):
    """The longest cached prefix: it ends exactly at the end of `node`; `pages` is int32 [num_tokens / page_size]."""

    node: PagedNode
    pages: np.ndarray
    num_tokens: int


class Inserted(NamedTuple):
    """The result of an insertion: the tokens end exactly at the end of `node`; the first `num_present` of them were
    there before."""

    node: PagedNode
    num_present: int


class Tree:
    """The prefix tree of one replica. Only one thread at a time may use it."""

    def __init__(
        self,
        page_size: int,
        pool: PagePool,
        policy: Callable[[PagedNode], float] = lru,
        on_event: Callable[[Event], None] | None = None,
        clock: Callable[[], float] | None = None,
        components: Sequence[Component[Any]] = (),
    ) -> None:
        """`on_event` is called with every change, in order. `clock` must never go back; by default it counts calls.
        Raises ValueError if the pool's pages have another size."""
        if page_size != pool.page_size:
            raise ValueError(f"the tree's page_size is {page_size}, the pool's {pool.page_size}")
        self.page_size = page_size
        self.pool = pool
        self.policy = policy
        self.root = PagedNode(0, None, b"")
        self._on_event = on_event
        self._clock = clock or itertools.count(1).__next__
        self._page_bytes = page_size * TOKEN_BYTES
        self._numbers = itertools.count(1)
        self._num_cached = 0
        self._num_evictable = 0
        self._num_leased = self._num_reserved = 0
        self._leased_by: dict[str, int] = {}
        # (value, serial number, node) of every evictable leaf, and of some nodes that are no longer evictable leaves.
        # When a node comes up, it is dropped if it is no longer one, and queued again if its value has risen. When a
        # value falls, because a lease has ended, the node is queued again at once, and its old entry is stale: its
        # value is no longer the very object in `PagedNode.queued`.
        self.heap: list[tuple[tuple[bool, float], int, PagedNode]] = []
        self._serials = itertools.count()
        self.num_stale = 0
        self.components = tuple(components)
        self.points: dict[PagedNode, None] = {}  # the nodes with resume points
        self.pins: dict[PagedNode, int] = {}  # of those that are pinned
        self.num_points_evicted = 0  # since the start
        self.num_pages_evicted = 0  # likewise
        if self.components:
            self._tell(Saved(self.root.number))

    @property
    def num_cached(self) -> int:
        """Number of pages that the tree owns."""
        return self._num_cached

    @property
    def num_evictable(self) -> int:
        """Number of pages that `evict` could free now: those of nodes without a lock."""
        return self._num_evictable

    @property
    def num_leased(self) -> int:
        """Number of pages with a lease."""
        return self._num_leased

    @property
    def leased_by(self) -> Mapping[str, int]:
        """Number of pages with a lease, by client."""
        return self._leased_by

    @property
    def num_reserved(self) -> int:
        """Number of pages with a lease and without a lock. They are among the evictable ones."""
        return self._num_reserved

    def match(self, tokens: Sequence[int] | np.ndarray) -> Match:
        """The longest prefix of `tokens` that can be continued, in whole pages. Counts as a use of the path, and of the
        resume point at its end. Without components, splits the node inside which the prefix ends."""
        prompt = whole_pages(pack(tokens), self._page_bytes)
        if not self.components:
            return self._match_to(self._find(prompt)[0])
        node, inside, _ = descend(self.root, prompt, self._page_bytes)
        if inside < len(node.edge):
            assert node.parent is not None
            node = node.parent
        while node.parent is not None and node not in self.points:
            node = node.parent
        self._use(node)
        if node in self.points:
            for component in self.components:
                component.matched(node)
        return self._match_to(node)

    def num_present(self, tokens: Sequence[int] | np.ndarray) -> int:
        """Leading tokens of `tokens` whose KV the tree has, in whole pages, whether or not they can be continued."""
        return descend(self.root, whole_pages(pack(tokens), self._page_bytes), self._page_bytes)[2] // TOKEN_BYTES

    def insert(
        self, tokens: Sequence[int] | np.ndarray, pages: np.ndarray, parts: Sequence[Any] | None = None
    ) -> Inserted:
        """Makes `tokens` (whole pages) a prefix of the tree, with their KV in `pages` (int32 [tokens / page_size]).

        The tree takes the pages of `tokens[num_present:]`. Of the pages of `tokens[:num_present]`, the caller must free
        those that are not the tree's own (as the pages from `match` are). `parts`: of the resume point at the end, one
        for each component, which take them. If there is a point already, it stays, and nothing of `parts` is taken; the
        caller sees this by `Component.parts`.

        Raises ValueError, and nothing changes, unless the tokens fill the pages exactly and the parts fit.
        """
        parts = () if parts is None else parts
        if len(parts) != len(self.components) or (self.components and not len(tokens)):
            raise ValueError(f"{len(tokens)} tokens with {len(parts)} parts for {len(self.components)} components")
        for component, part in zip(self.components, parts, strict=True):
            component.check_part(len(tokens), part)
        prompt = pack(tokens)
        if len(prompt) != len(pages) * self._page_bytes:
            raise ValueError(
                f"{len(tokens)} tokens do not fill {len(pages)} pages of {self.page_size}: insert whole pages only"
            )
        node, end = self._find(prompt)
        if end < len(prompt):
            node = self._add_leaf(node, prompt[end:], pages[end // self._page_bytes :])
        if self.components:
            self._make_point(node, parts)
        return Inserted(node, end // TOKEN_BYTES)

    def lock(self, node: PagedNode) -> None:
        """Keeps `node` and its ancestors from eviction until an equal number of `unlock(node)`. Raises ValueError for a
        node that was evicted."""
        if node.parent is None and node is not self.root:
            raise ValueError(f"node {node.number} was evicted: lock what match and insert return before evicting")
        node.own_locks += 1
        walker: PagedNode | None = node
        while walker is not None:
            if walker.locks == 0:
                self._num_evictable -= len(walker.pages)
                self._num_reserved -= len(walker.pages) if walker.leases else 0
            walker.locks += 1
            walker = walker.parent

    def unlock(self, node: PagedNode) -> None:
        """Removes one lock. Raises ValueError if `node` has none. With components, frees the node's pages if that was
        the last lock of a leaf without a resume point."""
        if node.own_locks == 0:
            raise ValueError(f"node {node.number} is not locked")
        node.own_locks -= 1
        walker: PagedNode | None = node
        while walker is not None:
            walker.locks -= 1
            if walker.locks == 0:
                self._num_evictable += len(walker.pages)
                self._num_reserved += len(walker.pages) if walker.leases else 0
            walker = walker.parent
        self._queue(node)
        if self.components and self._is_evictable_leaf(node) and node not in self.points:
            self._free_leaf(node)

    def pin(self, node: PagedNode) -> None:
        """Keeps the resume point of `node`, which is locked, until an equal number of `unpin(node)`. Nothing to do at
        the root. Raises ValueError for a node without a point."""
        if node is self.root:
            return
        if node not in self.points or not node.own_locks:
            raise ValueError(f"node {node.number} has no point or no lock: pin what match and insert return, locked")
        pins = self.pins[node] = self.pins.get(node, 0) + 1
        for component in self.components:
            component.pinned(node, pins)

    def unpin(self, node: PagedNode) -> None:
        """Removes one pin. Raises ValueError if `node` has none."""
        if node is self.root:
            return
        pins = self.pins.pop(node, 0) - 1
        if pins < 0:
            raise ValueError(f"the point of node {node.number} is not pinned")
        if pins:
            self.pins[node] = pins
        for component in self.components:
            component.unpinned(node, pins)

    def lease(self, node: PagedNode, client: str = "") -> NodeLease:
        """Lets `node` and its ancestors be evicted last, until `end_lease`. Raises ValueError for a node that was
        evicted."""
        if node.parent is None and node is not self.root:
            raise ValueError(f"node {node.number} was evicted: lease what match and insert return before evicting")
        lease = NodeLease(node, client)
        node.own_leases.add(lease)
        walker: PagedNode | None = node
        while walker is not None:
            if not walker.leases:
                self._num_leased += len(walker.pages)
                self._num_reserved += len(walker.pages) if walker.locks == 0 else 0
            if client not in walker.leases:
                self._count_leased(client, len(walker.pages))
            walker.leases[client] = walker.leases.get(client, 0) + 1
            walker = walker.parent
        return lease

    def end_lease(self, lease: NodeLease) -> None:
        """Ends a lease. Raises KeyError if it has ended."""
        lease.node.own_leases.remove(lease)
        client = lease.client
        walker: PagedNode | None = lease.node
        while walker is not None:
            walker.leases[client] -= 1
            if not walker.leases[client]:
                del walker.leases[client]
                self._count_leased(client, -len(walker.pages))
            if not walker.leases:
                self._num_leased -= len(walker.pages)
                self._num_reserved -= len(walker.pages) if walker.locks == 0 else 0
                self._queue_again(walker)
            walker = walker.parent

    def _count_leased(self, client: str, num_pages: int) -> None:
        self._leased_by[client] = self._leased_by.get(client, 0) + num_pages
        if not self._leased_by[client]:
            del self._leased_by[client]

    def evict(self, num_pages: int) -> int:
        """Frees `num_pages` pages into the pool, or fewer if the rest is locked, and returns their number.

        The least valuable leaf without a lease goes first, then the least valuable one with a lease. The last leaf
        loses only as much of its tail as is needed. Takes amortised O(log leaves) a leaf, for a tree of any size.
        """
        freed: list[np.ndarray] = []
        missing = min(num_pages, self._num_evictable)
        while missing > 0:
            freed.append(self._take_pages(self._pop_leaf(), missing))
            missing -= len(freed[-1])
        if not freed:
            return 0
        pages = np.concatenate(freed)
        self.num_pages_evicted += len(pages)
        self.pool.free(pages)
        return len(pages)

    def evict_point(self, component: Component[Any]) -> bool:
        """Frees the first resume point of the component's `eviction_order` that is not pinned, those with a lease of
        their own after all others, and the pages that nothing leads through any more. Returns whether there was one."""
        evicted: PagedNode | None = None
        for node in component.eviction_order():
            if node in self.pins:
                continue
            if not node.own_leases:
                evicted = node
                break
            evicted = evicted or node
        if evicted is None:
            return False
        if evicted.children or evicted.locks:
            self._free_point(evicted)
            self._tell(Dropped(evicted.number))
        else:
            self._free_leaf(evicted)
        return True

    def allocate_part(self, component: Component[Any], num_pages: int) -> np.ndarray | None:
        """Returns `num_pages` of a component's pool, int32, which the caller then owns. Evicts resume points until they
        are free; None if there are too few that are not pinned, or owned by requests."""
        while component.pool.num_free < num_pages and self.evict_point(component):
            pass
        return component.pool.allocate(num_pages)

    def reset(self) -> None:
        """Removes all nodes and frees all pages. Raises ValueError while a page is locked."""
        if self._num_evictable != self._num_cached:
            raise ValueError(f"{self._num_cached - self._num_evictable} pages are locked: finish their requests first")
        self.evict(self._num_cached)

    def snapshot(self) -> list[Event]:
        """Events that tell this tree to a new listener, parents before children. `snapshot_walk` does the same in
        pieces."""
        nodes = [Stored(node.number, node.parent.number, node.edge) for node in walk(self.root) if node.parent]
        return [*nodes, *(Saved(node.number) for node in (self.root, *self.points) if self.components)]

    def snapshot_walk(self) -> SnapshotWalk:
        """A way through the tree, to tell it to a new listener in pieces."""
        return SnapshotWalk(self.root, self.points if self.components else None)

    def check_integrity(
        self, held_pages: Iterable[int] = (), held_parts: Sequence[Iterable[int]] | None = None
    ) -> None:
        """Raises AssertionError, with the fault, unless the tree is sound and every page of the pool, and of each
        component's, has exactly one owner: the free list, a request, or the tree. `held_pages`: all pages that requests
        own, without the tree's pages that they read; `held_parts`: the same for each component. Walks the whole
        tree."""
        check(self, held_pages)
        check_points(self)
        held_parts = [()] * len(self.components) if held_parts is None else held_parts
        for component, held in zip(self.components, held_parts, strict=True):
            component.check(held, self.pins)

    def _find(self, prompt: bytes) -> tuple[PagedNode, int]:
        """Returns (node, end): the longest prefix of `prompt` in the tree is its first `end` bytes, and `node` ends
        there. Splits a node if necessary, and marks the path as used."""
        node, inside, end = descend(self.root, prompt, self._page_bytes)
        if inside < len(node.edge):
            node = self._split(node, inside)
        self._use(node)
        return node, end

    def _use(self, node: PagedNode) -> None:
        """Marks the path to `node` as used."""
        now = self._clock()
        walker: PagedNode | None = node
        while walker is not None:
            walker.last_used = now
            walker = walker.parent

    def _match_to(self, node: PagedNode) -> Match:
        """The match that ends at the end of `node`."""
        parts = []
        walker: PagedNode | None = node
        while walker is not None:
            parts.append(walker.pages)
            walker = walker.parent
        pages = np.concatenate(parts[::-1])
        return Match(node, pages, len(pages) * self.page_size)

    def _add_leaf(self, parent: PagedNode, edge: bytes, pages: np.ndarray) -> PagedNode:
        leaf = PagedNode(next(self._numbers), parent, edge)
        leaf.pages = np.array(pages, dtype=np.int32)
        leaf.last_used = parent.last_used
        attach(leaf, self._page_bytes)
        self._num_cached += len(leaf.pages)
        self._num_evictable += len(leaf.pages)
        self._queue(leaf)
        self._tell(Stored(leaf.number, parent.number, edge))
        self._children_changed(parent)
        return leaf

    def _split(self, node: PagedNode, at: int) -> PagedNode:
        """Moves the first `at` bytes of `node` to a new node above it, and returns the new node. Locks stay on `node`,
        so that a request which holds it still holds all of its pages."""
        upper = insert_above(node, next(self._numbers), at, self._page_bytes)
        num_pages = at // self._page_bytes
        # Copies: views of a trimmed tail would keep the array of the whole node alive.
        upper.pages, node.pages = node.pages[:num_pages].copy(), node.pages[num_pages:].copy()
        upper.last_used = node.last_used
        upper.locks = node.locks
        upper.leases = dict(node.leases)
        self._tell(Split(node.number, upper.number, at // TOKEN_BYTES))
        return upper

    def _take_pages(self, leaf: PagedNode, most: int) -> np.ndarray:
        """Removes a leaf, which is not queued, or its last `most` pages. Returns its pages, which are not freed yet.

        With components, it goes whole, with its point and the nodes above it that were there for it alone. Their pages
        may be more than `most`."""
        if not self.components:
            if len(leaf.pages) > most:
                self._split(leaf, (len(leaf.pages) - most) * self._page_bytes)
            self._remove(leaf)
            return leaf.pages
        freed = []
        node = leaf
        while True:
            parent = node.parent
            assert parent is not None
            if node in self.points:
                self._free_point(node)
            self._unqueue(node)
            self._remove(node)
            freed.append(node.pages)
            if parent is self.root or parent.children or parent.locks or parent in self.points:
                return np.concatenate(freed)
            node = parent

    def _free_leaf(self, leaf: PagedNode) -> None:
        self._unqueue(leaf)
        pages = self._take_pages(leaf, len(leaf.pages))
        self.num_pages_evicted += len(pages)
        self.pool.free(pages)

    def _make_point(self, node: PagedNode, parts: Sequence[Any]) -> None:
        """Gives `node` a resume point of these parts, if it has none."""
        if node in self.points:
            for component in self.components:
                component.matched(node)
            return
        self.points[node] = None
        for component, part in zip(self.components, parts, strict=True):
            component.save(node, part)
        self._tell(Saved(node.number))

    def _free_point(self, node: PagedNode) -> None:
        del self.points[node]
        for component in self.components:
            component.release(node)
        self.num_points_evicted += 1

    def _children_changed(self, node: PagedNode) -> None:
        if node in self.points:
            for component in self.components:
                component.children_changed(node)

    def _tell(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def _remove(self, leaf: PagedNode) -> None:
        parent = detach(leaf, self._page_bytes)
        self._num_cached -= len(leaf.pages)
        self._num_evictable -= len(leaf.pages)
        if leaf.leases:
            self._num_leased -= len(leaf.pages)
            self._num_reserved -= len(leaf.pages)
            for client in leaf.leases:
                self._count_leased(client, -len(leaf.pages))
            for lease in leaf.own_leases:
                lease.node = parent
            parent.own_leases |= leaf.own_leases
        self._queue(parent)
        self._children_changed(parent)
        self._tell(Removed(leaf.number))

    def _is_evictable_leaf(self, node: PagedNode) -> bool:
        return not node.children and node.locks == 0 and node.parent is not None

    def _value(self, node: PagedNode) -> tuple[bool, float]:
        return bool(node.leases), self.policy(node)

    def _queue(self, node: PagedNode) -> None:
        """Gives `node` an entry in the heap if it is an evictable leaf without one."""
        if node.queued is None and self._is_evictable_leaf(node):
            node.queued = self._value(node)
            heapq.heappush(self.heap, (node.queued, next(self._serials), node))

    def _queue_again(self, node: PagedNode) -> None:
        """Queues a node again if its value has fallen below that of its entry in the heap."""
        if node.queued is not None and node.queued > self._value(node):
            self._unqueue(node)
            self._queue(node)

    def _unqueue(self, node: PagedNode) -> None:
        """Makes the entry of a node in the heap a stale one, if it has one."""
        if node.queued is None:
            return
        node.queued = None
        self.num_stale += 1
        if self.num_stale > len(self.heap) // 2:
            self.heap = [entry for entry in self.heap if entry[2].queued is entry[0]]
            heapq.heapify(self.heap)
            self.num_stale = 0

    def _pop_leaf(self) -> PagedNode:
        """Removes the least valuable evictable leaf from the heap and returns it. There must be one."""
        while True:
            value, _, node = heapq.heappop(self.heap)
            if node.queued is not value:
                self.num_stale -= 1
                continue
            node.queued = None
            if self._value(node) > value:
                self._queue(node)
            elif self._is_evictable_leaf(node):
                return node
