"""The engine while things go wrong: steps, samplers and preparations that fail, aborts, pages that run out. Whoever is
not hit says what he says alone, by the real sampler; of the others nothing stays behind."""

import random
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule import POLICIES
from tests.worker.fakes import FakeExecutor, any_models, pages_now
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore
from worker.engine.engine import Components, Engine, Finished
from worker.executor.executor import ForwardOutput
from worker.messages import Generate, Grammar, Lease, SamplingParams
from worker.sampling.sampler import PendingSample, Sampler
from worker.step import Plan
from worker.structured_output import CompiledGrammar

VOCAB_SIZE, EOS = 50, 49
COSTS = {pp: CostStore(any_models(pp)) for pp in (1, 2, 3)}
ALONE = {"overlap": False, "token_budget": 512}
LOGITS = torch.from_numpy(np.random.default_rng(0).normal(0.0, 2.0, (997, VOCAB_SIZE)).astype(np.float32))
STEPS = 3000

Faults = Iterator[bool]


class Flaky(FakeExecutor):
    """Every token may come next. A step may fail when it has been computed."""

    def __init__(self, num_pages: int, page_size: int, faults: Faults) -> None:
        super().__init__(num_pages, page_size, VOCAB_SIZE, eos_token_ids=(EOS,))
        self.faults = faults

    def forward(self, plan: Plan) -> ForwardOutput:
        output = super().forward(plan)
        _fail_at(self.faults)
        return output

    def logits(self, seen: list[int]) -> torch.Tensor:
        return LOGITS[[one % len(LOGITS) for one in seen]]


class FlakySampler(Sampler):
    """The real one, of which everything may fail that an engine asks."""

    def __init__(self, config: WorkerConfig, executor: Flaky) -> None:
        super().__init__(config.max_running, VOCAB_SIZE, executor.device, executor.last_tokens)
        self.faults = executor.faults

    def add(self, *arguments: object) -> None:
        _fail_at(self.faults)
        super().add(*arguments)

    def launch(self, *arguments: object) -> PendingSample:
        _fail_at(self.faults)
        pending = super().launch(*arguments)
        return SimpleNamespace(result=lambda: _fail_at(self.faults) or pending.result())


class Compiled:
    """A compiler that has its one grammar ready."""

    def __init__(self) -> None:
        texts = [bytes([ord("A") + i]) for i in range(EOS)] + [b""]
        info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, stop_token_ids=[EOS])
        self.grammar = CompiledGrammar(xgrammar.GrammarCompiler(info).compile_grammar("root ::= [C-V]* [A-B]"), "ebnf")

    def submit(self, grammar: Grammar, client: str = "") -> "Future[CompiledGrammar]":
        future: Future[CompiledGrammar] = Future()
        future.set_result(self.grammar)
        return future

    def close(self) -> None:
        pass


def _fail_at(faults: Faults) -> None:
    if next(faults):
        raise RuntimeError("a fault")


def engine(compiled: Compiled, num_pages: int, page_size: int, faults: Faults, **config: object) -> Engine:
    def load(model: Path, config: WorkerConfig) -> Components:
        executor = Flaky(num_pages, page_size, faults)
        return Components(executor, FlakySampler(config, executor), compiled, COSTS[config.pp])

    return Engine(Path("none"), WorkerConfig(page_size=page_size, **config), load=load)


def faults_of(rng: random.Random, share: float, raised: list[int]) -> Faults:
    """Whether something is to fail, whenever it is asked; `raised` counts."""
    while True:
        fails = rng.random() < share
        raised[0] += fails
        yield fails


def some_sampling(rng: random.Random, num_prompt: int) -> SamplingParams:
    """Of what one may ask for, a bit of everything. A seed, so that it is the same again."""
    return SamplingParams(
        max_tokens=rng.randrange(1, 14),
        min_tokens=rng.choice([0, 0, 3]),
        temperature=rng.choice([0.0, 0.0, 0.8]),
        seed=rng.randrange(9),
        top_k=rng.choice([0, 0, 5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 5]))),
        ignore_eos=rng.random() < 0.3,
        allowed_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 0, 9]))),
        bad_words=tuple(tuple(rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 2]))) for _ in range(rng.choice([0, 9]))),
        logprobs=rng.choice([None, None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, 0, 2]),
        prompt_logprobs_start=rng.choice([0, rng.randrange(num_prompt)]),
        grammar=Grammar("ebnf", "") if rng.random() < 0.2 else None,
    )


