"""A tree, its pool and a mirror fed by its events, for every test of the room; all are checked at the end."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from radix.events import Event
from radix.mirror import Mirror
from radix.pages import PagePool
from radix.tree import Inserted, Tree


class Cache:
    """A tree with what stands around it in a replica: the pool, listeners, and the pages that requests hold."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.events: list[Event] = []
        self.mirror = Mirror(page_size)
        self.pool = PagePool(num_pages, page_size)
        self.tree = Tree(page_size, self.pool, on_event=self._listen)
        self.held: set[int] = set()

    def _listen(self, event: Event) -> None:
        self.events.append(event)
        self.mirror.apply(event)

    def allocate(self, n: int) -> np.ndarray:
        pages = self.pool.allocate(n)
        assert pages is not None
        self.held.update(pages.tolist())
        return pages

    def free(self, pages: np.ndarray) -> None:
        self.pool.free(pages)
        self.held.difference_update(pages.tolist())

    def insert(self, tokens: list[int]) -> Inserted:
        """As a request does: match, compute the rest, insert, free what another had stored meanwhile."""
        match = self.tree.match(tokens)
        total = len(tokens) // self.tree.page_size
        fresh = self.allocate(total - len(match.pages))
        inserted = self.tree.insert(tokens, np.concatenate([match.pages, fresh]))
        self.held.difference_update(fresh.tolist())
        assert inserted.num_present == match.num_tokens
        return inserted

    def check(self) -> None:
        self.tree.check_integrity(self.held)
        assert sorted_events(self.mirror) == sorted_events(self.tree)
        assert self.mirror.num_tokens == self.tree.num_cached * self.tree.page_size
        again = Mirror(self.tree.page_size)
        for event in self.tree.snapshot():
            again.apply(event)
        assert sorted_events(again) == sorted_events(self.tree)


def sorted_events(tree: Tree | Mirror) -> list[tuple[int, int, list[int]]]:
    """The nodes of a tree, in an order that does not depend on its history."""
    return sorted((event.node, event.parent, event.tokens) for event in tree.snapshot())


@pytest.fixture
def new_cache() -> Iterator[Callable[[int, int], Cache]]:
    caches: list[Cache] = []

    def new(num_pages: int, page_size: int) -> Cache:
        caches.append(Cache(num_pages, page_size))
        return caches[-1]

    yield new
    for cache in caches:
        cache.check()
