"""Decoding as graphs do it, with the attention that they have where FlashInfer has none. Without a GPU the graphs are
not replayed, but computed again from the same arrays, and the kernels run in Triton's interpreter."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.padding import mixed_sizes, token_sizes
from worker.config import WorkerConfig
from worker.engine.engine import Engine, load_components
from worker.executor.cuda_graphs import CudaGraphRunner, GraphKind, Progress
from worker.executor.model_runner import ModelRunner
from worker.executor.multi_rank import Follower, MultiRankExecutor, find_store, open_store
from worker.executor.piecewise_graphs import PiecewiseGraphs
from worker.messages import SamplingParams

NEW_TOKENS = 5
MAX_RUNNING = 6
ON_GPU = torch.cuda.is_available()


class Again:
    """In the place of a graph."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work

    def reset(self) -> None:
        del self.replay  # what is given up does not run


class Uncaptured(CudaGraphRunner):
    """Notes what it runs: kinds, sizes, and whether prefixes are read together."""

    def capture(self, tables: np.ndarray, progress: Progress | None = None) -> None:
        self.ran: list[tuple[GraphKind, int, bool]] = []
        for shape in self.shapes:
            self._graphs[shape] = Again(partial(self._run, *shape))

    def _run(self, kind: GraphKind, size: int, rows: int) -> None:
        self.ran.append((kind, size, bool(self._attention._members.any())))
        self._forward(kind, size, rows)


@pytest.fixture
def triton_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Engine, Uncaptured]]:
    pytest.importorskip("triton")
    from kernels.attention import shared_prefix
    from kernels.attention.triton_backend import TritonAttention

    monkeypatch.setattr(shared_prefix, "_STARTS_BYTES", 0)
    monkeypatch.setattr(shared_prefix, "_FLOAT32_BYTES", 0)

    def make(folder: Path, **settings) -> tuple[Engine, Uncaptured]:
        config = configured(**settings)
        engine = Engine(folder, config, load=load_components)
        return engine, uncaptured(engine.executor, config)

    def uncaptured(runner: ModelRunner, config: WorkerConfig) -> Uncaptured:
        layers, _, pages, *rest = runner._attention.kv.shape
        kv = torch.full((layers, 2, pages + 1, *rest), float("nan"))
        shape, max_pages = runner.model_config.attention_shape, MAX_RUNNING * runner._tables.rows.shape[1]
        runner._attention = TritonAttention(kv, shape, MAX_RUNNING, max_pages, max(MAX_RUNNING, config.token_budget))
        logits = torch.empty(MAX_RUNNING, runner.vocab_size if runner.stage.is_last else 0)
        shared = runner.decoder, runner._attention, runner.last_tokens, logits
        runner._graphs = Uncaptured(*shared, config.token_budget, runner._begin)
        runner._graphs.capture(runner._tables.rows)
        return runner._graphs

    make.uncaptured = uncaptured
    return make


def configured(**settings) -> WorkerConfig:
    settings = {"kv_tokens": 512, "token_budget": 64} | settings
    return WorkerConfig(device="cpu", dtype="float32", page_size=4, max_running=MAX_RUNNING, **settings)


def check(folder: Path, engine: Engine, batch: list[list[int]], times: int = 1, **wants) -> None:
    """Greedy tokens are those of transformers, whatever else is wanted."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, **wants)
    for _ in range(times):
        said = [finished.token_ids for finished in engine.generate(batch, sampling)]
    for prompt, tokens in zip(batch, said, strict=True):
        wanted = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert prompt + tokens == wanted[0].tolist()
    engine.check_integrity()


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, 131, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.skipif(ON_GPU, reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("name", ["gemma2", "mistral_window"])
def test_same_as_transformers(name: str, tiny_model: Callable[[str], Path], triton_engine) -> None:
    folder = tiny_model(name)
    engine, graphs = triton_engine(folder)
    shared, *own = prompts(21, 3, 9, 1, 14)
    # The second time all have the first one's pages.
    check(folder, engine, [shared + tokens for tokens in own], times=2)
    assert (GraphKind.DECODE, 4, name == "gemma2") in graphs.ran, graphs.ran
    assert name == "gemma2" or not any(shares for *_, shares in graphs.ran)
    engine.close()


@pytest.mark.skipif(ON_GPU, reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize(("token_budget", "overlap"), [(1, True), (7, True), (64, False)])
def test_mixed(token_budget: int, overlap: bool, tiny_model: Callable[[str], Path], triton_engine) -> None:
    """Prompts in pieces beside others' decodes."""
    folder = tiny_model("qwen3")
    engine, graphs = triton_engine(folder, token_budget=token_budget, overlap=overlap)
    # More than may run at once, so that some start while others decode.
    batch = prompts(3, 2, 19, 5, 11, 7, 9)
    check(folder, engine, batch[:2] if token_budget == 1 else batch)
    mixed = {size for kind, size, _ in graphs.ran if kind is GraphKind.MIXED}
    assert mixed and mixed <= set(token_sizes(token_budget)), graphs.ran
    engine.close()


@pytest.mark.skipif(ON_GPU, reason="the interpreter is for machines without a GPU")
def test_logits_of_prompts_are_nobodys_tokens(tiny_model: Callable[[str], Path], triton_engine) -> None:
    """But the last one's of each."""
    folder = tiny_model("qwen3")
    engine, graphs = triton_engine(folder, token_budget=5, overlap=True)
    check(folder, engine, prompts(3, 7, 4), prompt_logprobs=0)
    assert any(kind is GraphKind.MIXED for kind, *_ in graphs.ran)
    engine.close()


