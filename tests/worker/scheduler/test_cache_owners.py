"""Whatever comes, ends or is evicted, each page and each row of every group has one owner, copies in flight included.
The fake executor refuses KV, a window or states of other tokens than those before a chunk."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.worker.driver import Driver, prompt
from tests.worker.fakes import FakeExecutor, Window, copies_of, pages_now
from worker.kv_layout import DEVICE, SLOT
from worker.scheduler.cache_group import CacheGroup
from worker.scheduler.sequence import Sequence

LENGTHS = st.sampled_from([1, 5, 9, 16, 30])


class Owners(RuleBasedStateMachine):
    """A replica without components, and in subclasses with one or two: `num_rows` of states, `window` of other
    layers."""

    num_rows: int | None = None
    window: Window | None = None

    @initialize(budget=st.sampled_from([5, 24]), overlap=st.booleans(), pages=st.sampled_from([16, 40]))
    def start(self, budget: int, overlap: bool, pages: int) -> None:
        fake = FakeExecutor(num_pages=pages, num_checkpoints=self.num_rows, window=self.window)
        # Sequences start though there may be no pages for all that they will need: some are preempted.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("worker.scheduler.kv_demand.peak_pages", pages_now)
        self.driver = Driver(fake, overlap=overlap, token_budget=budget, max_running=4, checkpoint_interval=8)
        self.asked: dict[str, tuple[list[int], int]] = {}

    @rule(stem=st.integers(0, 1), shared=LENGTHS, own=st.integers(0, 6), most=st.integers(1, 20), first=st.booleans())
    def add(self, stem: int, shared: int, own: int, most: int, first: bool) -> None:
        name = str(len(self.asked))
        self.asked[name] = [*prompt(30, seed=stem)[:shared], *prompt(own, seed=len(self.asked))], most
        self.driver.add(name, *self.asked[name], priority=int(first))

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @rule(which=st.integers(0, 50), is_failure=st.booleans())
    def end(self, which: int, is_failure: bool) -> None:
        """A client goes, or a request fails, while its chunk and copies may be in flight."""
        name = str(which % max(1, len(self.asked)))
        if name in self.driver.scheduler:
            del self.asked[name]
            self.driver.outputs.pop(name, None)
            self.driver.scheduler.fail(name, None) if is_failure else self.driver.scheduler.abort([name])
            self.driver.scheduler.take_outputs()
            self.asked[name] = [], 0

    @rule(num_pages=st.integers(1, 10))
    def evict(self, num_pages: int) -> None:
        self.driver.tree.evict(num_pages)

    @rule(which=st.integers(0, 1))
    def evict_point(self, which: int) -> None:
        for component in self.driver.tree.components[which : which + 1]:
            self.driver.tree.evict_point(component)

    @invariant()
    def each_unit_has_one_owner(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.scheduler.check_integrity()
        for group in self.driver.scheduler.kv_cache.groups:
            owners = np.bincount([*self.owned(group)], minlength=group.num_units)
            assert owners.tolist() == [1] * group.num_units
        if self.driver.flight is not None:
            self.copies_have_owners()

    def owned(self, group: CacheGroup) -> Iterator[int]:
        """The units of a group, by those who own them: the free list, sequences, the tree."""
        yield from group.pool.free_pages().tolist()
        for seq in self.driver.scheduler.running:
            yield from map(int, group.held(seq))
        tree = self.driver.tree
        if group.component is not None:
            yield from {int(unit) for part in group.component.parts.values() for unit in np.atleast_1d(part)}
        else:
            nodes = [tree.root]
            for node in nodes:
                yield from node.pages.tolist()
                nodes += node.children.values()

    def copies_have_owners(self) -> None:
        """A row that a step in flight writes is its sequence's, until that goes. A copy is between a sequence's own
        states and a row."""
        step, *_ = self.driver.flight
        groups = self.driver.scheduler.kv_cache.groups
        for copy in copies_of(step.plan):
            seq: Sequence = step.sequences[copy.chunk]
            assert {copy.from_tier, copy.to_tier} == {SLOT, DEVICE}
            if copy.to_tier == DEVICE and seq.is_running and not step.dropped[copy.chunk]:
                assert copy.to_unit in groups[copy.group].held(seq)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        try:
            self.driver.run()
            for name, (tokens, most) in self.asked.items():
                if most:
                    assert self.driver.tokens(name) == self.driver.executor.generate(tokens, most)
            self.driver.tree.reset()
            assert all(group.pool.num_free == group.num_units for group in self.driver.scheduler.kv_cache.groups)
        finally:
            self.patch.undo()


class OwnersOfStates(Owners):
    num_rows = 6


class OwnersOfWindows(Owners):
    window = Window(16, 10)


class OwnersOfStatesAndWindows(Owners):
    num_rows, window = 6, Window(16, 10)


class OwnersOfStatesAndChunks(Owners):
    num_rows, window = 6, Window(16, 12, in_chunks=True)


class OwnersWithoutRows(Owners):
    """States are not kept for others, and so nothing is."""

    num_rows, window = 0, Window(16, 10)


CASES = [Owners, OwnersOfStates, OwnersOfWindows, OwnersOfStatesAndWindows, OwnersOfStatesAndChunks, OwnersWithoutRows]
for case in CASES:
    case.TestCase.settings = settings(deadline=None, max_examples=20, stateful_step_count=30)
TestOwners, TestOfStates, TestOfWindows, TestOfStatesAndWindows, TestOfStatesAndChunks, TestWithoutRows = (
    case.TestCase for case in CASES
)
