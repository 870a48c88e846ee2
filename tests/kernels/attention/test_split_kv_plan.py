"""How attention is cut into work, for batches whose sequences share what they begin with and longer chunks."""

import numpy as np
import pytest
import torch

from kernels.attention.interface import AttentionBatch, AttentionShape, SharedPrefixes

pytest.importorskip("triton")

from kernels.attention.triton_backend import TritonAttention

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Tokens that a group shares, and what each of its sequences has of its own.
GROUPS = [(48, [1, 3, 20]), (16, [5, 16]), (80, [2, 1, 4, 7, 9, 30, 2, 2, 33]), (0, [1, 40])]


def grouped(groups: list[tuple[int, list[int]]], page_size: int) -> tuple[AttentionBatch, int]:
    """A batch of decodes in shuffled order, rows and pages, and how many pages it has."""
    generator = np.random.default_rng(7)
    counts = [(shared // page_size, -(-own // page_size)) for shared, owns in groups for own in owns]
    num_pages = sum(shared // page_size for shared, _ in groups) + sum(own for _, own in counts)
    free = iter(generator.permutation(num_pages).astype(np.int32))
    n = len(counts)
    rows = generator.permutation(n + 1)[:n].astype(np.int32)
    tables = np.full((n + 1, max(map(sum, counts)) + 2), 1 << 30, dtype=np.int32)
    starts, chunk = np.zeros(n, dtype=np.int32), 0
    for shared, owns in groups:
        prefix = [next(free) for _ in range(shared // page_size)]
        for own in owns:
            pages = prefix + [next(free) for _ in range(-(-own // page_size))]
            tables[rows[chunk], : len(pages)] = pages
            starts[chunk] = len(prefix) * page_size + own - 1
            chunk += 1
    order = generator.permutation(n)
    return AttentionBatch(tables, rows[order], starts[order], np.ones(n, dtype=np.int32)), num_pages


def all_shared(batch: AttentionBatch, page_size: int) -> SharedPrefixes:
    """Of a batch each of whose sequences begins as others do, and has one token more."""
    first_pages = batch.tables[batch.rows, 0]
    members = np.argsort(first_pages, kind="stable").astype(np.int32)
    ends = np.append(np.flatnonzero(np.diff(first_pages[members], prepend=-1)), len(members)).astype(np.int32)
    return SharedPrefixes(members, ends, batch.starts[members[ends[:-1]]] // page_size)


def with_chunk(batch: AttentionBatch) -> AttentionBatch:
    """The first sequence is a chunk instead, of its whole context."""
    order = np.roll(np.arange(len(batch.rows)), -1)
    starts, lengths = batch.starts[order], batch.lengths[order]
    starts[-1], lengths[-1] = 0, starts[-1] + 1
    return AttentionBatch(batch.tables, batch.rows[order], starts, lengths)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_work_is_bounded(seed: int, kv_heads: int) -> None:
    """However a batch is, its items fit a graph's grid, which is all the room there is for them, and their parts."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(2, int(generator.choice([3, 10, 60])), int(generator.integers(1, 20)))
    batch, _ = grouped([(16 * int(generator.integers(1, 200)), [1] * int(size)) for size in sizes], 16)
    n = len(batch.rows)
    shared = all_shared(batch, 16)
    shape = AttentionShape(4 * kv_heads, kv_heads, 128, 1.0, (None,))
    tested = TritonAttention(torch.empty(1, 2, 1, kv_heads, 16, 128), shape, n, int(1e5), 4000)
    mixed = with_chunk(batch)
    for planned, together in ((batch, shared), (batch, SharedPrefixes.none()), (mixed, SharedPrefixes.none())):
        size = planned.num_tokens + seed
        if size > 4000:
            continue
        tested.plan_graph(planned, size, together)
        _, works = tested._work(planned, together, seed)
        work = works[None]
        assert len(work.items) <= tested._most_items(size)
        assert len(work.slots) == len(work.counts) == size
        assert work.counts.sum() <= len(tested._part_out)
        if together is shared:
            assert (work.counts[:n] >= 2).all()
