"""SmolLM2-135M-Instruct in float32: greedy output is, token for token, what `transformers` generates, whatever the
batch, the chunks, the pages, the cache, the stages and ranks, a preemption or a resume. More combinations of these
are run with tiny models (`tests/worker/engine`), and by `make nightly`.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from tests.conftest import NEW_TOKENS, NIGHTLY, SHORT, Reference
from tests.worker.conftest import without_grammars
from tests.worker.engines import checked_engines
from tests.worker.pipelines import pipeline
from worker.config import WorkerConfig
from worker.engine.engine import Components, Finished, load_components
from worker.executor import loading, model_runner
from worker.messages import Generate, Grammar, SamplingParams

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)


@pytest.fixture(scope="session")
def folder(reference: Reference) -> Path:
    return reference.folder


@pytest.fixture(scope="session")
def prompts(reference: Reference) -> list[list[int]]:
    return reference.prompts


@pytest.fixture(scope="session")
def expected(reference: Reference) -> list[list[int]]:
    return reference.said


@pytest.fixture(scope="module")
def weights() -> Iterator[None]:
    """The weights are read once, not for each engine."""
    read = lru_cache(maxsize=1)(loading.load_weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_weights", lambda *arguments: dict(read(*arguments)))  # a decoder empties its own
        yield


@pytest.fixture
def engine(folder: Path, weights: None) -> Iterator:
    """Makes an engine; at the end no page is lost."""
    with checked_engines(folder, kv_tokens=8192) as make:
        yield lambda load=no_grammars, **config: make(load, **config)


def no_grammars(model_dir: Path, config: WorkerConfig) -> Components:
    return without_grammars(model_dir, config, model_runner.ModelRunner.load(model_dir, config))


def tokens(finished: list[Finished]) -> list[list[int]]:
    assert not any(f.failure for f in finished)
    return [f.token_ids for f in finished]


def test_alone(engine, prompts, expected):
    one = engine()
    some = slice(None, None, 1 if NIGHTLY else 12)  # all are said together, below
    for prompt, said in zip(prompts[some], expected[some], strict=True):
        one.reset_cache()
        assert tokens(one.generate([prompt], GREEDY)) == [said]


@pytest.mark.parametrize(("page_size", "overlap"), [(16, True), *([(1, False)] if NIGHTLY else [])])
def test_together_cold_then_warm(engine, prompts, expected, page_size, overlap):
    one = engine(page_size=page_size, overlap=overlap)
    assert tokens(one.generate(prompts, GREEDY)) == expected
    warm = one.generate(prompts, GREEDY)
    assert tokens(warm) == expected
    for f, prompt in zip(warm, prompts, strict=True):
        assert f.cached_tokens == (len(prompt) - 1) // page_size * page_size


@pytest.mark.parametrize(("budget", "overlap"), [(64, True), *([(7, False)] if NIGHTLY else [])])
def test_in_chunks(engine, prompts, expected, budget, overlap):
    one = engine(token_budget=budget, overlap=overlap)
    some = slice(None, None, 1 if NIGHTLY else 3)
    assert tokens(one.generate(prompts[some], GREEDY)) == expected[some]


def test_in_chunks_of_one_token(engine, prompts, expected, monkeypatch):
    monkeypatch.setattr(
        "worker.scheduler.scheduler.chunk_tokens", lambda missing, budget, room: max(0, min(1, budget, room))
    )
    one = engine()
    some = slice(None, len(SHORT), 1 if NIGHTLY else 3)
    assert tokens(one.generate(prompts[some], GREEDY)) == expected[some]
    assert one.load().steps >= max(map(len, prompts[some])) + min(map(len, expected))


def test_preempted(engine, crowded, prompts, expected):
    one = engine(overlap=True, kv_tokens=320, token_budget=128)
    fitting = [i for i, prompt in enumerate(prompts) if len(prompt) < 290]
    assert len(fitting) >= 24
    assert tokens(one.generate([prompts[i] for i in fitting], GREEDY)) == [expected[i] for i in fitting]
    assert one.load().preemptions >= 5


@pytest.mark.parametrize(
    ("pp", "tp", "overlap", "schedule"),
    [
        (4, 1, True, "uniform"),
        (2, 2, False, "fixed_chunk"),
        *([(2, 1, True, "uniform"), (2, 1, True, "offline"), (4, 1, False, "fixed_chunk")] if NIGHTLY else []),
    ],
)
def test_in_stages(folder, weights, crowded, prompts, expected, pp, tp, overlap, schedule):
    """Chunks follow each other in steps in flight, and what is preempted loses a token that was on its way."""
    chosen = [i for i, prompt in enumerate(prompts) if len(prompt) < 60][::5]
    few = replace(GREEDY, max_tokens=12)
    settings = {"kv_tokens": 80, "page_size": 4, "token_budget": 24, "overlap": overlap, "schedule": schedule}
    with pipeline(folder, pp=pp, tp=tp, **settings) as one:
        said = tokens(one.generate([prompts[i] for i in chosen], few))
        assert said == [expected[i][: few.max_tokens] for i in chosen]
        assert one.load().preemptions >= 1


def test_resumed(engine, prompts, expected):
    """After one token, after most, and after any number between."""
    one = engine()
    heads = [said[: min(1 + i % (NEW_TOKENS - 1), len(said) - 1)] for i, said in enumerate(expected)]
    for i, (prompt, head) in enumerate(zip(prompts, heads, strict=True)):
        one.add(Generate(request_id=str(i), prompt_ids=prompt, output_ids=head, sampling=GREEDY))
    while one.has_work:
        for output in one.step():
            heads[int(output.request_id)] += output.token_ids
    assert heads == expected


def test_beside_others_that_want_something_else(engine, folder, prompts, expected):
    """Grammars, temperatures, penalties and log probabilities in the same steps change nothing for the rest; nor does
    the rest for them."""
    one = engine(load=load_components, overlap=True)
    number = SamplingParams(max_tokens=NEW_TOKENS, temperature=1, seed=1, grammar=Grammar("regex", "[0-9]{3}-[0-9]{4}"))
    drawn = SamplingParams(max_tokens=NEW_TOKENS, temperature=1, seed=2, top_p=0.9, repetition_penalty=1.2, logprobs=2)
    wanted = [GREEDY, number, GREEDY, drawn]
    each = [wanted[i % 4] for i in range(len(SHORT))]
    first = one.generate(prompts[: len(SHORT)], each)
    for i, (finished, said) in enumerate(zip(first, expected, strict=False)):
        if each[i] is GREEDY:
            assert finished.token_ids == said
    alone = [one.generate([prompts[i]], each[i])[0] for i in (1, 3, 5, 7)]
    assert tokens(alone) == [first[i].token_ids for i in (1, 3, 5, 7)]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for i, finished in enumerate(first):
        if each[i] is number:
            assert re.fullmatch("[0-9]{3}-[0-9]{4}", tokenizer.decode(finished.token_ids))
            assert finished.finish_reason == "stop"
        if each[i] is drawn:
            assert len(finished.logprobs) == len(finished.token_ids)
