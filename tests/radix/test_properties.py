"""Any history of matches, inserts, locks, leases and evictions, against a model with no tree: a dict of cached
prefixes."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radix.node import NodeLease
from radix.tree import Inserted, PagedNode

from .conftest import Cache

NUM_PAGES = 24
PROMPTS = st.lists(st.integers(0, 1), max_size=24)


class Model(RuleBasedStateMachine):
    """`prefixes` maps each cached prefix (whole pages) to the page of its last tokens and the time of its last use;
    `locks` lists what is locked with how many tokens end there, `leases` what is leased."""

    num_rows: int | None = None

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]))
    def start(self, page_size: int) -> None:
        self.cache = Cache(NUM_PAGES, page_size, self.num_rows)
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


class CheckpointModel(Model):
    """A tree with checkpoints. `rows` maps the prefix of each to its row. What is cached follows from them: all
    prefixes of theirs. `once` and `again` list them by use, those that others have gone on from apart."""

    num_rows = 5

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]))
    def start(self, page_size: int) -> None:
        super().start(page_size)
        self.rows: dict[tuple[int, ...], int] = {}
        self.once: list[tuple[int, ...]] = []
        self.again: list[tuple[int, ...]] = []

    def continued(self, tokens: list[int]) -> list[tuple[int, ...]]:
        found = self.cached(tokens)
        while found and found[-1] not in self.rows:
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
        if len(self.again) > self.num_rows // 2:
            self.once.append(self.again.pop(0))

    @rule(tokens=PROMPTS, knows_what_is_cached=st.booleans())
    def insert(self, tokens: list[int], knows_what_is_cached: bool) -> None:
        """With a row of the request's, or with one for which a checkpoint has to go."""
        if len(tokens) < self.page_size:
            return
        if not self.cache.tree.rows.num_free:
            self.evict_checkpoint()
        if not self.cache.tree.rows.num_free:
            return
        super().insert(tokens, knows_what_is_cached)

    def store(self, tokens: list[int], pages: np.ndarray) -> Inserted:
        row = self.cache.tree.allocate_row()
        inserted = self.cache.tree.insert(tokens, pages, row)
        if tuple(tokens) in self.rows:
            self.use_again(tuple(tokens))
        else:
            self.rows[tuple(tokens)] = row
            self.once.append(tuple(tokens))
        return inserted

    @rule()
    def evict_checkpoint(self) -> None:
        locked, leased = ({held for _, held in ends} for ends in (self.locks, self.leases))
        candidates = [prefix for prefix in (*self.once, *self.again) if prefix not in locked]
        gone = next((prefix for prefix in candidates if prefix not in leased), next(iter(candidates), None))
        assert self.cache.tree.evict_checkpoint() == (gone is not None)
        if gone is not None:
            del self.rows[gone]
            self.forget()

    @rule(held=st.booleans())
    def hold_a_row(self, held: bool) -> None:
        """A request takes a free row for states that are not computed yet, or gives one back."""
        if held and self.cache.tree.rows.num_free > 1:
            self.cache.held_rows.add(self.cache.tree.allocate_row())
        elif not held and self.cache.held_rows:
            self.cache.tree.free_row(self.cache.held_rows.pop())

    @rule(num_pages=st.integers(0, 8))
    def evict(self, num_pages: int) -> None:
        free, leased, before = set(self.prefixes) - self.pinned(), self.leased(), dict(self.prefixes)
        freed = self.cache.tree.evict(num_pages)
        assert min(num_pages, len(free)) <= freed <= len(free)
        gone = [prefix for prefix in self.rows if not self.is_saved(prefix)]
        self.rows = {prefix: row for prefix, row in self.rows.items() if prefix not in gone}
        self.forget()
        assert len(before) - len(self.prefixes) == freed and before.keys() - self.prefixes.keys() <= free
        if not gone:
            return
        leaves = [one for one in self.rows if one in free and sum(other[: len(one)] == one for other in self.rows) == 1]
        value = {prefix: (prefix in leased, use) for prefix, (_, use) in before.items()}
        last = max(gone, key=value.__getitem__)
        assert all(value[last] <= value[leaf] for leaf in leaves)
        kept = self.prefixes.keys() | {last[:end] for end in range(self.page_size, len(last) + 1, self.page_size)}
        assert len(before) - len(kept) < num_pages, "the last leaf had not to go"

    def forget(self) -> None:
        """Forgets the prefixes that no checkpoint needs."""
        self.once, self.again = ([one for one in used if one in self.rows] for used in (self.once, self.again))
        kept = {one[:end] for one in self.rows for end in range(self.page_size, len(one) + 1, self.page_size)}
        self.prefixes = {prefix: use for prefix, use in self.prefixes.items() if prefix in kept}
        self.leases = [(lease, self.longest(held)) for lease, held in self.leases]

    def is_saved(self, prefix: tuple[int, ...]) -> bool:
        return self.cache.listener.match(prefix) == len(prefix)

    @precondition(lambda self: not self.locks)
    @rule()
    def reset(self) -> None:
        super().reset()
        self.rows, self.once, self.again = {}, [], []

    @invariant()
    def sound(self) -> None:
        super().sound()
        if hasattr(self, "rows"):
            tree = self.cache.tree
            order = [tree.checkpoints[node] for node in tree.eviction_order()]
            assert order == [self.rows[prefix] for prefix in (*self.once, *self.again)]


