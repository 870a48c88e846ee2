"""Attention of few sequences, each one token, against the definition."""

from collections.abc import Callable

import pytest
import torch

from kernels.attention.interface import AttentionBatch, AttentionShape
from tests.kernels.attention.batches import decodes, random_sinks
from tests.kernels.device import DEVICE, DTYPE, ON_GPU
from tests.kernels.reference import TOLERANCES, ReferenceAttention

pytest.importorskip("triton")

from kernels.attention.split_kv_decode import SplitKVDecode
from kernels.ops.fused import rotate_and_store


@pytest.mark.slow
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


def test_reads_what_the_kernel_before_wrote() -> None:
    """Steps of one graph, as contexts grow: the newest key and value of each are written in the same graph."""
    shape, page_size = AttentionShape(8, 2, 64, 0.2, (None, 200)), 16
    batch, num_pages = decodes([126, 30, 257], page_size)
    n, torch_size = len(batch.rows), (2, 2, num_pages + 1, 2, page_size, 64)
    torch.manual_seed(1)
    kv = torch.randn(torch_size, dtype=DTYPE).to(DEVICE)
    tested = SplitKVDecode(kv, shape, n, num_pages, 6)
    qkv = torch.randn(2, n, 12 * 64, dtype=DTYPE).to(DEVICE)
    angles, positions = torch.rand(300, 64).to(DEVICE), torch.zeros(n, dtype=torch.int64, device=DEVICE)
    queries = torch.empty(2, n, 8, 64, dtype=DTYPE, device=DEVICE)
    outs = torch.empty_like(queries)

    def run() -> None:
        for layer in range(2):
            rotate_and_store(qkv[layer], 8, angles, positions, tested.slots, kv[layer], out=queries[layer])
            tested.attend_into(layer, queries[layer], outs[layer])

    replay = None
    for step in range(2):
        grown = AttentionBatch(batch.tables, batch.rows, batch.starts - 1 + step, batch.lengths)
        tested.plan_graph(grown, n)
        positions.copy_(torch.from_numpy(grown.starts))
        if replay is None:
            replay = captured(run)
        replay()
        expected = ReferenceAttention(kv.cpu(), shape)
        expected.plan(grown)
        for layer in range(2):
            wanted = expected.attend(layer, queries[layer].cpu())
            torch.testing.assert_close(outs[layer].cpu(), wanted, atol=TOLERANCES[DTYPE], rtol=TOLERANCES[DTYPE])


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """A call that replays a CUDA graph of `run`; without a GPU `run` itself."""
    if not ON_GPU:
        return run
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
