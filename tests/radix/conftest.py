"""A tree, its pool and listeners to its events, for every test of the room; all are checked at the end."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from radix.checkpoints import StateComponent
from radix.component import Component
from radix.events import Dropped, Event, Removed, Saved, Split, Stored
from radix.index import PrefixIndex
from radix.node import pack
from radix.pages import PagePool
from radix.tree import Inserted, Tree
from radix.windows import WindowComponent


class Listener:
    """What a tree told, kept in the plainest way: the whole path to each node, by numbers."""

    def __init__(self, page_size: int) -> None:
        self.page_bytes = 4 * page_size
        self.paths = {0: b""}
        self.parents: dict[int, int] = {}
        self.checkpoints: set[int] | None = None  # numbers of nodes; None for a tree without any

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
        elif isinstance(event, Saved):
            assert event.node in self.paths and event.node not in (self.checkpoints or ())
            self.checkpoints = {*(self.checkpoints or ()), event.node}
        elif isinstance(event, Dropped):
            self.checkpoints.remove(event.node)
        else:
            assert isinstance(event, Removed) and event.node not in self.parents.values()
            del self.paths[event.node], self.parents[event.node]
            if self.checkpoints is not None:
                self.checkpoints.discard(event.node)

    def prefixes(self) -> set[bytes]:
        """All that is cached, in whole pages."""
        step = self.page_bytes
        return {path[:end] for path in self.paths.values() for end in range(step, len(path) + 1, step)}

    def match(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest cached prefix that can be continued."""
        prompt = pack(tokens)
        if self.checkpoints is not None:
            return max(len(path) // 4 for path in self.saved() if prompt.startswith(path))
        cached, end = self.prefixes(), 0
        while end + self.page_bytes <= len(prompt) and prompt[: end + self.page_bytes] in cached:
            end += self.page_bytes
        return end // 4

    def continued(self, path: bytes) -> int:
        """Tokens of the path to a node that can be continued."""
        if self.checkpoints is None:
            return len(path) // 4
        return max(len(saved) // 4 for saved in self.saved() if path.startswith(saved))

    def saved(self) -> list[bytes]:
        """The paths to all checkpoints."""
        return [self.paths[number] for number in self.checkpoints]

    def events(self) -> list[Event]:
        nodes = [
            Stored(number, above, self.paths[number][len(self.paths[above]) :])
            for number, above in self.parents.items()
        ]
        return [*nodes, *map(Saved, self.checkpoints or ())]


class Cache:
    """A tree with what stands around it in a replica: the pool, listeners, and the pages that requests hold. With
    `num_rows`, it has checkpoints, and requests hold rows too. With `windows`, numbers of window pages and of tokens in
    a window and whether these are chunks, it has windows, and requests hold window pages."""

    def __init__(
        self, num_pages: int, page_size: int, num_rows: int | None = None, windows: tuple[int, int, bool] | None = None
    ) -> None:
        self.events: list[Event] = []
        self.listener = Listener(page_size)
        self.indexed = PrefixIndex(page_size).add()
        self.pool = PagePool(num_pages, page_size)
        self.held: set[int] = set()
        self.held_windows: set[int] = set()
        self.held_rows: set[int] = set()
        components, self._held_parts = list[Component](), list[set[int]]()
        if num_rows is not None:
            components.append(StateComponent(PagePool(num_rows, page_size)))
            self._held_parts.append(self.held_rows)
        if windows is not None:
            of_windows = PagePool(windows[0], page_size)
            components.append(WindowComponent(of_windows, windows[1], in_chunks=windows[2]))
            self._held_parts.append(self.held_windows)
        self.tree = Tree(page_size, self.pool, on_event=self._listen, components=components)

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
        """As a request does: match, compute the rest, insert, free what was there but could not be continued."""
        rows = [self.allocate_row() for _ in self.tree.components]
        match = self.tree.match(tokens)
        total = len(tokens) // self.tree.page_size
        fresh = self.allocate(total - len(match.pages))
        pages = np.concatenate([match.pages, fresh])
        inserted = self.tree.insert(tokens, pages, rows)
        for component, row in zip(self.tree.components, rows, strict=True):
            if component.parts[inserted.node] != row:
                component.pool.free_one(row)
        twice = fresh[: inserted.num_present // self.tree.page_size - len(match.pages)]
        assert rows or not len(twice)
        self.pool.free(twice)
        self.held.difference_update(fresh.tolist())
        return inserted

    @property
    def component(self) -> Component:
        """The last component."""
        return self.tree.components[-1]

    @property
    def parts(self) -> dict:
        return self.component.parts

    def evict_point(self) -> bool:
        return self.tree.evict_point(self.component)

    def make_room(self, num_pages: int) -> None:
        """Evicts points until so many pages of the last component are free."""
        if (pages := self.tree.allocate_part(self.component, num_pages)) is not None:
            self.component.pool.free(pages)

    def allocate_row(self) -> int | None:
        """A row of the first component, which is of states."""
        allocated = self.tree.allocate_part(self.tree.components[0], 1)
        return None if allocated is None else int(allocated[0])

    def check(self) -> None:
        self.tree.check_integrity(self.held, self._held_parts)
        told = self.tree.snapshot()
        assert sorted_events(self.listener.events()) == sorted_events(told)
        again = Listener(self.tree.page_size)
        for event in told:
            again.apply(event)  # parents come first
        assert self.indexed.num_tokens == self.tree.num_cached * self.tree.page_size
        for path in self.listener.paths.values():
            assert self.indexed.index.match(path)[0] == self.listener.continued(path)


def make_tree(page_size: int, pool: PagePool, num_rows: int | None, on_event: Callable[[Event], None]) -> Tree:
    """A tree, with checkpoints if it has rows for them."""
    components = [] if num_rows is None else [StateComponent(PagePool(num_rows, page_size))]
    return Tree(page_size, pool, on_event=on_event, components=components)


def sorted_events(events: list[Event]) -> list[Event]:
    """The nodes and checkpoints of a tree, in an order that does not depend on its history."""
    return sorted(events, key=lambda event: (event.node, isinstance(event, Saved)))


@pytest.fixture
def new_cache() -> Iterator[Callable[[int, int], Cache]]:
    caches: list[Cache] = []

    def new(num_pages: int, page_size: int, num_rows: int | None = None, **windows: tuple[int, int]) -> Cache:
        caches.append(Cache(num_pages, page_size, num_rows, **windows))
        return caches[-1]

    yield new
    for cache in caches:
        cache.check()
