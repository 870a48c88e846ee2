"""Attention of few sequences, each one token, against the definition."""

import numpy as np
import pytest
import torch

from kernels.attention.interface import AttentionShape
from tests.kernels.attention.test_interface import random_sinks
from tests.kernels.attention.test_split_kv_plan import DEVICE, TOLERANCES
from tests.kernels.attention.test_stream_k_decode import DTYPE, decodes
from tests.kernels.reference import ReferenceAttention

pytest.importorskip("triton")

from kernels.attention import split_kv_decode
from kernels.attention.split_kv_decode import SplitKVDecode

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("shape", "page_size"),
    [
        (AttentionShape(8, 1, 64, 0.125, (None,)), 16),
        (AttentionShape(6, 2, 64, 0.2, (None, 50)), 1),
        (AttentionShape(2, 2, 128, 0.1, (130,), softcap=3.0), 8),
        (AttentionShape(8, 2, 64, 0.2, (None, 200), has_sinks=True), 64),
    ],
)
@pytest.mark.parametrize("contexts", [[1], [700], [130, 2, 129, 600, 1]])
def test_same_as_reference(shape: AttentionShape, page_size: int, contexts: list[int]) -> None:
    """In a graph with padding. Twice the same layer: what counts parts that are there is zero again."""
    batch, num_pages = decodes(contexts, page_size)
    n, size = len(contexts), len(contexts) + 2
    torch.manual_seed(1)
    kv = torch.randn(len(shape.windows), 2, num_pages + 1, shape.num_kv_heads, page_size, shape.head_dim, dtype=DTYPE)
    # Beyond the contexts, and on pages that are nobody's, stands what spoils whatever reads it.
    for row, context in zip(batch.rows, contexts, strict=True):
        if context % page_size:
            kv[:, :, batch.tables[row, context // page_size], :, context % page_size :] = float("nan")
    sinks = random_sinks(shape)
    expected = ReferenceAttention(kv.clone(), shape, sinks)
    expected.plan(batch)
    device_sinks = None if sinks is None else sinks.to(DEVICE)
    tested = SplitKVDecode(kv.to(DEVICE), shape, size, num_pages, 6, device_sinks)
    tested.plan_graph(batch, size)
    assert len(tested.slots) == size
    for layer in (*range(len(shape.windows)), 0):
        q = torch.randn(size, shape.num_heads, shape.head_dim, dtype=DTYPE)
        got = torch.full_like(q, float("nan")).to(DEVICE)
        tested.attend_into(layer, q.to(DEVICE), got)
        wanted = expected.attend(layer, q[:n])
        torch.testing.assert_close(got[:n].cpu(), wanted, atol=TOLERANCES[DTYPE], rtol=TOLERANCES[DTYPE])
        assert got.isfinite().all()
