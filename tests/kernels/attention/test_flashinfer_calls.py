"""How FlashInfer's kernels are called, with kernels that compute what their arguments say by the definition: windows,
soft caps and sinks, on a machine without FlashInfer."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention import flashinfer_backend
from kernels.attention.interface import AttentionShape
from tests.kernels.attention.batches import MIXED, random_batch, random_sinks
from tests.kernels.reference import ReferenceAttention

pytest.importorskip("triton")

SINGLES = [chunk for chunk in MIXED if chunk[1] == 1]
CHUNKS = [chunk for chunk in MIXED if 1 < chunk[1] < 9]
SHAPES = [
    AttentionShape(4, 2, 16, 0.25, (9, None, 40), has_sinks=True),
    AttentionShape(2, 1, 16, 0.25, (None, 9), softcap=3.0),
    AttentionShape(6, 2, 16, 0.25, (9,), softcap=3.0, has_sinks=True),
]


class Kernel:
    """One of FlashInfer's modules. A plan is what it was made for."""

    def __init__(self, has_window: bool, is_fa3: bool) -> None:
        self.has_window, self.is_fa3 = has_window, is_fa3

    def plan(self, partial: Any, device_bytes: Any, host_bytes: Any, *arguments: Any) -> tuple[Any, ...]:
        *sizes, _, _, dim, _, causal, before = arguments[: 13 if self.is_fa3 else -4]
        assert len(arguments) == (13 if self.is_fa3 else 17) and (before >= 0) == self.has_window
        query_ends, page_ends, contexts, num_tokens, num_chunks, *_ = sizes
        assert len(contexts) == num_chunks == len(query_ends) - 1 == len(page_ends) - 1
        assert query_ends[-1] == num_tokens
        return contexts.tolist(), bool(causal), before, dim

    def paged_run(
        self, partial: Any, device_bytes: Any, plan: Any, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        query_ends: torch.Tensor, page_ends: torch.Tensor, pages: torch.Tensor, last_page_tokens: torch.Tensor,
        out: torch.Tensor, sums: torch.Tensor | None, mask: int, layout: int, before: int, early: bool, *rest: Any,
    ) -> None:  # fmt: skip
        contexts, causal, planned_before, _ = plan
        assert (mask == 1) == causal and planned_before == before and layout == 1
        softcap, scale = (rest[4], rest[5]) if self.is_fa3 else (rest[8], rest[9])
        assert len(rest) == (8 if self.is_fa3 else 13)
        page_size, group = keys.shape[2], q.shape[1] // keys.shape[1]
        for chunk, context in enumerate(contexts):
            own = pages[page_ends[chunk] : page_ends[chunk + 1]]
            assert context == (len(own) - 1) * page_size + last_page_tokens[chunk]
            k, v = (x[own.long()].transpose(0, 1).flatten(1, 2)[:, :context].double() for x in (keys, values))
            tokens = range(query_ends[chunk], query_ends[chunk + 1])
            for token in tokens:
                position = context - len(tokens) + token - tokens.start
                first = 0 if before < 0 else max(0, position - before)
                for head in range(q.shape[1]):
                    seen = slice(first, position + 1)
                    scores = scale * (k[head // group, seen] @ q[token, head].double())
                    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
                    out[token, head] = scores.softmax(0) @ v[head // group, seen]
                    if sums is not None:
                        sums[token, head] = scores.logsumexp(0) / np.log(2)


@pytest.fixture(params=[False, True], ids=["", "hopper"], autouse=True)
def _flashinfer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.utils")
    module.is_sm90a_supported = lambda device: request.param  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.utils", module)
    made = {window: (Kernel(window, False), Kernel(window, request.param)) for window in (False, True)}
    monkeypatch.setattr(flashinfer_backend, "modules", lambda shape, dtype, device: made)
    monkeypatch.setattr(flashinfer_backend, "_PLAN_BYTES", 64)
    monkeypatch.setattr(flashinfer_backend, "_PARTIAL_BYTES", 64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [None, 8])
def test_same_as_reference(shape: AttentionShape, size: int | None) -> None:
    """Single tokens before chunks, and single tokens in a graph with padding."""
    chunks = SINGLES if size else SINGLES[:2] + CHUNKS
    batch = random_batch(np.random.default_rng(1), chunks, 16)
    pages = sum(-(-(start + length) // 16) for start, length in chunks)
    torch.manual_seed(1)
    kv, sinks = torch.randn(len(shape.windows), 2, pages + 1, shape.num_kv_heads, 16, 16), random_sinks(shape)
    expected = ReferenceAttention(kv.clone(), shape, sinks)
    tested = flashinfer_backend.FlashInferAttention(kv, shape, 16, 16 * batch.tables.shape[1], 64, sinks)
    expected.plan(batch)
    if size is None:
        tested.plan(batch)
    else:
        tested.plan_graph(batch, size, None)
    n = batch.num_tokens
    for layer in range(len(shape.windows)):
        q = torch.randn(size or n, shape.num_heads, 16)
        got = tested.attend(layer, q)
        assert got.isfinite().all()
        torch.testing.assert_close(got[:n], expected.attend(layer, q[:n]), atol=1e-5, rtol=1e-4)


def test_attention_to_windows_costs_less() -> None:
    """Whether a graph of chunks is faster depends on the keys that layers see."""
    chunks, kv = random_batch(np.random.default_rng(1), [(6000, 1000)], 16), torch.zeros(1, 2, 2, 8, 16, 16)

    def fits(*windows: int | None) -> bool:
        shape = AttentionShape(64, 8, 16, 1.0, windows)
        return flashinfer_backend.FlashInferAttention(kv, shape, 4, 4, 4).fits_graph(chunks)

    # 27 GFLOP of a layer without a window, half of one with.
    assert fits(*(None,) * 6) and not fits(*(None,) * 7)
    assert fits(*(128,) * 300) and not fits(*(128,) * 400)
    assert fits(*(128,) * 20, *(None,) * 6) and not fits(*(128,) * 100, *(None,) * 6)
