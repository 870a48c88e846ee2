"""Pipelines: the tokens of one rank whatever the stages, with several steps in flight; and the scheduler's own part of
that, against a model that is a hash."""

import json
import math
import random
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.meter import Span
from pipeline.schedule import POLICIES
from pipeline.stage_balanced import StageBalanced
from tests.worker.covering import SHARDED
from tests.worker.driver import Driver, prompt
from tests.worker.pipelines import pipeline
from tests.worker.references import GREEDY, LENGTHS, batch, expected, prompts, settings
from worker.config import WorkerConfig
from worker.engine.engine import Engine
from worker.errors import DeviceLost
from worker.executor.executor import ForwardOutput
from worker.executor.model_runner import ModelRunner
from worker.executor.multi_rank import MultiRankExecutor
from worker.executor.weight_loader import load_weights
from worker.messages import Generate, SamplingParams
from worker.models.config import decoder_config, read_config
from worker.models.sharding import Shard
from worker.scheduler.scheduled_step import ScheduledStep
from worker.step import PENDING, Plan, StepTime

# ---------------------------------------------------------------- the scheduler


class Piped(Driver):
    """As the engine of a pipeline does: a step is computed when it is the oldest under way. With `hands_back`, steps
    are planned too when its tokens are there and the scheduler does not know them yet."""

    def __init__(self, executor, hands_back: bool = False, **config) -> None:
        self.under_way: deque[ScheduledStep] = deque()
        self.hands_back = hands_back
        self.sampled: ScheduledStep | None = None
        self.handed: dict[ScheduledStep, torch.Tensor] = {}  # to steps that wait for them
        super().__init__(executor, **config)

    def returning_s(self, step: ScheduledStep) -> float:
        return 0.0 if step is self.sampled else math.inf

    def step(self) -> Plan | None:
        self.now_s += 0.01
        self.fill()
        if not self.under_way:
            self.collect()
            return None
        step = self.under_way[0]
        known = self.executor.last_tokens.clone()
        if step in self.handed:
            self.executor.last_tokens.copy_(self.handed.pop(step))
        rows = self.executor.forward(step.plan).logits.argmax(1)
        self.executor.last_tokens.copy_(known)
        update = self.sample(step, rows)
        assert (self.scheduler._table.slot[step.rows[update[0]]] == step.plan.slots[update[0]]).all(), "another's"
        if self.hands_back:
            self.sampled = step
            self.fill()
        self.under_way.popleft()
        self.scheduler.update(step, *update, {})
        self.collect()
        return step.plan

    def fill(self) -> None:
        while step := self.scheduler.schedule().step:
            assert 0 < step.plan.num_tokens <= self.config.token_budget
            if waits := self.waiting(step.plan):
                back = self.sampled
                assert back is not None and step.tokens_from_step == back.plan.step, (
                    "no stage but the last has the token"
                )
                assert set(waits) <= set(back.plan.slots[back.samples & ~back.dropped].tolist())
                self.handed[step] = self.executor.last_tokens.clone()
            else:
                assert step.tokens_from_step is None
            self.under_way.append(step)
            assert len(self.under_way) <= self.scheduler.policy.most_in_flight + (self.sampled is self.under_way[0])

    def waiting(self, plan: Plan) -> list[int]:
        return [chunk.slot for chunk in plan.chunks if PENDING in chunk.token_ids]

    def land(self) -> None:
        while self.under_way:
            self.step()


@pytest.fixture
def piped(fake_executor) -> Callable[..., Piped]:
    def make(pp: int = 4, num_pages: int = 64, **config) -> Piped:
        return Piped(fake_executor(num_pages=num_pages, page_size=4), pp=pp, **config)

    return make


def test_chunks_follow_each_other_and_a_decode_waits_for_its_token(piped: Callable[..., Piped]) -> None:
    d = piped(token_budget=4, schedule="uniform")
    d.add("a", prompt(14), max_tokens=3)
    d.step()
    assert [len(step.plan) for step in d.under_way] == [1, 1, 1], "the whole prompt is under way"
    assert [plan.num_tokens for plan in d.run()] == [4, 4, 2, 1, 1]
    assert d.tokens("a") == d.executor.generate(prompt(14), 3)


