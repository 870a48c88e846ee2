"""FlashInfer's attention against the definition, on a GPU that has it: steps, and what a graph replays."""

import numpy as np
import pytest
import torch

from kernels import flashinfer_attention
from kernels.attention import AttentionShape
from kernels.reference import ReferenceAttention
from tests.kernels.test_attention import MIXED, random_batch

SHAPES = [AttentionShape(32, 8, 128, 128**-0.5, (None, None)), AttentionShape(9, 3, 64, 0.2, (None,))]
SINGLES = [chunk for chunk in MIXED if chunk[1] == 1]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not flashinfer_attention.can_run(SHAPES[0], torch.bfloat16),
    reason="needs a GPU and FlashInfer",
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("size", [None, len(SINGLES), 40])
def test_same_as_reference(shape: AttentionShape, page_size: int, size: int | None) -> None:
    """A size is a graph's; without one it is a mixed step."""
    chunks = SINGLES if size else sorted(MIXED, key=lambda chunk: chunk[1] > 1)
    batch = random_batch(np.random.default_rng(1), chunks, page_size)
    pages = sum(-(-(start + length) // page_size) for start, length in chunks)
    torch.manual_seed(1)
    kv = torch.randn(len(shape.windows), 2, pages + 1, shape.num_kv_heads, page_size, shape.head_dim).bfloat16()
    expected = ReferenceAttention(kv.clone(), shape)
    tested = flashinfer_attention.FlashInferAttention(kv.cuda(), shape, 64, 64 * batch.tables.shape[1])
    expected.plan(batch)
    if size:
        tested.plan_graph(batch, size)
    else:
        tested.plan(batch)
    n = batch.num_tokens
    for layer in range(len(shape.windows)):
        qkv = torch.randn(size or n, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim).bfloat16()
        q, k, v = qkv.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
        got = tested.run(layer, q.contiguous().cuda(), k.cuda(), v.cuda())[:n].cpu()
        torch.testing.assert_close(got, expected.run(layer, q[:n], k[:n], v[:n]), atol=0.02, rtol=0.02)
    assert torch.equal(tested.kv[:, :, :-1].cpu(), expected.kv[:, :, :-1])
