"""What sequences share, read together and merged with the rest of each, against the definition."""

import numpy as np
import pytest
import torch

from kernels import prefixes
from kernels.attention import AttentionBatch, AttentionShape, SharedPrefixes
from kernels.prefixes import PrefixFinder
from kernels.reference import ReferenceAttention, attend_keys

pytest.importorskip("triton")

from kernels import range_attention
from kernels.range_attention import Tile, merge
from kernels.shared_attention import SharedAttention

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


def by_itself(
    reference: ReferenceAttention, batch: AttentionBatch, found: SharedPrefixes, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence's attention to what its group does not read: what FlashInfer would leave."""
    page_size = reference.kv.shape[4]
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2])
    for chunk, skipped in enumerate(found.pages_of(len(batch.rows))):
        pages = batch.tables[batch.rows[chunk], skipped : batch.starts[chunk] // page_size + 1]
        # [2, tokens, num_kv_heads, head_dim]
        tokens = (
            reference.kv[0][:, pages].transpose(2, 3).flatten(1, 2)[:, : batch.starts[chunk] + 1 - skipped * page_size]
        )
        own, logs = attend_keys(q[chunk], *tokens, reference.shape)
        out[chunk], lse[chunk] = own.to(q.dtype), logs.float()
    return out, lse


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype"),
    [
        (3, 1, 64, 16, torch.float32),
        (8, 1, 32, 1, torch.float32),
        (2, 2, 20, 4, torch.float32),
        (4, 2, 16, 16, torch.float16),
        *([(32, 8, 128, 16, torch.bfloat16)] if ON_GPU else []),
    ],
)
def test_same_as_reference(
    heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of fewer queries and keys than a group has; both as a step and as a graph would have it."""
    monkeypatch.setattr(prefixes, "_STARTS_BYTES", 0)
    monkeypatch.setattr(prefixes, "_FLOAT32_BYTES", 0)
    monkeypatch.setattr(range_attention, "tile_for", lambda shape, dtype, queries: Tile(16, 16, 4, 2))
    shape = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, (None,))
    batch, num_pages = grouped(GROUPS, page_size)
    n = len(batch.rows)
    found = PrefixFinder(page_size, shape, dtype.itemsize).find(batch)
    assert found is not None and sorted(np.diff(found.ends)) == [2, 3, 9]
    torch.manual_seed(3)
    kv = torch.randn(1, 2, num_pages, kv_heads, page_size, head_dim).to(dtype)
    q = torch.randn(n, heads, head_dim).to(dtype)
    reference = ReferenceAttention(kv, shape)
    reference.plan(batch)
    wanted = reference.attend(0, q)
    out, lse = by_itself(reference, batch, found, q)
    tested = SharedAttention(DEVICE, dtype, shape, 16 + n, 1000)
    for prefix, size in ((SharedPrefixes.none(), 16), (found, None), (found, n + 16)):
        tested.plan(batch, prefix, page_size)
        total = out.to(DEVICE, copy=True)
        parts = tested.parts(
            torch.full((tested.most_parts, heads, head_dim), float("nan"), device=DEVICE),
            torch.full((tested.most_parts, heads), float("nan"), device=DEVICE),
        )
        tested.attend(q.to(DEVICE), kv[0].to(DEVICE), total, parts, size)
        merge(total, parts, lse.to(DEVICE))
        expected = wanted if prefix is found else out
        torch.testing.assert_close(total.cpu(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("seed", range(10))
def test_work_is_bounded(seed: int) -> None:
    """However groups are, their items fit a graph's grid, which is all the room there is for them, and their parts."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(2, int(generator.choice([3, 10, 60])), int(generator.integers(1, 20)))
    batch, _ = grouped([(16 * int(generator.integers(1, 200)), [1] * int(size)) for size in sizes], 16)
    n = len(batch.rows)
    first_pages = batch.tables[batch.rows, 0]
    members = np.argsort(first_pages, kind="stable").astype(np.int32)
    ends = np.append(np.flatnonzero(np.diff(first_pages[members], prepend=-1)), n).astype(np.int32)
    num_pages = batch.starts[members[ends[:-1]]] // 16
    shape = AttentionShape(32, 8, 128, 1.0, (None,))
    tested = SharedAttention(torch.device("cpu"), torch.bfloat16, shape, n, int(num_pages.sum()))
    tested.plan(batch, SharedPrefixes(members, ends, num_pages), 16)
    assert n <= tested.counts.sum() <= tested.most_parts
