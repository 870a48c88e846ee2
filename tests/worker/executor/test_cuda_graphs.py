"""Steps as graphs run them, with the attention that they have where FlashInfer has none. On a GPU (`-m gpu`) they are
captured and replayed. Without one they are computed again from the same arrays, and kernels run in the interpreter."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels.attention.interface import AttentionShape
from pipeline.padding import mixed_sizes, token_sizes
from tests.conftest import NIGHTLY
from tests.worker.adapters import merged, write_adapter
from tests.worker.conftest import make_tiny, without_grammars
from tests.worker.engines import clock
from worker.config import WorkerConfig
from worker.engine.engine import Components, Engine
from worker.executor import model_runner
from worker.executor.cuda_graphs import CudaGraphRunner, GraphKind, Progress
from worker.executor.kv_pools import Pools, build_attention
from worker.executor.loading import LoadedModel, load_model, probe_step
from worker.executor.model_runner import ModelRunner
from worker.executor.multi_rank import Follower, MultiRankExecutor
from worker.executor.piecewise_graphs import PiecewiseGraphs
from worker.messages import Adapter, SamplingParams
from worker.parallel.rank_store import find_store, open_store

NEW_TOKENS = 4
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
MAX_RUNNING = 6
INTERPRETER = pytest.param("cpu", marks=[pytest.mark.interpreter, pytest.mark.slow])
Ran = list[tuple[GraphKind, int, bool]]
"""Kinds and sizes of the graphs that ran, and whether prefixes were read together."""


@pytest.fixture(params=[INTERPRETER, pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On `cuda` graphs are captured and replayed. On `cpu` every model that is loaded has what it has on a GPU, but for
    the capture."""
    if request.param == "cpu":
        monkeypatch.setattr(model_runner, "load_model", uncaptured)
    return request.param


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """As `tiny_model`, for half the time in the interpreter."""
    return cache(lambda name: make_tiny(name, tmp_path_factory.mktemp(name), layers=2))


