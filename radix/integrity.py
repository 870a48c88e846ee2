"""Checks that a tree and its pools are sound: pages, links, locks, leases, counts, eviction order, resume points and
their parts."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from radix.node import TOKEN_BYTES, PagedNode, walk
from radix.pages import PagePool


class CheckedTree(Protocol):
    """The attributes of a `radix.tree.Tree` that are checked."""

    page_size: int
    pool: PagePool
    root: PagedNode
    policy: Callable[[PagedNode], float]
    heap: list[tuple[tuple[bool, float], int, PagedNode]]
    num_stale: int

    @property
    def num_cached(self) -> int: ...

    @property
    def num_evictable(self) -> int: ...

    @property
    def num_leased(self) -> int: ...

    @property
    def leased_by(self) -> Mapping[str, int]: ...

    @property
    def num_reserved(self) -> int: ...


class CheckedComponent(Protocol):
    """The attributes of a `radix.component.Component` that are checked."""

    @property
    def parts(self) -> Mapping[PagedNode, object]: ...

    def eviction_order(self) -> Iterator[PagedNode]: ...


class CheckedPoints(Protocol):
    """The attributes of a `radix.tree.Tree` with components that are checked, besides those of any tree."""

    root: PagedNode
    points: dict[PagedNode, None]
    pins: dict[PagedNode, int]

    @property
    def components(self) -> Sequence[CheckedComponent]: ...


class CheckedRows(Protocol):
    """The attributes of a `radix.checkpoints.StateComponent` that are checked, besides those of any component."""

    pool: PagePool
    parts: dict[PagedNode, int]


class CheckedWindows(Protocol):
    """The attributes of a `radix.windows.WindowComponent` that are checked, besides those of any component."""

    page_size: int
    pool: PagePool
    parts: dict[PagedNode, np.ndarray]
    uses: np.ndarray

    @property
    def num_cached(self) -> int: ...

    @property
    def num_evictable(self) -> int: ...

    def first_page(self, position: int) -> int: ...


def check(tree: CheckedTree, held_pages: Iterable[int]) -> None:
    """Raises AssertionError, with the fault, if anything is wrong. `held_pages`: all pages that requests own, without
    the tree's pages that they read."""
    nodes = list(_reachable(tree))
    tree.pool.check_integrity()
    for node in nodes:
        _check_node(tree, node)
        _check_locks(node)
        _check_leases(node)
    _check_counts(tree, nodes)
    _check_heap(tree, nodes)
    _check_owners("page", tree.pool, np.concatenate([node.pages for node in nodes]), held_pages)


def check_points(tree: CheckedPoints) -> None:
    """Raises AssertionError, with the fault, if anything is wrong with the resume points of a tree whose nodes and
    pages are sound: a point is at a node, and has a part of every component."""
    nodes, points = set(walk(tree.root)), tree.points.keys()
    for node in points:
        _require(node in nodes, f"node {node.number} has a point and is gone")
        _require(node is not tree.root, "the root has a point")
    for component in tree.components:
        _require(component.parts.keys() == points, f"{len(component.parts)} parts are there, and {len(points)} points")
        order = list(component.eviction_order())
        _require(
            len(order) == len(points) and set(order) == points,
            f"{len(points)} points are there, {len(order)} can be evicted in their order",
        )
    for node, pins in tree.pins.items():
        _require(node in points, f"node {node.number} is pinned, and its point was not kept")
        _require(0 < pins <= node.own_locks, f"node {node.number} has {pins} pins and {node.own_locks} locks")
    if tree.components:
        for node in nodes - points - {tree.root}:
            _require(bool(node.children or node.locks), f"node {node.number} is a leaf without a point or a lock")


def check_rows(rows: CheckedRows, held: Iterable[int]) -> None:
    """Raises AssertionError, with the fault, unless every row has one owner. `held`: all rows that requests own."""
    rows.pool.check_integrity()
    _check_owners("row", rows.pool, np.array([*rows.parts.values()], dtype=np.int64), held)


def check_windows(windows: CheckedWindows, held: Iterable[int], pins: Iterable[PagedNode]) -> None:
    """Raises AssertionError, with the fault, if anything is wrong with the windows at a tree's points. `held`: all
    window pages that requests own, without the tree's that they read. `pins`: the pinned nodes."""
    windows.pool.check_integrity()
    uses = np.zeros(windows.pool.num_pages, dtype=np.int64)
    for node, window in windows.parts.items():
        num_pages = _pages_to(node)
        whole = num_pages - windows.first_page(num_pages * windows.page_size)
        _require(len(window) == whole, f"the window of node {node.number} has {len(window)} pages, and needs {whole}")
        uses[window] += 1
    _require(bool((uses == windows.uses).all()), "the windows that have a page are counted wrongly")
    cached, pinned = uses.nonzero()[0], {page for node in pins for page in windows.parts[node].tolist()}
    _require(
        (windows.num_cached, windows.num_evictable) == (len(cached), len(cached) - len(pinned)),
        f"{len(cached)} window pages are cached and {len(pinned)} pinned, which is counted wrongly",
    )
    _check_owners("window page", windows.pool, cached, held)


