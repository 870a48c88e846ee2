"""Page allocation: how KV pages pass between running sequences, the free list and the prefix tree."""

from collections.abc import Callable, Iterable

import numpy as np

from radix.node import NO_PAGES, PagedNode
from radix.tree import Inserted, Tree
from worker.messages import ReplicaLoad
from worker.scheduler.sequence import Sequence
from worker.scheduler.sequence_table import SequenceTable


class KVCacheManager:
    """The KV pages of one replica, allocated to sequences.

    The pages of a sequence are first `num_shared` pages of the tree, kept by its lock on `node`, then its own pages.
    """

    def __init__(self, tree: Tree, table: SequenceTable[Sequence], reuses_prefixes: bool = True) -> None:
        """`reuses_prefixes`: whether pages are kept for other sequences; without, the tree stays empty."""
        self.tree = tree
        self.reuses_prefixes = reuses_prefixes
        self._table = table
        self.pool = tree.pool
        self.page_size = tree.page_size

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted from the tree."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_growable(self) -> int:
        """Pages that can be allocated to running sequences now."""
        return self.num_available

    @property
    def free_share(self) -> float:
        """Fraction of all pages that is free or can be evicted."""
        return self.num_available / self.pool.num_pages

    def has_windows_for(self, seq: Sequence, running: np.ndarray) -> bool:
        """Whether `seq`, which has acquired its prefix, may start as far as pages of windows go. `running`: int64,
        table rows of the running sequences."""
        return True

    @property
    def num_unreserved(self) -> int:
        """Available pages that no lease keeps for sequences to come."""
        return self.num_available - self.tree.num_reserved

    def cached_tokens(self, seq: Sequence) -> int:
        """Length of the cached prefix of `seq` now, in tokens; at most its `reusable_tokens`."""
        return self.tree.match(seq.cache_keys(seq.reusable_tokens)).num_tokens

    def acquire_prefix(self, seq: Sequence) -> None:
        """Locks the cached prefix of `seq` in the tree and gives it these pages."""
        match = self.tree.match(seq.cache_keys(seq.reusable_tokens))
        self.tree.lock(match.node)
        seq.node = match.node
        seq.add_pages(match.pages)
        seq.num_shared = len(match.pages)
        seq.num_computed = seq.num_confirmed = match.num_tokens

    def allocate(self, seq: Sequence, num_pages: int) -> None:
        """Adds `num_pages` pages to a sequence, at most `num_growable`."""
        seq.add_pages(self._allocate_pages(num_pages))

    def allocate_each(self, rows: np.ndarray) -> None:
        """Adds a page to each sequence. `rows`: int64, their table rows, at most `num_growable`."""
        sequences, num_pages = self._table.sequences_at(rows), self._table.num_pages[rows].tolist()
        pages = self._allocate_pages(len(rows)).tolist()
        for seq, index, page in zip(sequences, num_pages, pages, strict=True):
            seq.write_page(index, page)
        self._table.num_pages[rows] += 1

    def cache_prefix(self, seq: Sequence) -> PagedNode:
        """Hands the whole pages of `seq` that ended steps computed to the tree, and locks them there. Returns the node
        at whose end they end.

        If the tree has some of these tokens already, computed by another sequence, `seq` goes on with the tree's pages
        and its own are freed. A step in flight may still read the freed pages. That is safe, because they are written
        again only by later steps.
        """
        num_full = seq.num_confirmed // self.page_size
        assert seq.node is not None
        if num_full <= seq.num_shared or not self.reuses_prefixes:
            return seq.node
        return self._hand_over(seq, num_full, self.tree.insert)

    def _hand_over(
        self, seq: Sequence, num_full: int, insert: Callable[[np.ndarray, np.ndarray], Inserted]
    ) -> PagedNode:
        """Hands the first `num_full` pages of `seq`, some of them its own, to the tree with `insert`, as `cache_prefix`
        says."""
        assert seq.node is not None
        keys, pages = seq.cache_keys(num_full * self.page_size), seq.pages(0, num_full)
        node, num_present = insert(keys, pages)
        self.tree.lock(node)
        self.tree.unlock(seq.node)
        seq.node = node
        twice = slice(seq.num_shared, num_present // self.page_size)
        if twice.stop > twice.start:
            self.pool.free(pages[twice])
            pages[twice] = self.tree.match(keys).pages[twice]
            seq.num_sent_pages = 0
        seq.num_shared = num_full
        return node

    def give_back(self, rows: np.ndarray) -> None:
        """Frees pages that sequences no longer need while they run. `rows`: int64, table rows of sequences of which a
        step has ended."""

    def free(self, seq: Sequence, keep: bool) -> None:
        """Frees all pages of `seq`. `keep`: the whole pages that ended steps computed go to the tree first."""
        if keep:
            self.cache_prefix(seq)
        self.pool.free(seq.own_pages)
        assert seq.node is not None
        self.tree.unlock(seq.node)
        seq.node = None
        seq.clear_pages()
        seq.num_shared = seq.num_computed = seq.num_confirmed = 0

    def describe(self, load: ReplicaLoad) -> None:
        """Sets how many tokens the pages hold."""
        load.kv_tokens_used = (self.pool.num_pages - self.num_available) * self.page_size
        load.kv_tokens_cached = self.tree.num_evictable * self.page_size
        load.kv_tokens_leased = self.tree.num_leased * self.page_size

    def _allocate_pages(self, num_pages: int) -> np.ndarray:
        if num_pages > self.pool.num_free:
            self.tree.evict(num_pages - self.pool.num_free)
        pages = self.pool.allocate(num_pages)
        assert pages is not None, "more pages were promised than there are"
        return pages

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every page has exactly one owner. Walks the tree."""
        running = list(running)
        self._check_tree(running, np.concatenate([NO_PAGES, *(seq.own_pages for seq in running)]).tolist())
        if not running:
            assert self.tree.num_evictable == self.tree.num_cached, "pages are locked and nothing runs"

    def _check_tree(self, running: Iterable[Sequence], own_pages: list[int]) -> None:
        self.tree.check_integrity(own_pages)