class WindowModel(Model):
    """A tree with windows. `windows` maps each prefix with one to its window pages; `pins` lists what is pinned, with
    the prefixes that end there."""

    num_windows, window_tokens, in_chunks = 14, 5, False

    @initialize(page_size=st.sampled_from([1, 2, 3, 4]))
    def start(self, page_size: int) -> None:
        super().start(page_size)
        self.cache = Cache(NUM_PAGES, page_size, windows=(self.num_windows, self.window_tokens, self.in_chunks))
        self.windows: dict[tuple[int, ...], list[int]] = {}
        self.pins: list[tuple[PagedNode, tuple[int, ...]]] = []

    def continued(self, tokens: list[int]) -> list[tuple[int, ...]]:
        found = self.cached(tokens)
        while found and found[-1] not in self.windows:
            found.pop()
        return found

    def pages_before(self, tokens: tuple[int, ...]) -> range:
        """Numbers of the pages that a token after these sees: those with one of its window's tokens."""
        first = max(0, len(tokens) - self.window_tokens + 1)
        if self.in_chunks:
            first = len(tokens) - len(tokens) % self.window_tokens
        seen = range(first, len(tokens))
        return range(seen.start // self.page_size, len(tokens) // self.page_size)

    def evictable(self) -> set[int]:
        """Window pages of the tree in no pinned window."""
        pinned = {page for _, end in self.pins for page in self.windows.get(end, ())}
        return {page for window in self.windows.values() for page in window} - pinned

    @rule(tokens=PROMPTS, knows_what_is_cached=st.booleans())
    def insert(self, tokens: list[int], knows_what_is_cached: bool) -> None:
        """With window pages of the request's, evicted for it, or those that the tree has for the same tokens."""
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        needed = len(self.pages_before(tuple(tokens)))
        if tokens and needed <= self.cache.tree.window_pool.num_free + len(self.evictable()):
            self.cache.tree.evict_windows(needed)
            self.forget()
            super().insert(tokens, knows_what_is_cached)

    def store(self, tokens: list[int], pages: np.ndarray) -> Inserted:
        tree, prefix = self.cache.tree, tuple(tokens)
        window = tree.window_pool.allocate(len(self.pages_before(prefix)))
        # A request that went on from the deepest window before this one has read its last pages there.
        before = [found for found in self.continued(tokens) if found != prefix]
        if before and prefix not in self.windows:
            there = dict(zip(self.pages_before(before[-1]), self.windows[before[-1]], strict=True))
            places = [place for place, number in enumerate(self.pages_before(prefix)) if number in there]
            tree.window_pool.free(window[places])
            window[places] = [there[self.pages_before(prefix)[place]] for place in places]
        inserted = tree.insert(tokens, pages, window)
        if prefix in self.windows:
            tree.window_pool.free(window)
        else:
            self.windows[prefix] = window.tolist()
        return inserted

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

    @rule()
    def evict_checkpoint(self) -> None:
        kept = {end for _, end in self.pins}
        leased = {held for _, held in self.leases}
        candidates = self.windows.keys() - kept
        assert self.cache.tree.evict_checkpoint() == bool(candidates)
        before = dict(self.windows)
        self.forget()
        gone = before.keys() - self.windows.keys()
        assert len(gone) == bool(candidates) and gone <= candidates
        assert not gone & leased or candidates <= leased, "those with a lease go last"

    @rule(num_pages=st.integers(0, 14))
    def evict_windows(self, num_pages: int) -> None:
        pool, evictable = self.cache.tree.window_pool, self.evictable()
        assert self.cache.tree.num_windows_evictable == len(evictable)
        most = pool.num_free + len(evictable)
        self.cache.tree.evict_windows(num_pages)
        assert min(num_pages, most) <= pool.num_free <= most
        self.forget()

    @rule(held=st.booleans())
    def hold_a_window_page(self, held: bool) -> None:
        pool = self.cache.tree.window_pool
        if held and pool.num_free > 6:
            self.cache.held_windows.add(int(pool.allocate(1)[0]))
        elif not held and self.cache.held_windows:
            pool.free(np.array([self.cache.held_windows.pop()]))

    @rule(num_pages=st.integers(0, 8))
    def evict(self, num_pages: int) -> None:
        free, before = set(self.prefixes) - self.pinned(), dict(self.prefixes)
        freed = self.cache.tree.evict(num_pages)
        assert min(num_pages, len(free)) <= freed <= len(free)
        self.forget()
        assert len(before) - len(self.prefixes) == freed and before.keys() - self.prefixes.keys() <= free

    def forget(self) -> None:
        """Forgets the windows that were evicted, and the prefixes that neither a window nor a lock needs."""
        told = {tuple(np.frombuffer(path, np.int32).tolist()) for path in self.cache.listener.saved()}
        self.windows = {prefix: window for prefix, window in self.windows.items() if prefix in told}
        ends = [*self.windows, *(held for _, held in self.locks)]
        kept = {one[:end] for one in ends for end in range(self.page_size, len(one) + 1, self.page_size)}
        self.prefixes = {prefix: use for prefix, use in self.prefixes.items() if prefix in kept}
        self.leases = [(lease, self.longest(held)) for lease, held in self.leases]

    @precondition(lambda self: not self.locks)
    @rule()
    def reset(self) -> None:
        super().reset()
        self.windows = {}

    @invariant()
    def sound(self) -> None:
        super().sound()
        if hasattr(self, "windows"):
            tree = self.cache.tree
            assert sorted(window.tolist() for window in tree.checkpoints.values()) == sorted(self.windows.values())
            assert tree.num_window_pages == len({page for window in self.windows.values() for page in window})
            order = list(tree.eviction_order())
            inner = [len(node.children) == 1 for node in order if node not in tree._used_again]
            assert inner == sorted(inner, reverse=True), "those of nodes with one child go first"


class ChunkModel(WindowModel):
    """A window is the begun chunk of six tokens: at the end of one nothing is needed to go on."""

    window_tokens, in_chunks = 6, True


TestModel = pytest.mark.slow(Model.TestCase)
TestModel.settings = settings(deadline=None, max_examples=100, stateful_step_count=50)
TestCheckpointModel = pytest.mark.slow(CheckpointModel.TestCase)
TestCheckpointModel.settings = TestModel.settings
TestWindowModel = pytest.mark.slow(WindowModel.TestCase)
TestWindowModel.settings = TestModel.settings
TestChunkModel = pytest.mark.slow(ChunkModel.TestCase)
TestChunkModel.settings = TestModel.settings
