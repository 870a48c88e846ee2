"""Which sequences read together, on random tables, against trying every way of grouping."""

import itertools

import numpy as np
import pytest

from kernels.attention import shared_prefix
from kernels.attention.interface import AttentionBatch, AttentionShape, SharedPrefixes
from kernels.attention.shared_prefix import SharedPrefixFinder

PAGE_SIZE = 4
# One page is 2 KiB, one sequence's part 512 bytes.
SHAPE = AttentionShape(2, 2, 32, 1.0, (None,))
PAGE_BYTES, PART_BYTES = 2048, 512


@pytest.fixture(autouse=True)
def _starting_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "_STARTS_BYTES", 0)


def finder() -> SharedPrefixFinder:
    return SharedPrefixFinder(PAGE_SIZE, SHAPE, 4)


def decodes(paths: list[list[int]], generator: np.random.Generator, width: int) -> AttentionBatch:
    """Sequences whose tables begin with these pages, each with some of its own after them, in shuffled rows."""
    n = len(paths)
    rows = generator.permutation(n + 3)[:n].astype(np.int32)
    tables = generator.integers(0, 5, (n + 3, width)).astype(np.int32)  # what stands beyond a table's end is anything
    starts, own = np.zeros(n, dtype=np.int32), itertools.count(10_000)
    for chunk, path in enumerate(paths):
        pages = path + [next(own) for _ in range(int(generator.integers(1, 4)))]
        tables[rows[chunk], : len(pages)] = pages
        starts[chunk] = (len(pages) - 1) * PAGE_SIZE + generator.integers(0, PAGE_SIZE)
    return AttentionBatch(tables, rows, starts, np.ones(n, dtype=np.int32))


def random_paths(generator: np.random.Generator, count: int, scale: int) -> list[list[int]]:
    """Paths in a tree of runs of pages."""
    numbers = itertools.count(100)

    def run() -> list[int]:
        return [next(numbers) for _ in range(int(generator.integers(1, scale)))]

    nodes: list[list[int]] = [[]]
    for _ in range(int(generator.integers(1, 8))):
        nodes.append(nodes[generator.integers(len(nodes))] + run())
    return [nodes[generator.integers(len(nodes))] for _ in range(count)]


def saved(groups: list[tuple[int, int]]) -> int:
    """Bytes that groups of (sequences, pages) save."""
    return sum((size - 1) * pages * PAGE_BYTES - size * PART_BYTES for size, pages in groups)


def most_saved(tables: list[list[int]]) -> int:
    """By the best choice, for every prefix, between reading it together and what its parts save."""
    best = 0
    for depth in range(1, max(map(len, tables), default=0) + 1):
        parts: dict[int, list[list[int]]] = {}
        for table in tables:
            if len(table) >= depth:
                parts.setdefault(table[depth - 1], []).append(table)
        if len(parts) == 1 and len(alike := next(iter(parts.values()))) > 1:
            best = max(best, saved([(len(alike), depth)]))
        if len(parts) != 1 or len(next(iter(parts.values()))) < len(tables):
            return max(best, sum(most_saved(part) for part in parts.values() if len(part) > 1))
    return best


def groups_of(found: SharedPrefixes) -> list[np.ndarray]:
    return np.split(found.members, found.ends[1:-1])


@pytest.mark.parametrize("seed", range(60))
def test_saves_most(seed: int) -> None:
    generator = np.random.default_rng(seed)
    scale = int(generator.choice([3, 8, 100]))
    batch = decodes(random_paths(generator, int(generator.integers(2, 12)), scale), generator, 9 * scale)
    found = finder().find(batch)
    whole = batch.starts // PAGE_SIZE
    tables = [batch.tables[row, :count].tolist() for row, count in zip(batch.rows, whole, strict=True)]
    sizes = [] if found is None else [len(group) for group in groups_of(found)]
    if found is not None:
        assert len(set(found.members)) == len(found.members) == found.ends[-1]
        for group, pages in zip(groups_of(found), found.num_pages, strict=True):
            assert len({tuple(tables[chunk][:pages]) for chunk in group}) == 1
            assert all(len(tables[chunk]) >= pages for chunk in group)
        np.testing.assert_array_equal(
            found.pages_of(len(batch.rows))[found.members], np.repeat(found.num_pages, np.diff(found.ends))
        )
    pages = [] if found is None else found.num_pages.tolist()
    assert saved(list(zip(sizes, pages, strict=True))) == most_saved(tables)


def test_the_page_that_is_written_is_not_shared() -> None:
    """Even if tables say so, as they do where nothing stands in them yet."""
    tables = np.zeros((2, 3), dtype=np.int32)
    tables[:, 0] = 7
    ones = np.ones(2, dtype=np.int32)
    rows = np.arange(2, dtype=np.int32)
    assert finder().find(AttentionBatch(tables, rows, ones * (PAGE_SIZE - 1), ones)) is None
    found = finder().find(AttentionBatch(tables, rows, ones * PAGE_SIZE, ones))
    assert found is not None and found.num_pages.tolist() == [1]


def test_too_little_to_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = decodes([[1, 2], [1, 2], [3, 4], [3, 4]], np.random.default_rng(0), 20)
    worth = 2 * saved([(2, 2)])
    monkeypatch.setattr(shared_prefix, "_STARTS_BYTES", worth - 1)
    assert finder().find(batch) is not None
    monkeypatch.setattr(shared_prefix, "_STARTS_BYTES", worth)
    assert finder().find(batch) is None


def test_the_next_step_has_the_same_groups() -> None:
    paths = [[1, 2, 3]] * 3 + [[1, 2, 3, 4]] * 2 + [[9]]
    batch = decodes(paths, np.random.default_rng(1), 20)
    tested = finder()
    found = tested.find(batch)
    later = AttentionBatch(batch.tables, batch.rows.copy(), batch.starts + 1, batch.lengths)
    assert found is not None and tested.find(later) is found

    # Another sequence in a slot, which shares the first page only, and is by chance where that one would have been.
    later.tables[batch.rows[0], 1:3] = 50, 51
    after = AttentionBatch(batch.tables, batch.rows, batch.starts + 2, batch.lengths)
    other = tested.find(after)
    assert other is not None and 0 not in other.members

    # The tree's page in the place of its own: seen after a while at the latest.
    late = [AttentionBatch(batch.tables, batch.rows, batch.starts + 3 + step, batch.lengths) for step in range(40)]
    later.tables[batch.rows[0], 1:3] = 2, 3
    assert tested.find(late[0]) is other
    back = [tested.find(one) for one in late[1:]][-1]
    assert back is not None and 0 in back.members

    # One less.
    fewer = AttentionBatch(batch.tables, batch.rows[:-2], batch.starts[:-2] + 43, batch.lengths[:-2])
    without = tested.find(fewer)
    assert without is not None and without is not back and without.members.max() < len(fewer.rows)
