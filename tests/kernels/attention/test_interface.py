"""Every attention backend against the definition, on random batches."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.cpu.numba_backend import NumbaAttention
from kernels.attention.interface import AttentionBackend, AttentionShape
from kernels.attention.torch_backend import TorchAttention
from tests.kernels.attention.batches import MIXED, random_batch, random_sinks
from tests.kernels.reference import ReferenceAttention

Backend = Callable[[torch.Tensor, AttentionShape, torch.Tensor | None], AttentionBackend]
BACKENDS = [TorchAttention, NumbaAttention]


def compare(
    backend: Backend,
    shape: AttentionShape,
    chunks: list[tuple[int, int]],
    page_size: int,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-6,
) -> None:
    generator = np.random.default_rng(len(chunks))
    batch = random_batch(generator, chunks, page_size)
    torch.manual_seed(1)
    num_pages = sum(-(-(start + length) // page_size) for start, length in chunks)
    kv = torch.randn(len(shape.windows), 2, num_pages, shape.num_kv_heads, page_size, shape.head_dim).to(dtype)
    own, reference, sinks = kv.clone(), kv.clone(), random_sinks(shape)
    tested, expected = backend(own, shape, sinks), ReferenceAttention(reference, shape, sinks)
    tested.plan(batch)
    expected.plan(batch)
    for layer in range(len(shape.windows)):
        # As the decoder has them: parts of one fused product.
        qkv = torch.randn(batch.num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim).to(dtype)
        q, k, v = qkv.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
        got, wanted = tested.run(layer, q, k, v), expected.run(layer, q, k, v)
        assert got.shape == q.shape and got.dtype == dtype and got.is_contiguous()
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
    assert torch.equal(own, reference)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_mixed_batch(backend: Backend, page_size: int) -> None:
    compare(backend, AttentionShape(9, 3, 64, 0.125, (None, None)), MIXED, page_size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(4, 4, 16, 0.25, (None, 1, 5, 100)),
        AttentionShape(3, 1, 12, 0.4, (7, None)),
        AttentionShape(8, 2, 20, 1.0, (None, 9), softcap=3.0),
        AttentionShape(8, 2, 16, 0.4, (None, 9), has_sinks=True),
        AttentionShape(3, 1, 12, 1.0, (7,), softcap=3.0, has_sinks=True),
    ],
)
def test_windows_groups_softcap_and_sinks(backend: Backend, shape: AttentionShape) -> None:
    compare(backend, shape, MIXED, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend: Backend) -> None:
    shape = AttentionShape(6, 2, 64, 0.125, (None, 20), has_sinks=True)
    compare(backend, shape, MIXED, 16, torch.bfloat16, tolerance=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_are_given_if_and_only_if_there_are_some(backend: Backend) -> None:
    kv = torch.zeros(1, 2, 1, 1, 4, 8)
    with pytest.raises(ValueError, match="only if"):
        backend(kv, AttentionShape(1, 1, 8, 1.0, (None,), has_sinks=True), None)
    with pytest.raises(ValueError, match="only if"):
        backend(kv, AttentionShape(1, 1, 8, 1.0, (None,)), torch.zeros(1, 1))


def test_float16() -> None:
    shape = AttentionShape(6, 2, 64, 0.125, (None, 20))
    compare(TorchAttention, shape, MIXED, 16, torch.float16, tolerance=0.004)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_threads(backend: Backend, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(backend, AttentionShape(4, 2, 32, 0.2, (None,)), MIXED, 16)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores(backend: Backend) -> None:
    """Scores far apart neither overflow nor lose the largest."""
    compare(backend, AttentionShape(4, 2, 32, 30.0, (None,)), MIXED, 16, tolerance=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=6),
    page_size=st.integers(1, 20),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    window=st.none() | st.integers(1, 50),
    backend=st.sampled_from(BACKENDS),
)
@pytest.mark.slow
def test_any_batch(
    chunks: list[tuple[int, int]], page_size: int, kv_heads: int, group: int, window: int | None, backend: Backend
) -> None:
    compare(backend, AttentionShape(kv_heads * group, kv_heads, 8, 0.3, (window,)), chunks, page_size)
