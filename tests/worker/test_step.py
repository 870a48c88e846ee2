"""Plans as columns: what goes to the other ranks, what is left of one, and the tables that follow from them."""

import random

import numpy as np
import pytest

from tests.worker.fakes import copies_of
from worker.executor.page_table import PageTable
from worker.kv_layout import DEVICE, SLOT
from worker.step import PENDING, Chunk, Copy, Plan

CHUNKS = [
    Chunk(3, 7, [PENDING], 2, [], 1),
    Chunk(0, 0, [5, 6, 7], 0, [9, 4], 0),
    Chunk(8, 16, [1], 4, [11], 1),
    Chunk(2, 4, [2, 3], 1, [12, 13], 2, 1),
]
# Of chunks, by index: rows of states that are written, written and read, and adapters.
COPIES = [Copy(1, 2, 2, SLOT, 0, DEVICE, 7), Copy(1, 3, 2, SLOT, 0, DEVICE, 8), Copy(3, 4, 2, DEVICE, 9, SLOT, 2)]
ADAPTERS = [(0, 1, 5), (2, 0, 6)]


def rich_plan(step: int) -> Plan:
    """Of `CHUNKS`, with all that a plan may have. Pages of the second group are numbered 100 more than
    those of the first."""
    plan = Plan.from_chunks(step, CHUNKS)
    plan.pages = np.concatenate((plan.pages, plan.pages + np.int32(100)))
    plan.copies, plan.adapters = (np.array(some, dtype=np.int32) for some in (COPIES, ADAPTERS))
    return plan


def test_a_plan_is_the_same_on_every_rank():
    plan = rich_plan(7_000_000_000)
    assert plan.chunks == CHUNKS and len(plan) == 4 and plan.num_tokens == 7
    there = Plan.decode(plan.encode())
    assert there.chunks == CHUNKS and there.step == 7_000_000_000
    assert there.pages.tolist() == [[9, 4, 11, 12, 13], [109, 104, 111, 112, 113]]
    assert (copies_of(there), there.adapters.tolist()) == (COPIES, [*map(list, ADAPTERS)])
    one = Plan.from_chunks(1, CHUNKS[:1])
    assert Plan.decode(one.encode()).chunks == CHUNKS[:1] and one.pages.shape == (1, 0)


@pytest.mark.parametrize("chosen", range(16))
def test_chunks_are_left_out(chosen):
    mask = np.array([bool(chosen & 1 << i) for i in range(4)])
    left = rich_plan(1).only(mask)
    assert left.num_tokens == left.lengths.sum() and len(left) == mask.sum()
    assert left.pages[1].tolist() == (left.pages[0] + 100).tolist()
    indices = np.flatnonzero(mask).tolist()
    for pairs, whole in ((copies_of(left), COPIES), (left.adapters.tolist(), ADAPTERS)):
        assert [(indices[index], *rest) for index, *rest in pairs] == [one for one in whole if mask[one[0]]]
    if chosen:
        assert left.chunks == [chunk for chunk, stays in zip(CHUNKS, mask, strict=True) if stays]


def test_tables_hold_what_plans_said():
    rng = random.Random(0)
    tables, expected = PageTable(6, 20, 4, 2), {slot: [] for slot in range(6)}
    for step in range(200):
        chunks = []
        for slot in rng.sample(range(6), rng.randint(1, 6)):
            kept = rng.choice([0, len(expected[slot]), len(expected[slot])])
            pages = rng.choices(range(1000), k=rng.randint(0 if kept else 1, min(3, 20 - kept)))
            expected[slot][kept:] = pages
            chunks.append(Chunk(slot, 4 * len(expected[slot]) - 1, [1], kept, pages, 1))
        plan = Plan.from_chunks(step, chunks)
        plan.pages = np.concatenate((plan.pages, plan.pages + np.int32(100)))
        tables.update(plan)
        for slot, pages in expected.items():
            assert tables.rows[0, slot, : len(pages)].tolist() == pages
            assert tables.rows[1, slot, : len(pages)].tolist() == [page + 100 for page in pages]


def test_a_chunk_outside_its_pages_is_an_error():
    tables = PageTable(4, 3, 4)
    with pytest.raises(ValueError, match=r"slot 2: .*\b9\b.*\b2 pages of 4\b"):
        tables.update(Plan.from_chunks(1, [Chunk(1, 0, [1], 0, [7], 1), Chunk(2, 7, [1, 2], 0, [5, 6], 1)]))
    with pytest.raises(ValueError, match=r"slot 1: 4 pages .*\b3\b"):
        tables.update(Plan.from_chunks(2, [Chunk(1, 0, [1], 0, [7, 8, 9, 10], 1)]))
