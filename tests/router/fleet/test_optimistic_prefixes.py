import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from router.fleet import optimistic_prefixes
from router.fleet.optimistic_prefixes import EXPIRES_S, OptimisticPrefixes, marks, prefix_hashes


def hashes(tokens: list[int]) -> list[int]:
    return prefix_hashes(np.array(tokens, dtype=np.int32))


def test_marks_are_dense_at_first_and_never_off_by_more_than_a_sixteenth():
    found = marks(200_000)
    assert found[:33] == [*range(16, 513, 16), 544]
    assert len(found) < 200
    assert all(upper - lower <= max(16, lower / 16) for lower, upper in itertools.pairwise(found))
    assert marks(15) == []
    assert marks(40) == [16, 32]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3), max_size=120), st.lists(st.integers(0, 3), max_size=120))
def test_hashes_agree_exactly_as_far_as_the_prompts_do(first, second):
    agree = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    both = list(zip(hashes(first), hashes(second), strict=False))
    assert [a == b for a, b in both] == [index < agree // 16 for index in range(len(both))]


def splitmix(index: int) -> int:
    """The multiplier of token `index`, in plain integers."""
    state = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return (state ^ state >> 31) | 1


def test_hashes_are_the_same_in_every_process_and_whatever_follows():
    tokens = list(range(3, 19))
    expect = sum((token + 1) * splitmix(index) for index, token in enumerate(tokens)) % 2**64
    assert hashes(tokens) == [expect]
    assert hashes(list(range(5000)))[:5] == hashes(list(range(80)))
    assert hashes([]) == hashes([7] * 15) == []
    assert hashes([0] * 32)[0] != hashes([0] * 32)[1], "zeros count too"


def matched(entries: OptimisticPrefixes, prefixes: list[int], now: float) -> list[int]:
    return entries.match(prefixes, now, num_slots=3).tolist()


def test_entries_expire_unless_renewed():
    entries = OptimisticPrefixes()
    long, short = hashes(list(range(64))), hashes(list(range(32)))
    entries.add(1, long, now=0.0)
    entries.add(1, short, now=1.0)
    assert matched(entries, long, EXPIRES_S - 0.1) == [0, 4, 0]
    assert matched(entries, long, EXPIRES_S) == [0, 2, 0]
    assert matched(entries, hashes([9] * 64), EXPIRES_S) == [0, 0, 0]
    assert matched(entries, [], EXPIRES_S) == [0, 0, 0]
    assert matched(entries, long, EXPIRES_S + 1.0) == [0, 0, 0]
    assert len(entries) == 0


def test_renewed_entries_do_not_keep_older_ones_alive():
    entries = OptimisticPrefixes()
    first, second = hashes(list(range(64))), hashes(list(range(100, 164)))
    entries.add(0, first, now=0.0)
    entries.add(0, second, now=0.0)
    entries.add(0, first, now=1.0)
    assert matched(entries, second, EXPIRES_S) == [0, 0, 0]
    assert matched(entries, first, EXPIRES_S) == [4, 0, 0]


def test_each_replica_has_what_it_was_given():
    entries = OptimisticPrefixes()
    long, other = hashes(list(range(64))), hashes([*range(48), *range(100, 116)])
    entries.add(2, long, now=0.0)
    entries.add(0, long[:1], now=0.0)
    entries.add(1, other, now=0.0)
    assert matched(entries, long, 1.0) == [1, 3, 4]
    assert matched(entries, other, 1.0) == [1, 4, 3]
    entries.forget(2)
    assert matched(entries, long, 1.0) == [1, 3, 0]


def test_the_number_of_entries_is_bounded_and_the_oldest_go(monkeypatch):
    monkeypatch.setattr(optimistic_prefixes, "MAX_HASHES", 6)
    entries = OptimisticPrefixes()
    first, second = hashes(list(range(64))), hashes(list(range(100, 164)))
    entries.add(0, first, now=0.0)
    entries.add(0, second, now=0.0)
    assert len(entries) == 4
    assert matched(entries, first, 0.0) == [0, 0, 0]
    assert matched(entries, second, 0.0) == [4, 0, 0]


class Entries(RuleBasedStateMachine):
    """Any order of entries, expiry and replicas that go, against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.entries, self.now, self.plain = OptimisticPrefixes(), 0.0, []

    @rule(slot=st.integers(0, 2), tokens=st.integers(0, 3), length=st.integers(0, 5), passed=st.sampled_from([0, 0.7]))
    def add(self, slot: int, tokens: int, length: int, passed: float) -> None:
        self.now += passed
        prefixes = hashes([0] * 32 + [tokens] * 48)[:length]
        self.entries.add(slot, prefixes, self.now)
        self.plain.append((self.now + EXPIRES_S, slot, prefixes))

    @rule(slot=st.integers(0, 2))
    def forget(self, slot: int) -> None:
        self.entries.forget(slot)
        self.plain = [entry for entry in self.plain if entry[1] != slot]

    @rule(tokens=st.integers(0, 4))
    def match(self, tokens: int) -> None:
        prefixes = hashes([0] * 32 + [tokens] * 48)
        expect = [0, 0, 0]
        for ends, slot, had in self.plain:
            if ends > self.now:
                same = sum(a == b for a, b in zip(prefixes, had, strict=False))
                expect[slot] = max(expect[slot], same)
        assert matched(self.entries, prefixes, self.now) == expect
        live = {prefix for ends, _, had in self.plain if ends > self.now for prefix in had}
        assert len(self.entries) == len(live)


TestEntries = Entries.TestCase
TestEntries.settings = settings(deadline=None, max_examples=50, stateful_step_count=25)


@pytest.mark.parametrize("count", [1, 16, 17, 5000])
def test_multipliers_are_one_sequence_of_odd_numbers(count):
    bits = count.bit_length()
    table = optimistic_prefixes.multipliers(bits)
    assert len(table) >= count and (table % 2 == 1).all() and len(set(table.tolist())) == len(table)
    assert (optimistic_prefixes.multipliers(bits + 1)[: len(table)] == table).all()
