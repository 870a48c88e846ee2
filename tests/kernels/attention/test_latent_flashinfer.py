"""FlashInfer's latent attention against the definition: on a GPU its kernels, elsewhere stand-ins that compute what the
kernels are documented to compute from the same arguments."""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernels.attention import latent_flashinfer
from kernels.attention.interface import AttentionShape, LatentHeads
from kernels.attention.latent_flashinfer import FlashInferLatentAttention, has_kernel
from tests.kernels.attention.batches import MIXED, random_batch
from tests.kernels.attention.latents import LAYERS, Definition, latent_shape, random_weights
from tests.kernels.device import DEVICE, ON_GPU

DTYPE, TOLERANCE = (torch.bfloat16, 0.03) if ON_GPU else (torch.float32, 1e-5)
LITE, FLASH = LatentHeads(512, 128, 64, 128), LatentHeads(512, 192, 64, 256)  # of DeepSeek-V2-Lite, of GLM-4.7-Flash
SINGLES = [chunk for chunk in MIXED if chunk[1] == 1]
ORDERED = sorted(MIXED, key=lambda chunk: chunk[1] > 1)
# Contexts that chunks have themselves, of which the plain way makes less work; some end with a page.
FRESH = [(0, 1), (15, 1), (0, 5), (0, 48), (2, 20)]
PAGE_SIZE = 16


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """q: `[n, heads, size]`; keys and values: `[context, heads, size]`."""
    scores = scale * torch.einsum("nhd,thd->hnt", q, keys)
    if causal:
        n, context = scores.shape[1:]
        scores += torch.full((n, context), float("-inf")).triu_(context - n + 1)
    return torch.einsum("hnt,thd->nhd", scores.softmax(-1), values)