class Again:
    """In the place of a graph: its work."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work

    def reset(self) -> None:
        del self.replay  # what is given up does not run


class Noted:
    """A graph that calls `note` whenever it runs."""

    def __init__(self, graph: Again | torch.cuda.CUDAGraph, note: Callable[[], None]) -> None:
        self._graph, self._note, self.reset = graph, note, graph.reset

    def replay(self) -> None:
        self._note()
        self._graph.replay()


class Uncaptured(CudaGraphRunner):
    def capture(self, tables: np.ndarray, progress: Progress | None = None) -> None:
        self._graphs = {shape: Again(partial(self._forward, *shape)) for shape in self.shapes}


def noted(graphs: CudaGraphRunner) -> Ran:
    ran: Ran = []

    def note(kind: GraphKind, size: int) -> None:
        ran.append((kind, size, bool(graphs._attention.pools[0]._members.any())))

    graphs._graphs = {shape: Noted(graph, partial(note, *shape[:2])) for shape, graph in graphs._graphs.items()}
    return ran


def uncaptured(folder: Path, config: WorkerConfig, *rest: Any) -> LoadedModel:
    """As `load_model`."""
    from kernels.attention.triton_backend import TritonAttention
    from tests.interpreter import hasten

    hasten()
    loaded = load_model(folder, config, *rest)
    pools, max_pages = iter(loaded.pools.attention.pools), MAX_RUNNING * loaded.tables.rows.shape[2]

    def make(shape: AttentionShape, *_: object) -> TritonAttention:
        layers, _, pages, *rest = next(pools).kv.shape
        kv = torch.empty(layers, 2, pages + 1, *rest)
        return TritonAttention(kv, shape, MAX_RUNNING, max_pages, max(MAX_RUNNING, config.token_budget))

    attention, states = build_attention(loaded.config.attention_shape, loaded.layout, None, make), loaded.pools.states
    if states is not None:
        from kernels.recurrent.triton_states import TritonStates

        states = TritonStates(states.recurrent.fill_(float("nan")), states.inputs, states.shape)
    forward_pass = loaded.forward_pass
    logits = torch.empty(MAX_RUNNING, loaded.config.vocab_size if forward_pass.stage.is_last else 0)
    shared = forward_pass.decoder, attention, forward_pass.last_tokens, logits
    graphs = Uncaptured(*shared, config.token_budget, forward_pass.begin, states)
    graphs.capture(loaded.tables.rows[0])
    return replace(loaded, pools=Pools(attention, states), graphs=graphs)


@pytest.fixture
def triton_engine(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Engine, Ran]]]:
    """Makes an engine whose pages begin as no numbers, with notes of the graphs that it runs."""
    pytest.importorskip("triton")
    from kernels.attention import shared_prefix

    monkeypatch.setattr(shared_prefix, "_STARTS_BYTES", 0)
    monkeypatch.setattr(shared_prefix, "_FLOAT32_BYTES", 0)
    engines: list[Engine] = []

    def make(folder: Path, **settings) -> tuple[Engine, Ran]:
        config = configured(device, **settings)
        engines.append(engine := Engine(folder, config, load=no_grammars, clock=clock()))
        runner = engine.executor
        ran = noted(runner._graphs)
        for pool in runner._pools.attention.pools:
            pool.kv.fill_(float("nan"))
        return engine, ran

    yield make
    for engine in engines:
        engine.close()


def no_grammars(folder: Path, config: WorkerConfig) -> Components:
    return without_grammars(folder, config, ModelRunner.load(folder, config))


def configured(device: str, **settings) -> WorkerConfig:
    settings = {"kv_tokens": 512, "token_budget": 64, "schedule": "fixed_chunk", "overlap": False} | settings
    return WorkerConfig(device=device, dtype="float32", page_size=4, max_running=MAX_RUNNING, **settings)


def check(folder: Path, engine: Engine, batch: list[list[int]], times: int = 1, **wants) -> None:
    """Greedy tokens are those of transformers, whatever else is wanted."""
    sampling = msgspec.structs.replace(GREEDY, **wants)
    for _ in range(times):
        said = [finished.token_ids for finished in engine.generate(batch, sampling)]
    assert said == greedy(folder, batch)
    engine.check_integrity()


def greedy(folder: Path, batch: list[list[int]]) -> list[list[int]]:
    """The tokens of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    how = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist() for prompt in batch]


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, 131, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("name", ["gemma2", "mistral_window"])
def test_same_as_transformers(name: str, two_layers: Callable[[str], Path], triton_engine) -> None:
    """Layers with a window have pages of their own."""
    folder = two_layers(name)
    engine, ran = triton_engine(folder, window_kv_tokens=128)
    assert [group.kind for group in engine.executor.layout.groups] == ["full", "window"]
    shared, *own = prompts(21, 3, 9, 1, 14)
    # The second time all have the first one's pages.
    check(folder, engine, [shared + tokens for tokens in own], times=2)
    assert (GraphKind.DECODE, 4, name == "gemma2") in ran, ran
    assert name == "gemma2" or not any(shares for *_, shares in ran)


@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "lfm2"])
def test_recurrent_states(name: str, two_layers: Callable[[str], Path], triton_engine) -> None:
    """Decodes are graphs, and chunks are not. The second time all go on from checkpoints."""
    folder = two_layers(name)
    engine, ran = triton_engine(folder, token_budget=16, overlap=True, state_checkpoints=12)
    shared, *own = prompts(21, 3, 9, 1, 14)
    check(folder, engine, [shared + tokens for tokens in own], times=2)
    assert {kind for kind, *_ in ran} <= {GraphKind.DECODE, GraphKind.DECODE_SHARED_PREFIX}
    assert 4 in {size for _, size, _ in ran}, ran


