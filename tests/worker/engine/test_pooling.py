"""Embeddings: equal to `transformers` in float32, whatever the batch, the chunks, the cache, a preemption, the stages
and ranks."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from tests.worker.conftest import make_tiny, without_grammars
from tests.worker.driver import Driver, prompt
from tests.worker.engines import checked_engines
from tests.worker.pipelines import pipeline
from worker.config import WorkerConfig
from worker.engine.engine import Components, Engine, Finished
from worker.executor.model_runner import ModelRunner
from worker.messages import Generate, Grammar, Output, Outputs, SamplingParams, decode_from_replica, encode
from worker.step import Chunk, Plan, PooledChunks

LAST = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, pooling="last")
MEAN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, pooling="mean")
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LENGTHS = (1, 2, 5, 16, 17, 33, 40, 90, 91, 130)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as Qwen3-Embedding's larger ones are stored: without a head, though embeddings are not tied, and with
    names that do not begin with `model.`."""
    folder = make_tiny("qwen3", tmp_path_factory.mktemp("embedding"))
    tensors = load_file(folder / "model.safetensors")
    assert tensors.pop("lm_head.weight") is not None
    base = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(base, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of which some begin alike."""
    numbers = random.Random(5)
    beginning = [numbers.randrange(4, 131) for _ in range(200)]
    return [
        beginning[: length - length // 3] + [numbers.randrange(4, 131) for _ in range(length // 3)]
        for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def states(folder: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """Hidden states of each prompt after the final norm, by `transformers`."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in prompts]


@pytest.fixture
def engine(folder: Path) -> Iterator[Callable[..., Engine]]:
    def load(model_dir: Path, config: WorkerConfig) -> Components:
        return without_grammars(model_dir, config, ModelRunner.load(model_dir, config))

    with checked_engines(folder, kv_tokens=2048) as make:
        yield partial(make, load)


def check(finished: list[Finished], states: list[np.ndarray], sampling: list[SamplingParams]) -> None:
    for result, state, params in zip(finished, states, sampling, strict=True):
        assert result.failure is None and result.finish_reason == "stop" and result.token_ids == []
        assert result.embedding is not None
        expected = state[-1] if params.pooling == "last" else state.mean(axis=0)
        np.testing.assert_allclose(np.frombuffer(result.embedding, "<f4"), expected, rtol=1e-5, atol=1e-5)


def both(prompts: list[list[int]], states: list[np.ndarray]) -> tuple[list, list, list]:
    """Every prompt with each method."""
    return [*prompts, *prompts], [*states, *states], [LAST] * len(prompts) + [MEAN] * len(prompts)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"page_size": 1, "overlap": True},
        {"token_budget": 7, "max_running": 3},
        {"token_budget": 7, "overlap": True},
        {"token_budget": 64, "overlap": True, "page_size": 4},
    ],
    ids=str,
)
@pytest.mark.slow
def test_embeddings_are_those_of_transformers(engine, prompts, states, config) -> None:
    one = engine(**config)
    asked, expected, sampling = both(prompts, states)
    for _ in range(2):  # cold, then warm
        finished = one.generate(asked, sampling)
        check(finished, expected, sampling)
    page_size = config.get("page_size", 16)
    for result, ids, params in zip(finished, asked, sampling, strict=True):
        cached = (len(ids) - 1) // page_size * page_size
        assert result.cached_tokens == (cached if params.pooling == "last" else 0)


def test_embeddings_among_generated_texts(engine, prompts, states) -> None:
    alone = engine().generate(prompts, GREEDY)
    for overlap in (False, True):
        one = engine(token_budget=24, overlap=overlap)
        asked, expected, sampling = both(prompts, states)
        order = random.Random(1).sample(range(3 * len(prompts)), 3 * len(prompts))
        everything, params = [*asked, *prompts], [*sampling, *[GREEDY] * len(prompts)]
        finished = one.generate([everything[i] for i in order], [params[i] for i in order])
        results = dict(zip(order, finished, strict=True))
        check([results[i] for i in range(len(asked))], expected, sampling)
        assert [results[len(asked) + i].token_ids for i in range(len(prompts))] == [f.token_ids for f in alone]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sampling", [LAST, MEAN], ids=["last", "mean"])