class OverLatents:
    """In place of the kernel for latents."""

    def plan(self, partial: Any, device_bytes: Any, host_bytes: Any, *arguments: Any) -> Any:
        return arguments

    def run(self, partial: Any, device_bytes: Any, plan: Any, q: Any, rotated: Any, *arguments: Any) -> None:
        ends, page_ends, contexts, heads, rank, causal = plan
        latents, keys, pages, out, _sums, mask, num_heads, page_size, scale, *_ = arguments
        assert (mask == 1) == causal and heads == num_heads == q.shape[1] == rotated.shape[1] and rank == q.shape[2]
        for i in range(len(contexts)):
            own = slice(int(ends[i]), int(ends[i + 1]))
            table = pages[int(page_ends[i]) : int(page_ends[i + 1])].long()
            assert len(table) == -(-int(contexts[i]) // page_size)
            seen = torch.cat((latents[table], keys[table]), dim=2).flatten(0, 1)[: int(contexts[i]), None]
            seen, query = seen.expand(-1, heads, -1), torch.cat((q[own], rotated[own]), dim=2)
            out[own] = attend(query, seen, seen[..., :rank], scale, causal)


class OverHeads:
    """In place of FlashAttention 3."""

    def plan(self, partial: Any, device_bytes: Any, host_bytes: Any, ends: Any, key_ends: Any, *arguments: Any) -> Any:
        contexts, tokens, count, *_ = arguments
        assert int(ends[-1]) == tokens and len(contexts) == count and torch.equal(key_ends.diff(), contexts)
        return arguments

    def ragged_run(self, partial: Any, device_bytes: Any, plan: Any, *arguments: Any) -> None:
        q, keys, values, ends, key_ends, out, *_ = arguments
        scale = arguments[-3]
        for i in range(len(ends) - 1):
            own, seen = slice(int(ends[i]), int(ends[i + 1])), slice(int(key_ends[i]), int(key_ends[i + 1]))
            out[own] = attend(q[own], keys[seen], values[seen], scale, True)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(latent_flashinfer, "modules", lambda *of: (OverLatents(), OverHeads()))
    elif importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")


class Pair:
    """The tested backend and the definition over the same random pages."""

    def __init__(self, heads: LatentHeads, num_heads: int, num_pages: int, max_pages: int = 4096) -> None:
        torch.manual_seed(1)
        self.shape, self.heads = latent_shape(heads, num_heads), heads
        kv = torch.randn(LAYERS, 1, num_pages + 1, 1, PAGE_SIZE, heads.row).to(DTYPE)
        weights = [weight.to(DTYPE) for weight in random_weights(heads, num_heads)]
        own = [weight.to(DEVICE) for weight in weights]
        self.definition = Definition(kv, self.shape, weights)
        self.tested = FlashInferLatentAttention(kv.to(DEVICE), self.shape, own, 64, max_pages, 400)

    def queries(self, n: int) -> torch.Tensor:
        return torch.randn(n, self.shape.num_heads, self.heads.query).to(DTYPE)

    def check(self, batch: Any, q: torch.Tensor) -> None:
        for layer in range(LAYERS):
            got = self.tested.attend(layer, q.to(DEVICE))[: batch.num_tokens]
            self.compare(layer, batch, q, got)

    def compare(self, layer: int, batch: Any, q: torch.Tensor, got: torch.Tensor) -> None:
        wanted = self.definition.attend(layer, batch, q)
        torch.testing.assert_close(got.cpu().double(), wanted, atol=TOLERANCE, rtol=TOLERANCE)


def pages_of(chunks: list[tuple[int, int]]) -> int:
    return sum(-(-(start + length) // PAGE_SIZE) for start, length in chunks)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "num_heads"), [(LITE, 4), (FLASH, 5)], ids=["lite", "flash"])
@pytest.mark.parametrize("most", [None, 0], ids=["plain", "absorbed"])
def test_a_step(heads: LatentHeads, num_heads: int, most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks that are new in the plain way, unless it has no memory. Five heads are padded to eight."""
    if most is not None:
        monkeypatch.setattr(latent_flashinfer, "_EXPANDED_BYTES", most)
    pair = Pair(heads, num_heads, pages_of(MIXED))
    for chunks in (ORDERED, SINGLES, ORDERED[-3:], FRESH):
        batch = random_batch(np.random.default_rng(1), chunks, PAGE_SIZE)
        pair.tested.plan(batch)
        assert ON_GPU or (pair.tested._plain is not None) == (chunks is FRESH and most is None)
        pair.check(batch, pair.queries(batch.num_tokens))
        rows = [int(batch.tables[batch.rows[0], 0]) * PAGE_SIZE] if batch.starts[0] == 0 else []
        assert pair.tested.slots.tolist()[: len(rows)] == rows


@pytest.mark.slow
def test_graphs() -> None:
    """The same graph whatever the batch, of single tokens and of chunks; padding is in the last page."""
    pair = Pair(LITE, 4, pages_of(MIXED))
    for chunks, batches in ((False, (SINGLES, SINGLES[1:])), (True, (ORDERED, ORDERED[-1:], SINGLES, ORDERED[2:]))):
        size = sum(length for _, length in batches[0]) + 9
        q = torch.zeros(size, 4, LITE.query, dtype=DTYPE, device=DEVICE)
        outs: list[torch.Tensor] = []

        def run(q: torch.Tensor = q, outs: list[torch.Tensor] = outs) -> None:
            outs[:] = [pair.tested.attend(layer, q) for layer in range(LAYERS)]

        replay = run
        for number, each in enumerate(batches):
            batch = random_batch(np.random.default_rng(number), each, PAGE_SIZE)
            fresh = pair.queries(size)
            q.copy_(fresh)
            pair.tested.plan_graph(batch, size, None, chunks=chunks)
            if ON_GPU and not number:
                run()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run()
                replay = graph.replay
            replay()
            for layer, got in enumerate(outs):
                pair.compare(layer, batch, fresh, got[: batch.num_tokens])
            assert (pair.tested.slots[batch.num_tokens :] // PAGE_SIZE == pages_of(MIXED)).all()


def test_the_grid_of_a_graph_of_chunks_depends_on_its_size_alone() -> None:
    """It has two tiles at once if a sequence has more than 64 rows on average."""
    planned: list[tuple[torch.Tensor, ...]] = []
    pair = Pair(LITE, 16, pages_of(MIXED))
    module = pair.tested._absorbed_module = OverLatents()
    module.plan = lambda *arguments: planned.append(arguments[3:])  # type: ignore[method-assign]
    for chunks in (ORDERED, ORDERED[-1:], SINGLES):
        batch = random_batch(np.random.default_rng(1), chunks, PAGE_SIZE)
        pair.tested.plan_graph(batch, 256, None, chunks=True)
        ends, page_ends, contexts, heads, *_ = planned[-1]
        assert len(ends) == len(page_ends) == len(contexts) + 1 and int(ends[-1]) == 256
        assert 256 * heads // len(contexts) <= 64


def test_a_step_with_too_many_tiles_is_refused() -> None:
    pair = Pair(LITE, 128, 1)
    batch = random_batch(np.random.default_rng(1), [(0, 16_000)], PAGE_SIZE)
    pair.tested._most_context = 0
    with pytest.raises(ValueError, match="no room for a step of 16000 tokens: lower token_budget"):
        pair.tested.plan(batch)


@pytest.mark.parametrize(
    ("dtype", "shape", "has"),
    [
        (torch.bfloat16, latent_shape(LITE, 128), True),
        (torch.float32, latent_shape(LITE, 16), False),
        (torch.bfloat16, latent_shape(LITE, 129), False),
        (torch.bfloat16, latent_shape(LatentHeads(24, 12, 8, 10), 4), False),
        (torch.bfloat16, AttentionShape(8, 2, 64, 0.125, (None,)), False),
    ],
)
def test_models_that_it_has_kernels_for(dtype: torch.dtype, shape: AttentionShape, has: bool) -> None:
    assert has_kernel(shape, dtype) == has