@pytest.mark.parametrize(("token_budget", "overlap"), [(1, True), (7, True)])
def test_mixed(token_budget: int, overlap: bool, two_layers: Callable[[str], Path], triton_engine) -> None:
    """Prompts in chunks alongside others' decodes."""
    folder = two_layers("qwen3")
    engine, ran = triton_engine(folder, token_budget=token_budget, overlap=overlap)
    # More than may run at once, so that some start while others decode.
    batch = prompts(3, 2, 19, 5, 11, 7, 9)
    check(folder, engine, batch[:2] if token_budget == 1 else batch)
    mixed = {size for kind, size, _ in ran if kind is GraphKind.MIXED}
    assert mixed and mixed <= set(token_sizes(token_budget)), ran


def test_logits_of_prompts_are_nobodys_tokens(two_layers: Callable[[str], Path], triton_engine) -> None:
    """But the last one's of each."""
    folder = two_layers("qwen3")
    engine, ran = triton_engine(folder, token_budget=5, overlap=True)
    check(folder, engine, prompts(3, 7, 4), prompt_logprobs=0)
    assert any(kind is GraphKind.MIXED for kind, *_ in ran)


def test_preempted(two_layers: Callable[[str], Path], triton_engine, crowded) -> None:
    folder = two_layers("qwen3")
    engine, _ = triton_engine(folder, token_budget=20, kv_tokens=48, overlap=True)
    check(folder, engine, prompts(7, 10, 12, 9))
    assert engine.load().preemptions


def test_more_logits_than_a_graph_has(two_layers: Callable[[str], Path], triton_engine) -> None:
    """Log probabilities of a prompt are as many rows as it has tokens: a step by itself."""
    engine, ran = triton_engine(two_layers("qwen3"))
    (prompt,) = prompts(MAX_RUNNING + 3)
    sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=0)
    (finished,) = engine.generate([prompt], sampling)
    assert len(finished.token_ids) == 2
    assert [kind for kind, *_ in ran] == [GraphKind.DECODE]