def _pages_to(node: PagedNode) -> int:
    """Pages on the path to the end of `node`."""
    walker: PagedNode | None = node
    num_pages = 0
    while walker is not None:
        num_pages += len(walker.pages)
        walker = walker.parent
    return num_pages


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _reachable(tree: CheckedTree) -> Iterable[PagedNode]:
    """Yields all nodes. Raises AssertionError for a node that is reached twice, since a cycle would have no end."""
    seen: set[int] = set()
    for node in walk(tree.root):
        _require(node.number not in seen, f"two nodes have the number {node.number}, or there is a cycle")
        seen.add(node.number)
        yield node


def _check_node(tree: CheckedTree, node: PagedNode) -> None:
    page_bytes = tree.page_size * TOKEN_BYTES
    name = f"node {node.number}"
    _require((node is tree.root) == (node.parent is None), f"{name} has no parent, or is a root that has one")
    _require((node is tree.root) == (not node.edge), f"{name} has no tokens, or is a root that has some")
    _require(len(node.edge) == len(node.pages) * page_bytes, f"{name} does not fill its pages exactly")
    for key, child in node.children.items():
        _require(child.parent is node, f"node {child.number} is a child of {name} but names another parent")
        _require(
            child.edge[:page_bytes] == key, f"node {child.number} is filed under tokens that it does not begin with"
        )
        _require(child.last_used <= node.last_used, f"node {child.number} was used after {name}, its parent")


def _check_locks(node: PagedNode) -> None:
    below = sum(child.locks for child in node.children.values())
    _require(node.own_locks >= 0, f"node {node.number} was unlocked more often than locked")
    _require(
        node.locks == node.own_locks + below,
        f"node {node.number} counts {node.locks} locks, but has {node.own_locks} and its children {below}",
    )


def _check_leases(node: PagedNode) -> None:
    counted = Counter(lease.client for lease in node.own_leases)
    for child in node.children.values():
        counted.update(child.leases)
    _require(
        node.leases == counted,
        f"node {node.number} counts leases {node.leases}, but there are {dict(counted)} on it and below it",
    )
    for lease in node.own_leases:
        _require(lease.node is node, f"a lease on node {node.number} names node {lease.node.number}")


def _check_counts(tree: CheckedTree, nodes: list[PagedNode]) -> None:
    cached = sum(len(node.pages) for node in nodes)
    evictable = sum(len(node.pages) for node in nodes if node.locks == 0)
    _require(tree.num_cached == cached, f"num_cached is {tree.num_cached}, the nodes hold {cached} pages")
    _require(
        tree.num_evictable == evictable, f"num_evictable is {tree.num_evictable}, unlocked nodes hold {evictable} pages"
    )
    leased = sum(len(node.pages) for node in nodes if node.leases)
    _require(tree.num_leased == leased, f"num_leased is {tree.num_leased}, leased nodes hold {leased} pages")
    leased_by = Counter[str]()
    for node in nodes:
        leased_by.update(dict.fromkeys(node.leases, len(node.pages)))
    _require(dict(tree.leased_by) == +leased_by, f"leased_by is {tree.leased_by}, leased nodes hold {leased_by} pages")
    reserved = sum(len(node.pages) for node in nodes if node.leases and node.locks == 0)
    _require(
        tree.num_reserved == reserved,
        f"num_reserved is {tree.num_reserved}, leased nodes without locks hold {reserved} pages",
    )


def _check_heap(tree: CheckedTree, nodes: list[PagedNode]) -> None:
    heap = tree.heap
    listed: set[int] = set()
    stale = 0
    alive = {id(node) for node in nodes}
    for position, (value, _, node) in enumerate(heap):
        _require(position == 0 or heap[(position - 1) // 2][0] <= value, "the eviction heap is out of order")
        if node.queued is not value:
            stale += 1
            continue
        _require(id(node) in alive, f"the eviction heap holds node {node.number}, which is gone")
        _require(node.number not in listed, f"the eviction heap holds node {node.number} twice")
        listed.add(node.number)
    _require(tree.num_stale == stale, f"num_stale is {tree.num_stale}, the eviction heap has {stale} stale entries")
    for node in nodes:
        is_listed = node.number in listed
        _require(
            (node.queued is not None) == is_listed,
            f"node {node.number} is queued={node.queued}, but listed={is_listed}",
        )
        if node is not tree.root and not node.children and node.locks == 0:
            _require(node.queued is not None, f"node {node.number} is an evictable leaf that eviction cannot find")
        if node.queued is not None:
            value = (bool(node.leases), tree.policy(node))
            _require(node.queued <= value, f"the value of node {node.number} has fallen")


def _check_owners(what: str, pool: PagePool, cached: np.ndarray, held: Iterable[int]) -> None:
    """Raises AssertionError unless all of a pool have one owner. `cached`: what the tree owns. `held`: what requests
    own."""
    own, count = np.fromiter(held, dtype=np.int64), pool.num_pages
    for owner, ids in (("a request", own), ("the tree", cached)):
        foreign = ids[(ids < 0) | (ids >= count)]
        _require(not foreign.size, f"{owner} owns {what}s {foreign[:8].tolist()}, which are not of the pool")
    owners = [np.bincount(ids, minlength=count) for ids in (pool.free_pages(), own, cached)]
    total = owners[0] + owners[1] + owners[2]
    for one in np.flatnonzero(total != 1)[:1].tolist():
        in_free, in_held, in_tree = (int(owner[one]) for owner in owners)
        raise AssertionError(
            f"{int((total != 1).sum())} {what}s have not exactly one owner, such as {what} {one}: "
            f"free {in_free} times, held by requests {in_held} times, in the tree {in_tree} times"
        )
