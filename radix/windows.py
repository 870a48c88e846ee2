"""A tree for models in which some layers see a window of the last tokens only: their KV is in pages of its own.

The window may also be the begun chunk of a text that is cut into chunks of equal length.

A checkpoint (`radix.continuable`) is the window before the end of a node: the pages of these layers that its next token
sees. Windows of several nodes may have pages in common. So a page is the tree's while a window has it.

    window of 3 pages    [A|B|C|D]─ b c d ─┬─ [E]─ c d e       c and d are in the windows of both nodes
                                           └─ [F|G|H]─ f g h

- Windows of nodes with one child go first, without the node: a conversation goes on from its end. Those from which
  three sequences have started or gone on go last, as those of other nodes from which two have.
- A request *pins* the window of the node that it locks, as long as it reads a part of it. Then the lock goes on keeping
  the pages of the path, and the window may be evicted. A leaf without a window stays as long as it is locked.

A window page is owned by exactly one of: the free list, a request, the tree.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from radix.continuable import ContinuableTree
from radix.events import Event
from radix.integrity import check_windows
from radix.node import NO_PAGES, PagedNode
from radix.pages import PagePool
from radix.policies import lru
from radix.tree import Inserted


class WindowTree(ContinuableTree[np.ndarray]):
    """A `ContinuableTree` of windows: `checkpoints` has the window pages of each node that has any, int32, those of the
    path's last pages in their order."""

    def __init__(
        self,
        page_size: int,
        pool: PagePool,
        window_pool: PagePool,
        window_tokens: int,
        policy: Callable[[PagedNode], float] = lru,
        on_event: Callable[[Event], None] | None = None,
        clock: Callable[[], float] | None = None,
        *,
        in_chunks: bool = False,
    ) -> None:
        """`window_tokens`: a token sees itself and the `window_tokens - 1` before it; with `in_chunks`, the tokens
        before it in its chunk of `window_tokens`. Other arguments are those of `Tree`."""
        super().__init__(page_size, pool, policy, on_event, clock)
        self.window_pool = window_pool
        self.window_tokens, self.in_chunks = window_tokens, in_chunks
        self._inner: dict[PagedNode, None] = {}  # nodes with one child, in place of `_used_once`
        self._num_pinned_by: dict[
            PagedNode, int
        ] = {}  # sequences that have pinned the window of a node, of all with one
        self.uses = np.zeros(window_pool.num_pages, dtype=np.int32)  # by page, the windows of nodes that have it
        self.pins: dict[PagedNode, int] = {}
        self._page_pins = np.zeros(window_pool.num_pages, dtype=np.int32)  # by page, the pins of windows that have it
        self._num_cached_windows = self._num_pinned = 0

    @property
    def num_window_pages(self) -> int:
        """Number of window pages that the tree owns."""
        return self._num_cached_windows

    @property
    def num_windows_evictable(self) -> int:
        """Number of window pages that `evict_windows` could free now: those in no pinned window."""
        return self._num_cached_windows - self._num_pinned

    def first_page(self, position: int) -> int:
        """The first page that the token at `position` sees in a layer with a window, by its number in a sequence."""
        if self.in_chunks:
            return (position - position % self.window_tokens) // self.page_size
        return max(position - (self.window_tokens - 1), 0) // self.page_size

    def first_pages(self, positions: np.ndarray) -> np.ndarray:
        """`first_page` of each position, int64 `[n]`."""
        if self.in_chunks:
            return (positions - positions % self.window_tokens) // self.page_size
        return np.maximum(positions - (self.window_tokens - 1), 0) // self.page_size

    def insert(self, tokens: Sequence[int] | np.ndarray, pages: np.ndarray, window: np.ndarray = NO_PAGES) -> Inserted:
        """As `Tree.insert`, with the window before the end of `tokens`: pages number `first_page(len(tokens))` and
        after, int32. The tree takes those that it does not own. If it has a window there already, it keeps that one and
        takes none of `window`; the caller sees this by `checkpoints`. Raises ValueError, and nothing changes, if these
        are not the pages of the window."""
        if not len(tokens) or len(window) != len(tokens) // self.page_size - self.first_page(len(tokens)):
            raise ValueError(f"{len(tokens)} tokens with {len(window)} pages of a window: insert the whole window")
        inserted = super().insert(tokens, pages)
        if inserted.node not in self.checkpoints:
            self._num_cached_windows += int(np.count_nonzero(self.uses[window] == 0))
            self.uses[window] += 1
            self._save(inserted.node, np.array(window, dtype=np.int32))
        return inserted

    def owns(self, window: np.ndarray) -> np.ndarray:
        """Which of these window pages are the tree's: bool [n]."""
        return self.uses[window] > 0

    def pin(self, node: PagedNode) -> None:
        """Keeps the window of `node`, which is locked, until an equal number of `unpin(node)`. Nothing to do at the
        root. Raises ValueError for a node without a window."""
        if node is self.root:
            return
        if node not in self.checkpoints or not node.own_locks:
            raise ValueError(f"node {node.number} has no window or no lock: pin what match and insert return, locked")
        self._num_pinned_by[node] += 1
        self._rank(node)
        pins = self.pins.get(node, 0)
        self.pins[node] = pins + 1
        if not pins:
            window = self.checkpoints[node]
            self._num_pinned += int(np.count_nonzero(self._page_pins[window] == 0))
            self._page_pins[window] += 1

    def unpin(self, node: PagedNode) -> None:
        """Removes one pin. Raises ValueError if `node` has none."""
        if node is self.root:
            return
        pins = self.pins.pop(node, 0)
        if not pins:
            raise ValueError(f"the window of node {node.number} is not pinned")
        if pins > 1:
            self.pins[node] = pins - 1
            return
        window = self.checkpoints[node]
        self._page_pins[window] -= 1
        self._num_pinned -= int(np.count_nonzero(self._page_pins[window] == 0))

    def unlock(self, node: PagedNode) -> None:
        """As `Tree.unlock`. Frees the node's pages if that was the last lock of a leaf without a window."""
        super().unlock(node)
        if node.parent is not None and not node.children and not node.locks and node not in self.checkpoints:
            self._free_leaf(node)

    def evict_windows(self, num_pages: int) -> None:
        """Evicts windows until `num_pages` window pages are free, or none can be evicted."""
        while self.window_pool.num_free < num_pages and self.evict_checkpoint():
            pass

    def eviction_order(self) -> Iterator[PagedNode]:
        """As `ContinuableTree.eviction_order`, with nodes of one child first."""
        return itertools.chain(self._inner, super().eviction_order())

    def check_integrity(self, held_pages: Iterable[int] = (), held_windows: Iterable[int] = ()) -> None:
        """As `Tree.check_integrity`. `held_windows`: all window pages that requests own, without the tree's."""
        super().check_integrity(held_pages)
        check_windows(self, held_windows)

    @property
    def _most_used_again(self) -> int:
        return max(1, self.window_pool.num_pages // (2 * max(1, self.window_tokens // self.page_size)))

    def _release(self, checkpoint: np.ndarray) -> None:
        self.uses[checkpoint] -= 1
        freed = checkpoint[self.uses[checkpoint] == 0]
        self._num_cached_windows -= len(freed)
        self.window_pool.free(freed)

    def _is_kept(self, node: PagedNode) -> bool:
        return node in self.pins

    def _matched(self, node: PagedNode) -> None:
        self._rank(node)  # a sequence that waits is matched several times

    def _use_once(self, node: PagedNode) -> None:
        self._num_pinned_by[node] = 0
        self._rank(node)

    def _rank(self, node: PagedNode) -> None:
        """Gives the window of `node` its place in the order of eviction, as the last used of its kind."""
        self._forget_use(node)
        if self._num_pinned_by[node] < (3 if len(node.children) == 1 else 2):
            self._used_little(node)[node] = None
            return
        self._used_again[node] = None
        if len(self._used_again) > self._most_used_again:
            oldest = next(iter(self._used_again))
            del self._used_again[oldest]
            self._used_little(oldest)[oldest] = None

    def _used_little(self, node: PagedNode) -> dict[PagedNode, None]:
        return self._inner if len(node.children) == 1 else self._used_once

    def _forget_use(self, node: PagedNode) -> None:
        super()._forget_use(node)
        self._inner.pop(node, None)

    def _free_checkpoint(self, node: PagedNode) -> None:
        super()._free_checkpoint(node)
        del self._num_pinned_by[node]

    def _add_leaf(self, parent: PagedNode, edge: bytes, pages: np.ndarray) -> PagedNode:
        leaf = super()._add_leaf(parent, edge, pages)
        if parent in self.checkpoints:
            self._rank(parent)
        return leaf

    def _remove(self, leaf: PagedNode) -> None:
        parent = leaf.parent
        super()._remove(leaf)
        if parent in self.checkpoints:
            self._rank(parent)
