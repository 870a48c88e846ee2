"""Which pages running sequences hold, and how pages pass between them, the free list and the tree."""

from collections.abc import Iterable

import numpy as np

from radix.tree import Tree
from worker.request import Sequence


class Holdings:
    """The pages of one replica from the point of view of sequences.

    A sequence that holds pages has the tree's first (`num_shared` of them, kept by its lock on `node`), then its own.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.pool = tree.pool
        self.page_size = tree.page_size

    @property
    def num_available(self) -> int:
        """Pages that are free or can be made so."""
        return self.pool.num_free + self.tree.num_evictable

    def cached_tokens(self, seq: Sequence) -> int:
        """How many of the tokens that `seq` may reuse the tree has now."""
        return self.tree.match(seq.tokens.view(0, seq.reusable_tokens)).num_tokens

    def open(self, seq: Sequence) -> None:
        """Begins to hold what the tree has of `seq`."""
        match = self.tree.match(seq.tokens.view(0, seq.reusable_tokens))
        self.tree.lock(match.node)
        seq.node = match.node
        seq.add_pages(match.pages)
        seq.num_shared = len(match.pages)
        seq.num_computed = seq.num_confirmed = match.num_tokens

    def grow(self, seq: Sequence, num_pages: int) -> None:
        """Adds pages of its own. There must be as many available."""
        seq.add_pages(self._take(num_pages))

    def grow_each(self, sequences: list[Sequence]) -> None:
        """Adds a page to each of these. There must be as many available."""
        for seq, page in zip(sequences, self._take(len(sequences))[:, None], strict=True):
            seq.add_pages(page)

    def cache(self, seq: Sequence) -> None:
        """Gives the tree the whole pages of `seq` that ended steps computed, and holds them there. Where another was
        faster, the sequence goes on with the tree's pages in place of its own. A step in flight may still read those:
        whatever is written into them next comes after it."""
        num_full = seq.num_confirmed // self.page_size
        if num_full <= seq.num_shared:
            return
        tokens, pages = seq.tokens.view(0, num_full * self.page_size), seq.pages.view(0, num_full)
        node, num_present = self.tree.insert(tokens, pages)
        assert seq.node is not None
        self.tree.lock(node)
        self.tree.unlock(seq.node)
        seq.node = node
        twice = slice(seq.num_shared, num_present // self.page_size)
        if twice.stop > twice.start:
            self.pool.free(pages[twice])
            pages[twice] = self.tree.match(tokens).pages[twice]
            seq.num_sent_pages = 0
        seq.num_shared = num_full

    def close(self, seq: Sequence, keep: bool) -> None:
        """Ends holding anything. `keep`: the whole pages that ended steps computed go to the tree first."""
        if keep:
            self.cache(seq)
        self.pool.free(seq.pages.view(seq.num_shared, seq.pages.size))
        assert seq.node is not None
        self.tree.unlock(seq.node)
        seq.node = None
        seq.clear_pages()
        seq.num_shared = seq.num_computed = seq.num_confirmed = 0

    def _take(self, num_pages: int) -> np.ndarray:
        if num_pages > self.pool.num_free:
            self.tree.evict(num_pages - self.pool.num_free)
        pages = self.pool.allocate(num_pages)
        assert pages is not None, "more pages were promised than there are"
        return pages

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every page has exactly one owner. Walks the tree."""
        own = [seq.pages.view(seq.num_shared, seq.pages.size) for seq in running]
        self.tree.check_integrity(np.concatenate(own).tolist() if own else ())
        if not own:
            assert self.tree.num_evictable == self.tree.num_cached, "pages are locked and nothing runs"
