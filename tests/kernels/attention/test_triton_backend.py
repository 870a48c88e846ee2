"""Our own attention for GPUs against the definition: steps and what graphs replay, with all that FlashInfer lacks."""

import numpy as np
import pytest
import torch

from kernels.attention import shared_prefix
from kernels.attention.interface import AttentionBatch, AttentionShape, SharedPrefixes
from tests.kernels.attention.batches import GROUPS, MIXED, grouped, random_batch, random_sinks, with_chunk
from tests.kernels.covering import EVERY
from tests.kernels.device import DEVICE, ON_GPU
from tests.kernels.reference import TOLERANCES, ReferenceAttention

pytest.importorskip("triton")

from kernels.attention import split_kv_kernel
from kernels.attention.split_kv_kernel import TileSizes
from kernels.attention.triton_backend import TritonAttention

SHAPES = {
    "plain": AttentionShape(3, 1, 64, 0.125, (None,)),
    "windows": AttentionShape(2, 2, 16, 0.25, (None, 1, 20)),
    "window": AttentionShape(8, 1, 12, 0.4, (37,)),
    "softcap": AttentionShape(5, 1, 20, 1.0, (None, 9), softcap=3.0),
    "sinks": AttentionShape(4, 2, 16, 0.4, (None, 9), has_sinks=True),
}
REAL_TILES_FOR = split_kv_kernel.tiles_for
SINGLES = [chunk for chunk in MIXED if chunk[1] == 1]
CHUNKS = [chunk for chunk in MIXED if chunk[1] > 1]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that chunks are several tiles, and contexts several ranges."""
    monkeypatch.setattr(shared_prefix, "_STARTS_BYTES", 0)
    monkeypatch.setattr(shared_prefix, "_FLOAT32_BYTES", 0)
    monkeypatch.setattr(split_kv_kernel, "tiles_for", lambda shape, dtype: TileSizes(8, 16, 32, 4, 2, 2))


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
    sinks = random_sinks(shape)
    expected = ReferenceAttention(kv.clone(), shape, sinks)
    on_device = None if sinks is None else sinks.to(DEVICE)
    tested = TritonAttention(kv.to(DEVICE), shape, 40, 5000, 500, on_device)
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "page_size"), [*((name, 16) for name in SHAPES), ("window", 1)])
def test_steps(name: str, page_size: int) -> None:
    shape = SHAPES[name]
    for chunks in (SINGLES[-3:] + CHUNKS, SINGLES, CHUNKS[-2:]):
        batch = random_batch(np.random.default_rng(1), chunks, page_size)
        pages = sum(-(-(start + length) // page_size) for start, length in chunks)
        check(batch, pages, page_size, shape, torch.float32, [(None, None)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["windows", "softcap", "sinks"])
def test_graphs(name: str) -> None:
    """Of decodes, and of these beside longer chunks; padded or not."""
    for chunks in (SINGLES, SINGLES[-2:] + CHUNKS[:2]):
        batch = random_batch(np.random.default_rng(2), chunks, 4)
        pages = sum(-(-(start + length) // 4) for start, length in chunks)
        n = batch.num_tokens
        plans = [(n + 4, SharedPrefixes.none()), (n, None)]
        check(batch, pages, 4, SHAPES[name], torch.float32, plans[: 2 if EVERY or n == len(chunks) else 1])


@pytest.mark.parametrize("name", ["plain", "windows"])
def test_graphs_leave_first_tokens_to_others(name: str) -> None:
    shape, chunks = SHAPES[name], SINGLES + CHUNKS[:2]
    batch = random_batch(np.random.default_rng(2), chunks, 4)
    pages, n, first = sum(-(-(start + length) // 4) for start, length in chunks), batch.num_tokens, len(SINGLES)
    kv = torch.randn(len(shape.windows), 2, pages + 1, shape.num_kv_heads, 4, shape.head_dim)
    expected, tested = ReferenceAttention(kv.clone(), shape), TritonAttention(kv.to(DEVICE), shape, 40, 5000, 500)
    expected.plan(batch)
    tested.plan_graph(batch, n + 4, SharedPrefixes.none(), chunks=True, first=first)
    assert len(tested.slots) == n + 4
    for layer in range(len(shape.windows)):
        q = torch.randn(n + 4, shape.num_heads, shape.head_dim)
        got = torch.full_like(q, 7.0).to(DEVICE)
        tested.attend_into(layer, q.to(DEVICE), got)
        assert (got[:first] == 7).all() and got.isfinite().all()
        wanted = expected.attend(layer, q[:n])[first:]
        torch.testing.assert_close(got[first:n].cpu(), wanted, atol=TOLERANCES[torch.float32], rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if ON_GPU else [])])
def test_narrow(dtype: torch.dtype) -> None:
    batch = random_batch(np.random.default_rng(1), SINGLES + CHUNKS[:1], 16)
    pages = sum(-(-(start + length) // 16) for start, length in SINGLES + CHUNKS[:1])
    check(batch, pages, 16, AttentionShape(8, 2, 32, 0.2, (None,)), dtype, [(None, None)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype", "page_size"),
    [
        (AttentionShape(4, 1, 16, 0.25, (None, 20), has_sinks=True), torch.float32, 4),
        (AttentionShape(3, 1, 64, 0.125, (None,)), torch.float32, 16),
        (AttentionShape(2, 2, 20, 0.2, (None,)), torch.float32, 1),
        (AttentionShape(4, 2, 16, 0.25, (None,)), torch.float16, 16),
        *([(AttentionShape(32, 8, 128, 0.1, (None,)), torch.bfloat16, 16)] if ON_GPU else []),
    ],
)
def test_shared_prefixes(shape: AttentionShape, dtype: torch.dtype, page_size: int) -> None:
    """In steps and graphs, alone and beside a chunk of the sequence that was the first of them."""
    batch, pages = grouped(GROUPS, page_size)
    for chunks in (batch, with_chunk(batch)):
        pages_of = torch.empty(1, 2, 1, shape.num_kv_heads, page_size, 64)
        finder = TritonAttention(pages_of, shape, 40, 5000, 40, random_sinks(shape))
        shared = finder.shared_prefixes(chunks)
        assert shared is not None and len(shared.num_pages) == 3
        n = chunks.num_tokens
        plans = [(n + 3, shared), (n, None)] if chunks is batch else [(None, None), (n + 3, shared)]
        check(chunks, pages, page_size, shape, dtype, plans[: 2 if page_size == 4 else 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("group", "head_dim"), [(1, 64), (3, 64), (4, 128), (8, 128), (71, 64), (2, 96), (1, 256), (8, 512)]
)
def test_tiles_fit(group: int, head_dim: int, dtype: torch.dtype) -> None:
    """One token at least, in numbers that a kernel may have, and two programs fit a multiprocessor's memory."""
    shape = AttentionShape(2 * group, 2, head_dim, 1.0, (None,))
    tiles = REAL_TILES_FOR(shape, dtype)
    assert tiles.wide >= tiles.narrow >= group and tiles.keys >= 16
    assert not any(size & (size - 1) for size in (tiles.narrow, tiles.wide, tiles.keys))
    block = 1 << (head_dim - 1).bit_length()
    for rows, stages in ((tiles.narrow, tiles.narrow_stages), (tiles.wide, tiles.wide_stages)):
        assert (rows + 2 * tiles.keys * (stages - 1)) * block * dtype.itemsize <= 113 << 10


def test_windows_alone_share_nothing() -> None:
    batch, _ = grouped(GROUPS, 4)
    shape = SHAPES["window"]
    assert TritonAttention(torch.empty(1, 2, 1, 1, 4, 12), shape, 40, 5000, 40).shared_prefixes(batch) is None