def test_the_oldest_step_may_overlap_oldest_when_its_tokens_are_about_to_come(piped: Callable[..., Piped]) -> None:
    d = piped(pp=2, schedule="uniform", hands_back=True)
    for i in range(4):
        d.add(str(i), prompt(5, seed=i), max_tokens=6 + i)
    plans = d.run()
    waits = [len(d.waiting(plan)) for plan in plans]
    assert sum(waits) >= 12, "most decodes set out with tokens that nobody knew yet"
    assert all(d.tokens(str(i)) == d.executor.generate(prompt(5, seed=i), 6 + i) for i in range(4))
    assert sum(plan.num_tokens for plan in plans) == sum(5 + 5 + i for i in range(4)), "no token is computed twice"


def test_whether_the_oldest_may_overlap_oldest_is_asked_with_all_that_waits(
    piped: Callable[..., Piped], monkeypatch: pytest.MonkeyPatch
) -> None:
    d = piped(pp=2, schedule="uniform", hands_back=True, max_running=2)
    policy, asked, begun = d.scheduler.policy, [], []
    counts, begin = policy.may_overlap_oldest, policy.begin
    of = lambda view: (view.waiting, view.waiting_tokens, view.blocked_tokens)  # noqa: E731
    monkeypatch.setattr(policy, "may_overlap_oldest", lambda view: asked.append(of(view)) or counts(view))
    monkeypatch.setattr(policy, "begin", lambda view: begun.append(of(view)) or begin(view))
    for i in range(4):
        d.add(str(i), prompt(5, seed=i), max_tokens=4 + i)
    d.run()
    assert {(0, 0, 10), (2, 10, 0)} <= set(asked) <= set(begun)


def test_decodes_are_spread_over_the_steps_in_flight(piped: Callable[..., Piped]) -> None:
    d = piped(pp=4, num_pages=400, schedule="uniform")
    for i in range(10):
        d.add(str(i), prompt(5, seed=i), max_tokens=40)
    sizes = [plan.num_tokens for plan in d.run() if plan.lengths.max() == 1]
    assert max(sizes[5:]) == 2, "ten over five"
    assert all(d.tokens(str(i)) == d.executor.generate(prompt(5, seed=i), 40) for i in range(10))
    # Nobody waits while others are served again and again.
    assert len(sizes) <= 40 * 5 + 8


@pytest.mark.parametrize("schedule", sorted(POLICIES))
def test_no_decode_starves_beside_prompts(schedule: str, piped: Callable[..., Piped]) -> None:
    """While prompts never end to come, nobody waits longer than for every place in flight twice."""
    d = piped(pp=3, num_pages=800, schedule=schedule, token_budget=24, max_running=64)
    for i in range(6):
        d.add(str(i), prompt(7, seed=i), max_tokens=30)
    ages = dict.fromkeys(map(str, range(6)), 0)
    seen = dict.fromkeys(ages, 0)
    for turn in range(200):
        d.add(f"prompt {turn}", prompt(20, seed=turn), max_tokens=1)
        d.step()
        for name in ages:
            got = len(d.tokens(name))
            ages[name] = 0 if got > seen[name] or not got else ages[name] + 1
            seen[name] = got
        waiting = [age for name, age in ages.items() if d.reason(name) is None]
        assert max(waiting, default=0) <= 2 * d.scheduler.policy.most_in_flight
    assert all(d.reason(name) == "length" for name in ages)


@pytest.mark.slow
@examples(max_examples=150, deadline=None)
@given(
    pp=st.integers(2, 4),
    schedule=st.sampled_from(sorted(POLICIES)),
    num_pages=st.integers(2, 12),
    page_size=st.integers(1, 5),
    budget=st.integers(1, 12),
    eos=st.sampled_from([(), (3, 7, 11, 20)]),
    aborts=st.sets(st.integers(0, 7), max_size=2),
    hands_back=st.booleans(),
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 12), st.integers(-1, 1)), min_size=1, max_size=8
    ),
)
def test_every_request_ends_and_is_right(
    fake_executor, pp, schedule, num_pages, page_size, budget, eos, aborts, hands_back, requests
) -> None:
    executor = fake_executor(num_pages=num_pages, page_size=page_size)
    d = Piped(executor, hands_back, pp=pp, schedule=schedule, token_budget=budget, max_running=6, eos=eos)
    for i, (stem, length, max_tokens, priority) in enumerate(requests):
        d.add(str(i), prompt(20, seed=stem)[:length], max_tokens=max_tokens, priority=priority)
    for i in sorted(aborts):
        d.step()
        d.scheduler.abort([str(i)])
        d.scheduler.check_integrity()
    d.run(3000)
    for i, (stem, length, max_tokens, _) in enumerate(requests):
        if length + 1 > d.executor.context_length:
            assert d.failure(str(i)).param == "prompt"
            continue
        whole = d.executor.generate(prompt(20, seed=stem)[:length], max_tokens, eos)
        assert d.tokens(str(i)) == (whole[: len(d.tokens(str(i)))] if i in aborts else whole)
    d.tree.reset()
    assert d.tree.pool.num_free == num_pages


