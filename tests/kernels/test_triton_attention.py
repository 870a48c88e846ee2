"""Our own attention for GPUs against the definition: steps and what graphs replay, with all that FlashInfer lacks."""

import numpy as np
import pytest
import torch

from kernels import prefixes
from kernels.attention import AttentionBatch, AttentionShape, SharedPrefixes
from kernels.reference import ReferenceAttention
from tests.kernels.test_attention import MIXED, random_batch
from tests.kernels.test_shared_attention import DEVICE, GROUPS, ON_GPU, TOLERANCES, grouped

pytest.importorskip("triton")

from kernels import range_attention
from kernels.range_attention import Tile
from kernels.triton_attention import TritonAttention

SHAPES = {
    "plain": AttentionShape(3, 1, 64, 0.125, (None,)),
    "windows": AttentionShape(2, 2, 16, 0.25, (None, 1, 20)),
    "window": AttentionShape(8, 1, 12, 0.4, (37,)),
    "softcap": AttentionShape(5, 1, 20, 1.0, (None, 9), softcap=3.0),
}
REAL_TILE_FOR = range_attention.tile_for
SINGLES = [chunk for chunk in MIXED if chunk[1] == 1]
CHUNKS = [chunk for chunk in MIXED if chunk[1] > 1]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that chunks are several tiles, and contexts several ranges."""
    monkeypatch.setattr(prefixes, "_STARTS_BYTES", 0)
    monkeypatch.setattr(prefixes, "_FLOAT32_BYTES", 0)
    monkeypatch.setattr(range_attention, "tile_for", lambda shape, dtype, queries: Tile(16, 32, 4, 2))


def check(
    batch: AttentionBatch,
    num_pages: int,
    page_size: int,
    shape: AttentionShape,
    dtype: torch.dtype,
    plans: list[tuple[int | None, SharedPrefixes | None]],
) -> TritonAttention:
    """Each plan is a graph's size (or None for a step) and what it shares."""
    torch.manual_seed(1)
    kv = torch.randn(len(shape.windows), 2, num_pages + 1, shape.num_kv_heads, page_size, shape.head_dim).to(dtype)
    expected, tested = ReferenceAttention(kv.clone(), shape), TritonAttention(kv.to(DEVICE), shape, 40, 5000)
    expected.plan(batch)
    n = batch.num_tokens
    for size, shared in plans:
        if size is None:
            tested.plan(batch)
        else:
            tested.plan_graph(batch, size, shared)
        for layer in range(len(shape.windows)):
            qkv = torch.randn(size or n, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim).to(dtype)
            q, k, v = qkv.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
            got = tested.run(layer, q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)).cpu()
            wanted = expected.run(layer, q[:n], k[:n], v[:n])
            assert got.dtype == dtype and got.is_contiguous() and got.isfinite().all()
            torch.testing.assert_close(got[:n], wanted, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert torch.equal(tested.kv[:, :, :-1].cpu(), expected.kv[:, :, :-1])
    return tested


@pytest.mark.parametrize(("name", "page_size"), [*((name, 16) for name in SHAPES), ("window", 1)])
def test_steps(name: str, page_size: int) -> None:
    shape = SHAPES[name]
    for chunks in (SINGLES[-3:] + CHUNKS, SINGLES, CHUNKS[:2]):
        batch = random_batch(np.random.default_rng(1), chunks, page_size)
        pages = sum(-(-(start + length) // page_size) for start, length in chunks)
        check(batch, pages, page_size, shape, torch.float32, [(None, None)])


@pytest.mark.parametrize("name", ["windows", "softcap"])
def test_graphs(name: str) -> None:
    batch = random_batch(np.random.default_rng(2), SINGLES, 4)
    pages = sum(start // 4 + 1 for start, _ in SINGLES)
    check(batch, pages, 4, SHAPES[name], torch.float32, [(len(SINGLES), None), (9, None), (9, SharedPrefixes.none())])


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if ON_GPU else [])])
def test_narrow(dtype: torch.dtype) -> None:
    batch = random_batch(np.random.default_rng(1), SINGLES + CHUNKS[:1], 16)
    pages = sum(-(-(start + length) // 16) for start, length in SINGLES + CHUNKS[:1])
    check(batch, pages, 16, AttentionShape(8, 2, 32, 0.2, (None,)), dtype, [(None, None)])


def test_shared_prefixes() -> None:
    """Alone, in graphs, and beside a chunk of the sequence that was the first of them."""
    batch, pages = grouped(GROUPS[:2], 4)
    shape = AttentionShape(4, 1, 16, 0.25, (None, 20))
    shared = TritonAttention(torch.empty(1, 2, 1, shape.num_kv_heads, 4, 64), shape, 40, 5000).shared_prefixes(batch)
    assert shared is not None and len(shared.num_pages) == 2
    check(batch, pages, 4, shape, torch.float32, [(None, None), (20, shared), (20, None)])
    order = np.roll(np.arange(len(batch.rows)), -1)
    starts, lengths = batch.starts[order], batch.lengths[order]
    starts[-1], lengths[-1] = 0, starts[-1] + 1
    mixed = AttentionBatch(batch.tables, batch.rows[order], starts, lengths)
    check(mixed, pages, 4, shape, torch.float32, [(None, None)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 128), (8, 128), (71, 64), (2, 96), (1, 256)])
def test_tiles_fit(group: int, head_dim: int, dtype: torch.dtype) -> None:
    """One token at least, in numbers that a kernel may have, and no more than a multiprocessor's memory."""
    shape = AttentionShape(2 * group, 2, head_dim, 1.0, (None,))
    for queries in (1, 16, 64):
        tile = REAL_TILE_FOR(shape, dtype, queries)
        assert tile.rows >= max(group, 16) and tile.keys >= 16
        assert not tile.rows & (tile.rows - 1) and not tile.keys & (tile.keys - 1)
        block = 1 << (head_dim - 1).bit_length()
        assert (tile.rows + 2 * tile.keys * (tile.stages - 1)) * block * dtype.itemsize <= 200 << 10


def test_windows_alone_share_nothing() -> None:
    batch, _ = grouped(GROUPS, 4)
    shape = SHAPES["window"]
    assert TritonAttention(torch.empty(1, 2, 1, 1, 4, 12), shape, 40, 5000).shared_prefixes(batch) is None


def test_any_order_of_lengths_is_an_error() -> None:
    batch = random_batch(np.random.default_rng(1), [(0, 2), (5, 1)], 4)
    with pytest.raises(ValueError, match="must come first"):
        TritonAttention(torch.empty(1, 2, 9, 1, 4, 12), SHAPES["window"], 40, 5000).plan(batch)