def test_a_prompt_that_was_preempted(engine, crowded, prompts, states, sampling, overlap) -> None:
    """The text, which came first, needs pages that the long prompt has."""
    one = engine(overlap=overlap, kv_tokens=160, token_budget=9)
    text = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    finished = one.generate([prompts[2], prompts[-1]], [text, sampling])
    check(finished[1:], states[-1:], [sampling])
    assert one.load().preemptions >= 1


def test_the_number_of_averaged_rows_in_a_step_is_limited(engine, prompts, states, monkeypatch) -> None:
    monkeypatch.setattr("worker.scheduler.step_builder.HIDDEN_ROWS", 10)
    one = engine()
    check(one.generate(prompts, MEAN), states, [MEAN] * len(prompts))
    assert one.load().steps >= sum(LENGTHS) / 10


def test_an_aborted_prompt_gives_nothing_back(engine, prompts) -> None:
    one = engine(token_budget=16, overlap=True)
    one.add(Generate(request_id="a", prompt_ids=prompts[-1], sampling=MEAN))
    one.step()
    one.abort(["a"])
    while one.has_work:
        assert one.step() == []


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_stages_and_ranks(folder, prompts, states, pp, tp) -> None:
    asked, expected, sampling = both(prompts, states)
    with pipeline(folder, pp=pp, tp=tp, token_budget=24) as one:
        check(one.generate(asked, sampling), expected, sampling)


def test_a_plan_with_hidden_states_survives_its_frame_and_a_cut() -> None:
    chunks = [Chunk(3, 0, [5, 6], 0, [7], 0, 2), Chunk(1, 4, [9], 1, [], 1), Chunk(2, 8, [1, 2, 3], 2, [4], 0, 1)]
    plan = Plan.from_chunks(7, chunks)
    assert plan.hidden.tolist() == [[0, 2], [2, 1]]
    assert Plan.decode(plan.encode()).chunks == plan.chunks == chunks
    kept = plan.only(np.array([False, True, True]))
    assert kept.hidden.tolist() == [[1, 1]] and kept.chunks == chunks[1:]
    assert plan.only(np.array([False, True, False])).hidden.shape == (0, 2)


def test_an_embedding_is_sent_as_bytes() -> None:
    sent = Output(request_id="a", finish_reason="stop", embedding=np.float32([1, -2.5]).tobytes())
    assert decode_from_replica(encode(Outputs([sent]))) == Outputs([sent])


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": 2}, "max_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"grammar": Grammar("json_object")}, "grammar"),
    ],
)
def test_what_does_not_go_with_pooling_is_refused(drive, changes, param) -> None:
    d: Driver = drive()
    sampling = SamplingParams(**({"max_tokens": 1, "pooling": "last"} | changes))
    assert not d.add("a", prompt(5), sampling=sampling)
    d.collect()
    assert d.failure("a").param == param


def test_an_embedding_that_is_not_a_number_fails_alone(drive) -> None:
    d: Driver = drive()
    for name in ("a", "b"):
        d.add(name, prompt(5, seed=ord(name)), sampling=MEAN)
    step = d.scheduler.schedule().step
    assert step is not None and not step.samples.any() and step.plan.hidden.tolist() == [[0, 5], [1, 5]]
    sums = np.array([[1.0, np.nan], [5.0, 10.0]], dtype=np.float32)
    d.scheduler.update(step, np.empty(0, dtype=np.int64), None, {}, PooledChunks([0, 1], sums))
    d.collect()
    assert d.failure("a").kind == "internal"
    assert np.frombuffer(d.outputs["b"][0].embedding or b"", "<f4").tolist() == [1.0, 2.0]