def test_the_slot_of_one_that_is_preempted_may_be_anothers_before_its_step_ends(piped: Callable[..., Piped]) -> None:
    d = piped(pp=4, max_running=1)
    d.add("a", prompt(8), max_tokens=6)
    step = d.scheduler.schedule().step
    assert step is not None
    d.under_way.append(step)
    d.add("b", prompt(9, seed=1), max_tokens=3, priority=1)
    d.scheduler._preemption.preempt(next(iter(d.scheduler.running)))
    d.run()
    assert d.tokens("a") == d.executor.generate(prompt(8), 6)
    assert d.tokens("b") == d.executor.generate(prompt(9, seed=1), 3)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("name", "load_format", "cut"),
    [
        *(
            (name, load, None)
            for name in ("llama_biased_tied", "qwen3", "gemma3", "dots1")
            for load in ("auto", "dummy")
        ),
        ("qwen3", "auto", (1, 1, 2)),
    ],
)
def test_each_stage_has_its_layers_weights(
    name: str, load_format: str, cut: tuple[int, ...] | None, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(name)
    whole_config = decoder_config(read_config(folder))

    def loaded(shard: Shard) -> dict[str, torch.Tensor]:
        return load_weights(folder, shard, torch.device("cpu"), torch.float32, load_format)

    whole = loaded(Shard(whole_config))
    seen: set[str] = set()
    for stage in range(3):
        shard = Shard(whole_config, stage=stage, stages=3, cut=cut)
        assert cut is None or len(shard.layers) == shard.config.num_layers == cut[stage]
        own = {
            f"layers.{int(key.split('.')[1]) + shard.layers.start}.{key.split('.')[2]}" if "." in key else key: value
            for key, value in loaded(shard).items()
        }
        for key, value in own.items():
            assert torch.equal(value, whole[key])
        assert not {key for key in own.keys() & seen if key != "embedding"}
        seen |= own.keys()
    assert seen == whole.keys()


def test_more_stages_than_layers(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=r"pp=5 .*\b4 layers"):
        Shard(decoder_config(read_config(tiny_model("llama"))), stages=5)


def test_a_cut_that_does_not_fit(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=r"stage_layers=2,3 .*\b5 layers\b.*\b4\b"):
        Shard(decoder_config(read_config(tiny_model("llama"))), stages=2, cut=(2, 3))


def test_layers_that_share_keys_and_values_are_not_parted(tiny_model: Callable[[str], Path]) -> None:
    whole = decoder_config(read_config(tiny_model("gemma4")))
    assert [Shard(whole, stage=stage, stages=2).layers for stage in range(2)] == [range(1), range(1, 5)]
    with pytest.raises(ValueError, match=r"stage_layers=3,2 .*\blayer 1\b"):
        Shard(whole, stages=2, cut=(3, 2))
    with pytest.raises(ValueError, match=r"pp=3 .*\b2 layers"):
        Shard(whole, stages=3)
    with pytest.raises(ValidationError, match=r"stage_layers=1,2,1 .*\b3 stages\b.*\bpp=2"):
        WorkerConfig(pp=2, stage_layers="1,2,1")
    with pytest.raises(ValidationError, match="stage_layers=4,0 "):
        WorkerConfig(pp=2, stage_layers="4,0")


# ---------------------------------------------------------------- the same tokens


def said(engine: Engine, sampling: SamplingParams = GREEDY, count: int = len(LENGTHS)) -> list[list[int]]:
    results = engine.generate(batch()[:count], sampling)
    assert not any(result.failure for result in results)
    return [result.token_ids for result in results]


def said_in_a_crowd(engine: Engine) -> list[list[int]]:
    """Of prompts whose outputs are long enough that not all have room to their ends, whatever the timing."""
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return [finished.token_ids for finished in engine.generate(prompts(9), sampling)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_every_architecture(name: str, tiny_model: Callable[[str], Path]) -> None:
    with pipeline(tiny_model(name), pp=2, token_budget=16) as engine:
        assert said(engine) == expected(tiny_model(name))


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "stage_layers"), [(1, "1,6"), (2, "4,3"), (1, "5,2")])
def test_stages_with_one_kind_of_sublayers(tp: int, stage_layers: str, tiny_model: Callable[[str], Path]) -> None:
    """The first has Mamba2 alone; the last an odd number of sublayers; the last has MLPs alone."""
    with pipeline(tiny_model("nemotron_h"), pp=2, tp=tp, token_budget=16, stage_layers=stage_layers) as engine:
        assert said(engine) == expected(tiny_model("nemotron_h"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pp", "tp", "changes"),
    [
        (2, 1, {}),
        (4, 1, {}),
        (4, 1, {"overlap": True}),
        (2, 2, {}),
        (2, 1, {"stage_layers": "3,1"}),
        *((2, 1, {"schedule": name, "token_budget": 40}) for name in POLICIES if name != "uniform"),
        (2, 1, {"tbt_slo": 0.004, "token_budget": 40}),
    ],
)
def test_batched_chunked_cached_and_preempted(
    pp: int, tp: int, changes: dict, tiny_model: Callable[[str], Path], crowded: None
) -> None:
    with closing(Engine(tiny_model("llama"), settings())) as alone:
        wanted = said_in_a_crowd(alone)
    crowd = {"token_budget": 11, "kv_tokens": 160, "page_size": 4, **changes}
    with pipeline(tiny_model("llama"), pp=pp, tp=tp, **crowd) as engine:
        assert said_in_a_crowd(engine) == wanted
        assert engine.load().preemptions > 0
        assert said_in_a_crowd(engine) == wanted
        assert engine.load().cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pp", "tp"), [("qwen3_next", 1, 2), ("granitemoehybrid", 1, 2), ("lfm2", 2, 2)])
def test_recurrent_states_go_on_from_checkpoints(
    name: str, pp: int, tp: int, tiny_model: Callable[[str], Path], crowded: None
) -> None:
    with closing(Engine(tiny_model(name), settings())) as alone:
        wanted = said_in_a_crowd(alone)
    crowd = {"token_budget": 24, "kv_tokens": 80, "page_size": 4, "state_checkpoints": 40, "checkpoint_interval": 8}
    with pipeline(tiny_model(name), pp=pp, tp=tp, **crowd) as engine:
        assert said_in_a_crowd(engine) == wanted
        assert engine.load().preemptions > 0
        assert said_in_a_crowd(engine) == wanted
        assert engine.load().cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "tp"), [(2, 2), (3, 1)])
