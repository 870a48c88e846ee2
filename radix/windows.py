"""Windows, as a component of a tree: some layers see a window of the last tokens only, and have pages of their own.

The window may also be the begun chunk of a text that is cut into chunks of equal length.

The part of a node is the window before its end: the pages of these layers that its next token sees. Windows of several
nodes may have pages in common. So a page is the tree's while a window has it.

    window of 3 pages    [A|B|C|D]─ b c d ─┬─ [E]─ c d e       c and d are in the windows of both nodes
                                           └─ [F|G|H]─ f g h

Windows of nodes with one child go first, without the node: a conversation goes on from its end. Those from which three
sequences have started or gone on go last, as those of other nodes from which two have.

A window page is owned by exactly one of: the free list, a request, the tree.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from radix.component import Component
from radix.integrity import check_windows
from radix.node import PagedNode
from radix.pages import PagePool


class WindowComponent(Component[np.ndarray]):
    """Windows: the part of a node is its window's pages, int32, those of the path's last pages in their order. The pool
    has window pages.

    A request pins the window that it reads, as long as it reads a part of it.
    """

    def __init__(self, pool: PagePool, window_tokens: int, *, in_chunks: bool = False) -> None:
        """`window_tokens`: a token sees itself and the `window_tokens - 1` before it; with `in_chunks`, the tokens
        before it in its chunk of `window_tokens`."""
        super().__init__(pool)
        self.window_tokens, self.in_chunks, self.page_size = window_tokens, in_chunks, pool.page_size
        self._inner: dict[PagedNode, None] = {}  # nodes with one child, in place of `_used_once`
        self._num_pinned_by: dict[PagedNode, int] = {}  # sequences that have pinned a node's window, of all with one
        self.uses = np.zeros(pool.num_pages, dtype=np.int32)  # by page, the windows of nodes that have it
        self._page_pins = np.zeros(pool.num_pages, dtype=np.int32)  # by page, the pinned windows that have it
        self._num_cached = self._num_pinned = 0

    @property
    def num_cached(self) -> int:
        """Number of window pages that the tree owns."""
        return self._num_cached

    @property
    def num_evictable(self) -> int:
        """Number of window pages that could be evicted now: those in no pinned window."""
        return self._num_cached - self._num_pinned

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

    def owns(self, window: np.ndarray) -> np.ndarray:
        """Which of these window pages are the tree's: bool [n]."""
        return self.uses[window] > 0

    def check_part(self, num_tokens: int, part: np.ndarray) -> None:
        if len(part) != num_tokens // self.page_size - self.first_page(num_tokens):
            raise ValueError(f"{num_tokens} tokens with {len(part)} pages of a window: insert the whole window")

    def save(self, node: PagedNode, part: np.ndarray) -> None:
        """Takes those of the window's pages that the tree does not own."""
        super().save(node, np.array(part, dtype=np.int32))
        self._num_cached += int(np.count_nonzero(self.uses[part] == 0))
        self.uses[part] += 1
        self._num_pinned_by[node] = 0
        self._rank(node)

    def release(self, node: PagedNode) -> None:
        window = self.parts[node]
        self.uses[window] -= 1
        freed = window[self.uses[window] == 0]
        self._num_cached -= len(freed)
        self.pool.free(freed)
        super().release(node)
        del self._num_pinned_by[node]

    def matched(self, node: PagedNode) -> None:
        self._rank(node)  # a sequence that waits is matched several times

    def pinned(self, node: PagedNode, pins: int) -> None:
        self._num_pinned_by[node] += 1
        self._rank(node)
        if pins == 1:
            window = self.parts[node]
            self._num_pinned += int(np.count_nonzero(self._page_pins[window] == 0))
            self._page_pins[window] += 1

    def unpinned(self, node: PagedNode, pins: int) -> None:
        if not pins:
            window = self.parts[node]
            self._page_pins[window] -= 1
            self._num_pinned -= int(np.count_nonzero(self._page_pins[window] == 0))

    def children_changed(self, node: PagedNode) -> None:
        self._rank(node)

    def eviction_order(self) -> Iterator[PagedNode]:
        """As `Component.eviction_order`, with nodes of one child first."""
        return chain(self._inner, super().eviction_order())

    def check(self, held: Iterable[int], pins: Iterable[PagedNode]) -> None:
        check_windows(self, held, pins)

    @property
    def _most_used_again(self) -> int:
        return max(1, self.pool.num_pages // (2 * max(1, self.window_tokens // self.page_size)))

    def _rank(self, node: PagedNode) -> None:
        """Gives the window of `node` its place in the order of eviction, as the last used of its kind."""
        if self._num_pinned_by[node] < (3 if len(node.children) == 1 else 2):
            self._forget_use(node)
            self._use_little(node)
        else:
            self._use_again(node)

    def _use_little(self, node: PagedNode) -> None:
        order = self._inner if len(node.children) == 1 else self._used_once
        order[node] = None

    def _forget_use(self, node: PagedNode) -> None:
        super()._forget_use(node)
        self._inner.pop(node, None)