def some_requests(rng: random.Random, most_tokens: int) -> list[Generate]:
    stems = [rng.choices(range(VOCAB_SIZE), k=most_tokens) for _ in range(3)]
    prompts = [
        [*rng.choice(stems)[: rng.randrange(most_tokens)], rng.randrange(VOCAB_SIZE)]
        for _ in range(rng.randrange(2, 9))
    ]
    return [
        Generate(
            request_id=str(i),
            prompt_ids=prompt,
            sampling=some_sampling(rng, len(prompt)),
            priority=rng.choice([0, 0, 1, -1]),
            lease=rng.choice([None, Lease(rng.choice("pq"), rng.choice("ab"), rng.choice([0, 60]))]),
        )
        for i, prompt in enumerate(prompts)
    ]


def drive(engine: Engine, requests: list[Generate], rng: random.Random, aborts: float) -> tuple[dict, set[str]]:
    """What comes of each, and who was aborted: they come and go at any time."""
    to_come, found, gone = list(requests), {request.request_id: Finished() for request in requests}, set()
    for _ in range(STEPS):
        if not to_come and not engine.has_work:
            return found, gone
        if to_come and rng.random() < 0.5:
            engine.add(to_come.pop(0))
        if rng.random() < aborts:
            victim = rng.choice(requests)
            if victim not in to_come and not found[victim.request_id].finish_reason:
                engine.abort([victim.request_id])
                gone.add(victim.request_id)
        for output in engine.step():
            assert output.request_id not in gone and not found[output.request_id].finish_reason
            found[output.request_id].add(output)
        engine.check_integrity()
    raise AssertionError("it does not come to an end")


def told(finished: Finished) -> tuple:
    """What must be the same, whatever else runs."""
    rows = [finished.logprobs, finished.prompt_logprobs or []]
    chances = [[] if row is None else [row.token_id, round(row.logprob, 3)] for part in rows for row in part]
    return finished.token_ids, finished.finish_reason, chances


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return Compiled()


@pytest.mark.slow
@settings(max_examples=40)
@given(
    crowded=st.booleans(),
    pp=st.integers(1, 3),
    overlap=st.booleans(),
    schedule=st.sampled_from(sorted(POLICIES)),
    page_size=st.sampled_from([1, 2, 4, 7]),
    budget=st.sampled_from([1, 2, 5, 16, 64]),
    share=st.sampled_from([0.0, 0.02]),
    seed=st.integers(0, 2**32),
)
def test_whoever_is_not_hit_says_what_he_says_alone(
    compiled, crowded, pp, overlap, schedule, page_size, budget, share, seed
) -> None:
    rng = random.Random(seed)
    num_pages = rng.randrange(50, 80) // page_size
    requests = some_requests(rng, 30)
    raised = [0]
    config = {"pp": pp, "overlap": overlap, "schedule": schedule, "token_budget": budget, "max_running": 6}
    tried = engine(compiled, num_pages, page_size, faults_of(rng, share, raised), **config)
    with pytest.MonkeyPatch.context() as patch:
        if crowded:
            patch.setattr("worker.scheduler.kv_demand.peak_pages", pages_now)
        found, gone = drive(tried, requests, rng, aborts=0.04)
    assert len(tried.scheduler) == len(tried.readiness) == 0
    assert not any(tried.sampler._states), "a slot is left in the sampler"
    tried.reset_cache()
    assert tried.tree.pool.num_free == num_pages
    for request in requests:
        own = found[request.request_id]
        quiet = engine(compiled, 100, 4, faults_of(rng, 0.0, raised), **ALONE)
        (whole,) = drive(quiet, [request], rng, aborts=0.0)[0].values()
        if own.failure is not None:
            assert own.failure.kind == "internal" and raised[0]
        if request.request_id in gone or own.failure is not None:
            assert own.token_ids == whole.token_ids[: len(own.token_ids)]
        else:
            assert told(own) == told(whole)
