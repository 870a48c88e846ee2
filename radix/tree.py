"""A token-exact radix tree over pages: which prefixes have their KV cached, and in which pages.

Who owns a page, through the life of one request whose first pages were cached (| marks page boundaries):

    match      tree [A|B]                    the request locks the node it got and reads A and B, which stay the tree's
    allocate   tree [A|B]  request [C|D|E]   C, D and a part of E are computed
    insert     tree [A|B|C|D]  request [E]   `insert(tokens of A..D, [A,B,C,D])`: C and D pass to the tree

and when another request with the same prompt inserted [A|B|X] meanwhile, `num_present` says so:

    insert     tree [A|B|X|D]  request [C,E] `num_present` is 3 pages: X is used, C stays the request's, to free

A node that was returned is good until the next `evict` or `reset`, and beyond that while it is locked. Locks count on
the path to the root, so whatever lies below an unlocked node is unlocked too.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np

from radix.events import Event, Removed, Split, Stored
from radix.integrity import check
from radix.node import TOKEN_BYTES, Node, attach, descend, detach, insert_above, pack, snapshot, unpack, whole_pages
from radix.pages import PagePool
from radix.policies import lru

NO_PAGES = np.empty(0, dtype=np.int32)
NO_PAGES.flags.writeable = False


class PagedNode(Node):
    """A node of `Tree`: its pages, who holds it, when it was last used.

    `locks` counts those held on this node or below it, `own_locks` those on this node alone. `queued` says that the
    eviction heap has an entry for it.
    """

    __slots__ = ("last_used", "locks", "own_locks", "pages", "queued")

    def __init__(self, number: int, parent: Self | None, edge: bytes) -> None:
        super().__init__(number, parent, edge)
        self.pages = NO_PAGES
        self.last_used: float = 0
        self.locks = 0
        self.own_locks = 0
        self.queued = False


class Match(NamedTuple):
    """The longest cached prefix: it ends exactly at the end of `node`; `pages` is int32 [num_tokens / page_size]."""

    node: PagedNode
    pages: np.ndarray
    num_tokens: int


class Inserted(NamedTuple):
    """What was inserted ends exactly at the end of `node`; `num_present` of its tokens were there before."""

    node: PagedNode
    num_present: int


class Tree:
    """The prefix tree of one replica. One thread at a time."""

    def __init__(
        self,
        page_size: int,
        pool: PagePool,
        policy: Callable[[PagedNode], float] = lru,
        on_event: Callable[[Event], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`on_event` is told of every change, in order. `clock` never goes back; by default it counts calls. Raises
        ValueError when the pool's pages have another size."""
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
        # (value, number, node) of every evictable leaf, once each, and of some nodes that have ceased to be one: those
        # are dropped when they come up, as a value that has risen since is corrected then.
        self.heap: list[tuple[float, int, PagedNode]] = []

    @property
    def num_cached(self) -> int:
        """Pages that the tree owns."""
        return self._num_cached

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now: those of nodes without a lock."""
        return self._num_evictable

    def match(self, tokens: Sequence[int] | np.ndarray) -> Match:
        """The longest cached prefix of `tokens` in whole pages. Splits the node in which it ends; counts as a use."""
        node, _ = self._find(whole_pages(pack(tokens), self._page_bytes))
        parts = []
        walker: PagedNode | None = node
        while walker is not None:
            parts.append(walker.pages)
            walker = walker.parent
        pages = np.concatenate(parts[::-1])
        return Match(node, pages, len(pages) * self.page_size)

    def insert(self, tokens: Sequence[int] | np.ndarray, pages: np.ndarray) -> Inserted:
        """Makes `tokens` (whole pages) a prefix of the tree, with their KV in `pages` (int32 [tokens / page_size]).

        The tree takes the pages of `tokens[num_present:]`. Those of `tokens[:num_present]` that the caller passed and
        that are not the tree's own (what `match` returned) stay the caller's to free. Raises ValueError, and nothing
        changes, unless the tokens fill the pages exactly.
        """
        prompt = pack(tokens)
        if len(prompt) != len(pages) * self._page_bytes:
            raise ValueError(
                f"{len(tokens)} tokens do not fill {len(pages)} pages of {self.page_size}: insert whole pages only"
            )
        node, end = self._find(prompt)
        if end < len(prompt):
            node = self._add_leaf(node, prompt[end:], pages[end // self._page_bytes :])
        return Inserted(node, end // TOKEN_BYTES)

    def lock(self, node: PagedNode) -> None:
        """Keeps `node` and what it stands on from eviction until as many `unlock(node)`. Raises ValueError for a node
        that was evicted."""
        if node.parent is None and node is not self.root:
            raise ValueError(f"node {node.number} was evicted: lock what match and insert return before evicting")
        node.own_locks += 1
        walker: PagedNode | None = node
        while walker is not None:
            if walker.locks == 0:
                self._num_evictable -= len(walker.pages)
            walker.locks += 1
            walker = walker.parent

    def unlock(self, node: PagedNode) -> None:
        """Takes one lock back. Raises ValueError when `node` has none."""
        if node.own_locks == 0:
            raise ValueError(f"node {node.number} is not locked")
        node.own_locks -= 1
        walker: PagedNode | None = node
        while walker is not None:
            walker.locks -= 1
            if walker.locks == 0:
                self._num_evictable += len(walker.pages)
            walker = walker.parent
        self._queue(node)

    def evict(self, num_pages: int) -> int:
        """Frees `num_pages` into the pool, least valuable leaf first, and of the last leaf only its tail; fewer when
        the rest is locked. Returns how many. Amortised O(log leaves) a leaf, whatever the size of the tree."""
        freed: list[np.ndarray] = []
        missing = min(num_pages, self._num_evictable)
        while missing > 0:
            leaf = self._pop_leaf()
            if len(leaf.pages) > missing:
                self._split(leaf, (len(leaf.pages) - missing) * self._page_bytes)
            missing -= len(leaf.pages)
            freed.append(leaf.pages)
            self._remove(leaf)
        if not freed:
            return 0
        pages = np.concatenate(freed)
        self.pool.free(pages)
        return len(pages)

    def reset(self) -> None:
        """Forgets everything and frees every page. Raises ValueError while a page is locked."""
        if self._num_evictable != self._num_cached:
            raise ValueError(f"{self._num_cached - self._num_evictable} pages are locked: finish their requests first")
        self.evict(self._num_cached)

    def snapshot(self) -> list[Stored]:
        """Events that build this tree in an empty `Mirror`, parents before children."""
        return snapshot(self.root)

    def check_integrity(self, held_pages: Iterable[int] = ()) -> None:
        """Raises AssertionError, saying what is wrong, unless every page of the pool is owned by exactly one of the
        free list, a request (`held_pages` are those of all requests, without the ones they share) and the tree, and the
        tree is sound. Walks it all."""
        check(self, held_pages)

    def _find(self, prompt: bytes) -> tuple[PagedNode, int]:
        """(node, end): the longest prefix of `prompt` in the tree is its first `end` bytes, and `node` ends there.
        Splits if it must, and marks the path as used."""
        node, inside, end = descend(self.root, prompt, self._page_bytes)
        if inside < len(node.edge):
            node = self._split(node, inside)
        now = self._clock()
        walker: PagedNode | None = node
        while walker is not None:
            walker.last_used = now
            walker = walker.parent
        return node, end

    def _add_leaf(self, parent: PagedNode, edge: bytes, pages: np.ndarray) -> PagedNode:
        leaf = PagedNode(next(self._numbers), parent, edge)
        leaf.pages = np.array(pages, dtype=np.int32)
        leaf.last_used = parent.last_used
        attach(leaf, self._page_bytes)
        self._num_cached += len(leaf.pages)
        self._num_evictable += len(leaf.pages)
        self._queue(leaf)
        if self._on_event is not None:
            self._on_event(Stored(leaf.number, parent.number, unpack(edge)))
        return leaf

    def _split(self, node: PagedNode, at: int) -> PagedNode:
        """Puts the first `at` bytes of `node` into a new node above it, which is returned. Locks stay on `node`, so
        that whoever holds it still holds all of it."""
        upper = insert_above(node, next(self._numbers), at, self._page_bytes)
        num_pages = at // self._page_bytes
        # Copies, so that a trimmed tail does not keep the array of what was once a long node.
        upper.pages, node.pages = node.pages[:num_pages].copy(), node.pages[num_pages:].copy()
        upper.last_used = node.last_used
        upper.locks = node.locks
        if self._on_event is not None:
            self._on_event(Split(node.number, upper.number, at // TOKEN_BYTES))
        return upper

    def _remove(self, leaf: PagedNode) -> None:
        parent = detach(leaf, self._page_bytes)
        self._num_cached -= len(leaf.pages)
        self._num_evictable -= len(leaf.pages)
        self._queue(parent)
        if self._on_event is not None:
            self._on_event(Removed(leaf.number))

    def _is_evictable_leaf(self, node: PagedNode) -> bool:
        return not node.children and node.locks == 0 and node.parent is not None

    def _queue(self, node: PagedNode) -> None:
        """Gives `node` an entry in the heap if it is an evictable leaf without one."""
        if not node.queued and self._is_evictable_leaf(node):
            node.queued = True
            heapq.heappush(self.heap, (self.policy(node), node.number, node))

    def _pop_leaf(self) -> PagedNode:
        """The least valuable evictable leaf, out of the heap. There must be one."""
        while True:
            value, _, node = heapq.heappop(self.heap)
            node.queued = False
            if self.policy(node) > value:
                self._queue(node)
            elif self._is_evictable_leaf(node):
                return node