@pytest.mark.skipif(ON_GPU, reason="the interpreter is for machines without a GPU")
def test_preempted(tiny_model: Callable[[str], Path], triton_engine, crowded) -> None:
    folder = tiny_model("qwen3")
    engine, _ = triton_engine(folder, token_budget=20, kv_tokens=48, overlap=True)
    check(folder, engine, prompts(7, 10, 12, 9))
    assert engine.scheduler.counters.preemptions
    engine.close()


@pytest.mark.skipif(ON_GPU, reason="the interpreter is for machines without a GPU")
def test_more_logits_than_a_graph_has(tiny_model: Callable[[str], Path], triton_engine) -> None:
    """Log probabilities of a prompt are as many rows as it has tokens: a step by itself."""
    engine, graphs = triton_engine(tiny_model("qwen3"))
    (prompt,) = prompts(MAX_RUNNING + 3)
    sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=0)
    (finished,) = engine.generate([prompt], sampling)
    assert len(finished.token_ids) == 2
    assert [kind for kind, *_ in graphs.ran] == [GraphKind.DECODE]
    engine.close()


@pytest.mark.skipif(ON_GPU, reason="the interpreter is for machines without a GPU")
def test_pipeline(tiny_model: Callable[[str], Path], triton_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that have no tokens, or no logits, or neither, with several steps in flight."""
    from kernels.attention.triton_backend import TritonAttention
    from kernels.ops import argmax

    one_at_a_time = Lock()  # the interpreter is not for several threads

    def alone(kernel: Callable) -> Callable:
        def run(*arguments):
            with one_at_a_time:
                return kernel(*arguments)

        return run

    monkeypatch.setattr(TritonAttention, "attend_into", alone(TritonAttention.attend_into))
    monkeypatch.setattr(argmax, "greedy_argmax_into", alone(argmax.greedy_argmax_into))
    folder, config = tiny_model("qwen3"), configured(pp=3, token_budget=7)
    store, address = open_store()

    def follow(rank: int) -> Uncaptured:
        follower = Follower(folder, config, rank, find_store(address))
        graphs = triton_engine.uncaptured(follower._runner, config)
        follower.run()
        return graphs

    with ThreadPoolExecutor(2) as threads:
        followers = [threads.submit(follow, rank) for rank in (0, 1)]
        engine = Engine(
            folder, config, load=partial(load_components, make_executor=partial(MultiRankExecutor, store=store))
        )
        graphs = [triton_engine.uncaptured(engine.executor.runner, config)]
        check(folder, engine, prompts(3, 2, 19, 5, 9))
        engine.close()
        graphs += [follower.result(60) for follower in followers]
    ran = [[graph for graph in one.ran if graph[0] is not GraphKind.DECODE_SHARED_PREFIX] for one in graphs]
    assert {kind for kind, *_ in ran[0]} == {GraphKind.DECODE, GraphKind.MIXED}
    assert all(others == ran[0] for others in ran)


# ---------------------------------------------------------------- long steps, in pieces


class UncapturedPieces(PiecewiseGraphs):
    """Notes the sizes of what it runs."""

    ran: set[int] = set()

    def _captured(self, size: int, pool: object) -> list[Callable[[], None]]:
        return [partial(self._run, index, size) for index in range(self._decoder.config.num_layers)]

    def _run(self, index: int, size: int) -> None:
        self.ran.add(size)
        self._decoder.piece(index, self._buffers.first(size))


@pytest.fixture
def uncaptured_pieces(monkeypatch: pytest.MonkeyPatch) -> type[UncapturedPieces]:
    monkeypatch.setattr(UncapturedPieces, "ran", set())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return UncapturedPieces


@pytest.mark.skipif(ON_GPU, reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("name", ["gemma2", "llama_biased_tied", "qwen3"])
def test_pieces(name: str, tiny_model: Callable[[str], Path], triton_engine, uncaptured_pieces) -> None:
    folder = tiny_model(name)
    engine, _ = triton_engine(folder, token_budget=24, overlap=True)
    runner = engine.executor
    runner.decoder.build_rope_tables(runner.context_length)
    runner._graphs, runner._piecewise_graphs = None, uncaptured_pieces(runner.decoder, runner._attention, 16)
    runner._piecewise_graphs.capture(sizes := mixed_sizes(4, 16))
    # The longest step is longer than all pieces.
    check(folder, engine, prompts(21, 3, 9, 1, 14), times=2)
    assert {5, 8} <= runner._piecewise_graphs.ran <= set(sizes)
    engine.close()


@pytest.mark.skipif(ON_GPU, reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize(("seconds", "most"), [([1.0, 0.5, 1.0, 0.85, 1.0, 0.95], 64), ([1.0, 0.95], 0)])
def test_pieces_are_kept_if_faster(
    seconds: list[float], most: int, tiny_model, triton_engine, uncaptured_pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What steps take without and with them, of 32, of 64 and of 128 tokens."""
    engine, _ = triton_engine(tiny_model("llama"))
    runner, left = engine.executor, iter(seconds)
    runner.decoder.build_rope_tables(runner.context_length)
    monkeypatch.setattr(uncaptured_pieces, "_seconds", lambda _, step: (step(), next(left))[1])
    with torch.inference_mode():
        pieces = uncaptured_pieces.if_faster(runner.decoder, runner._attention, mixed_sizes(16, 256), runner._probe)
    assert next(left, None) is None, "no more is tried than what gains, and what does not"
    if most:
        assert pieces.max_tokens == most and list(pieces._graphs) == [64, 56, 48, 40, 32, 28, 24, 20]
        assert pieces.ran == {32, 64, 128}
        pieces.close()
        assert not pieces._graphs
    else:
        assert pieces is None
    engine.close()
