"""Pages of windows: which of them sequences hold, and where others can go on from their prefixes.

Layers with a window have pages of their own (`radix.windows`). A sequence gets them together with those of the other
layers. When a step has ended, it gives back those that lie wholly before the window of its next token, or that of its
last page boundary, where the tree may get it. A prefix can be continued only where its window is whole: at these
positions, all of them page boundaries,

- the last one of a prompt before its last token, and the end of what is computed of it;
- where a prompt parts from one that the tree holds, or one that waits from it;
- every `interval` tokens of a long prompt;
- the end of an output, also one that is preempted.

Steps run in the order of their plans. So a page may have its next owner while a step that reads it is in flight.
"""

from bisect import insort
from collections.abc import Iterable
from functools import partial

import numpy as np

from radix.node import NO_PAGES, PagedNode
from radix.windows import WindowTree
from worker.messages import ReplicaLoad
from worker.scheduler.kv_cache_manager import KVCacheManager
from worker.scheduler.sequence import Sequence, SequenceWindow, pages_for
from worker.scheduler.sequence_table import SequenceTable


class WindowedKVCache(KVCacheManager):
    """The KV pages of a replica whose model has layers with a window, and the pages of these layers."""

    def __init__(self, tree: WindowTree, table: SequenceTable[Sequence], interval: int) -> None:
        """`interval`: tokens after which a long prompt can be continued by others, rounded up to whole pages."""
        super().__init__(tree, table)
        self._windows = tree
        self._interval = pages_for(interval, tree.page_size) * tree.page_size
        # Most pages that a sequence needs for long: those of a window that begins anywhere in a page, and the next.
        self._most = pages_for(tree.window_tokens, tree.page_size) + 2

    @property
    def num_growable(self) -> int:
        """As `KVCacheManager.num_growable`: a sequence gets pages of both kinds."""
        return min(self.num_available, self.num_windows_available)

    @property
    def free_share(self) -> float:
        """As `KVCacheManager.free_share`, of the kind of pages that is scarcer."""
        return min(super().free_share, self.num_windows_available / self.num_window_pages)

    @property
    def num_window_pages(self) -> int:
        """Window pages that there are."""
        return self._windows.window_pool.num_pages

    @property
    def num_windows_available(self) -> int:
        """Window pages that are free or can be evicted from the tree."""
        return self._windows.window_pool.num_free + self._windows.num_windows_evictable

    def has_windows_for(self, seq: Sequence, running: np.ndarray) -> bool:
        """As `KVCacheManager.has_windows_for`: whether the pages that it needs for long are there next to those that
        running sequences are to get, each up to its window."""
        if not len(running):
            return True
        table = self._table
        rows = np.append(running, seq.row)
        tokens = np.maximum(table.expected_tokens[rows], table.num_tokens[rows] + 1)
        needed = -(-(np.minimum(tokens, table.token_limit[rows]) - 1) // self.page_size) - table.num_shared[rows]
        held = table.num_pages[rows] - np.maximum(table.first_window_page[rows], table.num_shared[rows])
        return int(np.maximum(np.minimum(needed, self._most) - held, 0).sum()) <= self.num_windows_available

    def acquire_prefix(self, seq: Sequence) -> None:
        """As `KVCacheManager.acquire_prefix`, up to where a window is whole."""
        super().acquire_prefix(seq)
        assert seq.node is not None
        last = (seq.num_known - 1) // self.page_size * self.page_size
        parts = self._windows.num_present(seq.cache_keys(last))
        own = seq.window = SequenceWindow(
            [position for position in sorted({parts, last}) if position > seq.num_computed]
        )
        seq.first_window_page = self._windows.first_page(seq.num_computed)
        own.pages.write(0, np.zeros(seq.num_pages, dtype=np.int32))
        own.pages.write(seq.first_window_page, self._windows.checkpoints.get(seq.node, NO_PAGES))
        self._pin(seq, seq.node)

    def allocate(self, seq: Sequence, num_pages: int) -> None:
        """As `KVCacheManager.allocate`, with as many window pages."""
        first = seq.num_pages
        super().allocate(seq, num_pages)
        assert seq.window is not None
        seq.window.pages.write(first, self._allocate_windows(num_pages))

    def allocate_each(self, rows: np.ndarray) -> None:
        """As `KVCacheManager.allocate_each`, with a window page each."""
        sequences, num_pages = self._table.sequences_at(rows), self._table.num_pages[rows].tolist()
        super().allocate_each(rows)
        for seq, index, page in zip(sequences, num_pages, self._allocate_windows(len(rows)).tolist(), strict=True):
            assert seq.window is not None
            seq.window.pages.write_one(index, page)

    def cache_prefix(self, seq: Sequence) -> PagedNode:
        """As `KVCacheManager.cache_prefix`, at each position where others may go on."""
        own = seq.window
        assert seq.node is not None and own is not None
        end = seq.num_confirmed // self.page_size * self.page_size
        reached = {position for position in own.targets if position <= end}
        own.targets = [position for position in own.targets if position > end]
        first = (seq.num_shared * self.page_size // self._interval + 1) * self._interval
        for position in sorted(reached.union(range(first, end, self._interval), [end])):
            num_full, first_page = position // self.page_size, self._windows.first_page(position)
            if num_full > seq.num_shared and first_page >= seq.first_window_page:
                window = own.pages.values[first_page:num_full]
                node = self._hand_over(seq, num_full, partial(self._windows.insert, window=window))
                self._take_over(seq, window, self._windows.checkpoints[node])
                self._pin(seq, node)
        return seq.node

    def give_back(self, rows: np.ndarray) -> None:
        """As `KVCacheManager.give_back`: the pages before the windows of sequences' next tokens."""
        table, size = self._table, self.page_size
        ends = table.num_confirmed[rows] // size * size
        firsts = self._windows.first_pages(ends)
        slid = (firsts > table.first_window_page[rows]).nonzero()[0]
        if not len(slid):
            return
        freed = []
        for seq, first in zip(table.sequences_at(rows[slid]), firsts[slid].tolist(), strict=True):
            freed.append(self._own(seq, seq.first_window_page, first))
            seq.first_window_page = first
            if first >= seq.num_shared:
                self._unpin(seq)
        self._windows.window_pool.free(np.concatenate(freed))

    def free(self, seq: Sequence, keep: bool) -> None:
        """As `KVCacheManager.free`, with the window pages of `seq`."""
        if keep:
            self.cache_prefix(seq)
        self._windows.window_pool.free(self._own(seq, seq.first_window_page, seq.num_pages))
        self._unpin(seq)
        seq.window = None
        seq.first_window_page = 0
        super().free(seq, keep=False)

    def describe(self, load: ReplicaLoad) -> None:
        """As `KVCacheManager.describe`, with the tokens that window pages hold."""
        super().describe(load)
        load.window_tokens_total = self.num_window_pages * self.page_size
        load.window_tokens_used = load.window_tokens_total - self.num_windows_available * self.page_size

    def continue_where_parts(self, seq: Sequence, waiting: Sequence) -> None:
        """Lets `waiting`, whose prompt begins like that of `seq`, go on where they part, if no step has computed that
        so far."""
        own, common = seq.window, seq.common_tokens(waiting, waiting.reusable_tokens)
        position = common // self.page_size * self.page_size
        if own is not None and position > seq.num_confirmed and position not in own.targets:
            insort(own.targets, position)

    def _own(self, seq: Sequence, first: int, last: int) -> np.ndarray:
        """Own pages among those number `first` to `last - 1`: the others are the tree's."""
        assert seq.window is not None
        pages = seq.window.pages.values[first:last]
        return pages[~self._windows.owns(pages)]

    def _take_over(self, seq: Sequence, window: np.ndarray, cached: np.ndarray) -> None:
        """Replaces a window of `seq`, a view of its pages, by that which the tree has there, if it is another."""
        if np.array_equal(window, cached):
            return
        self._windows.window_pool.free(window[~self._windows.owns(window)])
        window[:] = cached
        seq.num_sent_pages = 0

    def _pin(self, seq: Sequence, node: PagedNode) -> None:
        """Pins the window of `node`, at whose end the pages of `seq` are the tree's, instead of another."""
        own = seq.window
        assert own is not None
        self._windows.pin(node)
        self._unpin(seq)
        own.pinned = node

    def _unpin(self, seq: Sequence) -> None:
        assert seq.window is not None
        if seq.window.pinned is not None:
            self._windows.unpin(seq.window.pinned)
            seq.window.pinned = None

    def _allocate_windows(self, num_pages: int) -> np.ndarray:
        self._windows.evict_windows(num_pages)
        pages = self._windows.window_pool.allocate(num_pages)
        assert pages is not None, "more pages were promised than there are"
        return pages

    def _check_tree(self, running: Iterable[Sequence], own_pages: list[int]) -> None:
        own = [self._own(seq, seq.first_window_page, seq.num_pages) for seq in running]
        self._windows.check_integrity(own_pages, np.concatenate([NO_PAGES, *own]).tolist())
