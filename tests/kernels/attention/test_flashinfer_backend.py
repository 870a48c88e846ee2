"""FlashInfer's attention against the definition, on a GPU that has it: steps, and what a graph replays."""

import importlib.util

import numpy as np
import pytest
import torch

from kernels.attention import flashinfer_backend, shared_prefix
from kernels.attention.interface import AttentionShape, SharedPrefixes
from tests.kernels.attention.batches import GROUPS, MIXED, grouped, random_batch, random_sinks, with_chunk
from tests.kernels.reference import ReferenceAttention

SHAPES = [
    AttentionShape(32, 8, 128, 128**-0.5, (None, None)),
    AttentionShape(9, 3, 64, 0.2, (None,)),
    AttentionShape(64, 8, 64, 0.125, (60, None), has_sinks=True),  # gpt-oss's heads
    AttentionShape(16, 8, 256, 0.0625, (60, None)),  # Gemma 3's
    AttentionShape(8, 4, 256, 0.0625, (60, None), softcap=50.0),  # Gemma 2's
]
SINGLES = [chunk for chunk in MIXED if chunk[1] == 1]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"),
]


def made(
    kv: torch.Tensor, shape: AttentionShape, pages: int, tokens: int
) -> tuple[ReferenceAttention, flashinfer_backend.FlashInferAttention]:
    """The definition, and FlashInfer's attention for 64 sequences."""
    sinks = random_sinks(shape)
    on_device = None if sinks is None else sinks.cuda()
    tested = flashinfer_backend.FlashInferAttention(kv.cuda(), shape, 64, pages, tokens, on_device)
    return ReferenceAttention(kv.clone(), shape, sinks), tested


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("size", [None, len(SINGLES), 40])
@pytest.mark.parametrize(("stream_from", "split_up_to"), [(1, 0), (1000, 0), (1000, 1000)])
def test_same_as_reference(
    shape: AttentionShape,
    page_size: int,
    size: int | None,
    stream_from: int,
    split_up_to: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A size is a graph's; without one it is a mixed step. Single tokens are all of one kernel of ours, or all
    FlashInfer's."""
    monkeypatch.setattr(flashinfer_backend, "_STREAM_FROM", stream_from)
    monkeypatch.setattr(flashinfer_backend, "_SPLIT_UP_TO", split_up_to)
    chunks = SINGLES if size else sorted(MIXED, key=lambda chunk: chunk[1] > 1)
    batch = random_batch(np.random.default_rng(1), chunks, page_size)
    pages = sum(-(-(start + length) // page_size) for start, length in chunks)
    torch.manual_seed(1)
    kv = torch.randn(len(shape.windows), 2, pages + 1, shape.num_kv_heads, page_size, shape.head_dim).bfloat16()
    expected, tested = made(kv, shape, 64 * batch.tables.shape[1], 400)
    expected.plan(batch)
    if size:
        tested.plan_graph(batch, size, None)
    else:
        tested.plan(batch)
    n = batch.num_tokens
    for layer in range(len(shape.windows)):
        qkv = torch.randn(size or n, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim).bfloat16()
        q, k, v = qkv.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
        got = tested.run(layer, q.contiguous().cuda(), k.cuda(), v.cuda())[:n].cpu()
        torch.testing.assert_close(got, expected.run(layer, q[:n], k[:n], v[:n]), atol=0.02, rtol=0.02)
    assert torch.equal(tested.kv[:, :, :-1].cpu(), expected.kv[:, :, :-1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [None, 24])
def test_shared_prefixes(shape: AttentionShape, size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of decodes in a graph, and in a step beside a chunk of the sequence that was the first of them."""
    monkeypatch.setattr(shared_prefix, "_STARTS_BYTES", 0)
    monkeypatch.setattr(shared_prefix, "_FLOAT32_BYTES", 0)
    batch, pages = grouped([(128, [1, 3, 40]), *GROUPS], 16)
    if size is None:
        batch = with_chunk(batch)
    torch.manual_seed(1)
    kv = torch.randn(len(shape.windows), 2, pages + 1, shape.num_kv_heads, 16, shape.head_dim).bfloat16()
    expected, tested = made(kv, shape, 64 * batch.tables.shape[1], 400)
    expected.plan(batch)
    n = batch.num_tokens
    plans = [None] if size is None else [SharedPrefixes.none(), tested.shared_prefixes(batch), None]
    for shared in plans:
        if size is None:
            tested.plan(batch)
        else:
            tested.plan_graph(batch, size, shared)
        for layer in range(len(shape.windows)):
            q = torch.randn(size or n, shape.num_heads, shape.head_dim).bfloat16()
            got = tested.attend(layer, q.cuda())[:n].cpu()
            torch.testing.assert_close(got, expected.attend(layer, q[:n]), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stream_from", [1, 1000])
def test_graphs_of_chunks(shape: AttentionShape, stream_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single tokens beside chunks, those a stream's or all of it of ranges; the same graph, whatever it is to do."""
    monkeypatch.setattr(flashinfer_backend, "_STREAM_FROM", stream_from)
    every = sorted(MIXED, key=lambda chunk: chunk[1] > 1)
    largest = random_batch(np.random.default_rng(1), every, 16)
    size, pages = largest.num_tokens + 9, sum(-(-(start + length) // 16) for start, length in every)
    kv = torch.randn(len(shape.windows), 2, pages + 1, shape.num_kv_heads, 16, shape.head_dim).bfloat16()
    _, tested = made(kv, shape, 64 * largest.tables.shape[1], 2 * size)
    q = torch.zeros(size, shape.num_heads, shape.head_dim).bfloat16().cuda()
    outs = []

    def attend() -> None:
        outs[:] = [tested.attend(layer, q) for layer in range(len(shape.windows))]

    tested.plan_graph(largest, size, SharedPrefixes.none(), chunks=True)
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for chunks in (every, every[-1:], SINGLES, every[2:-1], every):
        batch = random_batch(np.random.default_rng(2), chunks, 16)
        expected = ReferenceAttention(kv.clone(), shape, None if tested.sinks is None else tested.sinks.cpu())
        expected.plan(batch)
        tested.plan_graph(batch, size, SharedPrefixes.none(), chunks=True)
        fresh = torch.randn(size, shape.num_heads, shape.head_dim).bfloat16()
        q.copy_(fresh)
        graph.replay()
        n = batch.num_tokens
        for layer, got in enumerate(outs):
            torch.testing.assert_close(got[:n].cpu(), expected.attend(layer, fresh[:n]), atol=0.02, rtol=0.02)