@pytest.mark.parametrize("device", [INTERPRETER], indirect=True)
def test_pipeline(device: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that have no tokens, or no logits, or neither, with several steps in flight."""
    pytest.importorskip("triton")
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
    folder, config = tiny_model("qwen3"), configured(device, pp=3, token_budget=7, schedule="uniform")
    store, meeting = open_store()

    def follow(rank: int) -> Ran:
        follower = Follower(folder, config, rank, find_store(meeting))
        ran = noted(follower._runner._graphs)
        follower.run()
        return ran

    def load(folder: Path, config: WorkerConfig) -> Components:
        return without_grammars(folder, config, MultiRankExecutor(folder, config, store))

    with ThreadPoolExecutor(2) as threads:
        followers = [threads.submit(follow, rank) for rank in (0, 1)]
        engine = Engine(folder, config, load=load)
        ran = [noted(engine.executor.runner._graphs)]
        check(folder, engine, prompts(3, 2, 19, 5, 9))
        engine.close()
        ran += [follower.result(60) for follower in followers]
    ran = [[graph for graph in one if graph[0] is not GraphKind.DECODE_SHARED_PREFIX] for one in ran]
    assert {kind for kind, *_ in ran[0]} == {GraphKind.DECODE, GraphKind.MIXED}
    assert all(others == ran[0] for others in ran)


# ---------------------------------------------------------------- long steps, in pieces


class UncapturedPieces(PiecewiseGraphs):
    def _captured(self, size: int, pool: object) -> list[Callable[[], None]]:
        return self._pieces(size)


@pytest.fixture
def pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> tuple[type[PiecewiseGraphs], set[int]]:
    """The class, and the sizes of its graphs that have run."""
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    ran: set[int] = set()

    class NotedPieces(PiecewiseGraphs if device == "cuda" else UncapturedPieces):
        def _captured(self, size: int, pool: object) -> list[Callable[[], None]]:
            first, *others = super()._captured(size, pool)
            return [lambda: (ran.add(size), first()), *others]

    return NotedPieces, ran


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gemma2", "qwen3", "afmoe"] if NIGHTLY else ["gemma2", "afmoe"])
def test_pieces(name: str, two_layers: Callable[[str], Path], triton_engine, pieces) -> None:
    folder, (noted_pieces, ran) = two_layers(name), pieces
    engine, _ = triton_engine(folder, token_budget=24, overlap=True)
    runner = engine.executor
    runner.decoder.build_rope_tables(runner.context_length)
    runner._graphs, attention = None, runner._pools.attention
    runner._forward_pass.pieces = noted_pieces(runner.decoder, attention, 16)
    if runner.device.type == "cuda":
        check(folder, engine, prompts(6))  # without graphs: what is compiled now is not compiled in a capture
        engine.reset_cache()
    runner._forward_pass.pieces.capture(sizes := mixed_sizes(4, 16))
    # The longest step is longer than all pieces.
    check(folder, engine, prompts(21, 3, 9, 1, 14), times=2)
    assert {5, 8} <= ran <= set(sizes)


@torch.inference_mode()
def test_pieces_with_adapters(two_layers: Callable[[str], Path], triton_engine, pieces, tmp_path: Path) -> None:
    """Two adapters and the base model in steps of a graph's size, less, and more than all graphs have."""
    folder, (noted_pieces, ran) = two_layers("qwen3"), pieces
    paths = [write_adapter(tmp_path / str(seed), folder, seed, rank=4) for seed in (0, 1)]
    models = [folder, *(merged(tmp_path / f"merged-{path.name}", folder, path) for path in paths)]
    adapters = [None, *(Adapter(path.name, str(path)) for path in paths)]
    engine, _ = triton_engine(folder, token_budget=24, overlap=True, max_loras=2)
    runner = engine.executor
    runner.decoder.build_rope_tables(runner.context_length)
    adapted = runner._forward_pass.adapters.adapted
    adapted.layers = [adapted._adapted(*numbered) for numbered in enumerate(runner.decoder.layers)]  # with the tables
    runner._graphs, attention = None, runner._pools.attention
    runner._forward_pass.adapted_pieces = noted_pieces(runner.decoder, attention, 16, adapted)
    runner._forward_pass.adapted_pieces.capture(sizes := mixed_sizes(4, 16))
    batch = [prompt for prompt in prompts(21, 3, 9) for _ in models]
    said = engine.generate(batch, GREEDY, adapters=adapters * 3)
    wanted = [greedy(model, batch[index :: len(models)]) for index, model in enumerate(models)]
    assert [done.token_ids for done in said] == [answers[i] for i in range(3) for answers in wanted]
    assert len(ran) > 1 and ran <= set(sizes)


@pytest.mark.parametrize(("seconds", "most"), [([1.0, 0.5, 1.0, 0.85, 1.0, 0.95], 16), ([1.0, 0.95], 0)])
def test_pieces_are_kept_if_faster(
    seconds: list[float], most: int, two_layers, triton_engine, pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What steps take without and with them, of 8, of 16 and of 32 tokens."""
    engine, _ = triton_engine(two_layers("llama"))
    runner, left, (noted_pieces, ran) = engine.executor, iter(seconds), pieces
    runner.decoder.build_rope_tables(runner.context_length)
    monkeypatch.setattr(noted_pieces, "_seconds", lambda _, step: (step(), next(left))[1])
    sizes = mixed_sizes(4, 64)
    probe = partial(probe_step, layout=runner.layout, longest=runner.context_length, device=runner.device)
    with torch.inference_mode():
        kept = noted_pieces.if_faster(runner.decoder, runner._pools.attention, sizes, probe)
    assert next(left, None) is None, "no more is tried than what gains, and what does not"
    if most:
        assert kept.max_tokens == most and sorted(kept._graphs) == [size for size in sizes if size <= most]
        assert ran == {8, 16, 32}
        kept.close()
        assert not kept._graphs
    else:
        assert kept is None
