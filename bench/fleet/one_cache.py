"""A single cache with the pages of all replicas: the hit rate that no placement can exceed by much."""

import numpy as np

from radix.pages import PagePool
from radix.tree import Tree


class OneCache:
    """A tree of the fleet's size that evicts the least recently used, and to which every prompt goes."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._pool = PagePool(num_pages, page_size)
        self._tree = Tree(page_size, self._pool)

    def use(self, tokens: np.ndarray) -> int:
        """Looks up `tokens`, int32 [n], and caches them. Returns the length of their cached prefix, without the last
        token."""
        match = self._tree.match(tokens)
        whole = len(tokens) // self._page_size
        missing = whole - len(match.pages)
        if missing > 0:
            self._tree.lock(match.node)
            self._tree.evict(missing - self._pool.num_free)
            self._tree.unlock(match.node)
            pages = self._pool.allocate(min(missing, self._pool.num_free))
            assert pages is not None
            pages = np.concatenate([match.pages, pages])
            self._tree.insert(tokens[: len(pages) * self._page_size], pages)
        return min(match.num_tokens, len(tokens) - 1)