def test_tokens_go_from_the_last_stage_to_the_first(
    pp: int, tp: int, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StageBalanced, "LEAD_S", 1e9)  # whatever the time
    with pipeline(tiny_model("llama"), pp=pp, tp=tp, overlap=True) as engine:
        expect, waits = engine.executor.announce, []
        engine.executor.announce = lambda plan: waits.append(int((plan.token_ids == PENDING).sum())) or expect(plan)
        assert said(engine) == expected(tiny_model("llama"))
        assert sum(waits) > len(LENGTHS) * GREEDY.max_tokens / 2, "of decodes most"
        meter = engine.meter()
        assert meter.num_batches == engine.load().steps
        sent = {one.step: one.planned_s for one in meter._done}
        ended = {one.step: one.spans[-1].end_s for one in meter._done}
        assert all(sent[one.step] >= ended[one.after] for one in meter._done if one.after is not None)
        # Seeds are the sampler's, which counts on the last stage what nobody else knows yet.
        random_s = SamplingParams(max_tokens=12, temperature=0.8, seed=7, frequency_penalty=0.5, ignore_eos=True)
        tokens = said(engine, random_s, 3)
    with closing(Engine(tiny_model("llama"), settings())) as engine:
        assert said(engine, random_s, 3) == tokens


@pytest.mark.slow
def test_all_stages_tell_when_they_computed_each_step(tiny_model: Callable[[str], Path]) -> None:
    with pipeline(tiny_model("llama"), pp=3, tp=2, token_budget=16) as engine:
        ran: list[dict[int, Span]] = [{}, {}, {}]
        take = engine.timeline.record

        def taken(told: list[StepTime]) -> None:
            for stage, step, span in told:
                assert step not in ran[stage] and step == len(ran[stage]) + 1
                ran[stage][step] = span
            take(told)

        engine.timeline.record = taken
        said(engine)
        load = engine.load()
        while min(map(len, ran)) < load.steps:
            engine._steps.record_times()
        assert engine.timeline.meter.num_batches == load.steps
        assert [model.num_observed for model in engine.costs.models] == [load.steps] * 3
        assert len(load.stage_seconds) == 3 and all(spent["compute"] > 0 for spent in load.stage_seconds)
        events = json.loads(engine.trace())["traceEvents"]
        assert sum(event["ph"] == "X" and event["tid"] == 0 for event in events) == 3 * load.steps
    for stage, spans in enumerate(ran):
        for step, span in spans.items():
            assert span.received_s <= span.begin_s <= span.end_s
            assert stage == 0 or ran[stage - 1][step].end_s <= span.begin_s
            assert step == 1 or spans[step - 1].end_s <= span.begin_s


