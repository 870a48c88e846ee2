"""The engine with fake parts: how requests enter, fail and leave. That tokens are right is in test_exactness."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from tests.worker.engines import clock
from tests.worker.fakes import FakePending
from worker.config import WorkerConfig
from worker.engine.engine import Engine
from worker.messages import Failure, Generate, Grammar, Output, SamplingParams, SchemaCheck
from worker.structured_output import CompiledGrammar, CompilerUnavailable, GrammarError
from worker.structured_output.compiling.answer_verdict import AnswerVerdict

GREEDY = SamplingParams(max_tokens=5, temperature=0)
GRAMMAR = SamplingParams(max_tokens=5, temperature=0, grammar=Grammar("regex", "a+"))


@pytest.fixture(
    params=[{}, {"overlap": True}, {"pp": 3}, {"pp": 3, "overlap": True}], ids=["", "overlap", "pp", "pp-overlap"]
)
def make(fake_parts, request):
    """Makes (engine, parts); at the end every page and slot must be back."""
    engines = []

    def make(config: dict | None = None, **executor):
        parts = fake_parts(**{"page_size": 4, **executor})
        ready = []
        engine = Engine(
            Path("none"),
            WorkerConfig(
                **({"page_size": parts.executor.page_size, "overlap": False} | request.param | (config or {}))
            ),
            load=parts,
            on_ready=lambda: ready.append(1),
            clock=clock(),
        )
        engine.ready = ready
        engines.append((engine, parts))
        return engine, parts

    yield make
    for engine, parts in engines:
        engine.abort(list(engine.scheduler._sequences))
        engine.check_integrity()
        assert not parts.sampler.slots, "a slot is left in the sampler"
        assert not len(engine.readiness)
        engine.reset_cache()
        assert engine.tree.pool.num_free == parts.executor.num_pages
        engine.close()
        assert parts.grammars.closed


def request(request_id: str, prompt: list[int], sampling: SamplingParams = GREEDY, **fields) -> Generate:
    return Generate(request_id=request_id, prompt_ids=prompt, sampling=sampling, **fields)


def run(engine: Engine, max_steps: int = 1000) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    raise AssertionError("it does not come to an end")


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_generate_answers_in_order(make):
    engine, parts = make({"max_running": 3, "max_waiting": 4})
    prompts = [[i, i + 1, 3, 4, 5] for i in range(20)]
    seen = []
    each = [SamplingParams(max_tokens=1 + i % 7, temperature=0) for i in range(20)]
    finished = engine.generate(prompts, each, progress=seen.append)
    assert [f.token_ids for f in finished] == [
        parts.executor.generate(p, s.max_tokens) for p, s in zip(prompts, each, strict=True)
    ]
    assert {f.finish_reason for f in finished} == {"length"}
    assert seen[-1] == 20 and seen == sorted(seen)
    again = engine.generate(prompts, GREEDY)
    assert [f.cached_tokens for f in again] == [4] * 20


@pytest.mark.slow
def test_generate_goes_on_where_more_wait_than_may(make, crowded):
    """Those that were preempted wait beside as many as may."""
    engine, parts = make({"max_running": 8, "max_waiting": 8, "token_budget": 64}, num_pages=24)
    prompts = [[4 + i, i % 7] for i in range(32)]
    greedy = SamplingParams(max_tokens=24, temperature=0)
    finished = engine.generate(prompts, greedy)
    assert [f.token_ids for f in finished] == [parts.executor.generate(prompt, 24) for prompt in prompts]
    assert engine.load().preemptions > 0


def test_generate_reports_a_prompt_that_cannot_run(make):
    engine, parts = make()
    bad, good = engine.generate([[], [1, 2]], GREEDY)
    assert bad.failure is not None and bad.failure.param == "prompt"
    assert good.token_ids == parts.executor.generate([1, 2], 5)


def test_generate_leaves_nothing_behind_when_interrupted(make):
    engine, _ = make()

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3]] * 4, GREEDY, progress=interrupt)
    assert len(engine.scheduler) == 0
    engine.check_integrity()


def test_preempted_sequences_take_their_slots_again(make, crowded):
    engine, parts = make(num_pages=12)
    params = SamplingParams(max_tokens=24, temperature=0)
    prompts = [[i] * 8 for i in range(4)]
    finished = engine.generate(prompts, params)
    assert engine.load().preemptions > 0
    assert [f.token_ids for f in finished] == [parts.executor.generate(p, 24) for p in prompts]


# ---------------------------------------------------------------- failures


def test_a_failing_model_fails_the_batch_and_nobody_else(make, caplog):
    engine, parts = make({"max_running": 2}, poison=49)
    for name, prompt in (("good", [1, 2, 3, 4, 5]), ("bad", [1, 49]), ("later", [3, 4, 5, 6, 7, 8])):
        engine.add(request(name, prompt))
    outputs = run(engine)
    for name in ("good", "bad"):
        (output,) = outputs[name]
        assert output.failure is not None and output.failure.kind == "internal"
        assert "poisoned" in output.failure.message
    assert tokens(outputs["later"]) == parts.executor.generate([3, 4, 5, 6, 7, 8], 5)
    assert engine.load().failed == 2
    lines = [record for record in caplog.records if "the model failed" in record.getMessage()]
    assert sorted(record.sequence for record in lines if hasattr(record, "sequence")) == ["bad", "good"]
    assert [record for record in lines if record.exc_info], "the traceback is there once a step"


def test_pages_of_a_failed_step_are_not_cached(make):
    engine, parts = make({"token_budget": 8}, poison=49)
    prompt = [8] * 12
    engine.add(request("bad", [*prompt, 49]))
    run(engine)
    assert engine.tree.num_cached == 2, "the two pages of the first step, not the one of the second"
    parts.executor.poison = None
    (finished,) = engine.generate([prompt], GREEDY)
    assert finished.token_ids == parts.executor.generate(prompt, 5)


def test_a_lost_device_is_an_error_with_a_name(make, monkeypatch):
    from worker.engine import steps as module

    engine, _ = make(poison=49)
    monkeypatch.setattr(module, "_is_lost", lambda device: True)
    engine.add(request("bad", [49]))
    with pytest.raises(module.DeviceLost, match="step 1"):
        engine.step()


def test_one_that_the_sampler_cannot_take_fails_alone(make):
    engine, parts = make()
    parts.sampler.refuse = 9
    engine.add(request("bad", [9, 1, 2]))
    engine.add(request("good", [1, 2, 3]))
    outputs = run(engine)
    (output,) = outputs["bad"]
    assert output.failure is not None and output.failure.kind == "internal"
    assert tokens(outputs["good"]) == parts.executor.generate([1, 2, 3], 5)


def test_what_is_learned_of_a_step_is_without_those_that_were_withdrawn(make, monkeypatch):
    engine, parts = make()
    planned, computed = {}, {}
    remember, forward = engine.timeline.planned, parts.executor.forward
    monkeypatch.setattr(engine.timeline, "planned", lambda s: planned.update({s.plan.step: s.shape}) or remember(s))
    monkeypatch.setattr(parts.executor, "forward", lambda p: computed.update({p.step: p.num_tokens}) or forward(p))
    parts.sampler.refuse = 9
    engine.add(request("bad", [9] * 40))
    engine.add(request("good", [1, 2, 3]))
    run(engine)
    assert planned[1].tokens == computed[1] == 3 and planned[1].chunks == 1
    assert {step: shape.tokens for step, shape in planned.items()} == computed


def test_one_that_cannot_be_sampled_fails_alone(make):
    engine, parts = make()
    parts.sampler.choke = 9
    engine.add(request("good", [1, 2, 3]))
    engine.add(request("bad", [9, 1, 2]))
    engine.add(request("too", [2, 2, 3]))
    outputs = run(engine)
    (output,) = outputs["bad"]
    assert output.failure is not None and (output.failure.kind, output.failure.param) == ("invalid", "regex")
    assert tokens(outputs["good"]) == parts.executor.generate([1, 2, 3], 5)
    assert tokens(outputs["too"]) == parts.executor.generate([2, 2, 3], 5)


def test_a_broken_sampler_fails_the_batch_and_nothing_leaks(make):
    engine, parts = make({"token_budget": 4})
    engine.add(request("a", [1, 2, 3]))
    engine.add(request("long", [1, 5, 2, 3, 4, 5]))
    parts.sampler.broken = True
    (output,) = engine.step()
    assert output.request_id == "a" and "broken" in output.failure.message
    parts.sampler.broken = False
    assert tokens(run(engine)["long"]) == parts.executor.generate([1, 5, 2, 3, 4, 5], 5)


def test_tokens_that_are_not_to_be_had_end_their_batch_only(make, monkeypatch):
    engine, parts = make({"token_budget": 4})
    engine.add(request("a", [1, 2, 3]))
    engine.add(request("long", [1, 5, 2, 3, 4, 5]))

    def fail(self):
        raise RuntimeError("no copy came")

    with monkeypatch.context() as patch:
        patch.setattr(FakePending, "result", fail)
        outputs = engine.step() or engine.step()
    (output,) = outputs
    assert output.request_id == "a" and "no copy came" in output.failure.message
    assert tokens(run(engine)["long"]) == parts.executor.generate([1, 5, 2, 3, 4, 5], 5)


def test_tokens_of_a_lost_device_end_the_engine(make, monkeypatch):
    from worker.engine import steps as module

    def fail(self):
        raise RuntimeError("an illegal memory access was encountered")

    engine, _ = make()
    with monkeypatch.context() as patch:
        patch.setattr(FakePending, "result", fail)
        patch.setattr(module, "_is_lost", lambda device: True)
        with pytest.raises(module.DeviceLost, match="step 1"):
            engine.generate([[1, 2, 3]], GREEDY)


# ---------------------------------------------------------------- grammars


def test_waits_for_its_grammar_and_holds_nobody_up(make):
    engine, parts = make()
    engine.add(msgspec.structs.replace(request("constrained", [1, 2, 3], GRAMMAR), client="c"))
    assert not engine.has_work and engine.load().waiting == 1 and parts.grammars.clients == ["c"]
    engine.add(request("free", [4, 5]))
    assert set(run(engine)) == {"free"}
    parts.grammars.futures[0].set_result(None)
    assert engine.ready and engine.has_work
    outputs = run(engine)
    assert tokens(outputs["constrained"]) == parts.executor.generate([1, 2, 3], 5)


@pytest.mark.parametrize(
    ("error", "kind", "param"),
    [
        (GrammarError("no such thing"), "invalid", "regex"),
        (CompilerUnavailable("no such thing"), "unavailable", None),
        (RuntimeError("no such thing"), "internal", None),
    ],
)
def test_a_grammar_that_does_not_compile_fails_its_request(make, error, kind, param):
    engine, parts = make()
    engine.add(request("bad", [1, 2, 3], GRAMMAR))
    engine.add(request("good", [1, 2, 3]))
    parts.grammars.futures[0].set_exception(error)
    outputs = run(engine)
    (output,) = outputs["bad"]
    assert isinstance(output.failure, Failure)
    assert (output.failure.kind, output.failure.param) == (kind, param)
    assert "no such thing" in output.failure.message
    assert tokens(outputs["good"]) == parts.executor.generate([1, 2, 3], 5)


def test_abort_while_the_grammar_compiles(make):
    engine, parts = make()
    engine.add(request("a", [1, 2, 3], GRAMMAR))
    engine.abort(["a"])
    assert parts.grammars.futures[0].cancelled()
    engine.add(request("a", [1, 2, 3], GRAMMAR))  # the same id again: not to be taken for the first
    assert run(engine) == {}
    parts.grammars.futures[1].set_result(None)
    assert tokens(run(engine)["a"]) == parts.executor.generate([1, 2, 3], 5)


def test_a_refused_request_compiles_nothing(make):
    engine, parts = make()
    engine.add(request("a", [], GRAMMAR))
    assert run(engine)["a"][0].finish_reason == "error"
    assert parts.grammars.futures == []


class Anything(CompiledGrammar):
    """A grammar of all outputs."""

    def matcher(self):
        return SimpleNamespace(stop_token_ids=[])


def held(make):
    """An engine whose only answer has ended, and waits for its verdict."""
    engine, parts = make()
    loose = msgspec.structs.replace(GRAMMAR, max_tokens=9, grammar=Grammar("json_schema", "{}", strict=False))
    compiled = Anything(None, "json_schema", not_enforced=["contains at #"])
    stop_at = parts.executor.generate([1, 2, 3], 3)[-1]
    loose = msgspec.structs.replace(loose, stop_token_ids=(stop_at,))
    engine.add(request("loose", [1, 2, 3], loose))
    parts.grammars.futures[0].set_result(compiled)
    outputs = run(engine)["loose"]
    assert outputs[0].check == SchemaCheck(["contains at #"]) and outputs[-1].finish_reason is None
    return engine, parts


def test_an_answer_is_held_until_it_has_been_judged(make):
    engine, parts = held(make)
    ((answer, future),) = parts.grammars.answers
    assert answer.token_ids == parts.executor.generate([1, 2, 3], 3)[:-1] and not engine.has_work
    future.set_result(AnswerVerdict("at #: no", 1))
    assert engine.has_work
    (last,) = run(engine)["loose"]
    assert last.finish_reason == "stop" and last.check == SchemaCheck(["contains at #"], False, "at #: no", 1)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_verdict_for_a_request_that_has_gone_is_no_work_for_ever(make, has_begun):
    engine, parts = held(make)
    ((_, future),) = parts.grammars.answers
    if has_begun:
        future.set_running_or_notify_cancel()
    engine.abort(["loose"])
    if has_begun:
        future.set_result(AnswerVerdict(None))
    assert engine.has_work
    assert engine.step() == [] and not engine.has_work


# ---------------------------------------------------------------- log probabilities of prompts


@pytest.mark.parametrize("budget", [1, 3, 512])
@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("warm", [False, True])
def test_prompt_logprobs_of_every_position(make, budget, length, warm):
    engine, parts = make({"token_budget": budget})
    prompt = [(5 * i + 3) % 50 for i in range(length)]
    if warm:
        engine.generate([prompt], GREEDY)
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=1)
    (finished,) = engine.generate([prompt], params)
    assert finished.token_ids == parts.executor.generate(prompt, 3)
    assert finished.cached_tokens == 0
    first, *rest = finished.prompt_logprobs
    assert first is None
    assert [p.token_id for p in rest] == prompt[1:]
    # The fake model puts all its weight on one token: the first of those it would say after each part of the prompt.
    likeliest = [parts.executor.generate(prompt[:i], 1)[0] for i in range(1, length)]
    assert [p.top[0][0] for p in rest] == likeliest
    row = torch.full((50,), -1.0)
    row[0] = 9.0
    best = float(row.log_softmax(0)[0])
    assert [p.rank for p in rest] == [1 if p.token_id == top else 2 for p, top in zip(rest, likeliest, strict=True)]
    assert [p.logprob for p in rest] == pytest.approx(
        [best if token == top else best - 10 for token, top in zip(prompt[1:], likeliest, strict=True)], abs=1e-4
    )


@pytest.mark.parametrize("budget", [1, 3, 512])
@pytest.mark.parametrize("start", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("warm", [0, 4, 14])
def test_prompt_logprobs_from_a_position_on(make, budget, start, warm):
    """They are those of the whole prompt, what comes before is taken from the cache, and its logits are not made."""
    engine, parts = make({"token_budget": budget})
    prompt = [(5 * i + 3) % 50 for i in range(14)]
    if warm:
        engine.generate([prompt[:warm]], GREEDY)
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=1)
    (finished,) = engine.generate([prompt], msgspec.structs.replace(params, prompt_logprobs_start=start))
    assert finished.token_ids == parts.executor.generate(prompt, 3)
    assert [p.token_id for p in finished.prompt_logprobs] == prompt[start:]
    page = parts.executor.page_size
    assert finished.cached_tokens == min(warm // page * page, (start - 1) // page * page)
    engine.reset_cache()
    (whole,) = engine.generate([prompt], params)
    assert finished.prompt_logprobs == whole.prompt_logprobs[start:]


def test_prompt_logprobs_of_the_end_share_a_prefix_that_is_computed_once(make):
    """What is scored after a common prompt, as choices are: the others wait for the prompt's pages."""
    engine, parts = make()
    common = [(5 * i + 3) % 50 for i in range(13)]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, prompt_logprobs_start=13)
    prompts = [[*common, number, 7] for number in range(4)]
    finished = engine.generate(prompts, params)
    page = parts.executor.page_size
    assert [one.cached_tokens for one in finished] == [0, *[12 // page * page] * 3]
    assert [[p.token_id for p in one.prompt_logprobs] for one in finished] == [prompt[13:] for prompt in prompts]


def test_prompt_logprobs_survive_a_preemption(make, crowded):
    engine, parts = make({"token_budget": 2}, num_pages=12)
    long = [(5 * i + 3) % 50 for i in range(20)]
    params = SamplingParams(max_tokens=10, temperature=0, prompt_logprobs=0)
    engine.add(request("first", [1] * 8, SamplingParams(max_tokens=38, temperature=0)))
    for _ in range(4):
        engine.step()
    engine.add(request("echo", long, params))
    outputs = run(engine)
    assert engine.load().preemptions > 0
    (told,) = [o.prompt_logprobs for o in outputs["echo"] if o.prompt_logprobs is not None]
    assert [p.token_id for p in told[1:]] == long[1:]
    assert tokens(outputs["echo"]) == parts.executor.generate(long, 10)


def test_prompt_logprobs_are_not_told_again_when_resumed(make):
    engine, parts = make()
    prompt = [1, 2, 3, 4, 5]
    whole = parts.executor.generate(prompt, 5)
    params = SamplingParams(max_tokens=5, temperature=0, prompt_logprobs=0, prompt_logprobs_start=2)
    engine.add(request("a", prompt, params, output_ids=whole[:2]))
    outputs = run(engine)["a"]
    assert tokens(outputs) == whole[2:]
    assert all(o.prompt_logprobs is None for o in outputs)


def test_after_the_last_request_there_is_nothing_to_do(make, monkeypatch):
    engine, _ = make()
    said: list[str] = []
    monkeypatch.setattr(engine.timeline, "nothing", said.append)
    engine.add(request("a", [1, 2, 3]))
    run(engine)
    assert said[-1:] == ["nothing_to_do"]
