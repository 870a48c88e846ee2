"""Any history of matches, inserts, locks, leases and evictions, against a model with no tree: a dict of cached
prefixes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radix.component import Component
from radix.node import NodeLease
from radix.tree import Inserted, PagedNode

from .conftest import Cache

NUM_PAGES = 24
PROMPTS = st.lists(st.integers(0, 1), max_size=24)


class Model(RuleBasedStateMachine):
    """`prefixes` maps each cached prefix (whole pages) to the page of its last tokens and the time of its last use;
    `locks` lists what is locked with how many tokens end there, `leases` what is leased."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]))
    def start(self, page_size: int) -> None:
        self.cache = Cache(NUM_PAGES, page_size)
        self.page_size = page_size
        self.prefixes: dict[tuple[int, ...], tuple[int, int]] = {}
        self.locks: list[tuple[PagedNode, tuple[int, ...]]] = []
        self.leases: list[tuple[NodeLease, tuple[int, ...]]] = []
        self.now = 0

    def cached(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """The cached prefixes of `tokens`, short to long."""
        found = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            prefix = tuple(tokens[:end])
            if prefix not in self.prefixes:
                break
            found.append(prefix)
        return found

    def continued(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """Those of `cached` that a request can go on from, with those before."""
        return self.cached(tokens)

    def use(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """`continued`, as the tree is asked for them."""
        found = self.continued(tokens)
        self.touch(found)
        return found

    def touch(self, prefixes: list[tuple[int, ...]]) -> None:
        self.now += 1
        for prefix in prefixes:
            self.prefixes[prefix] = (self.prefixes[prefix][0], self.now)

    def pinned(self) -> set[tuple[int, ...]]:
        return {held[:end] for _, held in self.locks for end in range(self.page_size, len(held) + 1, self.page_size)}

    def leased(self) -> set[tuple[int, ...]]:
        """The cached prefixes under a lease; what was evicted is under none."""
        ends = [(held, end) for _, held in self.leases for end in range(self.page_size, len(held) + 1, self.page_size)]
        return {held[:end] for held, end in ends} & self.prefixes.keys()

    @rule(tokens=PROMPTS)
    def match(self, tokens: list[int]) -> None:
        found = self.use(tokens)
        assert self.cache.listener.match(tokens) == len(found) * self.page_size
        match = self.cache.tree.match(tokens)
        assert match.num_tokens == len(found) * self.page_size
        assert match.pages.tolist() == [self.prefixes[prefix][0] for prefix in found]

    @rule(tokens=PROMPTS, knows_what_is_cached=st.booleans())
    def insert(self, tokens: list[int], knows_what_is_cached: bool) -> None:
        """A request that did not know what is cached has computed all of it, and keeps what was there before."""
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        total = len(tokens) // self.page_size
        found = self.cached(tokens)
        known = self.continued(tokens) if knows_what_is_cached else []
        mine = self.cache.pool.allocate(total - len(known))
        if mine is None:
            return
        self.touch(found)
        self.cache.held.update(mine.tolist())
        pages = np.array([*(self.prefixes[prefix][0] for prefix in known), *mine.tolist()], dtype=np.int32)
        inserted = self.store(tokens, pages)
        assert inserted.num_present == len(found) * self.page_size
        for index in range(len(found), total):
            self.prefixes[tuple(tokens[: (index + 1) * self.page_size])] = (int(pages[index]), self.now)
            self.cache.held.remove(int(pages[index]))
        self.cache.free(pages[len(known) : len(found)])

    def store(self, tokens: list[int], pages: np.ndarray) -> Inserted:
        return self.cache.tree.insert(tokens, pages)

    @rule(tokens=PROMPTS)
    def lock(self, tokens: list[int]) -> None:
        found = self.use(tokens)
        node = self.cache.tree.match(tokens).node
        self.cache.tree.lock(node)
        self.locks.append((node, found[-1] if found else ()))

    @precondition(lambda self: self.locks)
    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        node, _ = self.locks.pop(which % len(self.locks))
        self.cache.tree.unlock(node)

    @rule(tokens=PROMPTS)
    def lease(self, tokens: list[int]) -> None:
        found = self.use(tokens)
        node = self.cache.tree.match(tokens).node
        self.leases.append((self.cache.tree.lease(node), found[-1] if found else ()))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 100))
    def end_lease(self, which: int) -> None:
        lease, _ = self.leases.pop(which % len(self.leases))
        self.cache.tree.end_lease(lease)

    @rule(num_pages=st.integers(0, 8))
    def evict(self, num_pages: int) -> None:
        free, leased = set(self.prefixes) - self.pinned(), self.leased()
        before = {event.node for event in self.cache.tree.snapshot()}
        assert self.cache.tree.num_evictable == len(free)
        assert self.cache.tree.evict(num_pages) == min(num_pages, len(free))
        left = {prefix: use for prefix, use in self.prefixes.items() if self.is_cached(prefix)}
        gone = {prefix: use for prefix, use in self.prefixes.items() if prefix not in left}
        assert len(gone) == min(num_pages, len(free)) and set(gone) <= free
        # Without a lease first, then least recently used: what went never had a lease, and was never used after a leaf
        # that could have gone instead, unless that leaf had a lease.
        leaves = {
            prefix: use
            for prefix, use in left.items()
            if prefix in free and not any(other[: len(prefix)] == prefix and other != prefix for other in left)
        }
        if gone and leaves:
            last = max((prefix in leased, use) for prefix, (_, use) in gone.items())
            assert last <= min((prefix in leased, use) for prefix, (_, use) in leaves.items())
        assert len(before) + 1 >= len(self.cache.tree.snapshot()), "eviction splits one leaf at most"
        self.prefixes = left
        # A lease whose end was evicted stays on what is left of its path, and does not come back with other pages.
        self.leases = [(lease, self.longest(held)) for lease, held in self.leases]

    def longest(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        return max(self.cached(list(tokens)), key=len, default=())

    def is_cached(self, prefix: tuple[int, ...]) -> bool:
        return self.cache.listener.match(prefix) == len(prefix)

    @precondition(lambda self: not self.locks)
    @rule()
    def reset(self) -> None:
        self.cache.tree.reset()
        self.prefixes = {}
        self.leases = [(lease, ()) for lease, _ in self.leases]

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            assert self.cache.tree.num_cached == len(self.prefixes)
            assert self.cache.tree.num_evictable == len(set(self.prefixes) - self.pinned())
            assert self.cache.tree.num_leased == len(self.leased())
            assert len(self.cache.tree.heap) <= 2 * NUM_PAGES + 2


class ComponentModel(Model):
    """A tree with components: checkpoints (`num_rows`), windows (`window`: how many pages, tokens of one, and whether
    these are chunks), or both.

    `points` lists the prefixes with resume points, `rows` and `windows` map each to its parts; `pins` lists what is
    pinned, with the prefixes that end there. What is cached follows: all prefixes of points, and of what is locked.
    `once` and `again` list the points by use, those that others have gone on from apart.
    """

    num_rows: int | None = None
    window: tuple[int, int, bool] | None = None

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]))
    def start(self, page_size: int) -> None:
        super().start(page_size)
        self.cache = Cache(NUM_PAGES, page_size, self.num_rows, self.window)
        self.states = self.cache.tree.components[0] if self.num_rows is not None else None
        self.of_windows = self.cache.tree.components[-1] if self.window is not None else None
        self.points: list[tuple[int, ...]] = []
        self.rows: dict[tuple[int, ...], int] = {}
        self.windows: dict[tuple[int, ...], list[int]] = {}
        self.pins: list[tuple[PagedNode, tuple[int, ...]]] = []
        self.once: list[tuple[int, ...]] = []
        self.again: list[tuple[int, ...]] = []

    def continued(self, tokens: list[int]) -> list[tuple[int, ...]]:
        found = self.cached(tokens)
        while found and found[-1] not in self.points:
            found.pop()
        return found

    def use(self, tokens: list[int]) -> list[tuple[int, ...]]:
        found = super().use(tokens)
        if found:
            self.use_again(found[-1])
        return found

    def use_again(self, prefix: tuple[int, ...]) -> None:
        self.once, self.again = ([one for one in used if one != prefix] for used in (self.once, self.again))
        self.again.append(prefix)
        if len(self.again) > (self.num_rows or 0) // 2:
            self.once.append(self.again.pop(0))

    def pages_before(self, tokens: tuple[int, ...]) -> range:
        """Numbers of the pages that a token after these sees: those with one of its window's tokens."""
        _, size, in_chunks = self.window
        first = len(tokens) - len(tokens) % size if in_chunks else max(0, len(tokens) - size + 1)
        seen = range(first, len(tokens))
        return range(seen.start // self.page_size, len(tokens) // self.page_size)

    def evictable(self) -> set[int]:
        """Window pages of the tree in no pinned window."""
        pinned = {page for _, end in self.pins for page in self.windows.get(end, ())}
        return {page for window in self.windows.values() for page in window} - pinned

    def makes_room(self, component: Component, num_pages: int) -> bool:
        if (pages := self.cache.tree.allocate_part(component, num_pages)) is not None:
            component.pool.free(pages)
        self.forget()
        return pages is not None

    @rule(tokens=PROMPTS, knows_what_is_cached=st.booleans())
    def insert(self, tokens: list[int], knows_what_is_cached: bool) -> None:
        """With parts of the request's, for which points are evicted, or those that the tree has for the same tokens."""
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        if not tokens or (self.states is not None and not self.makes_room(self.states, 1)):
            return
        if self.of_windows is None or self.makes_room(self.of_windows, len(self.pages_before(tuple(tokens)))):
            super().insert(tokens, knows_what_is_cached)

    def store(self, tokens: list[int], pages: np.ndarray) -> Inserted:
        tree, prefix, parts = self.cache.tree, tuple(tokens), list[Any]()
        is_new = prefix not in self.points
        if self.states is not None:
            parts.append(self.states.pool.allocate(1)[0])
        if self.of_windows is not None:
            parts.append(self.window_before(tokens))
        inserted = tree.insert(tokens, pages, parts)
        if not is_new:
            for component, part in zip(tree.components, parts, strict=True):
                component.pool.free(np.atleast_1d(part))
            self.use_again(prefix)
            return inserted
        self.points.append(prefix)
        self.once.append(prefix)
        if self.states is not None:
            self.rows[prefix] = int(parts[0])
        if self.of_windows is not None:
            self.windows[prefix] = parts[-1].tolist()
        return inserted

    def window_before(self, tokens: list[int]) -> np.ndarray:
        """Window pages before the end of `tokens`. A request that went on from the deepest point before has read its
        last pages there."""
        prefix, pool = tuple(tokens), self.of_windows.pool
        window = pool.allocate(len(self.pages_before(prefix)))
        before = [found for found in self.continued(tokens) if found != prefix]
        if before and prefix not in self.points:
            there = dict(zip(self.pages_before(before[-1]), self.windows[before[-1]], strict=True))
            places = [place for place, number in enumerate(self.pages_before(prefix)) if number in there]
            pool.free(window[places])
            window[places] = [there[self.pages_before(prefix)[place]] for place in places]
        return window

    @rule(tokens=PROMPTS)
    def lock_and_pin(self, tokens: list[int]) -> None:
        self.lock(tokens)
        self.cache.tree.pin(self.locks[-1][0])
        self.pins.append(self.locks[-1])

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 100))
    def unpin(self, which: int) -> None:
        node, _ = self.pins.pop(which % len(self.pins))
        self.cache.tree.unpin(node)

    @precondition(lambda self: self.locks)
    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        node, held = self.locks.pop(which % len(self.locks))
        if sum(pin is node for pin, _ in self.pins) > sum(lock is node for lock, _ in self.locks):
            self.pins.remove((node, held))
            self.cache.tree.unpin(node)
        self.cache.tree.unlock(node)
        self.forget()

    @rule(which=st.integers(0, 1))
    def evict_point(self, which: int) -> None:
        component = self.cache.tree.components[which % len(self.cache.tree.components)]
        kept, leased = {end for _, end in self.pins}, {held for _, held in self.leases}
        candidates = [prefix for prefix in (*self.once, *self.again) if prefix not in kept]
        first = next((prefix for prefix in candidates if prefix not in leased), next(iter(candidates), None))
        before = set(self.points)
        assert self.cache.tree.evict_point(component) == bool(candidates)
        self.forget()
        gone = before - set(self.points)
        assert len(gone) == bool(candidates) and gone <= set(candidates)
        assert not gone & leased or set(candidates) <= leased, "those with a lease go last"
        assert component is not self.states or gone <= {first}

    @rule(held=st.booleans())
    def hold_a_row(self, held: bool) -> None:
        """A request takes a free row for states that are not computed yet, or gives one back."""
        if self.states is not None and held and self.states.pool.num_free > 1:
            self.cache.held_rows.add(int(self.states.pool.allocate(1)[0]))
        elif not held and self.cache.held_rows:
            self.states.pool.free_one(self.cache.held_rows.pop())

    @rule(held=st.booleans())
    def hold_a_window_page(self, held: bool) -> None:
        if self.of_windows is not None and held and self.of_windows.pool.num_free > 6:
            self.cache.held_windows.add(int(self.of_windows.pool.allocate(1)[0]))
        elif not held and self.cache.held_windows:
            self.of_windows.pool.free_one(self.cache.held_windows.pop())

    @rule(num_pages=st.integers(0, 14))
    def evict_windows(self, num_pages: int) -> None:
        if self.of_windows is None:
            return
        pool, evictable = self.of_windows.pool, self.evictable()
        most = pool.num_free + len(evictable)
        self.cache.make_room(num_pages)
        assert min(num_pages, most) <= pool.num_free <= most
        self.forget()

    @rule(num_pages=st.integers(0, 8))
    def evict(self, num_pages: int) -> None:
        free, leased, before = set(self.prefixes) - self.pinned(), self.leased(), dict(self.prefixes)
        points = list(self.points)
        freed = self.cache.tree.evict(num_pages)
        assert min(num_pages, len(free)) <= freed <= len(free)
        self.forget()
        assert len(before) - len(self.prefixes) == freed and before.keys() - self.prefixes.keys() <= free
        gone = [prefix for prefix in points if prefix not in self.points]
        if not gone:
            return
        left = self.points
        leaves = [one for one in left if one in free and sum(other[: len(one)] == one for other in left) == 1]
        value = {prefix: (prefix in leased, use) for prefix, (_, use) in before.items()}
        last = max(gone, key=value.__getitem__)
        assert all(value[last] <= value[leaf] for leaf in leaves)
        kept = self.prefixes.keys() | {last[:end] for end in range(self.page_size, len(last) + 1, self.page_size)}
        assert len(before) - len(kept) < num_pages, "the last leaf had not to go"

    def forget(self) -> None:
        """Forgets the points that were evicted, and the prefixes that neither a point nor a lock needs."""
        told = {tuple(np.frombuffer(path, np.int32).tolist()) for path in self.cache.listener.saved()}
        self.points, self.once, self.again = (
            [one for one in some if one in told] for some in (self.points, self.once, self.again)
        )
        self.rows, self.windows = (
            {prefix: part for prefix, part in parts.items() if prefix in told} for parts in (self.rows, self.windows)
        )
        ends = [*self.points, *(held for _, held in self.locks)]
        kept = {one[:end] for one in ends for end in range(self.page_size, len(one) + 1, self.page_size)}
        self.prefixes = {prefix: use for prefix, use in self.prefixes.items() if prefix in kept}
        self.leases = [(lease, self.longest(held)) for lease, held in self.leases]

    @precondition(lambda self: not self.locks)
    @rule()
    def reset(self) -> None:
        super().reset()
        self.forget()

    @invariant()
    def sound(self) -> None:
        super().sound()
        if not hasattr(self, "points"):
            return
        assert len(self.cache.tree.points) == len(self.points)
        if self.states is not None:
            order = [self.states.parts[node] for node in self.states.eviction_order()]
            assert order == [self.rows[prefix] for prefix in (*self.once, *self.again)]
        if self.of_windows is not None:
            windows = self.of_windows
            assert sorted(window.tolist() for window in windows.parts.values()) == sorted(self.windows.values())
            assert windows.num_cached == len({page for window in self.windows.values() for page in window})
            assert windows.num_evictable == len(self.evictable())
            order = list(windows.eviction_order())
            inner = [len(node.children) == 1 for node in order if node not in windows._used_again]
            assert inner == sorted(inner, reverse=True), "those of nodes with one child go first"


class CheckpointModel(ComponentModel):
    num_rows = 5


class WindowModel(ComponentModel):
    window = (14, 5, False)


class ChunkModel(ComponentModel):
    """A window is the begun chunk of six tokens: at the end of one nothing is needed to go on."""

    window = (14, 6, True)


class TwoComponentModel(ComponentModel):
    """States and windows: a point has both, or is gone."""

    num_rows, window = 5, (14, 5, False)


TestModel = pytest.mark.slow(Model.TestCase)
TestModel.settings = settings(deadline=None, max_examples=100, stateful_step_count=50)
TestCheckpointModel = pytest.mark.slow(CheckpointModel.TestCase)
TestCheckpointModel.settings = TestModel.settings
TestWindowModel = pytest.mark.slow(WindowModel.TestCase)
TestWindowModel.settings = TestModel.settings
TestChunkModel = pytest.mark.slow(ChunkModel.TestCase)
TestChunkModel.settings = settings(TestModel.settings, max_examples=50)
TestTwoComponentModel = pytest.mark.slow(TwoComponentModel.TestCase)
TestTwoComponentModel.settings = settings(TestModel.settings, max_examples=50)