@pytest.mark.slow
def test_receives_that_are_begun_when_they_are_needed(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs."""
    monkeypatch.setattr("worker.parallel.pipeline_stage.RECEIVES_AHEAD", 0)
    with pipeline(tiny_model("llama"), pp=3, tp=2, overlap=True, token_budget=11) as engine:
        assert said(engine) == expected(tiny_model("llama"))


def test_log_probabilities_of_prompts_whose_chunks_are_under_way(tiny_model: Callable[[str], Path]) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=2, logprobs=2)
    folder = tiny_model("llama")
    with closing(Engine(folder, settings())) as engine:
        alone = engine.generate(batch()[:4], sampling)
    with pipeline(folder, pp=2, token_budget=5) as engine:
        for got, wanted in zip(engine.generate(batch()[:4], sampling), alone, strict=True):
            assert got.token_ids == wanted.token_ids
            assert got.prompt_logprobs is not None and wanted.prompt_logprobs is not None
            assert len(got.prompt_logprobs) == len(wanted.prompt_logprobs)
            for one, other in zip(got.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
                assert one is not None and other is not None
                assert one.token_id == other.token_id and one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_closing_with_steps_under_way(tiny_model: Callable[[str], Path]) -> None:
    rng = random.Random(5)
    with pipeline(tiny_model("llama"), pp=4, token_budget=8) as engine:
        for i in range(4):
            ids = [rng.randrange(4, 131) for _ in range(60)]
            engine.add(Generate(request_id=str(i), prompt_ids=ids, sampling=GREEDY))
        engine.step()
        assert len(engine._loop._announced) == 5
        engine.abort(["0", "1", "2", "3"])


def test_one_that_fails_where_the_leading_rank_has_no_link_to(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, broken = ModelRunner.forward, []

    def fail(runner: ModelRunner, plan: Plan) -> ForwardOutput:
        if broken and (runner.stage.index, runner.stage.communicator.rank) == (0, 1):
            raise MemoryError("no more")
        return forward(runner, plan)

    monkeypatch.setattr(ModelRunner, "forward", fail)
    with pipeline(tiny_model("llama"), fails=True, tp=2, pp=2) as engine:
        assert said(engine) == expected(tiny_model("llama"))
        broken.append(True)
        with pytest.raises(DeviceLost, match=r"^rank 1: MemoryError: no more$"):
            said(engine)


@pytest.mark.slow
def test_processes_and_one_that_is_killed(tiny_model: Callable[[str], Path]) -> None:
    with closing(Engine(tiny_model("llama"), settings(pp=3, token_budget=16))) as engine:
        assert said(engine) == expected(tiny_model("llama"))
        assert isinstance(engine.executor, MultiRankExecutor)
        killed = engine.executor._processes[1]
        killed.kill()
        with pytest.raises(DeviceLost, match=r"^rank 1: .* -9$"):
            said(engine)
    assert not psutil.pid_exists(killed.pid)
