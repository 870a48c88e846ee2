"""Decoding as graphs do it, with the attention that they have where FlashInfer has none. Without a GPU the graphs are
not replayed, but computed again from the same arrays, and the kernels run in Triton's interpreter."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from worker.config import WorkerConfig
from worker.engine import Engine, load_parts
from worker.graphs import DecodeGraphs, Progress, ladder
from worker.messages import SamplingParams

NEW_TOKENS = 5
ON_GPU = torch.cuda.is_available()


class Again:
    """In the place of a graph."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class Uncaptured(DecodeGraphs):
    """Counts what it runs: sizes, and whether prefixes are read together."""

    def capture(self, tables: np.ndarray, progress: Progress | None = None) -> None:
        self.ran: list[tuple[int, bool]] = []
        for size in self._sizes.tolist():
            for of_ranges in self._kinds(size):
                self._graphs[size, of_ranges] = Again(lambda size=size: self._run(size))

    def _run(self, size: int) -> None:
        self.ran.append((size, len(self._attention._members) > 0 and bool(self._attention._members.any())))
        self._forward(size)


@pytest.fixture
def triton_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], tuple[Engine, Uncaptured]]:
    pytest.importorskip("triton")
    from kernels import prefixes
    from kernels.triton_attention import TritonAttention

    monkeypatch.setattr(prefixes, "_STARTS_BYTES", 0)
    monkeypatch.setattr(prefixes, "_FLOAT32_BYTES", 0)

    def make(folder: Path) -> tuple[Engine, Uncaptured]:
        config = WorkerConfig(device="cpu", dtype="float32", kv_tokens=512, page_size=4, max_running=6)
        engine = Engine(folder, config, load=load_parts)
        runner = engine.runner
        layers, _, pages, *rest = runner._attention.kv.shape
        kv = torch.full((layers, 2, pages + 1, *rest), float("nan"))
        runner._attention = TritonAttention(kv, runner.config.attention_shape, 6, 6 * runner._tables.rows.shape[1], 6)
        logits = torch.empty(6, runner.vocab_size)
        runner._graphs = Uncaptured(runner.decoder, runner._attention, runner.last_tokens, logits)
        runner._graphs.capture(runner._tables.rows)
        return engine, runner._graphs

    return make


@pytest.mark.skipif(ON_GPU, reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("name", ["gemma2", "mistral_window"])
def test_same_as_transformers(name: str, tiny_model: Callable[[str], Path], triton_engine) -> None:
    folder = tiny_model(name)
    engine, graphs = triton_engine(folder)
    generator = torch.Generator().manual_seed(7)
    shared, *own = (torch.randint(4, 131, (n,), generator=generator).tolist() for n in (21, 3, 9, 1, 14))
    batch = [shared + tokens for tokens in own]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    # The second time all have the first one's pages.
    for _ in range(2):
        said = [finished.token_ids for finished in engine.generate(batch, sampling)]
    for prompt, tokens in zip(batch, said, strict=True):
        wanted = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert prompt + tokens == wanted[0].tolist()
    assert (4, name == "gemma2") in graphs.ran, graphs.ran
    assert name == "gemma2" or not any(shares for _, shares in graphs.ran)
    engine.check_integrity()
    engine.close()


def test_ladder() -> None:
    """Ends at the most sequences that may run; no step pays for many more than it has."""
    for most in (1, 2, 7, 64, 100, 256, 500, 512):
        sizes = ladder(most)
        assert sizes[0] == 1 and sizes[-1] == most and sizes == sorted(set(sizes))
        assert all(b - a <= max(8, a / 4) for a, b in itertools.pairwise(sizes))
