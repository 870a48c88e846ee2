"""A tree, its pool and listeners to its events, for every test of the room; all are checked at the end."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from radix.events import Event, Split, Stored
from radix.index import PrefixIndex
from radix.node import pack
from radix.pages import PagePool
from radix.tree import Inserted, Tree


class Listener:
    """What a tree told, kept in the plainest way: the whole path to each node, by numbers."""

    def __init__(self, page_size: int) -> None:
        self.page_bytes = 4 * page_size
        self.paths = {0: b""}
        self.parents: dict[int, int] = {}

    def apply(self, event: Event) -> None:
        if isinstance(event, Stored):
            assert event.node not in self.paths
            self.paths[event.node] = self.paths[event.parent] + event.tokens
            self.parents[event.node] = event.parent
        elif isinstance(event, Split):
            assert event.upper not in self.paths
            above = self.parents[event.node]
            self.paths[event.upper] = self.paths[event.node][: len(self.paths[above]) + 4 * event.at]
            self.parents |= {event.upper: above, event.node: event.upper}
        else:
            assert event.node not in self.parents.values()
            del self.paths[event.node], self.parents[event.node]

    def prefixes(self) -> set[bytes]:
        """All that is cached, in whole pages."""
        step = self.page_bytes
        return {path[:end] for path in self.paths.values() for end in range(step, len(path) + 1, step)}

    def match(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest cached prefix."""
        prompt, cached, end = pack(tokens), self.prefixes(), 0
        while end + self.page_bytes <= len(prompt) and prompt[: end + self.page_bytes] in cached:
            end += self.page_bytes
        return end // 4

    def events(self) -> list[Stored]:
        return [
            Stored(number, above, self.paths[number][len(self.paths[above]) :])
            for number, above in self.parents.items()
        ]


class Cache:
    """A tree with what stands around it in a replica: the pool, listeners, and the pages that requests hold."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.events: list[Event] = []
        self.listener = Listener(page_size)
        self.indexed = PrefixIndex(page_size).add()
        self.pool = PagePool(num_pages, page_size)
        self.tree = Tree(page_size, self.pool, on_event=self._listen)
        self.held: set[int] = set()

    def _listen(self, event: Event) -> None:
        self.events.append(event)
        self.listener.apply(event)
        self.indexed.apply(event)

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
        told = self.tree.snapshot()
        assert sorted_events(self.listener.events()) == sorted_events(told)
        again = Listener(self.tree.page_size)
        for event in told:
            again.apply(event)  # parents come first
        assert self.indexed.num_tokens == self.tree.num_cached * self.tree.page_size
        for path in self.listener.paths.values():
            assert self.indexed.index.match(path)[0] == len(path) // 4


def sorted_events(events: list[Stored]) -> list[tuple[int, int, bytes]]:
    """The nodes of a tree, in an order that does not depend on its history."""
    return sorted((event.node, event.parent, event.tokens) for event in events)


@pytest.fixture
def new_cache() -> Iterator[Callable[[int, int], Cache]]:
    caches: list[Cache] = []

    def new(num_pages: int, page_size: int) -> Cache:
        caches.append(Cache(num_pages, page_size))
        return caches[-1]

    yield new
    for cache in caches:
        cache.check()
