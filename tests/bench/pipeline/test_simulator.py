"""The simulator: pipelines whose behaviour follows on paper, and what the policies do to real sizes."""

import math

import numpy as np
import pytest

from bench.pipeline.layout import SCHEDULES, Setting
from bench.pipeline.simulated_replica import VOCAB_SIZE, SimulatedReplica
from bench.pipeline.simulator import Hardware, Request, SimulatedClock, errors, simulate
from pipeline.cost import CostModel
from pipeline.roofline import DEVICES, LINKS, MODELS, LinkSpec, make_stages
from pipeline.shape import BatchShape
from pipeline.stage_backlog import StageBacklog
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore

STAGES = make_stages(MODELS["llama-70b"], DEVICES["h200"], 4)
FREE = LinkSpec("free", 0.0, math.inf, 0.0, math.inf)


def run(requests, name, hardware, token_budget=1024, slo_s=None, kv_tokens=1_000_000, models=None, **more):
    """With the scheduler of the worker. `slo_s` is for uniform alone."""
    clock = SimulatedClock()
    config = WorkerConfig(
        pp=len(hardware.stages),
        max_running=1024,
        kv_tokens=kv_tokens,
        context_length=kv_tokens,
    )
    config = Setting(name, token_budget, slo_s if name == "uniform" else None).applied(config)
    costs = CostStore(models or [CostModel(seconds_of) for seconds_of in hardware.stages])
    replica = SimulatedReplica(config, costs, clock, prompt_ids)
    result = simulate(requests, replica, hardware, clock, **more)
    replica.scheduler.check_integrity()
    return result


def prompt_ids(request):
    """No two begin alike."""
    return [request.number % VOCAB_SIZE, *range(1, request.prompt)]


def steady(seconds=1.0, stages=4, **more):
    """Stages that take one time for every micro-batch."""
    return Hardware([lambda shape: seconds] * stages, plan_s=0.0, return_s=0.0, **more)


def sockets(seed=0):
    return Hardware(
        [stage.seconds for stage in STAGES], LINKS["sockets"], MODELS["llama-70b"].token_bytes, jitter=0.02, seed=seed
    )


def documents(count, rate, seed=0):
    """Long prompts with short answers: medians of 7,059 and 208 tokens, 90th percentiles of 12,985 and 371."""
    rng = np.random.default_rng(seed)
    requests, at = [], 0.0
    while len(requests) < count:
        prompt, output = int(rng.lognormal(math.log(7059), 0.476)), int(rng.lognormal(math.log(208), 0.451))
        if prompt + output <= 16384:
            at += rng.exponential(1 / rate)
            requests.append(Request(len(requests), at, prompt, output))
    return requests


def test_one_request_goes_through_the_stages_once_for_each_token():
    result = run([Request(0, 5.0, 100, 3)], "fixed_chunk", steady())
    assert result.lives[0].started_s == 5.0
    assert result.lives[0].tokens_s == pytest.approx([9.0, 13.0, 17.0])
    assert result.quantile("ttft", 0.5) == pytest.approx(4.0) and result.quantile("tbt", 0.99) == pytest.approx(4.0)
    assert result.output_tokens_per_s() == pytest.approx(3 / 17)
    parts = result.meter.fractions()
    assert parts["compute"] == pytest.approx(3 / 9) and parts["nothing_to_do"] == pytest.approx(6 / 9)


def test_links_add_latency_and_transfer():
    link = LinkSpec("slow", 0.1, 100.0, 0.0, 1.0)
    hardware = steady(link=link, token_bytes=1)
    assert run([Request(0, 0.0, 200, 1)], "fixed_chunk", hardware).seconds == pytest.approx(4 + 3 * (0.1 + 2.0))


def test_sends_that_do_not_overlap_hold_up_the_next_micro_batch():
    requests = [Request(i, 0.0, 100, 1) for i in range(3)]
    link = LinkSpec("slow", 0.0, 100.0, 0.0, 1.0)
    overlapped = run(requests, "fixed_chunk", steady(stages=2, link=link, token_bytes=1), token_budget=100)
    held = run(requests, "fixed_chunk", steady(stages=2, link=link, token_bytes=1, overlap=False), token_budget=100)
    # Two micro-batches fit into the pipeline; the third starts when the first is through, at 3.
    assert overlapped.seconds == pytest.approx(6.0)
    # A stage that sends begins its next one when that is through.
    assert held.seconds == pytest.approx(7.0)
    assert held.meter.compute_s == overlapped.meter.compute_s
    assert held.lives[1].tokens_s[0] == pytest.approx(5.0) and overlapped.lives[1].tokens_s[0] == pytest.approx(4.0)


@pytest.mark.parametrize("batches", [1, 4, 12])
def test_the_bubble_of_filling_and_draining(batches):
    """m equal micro-batches through p stages take p - 1 + m steps: of these each stage works m."""
    result = run([Request(0, 0.0, 100 * batches, 1)], "throttle", steady(), token_budget=100)
    assert result.seconds == pytest.approx(3 + batches)
    assert result.num_batches == batches


def test_stages_that_are_full_leave_no_bubble():
    requests = [Request(i, 0.0, 100, 60) for i in range(32)]
    result = run(requests, "uniform", steady(0.01), token_budget=800, measure_s=(0.3, 1.5))
    assert result.meter.bubble() < 1e-6
    assert result.meter.fractions()["compute"] == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name == "uniform" else pytest.param(name, marks=pytest.mark.bench) for name in [*SCHEDULES, "offline"]],
)
def test_every_request_gets_every_token_in_order(name):
    requests = documents(5, 4.0)
    result = run(requests, name, sockets(), 2048, slo_s=0.25, kv_tokens=50_000)
    for life in result.lives:
        assert len(life.tokens_s) == life.request.output
        assert life.request.arrived_s <= life.started_s < life.tokens_s[0]
        assert (np.diff(life.tokens_s) > 0).all()
    again = run(requests, name, sockets(), 2048, slo_s=0.25, kv_tokens=50_000)
    assert [life.tokens_s for life in again.lives] == [life.tokens_s for life in result.lives]


def test_it_can_end_early():
    result = run(documents(25, 2.5), "uniform", sockets(), slo_s=0.25, until_s=4.0)
    assert result.quantile("delay", 1.0) == math.inf
    assert 3.0 < result.seconds <= 4.0


@pytest.mark.bench
@pytest.mark.slow
def test_uniform_micro_batches_halve_the_bubble_within_the_objective():
    """A 70B model in four stages over sockets, with long prompts, near what it can carry."""
    requests = documents(50, 2.1)
    until = requests[-1].arrived_s
    ours = run(requests, "uniform", sockets(), 8192, 0.25, 1_050_000, measure_s=(3.0, until))
    theirs = run(requests, "fixed_chunk", sockets(), 768, 0.25, 1_050_000, measure_s=(3.0, until))
    assert ours.meter.bubble() < theirs.meter.bubble() / 2
    assert ours.quantile("tbt", 0.99) < 0.25
    assert ours.quantile("ttft", 0.5) < theirs.quantile("ttft", 0.5)


@pytest.mark.bench
@pytest.mark.slow
def test_decodes_alone_keep_every_stage_busy():
    requests = [Request(i, 0.0, 500, 200) for i in range(128)]
    result = run(requests, "uniform", sockets(), 8192, 0.25, measure_s=(4.0, 10.0))
    assert result.meter.bubble() < 0.05


@pytest.mark.bench
@pytest.mark.slow
def test_a_model_of_measured_costs_stands_for_the_stage():
    """Calibration: a model learned on one workload predicts the time of another."""
    learned = [CostModel(lambda shape: 2.0 * STAGES[0].seconds(shape)) for _ in STAGES]  # a poor prior
    run(documents(8, 2.0, seed=1), "uniform", sockets(), slo_s=0.25, models=learned)
    held_out = documents(8, 1.8, seed=2)
    hardware = Hardware([model.predict for model in learned], LINKS["sockets"], MODELS["llama-70b"].token_bytes)
    predicted = run(held_out, "fixed_chunk", hardware, 512)
    measured = run(held_out, "fixed_chunk", sockets(), 512)
    off = errors(
        {"fixed_512": measured.output_tokens_per_s()},
        {"fixed_512": predicted.output_tokens_per_s(), "another": 1.0},
    )
    assert set(off) == {"fixed_512"} and abs(off["fixed_512"]) < 0.05


def test_what_lies_before_the_first_stage():
    ahead = StageBacklog()
    assert ahead.free_s(1.0) == 0.0
    ahead.sent(1, 1.0, [0.5])
    ahead.sent(2, 1.1, [0.3])
    assert ahead.free_s(1.2) == pytest.approx(0.6)
    ahead.ended(1, 0, 1.7)  # later than predicted
    assert ahead.free_s(1.8) == pytest.approx(0.2)
    ahead.ended(2, 0, 1.9)
    assert ahead.free_s(1.9) == 0.0
    ahead.sent(3, 5.0, [0.1])
    assert ahead.free_s(5.0) == pytest.approx(0.1)
    ahead.failed(3)
    assert ahead.free_s(5.0) == 0.0


def test_when_a_step_has_been_through():
    ahead = StageBacklog(2)
    ahead.sent(1, 1.0, [0.5, 0.7])
    ahead.sent(2, 1.0, [0.5, 0.7])
    assert ahead.returning_s(1, 1.0) == pytest.approx(1.2)
    assert ahead.returning_s(2, 1.0) == pytest.approx(1.9)
    ahead.ended(1, 1, 2.4)  # the last stage, which is near, tells before the first one
    assert ahead.returning_s(1, 2.0) == 0.0
    assert ahead.returning_s(2, 2.5) == pytest.approx(0.6)
    ahead.ended(1, 0, 1.6)
    ahead.ended(2, 0, 2.5)
    assert ahead.returning_s(2, 2.5) == pytest.approx(0.7)
    assert ahead.free_s(2.5) == 0.0


@pytest.mark.bench
@pytest.mark.slow
def test_the_models_of_the_stages_learn_as_they_run():
    models = [CostModel(lambda shape: 3.0 * STAGES[0].seconds(shape)) for _ in STAGES]
    run(documents(6, 2.0), "uniform", sockets(), slo_s=0.25, models=models)
    shape = BatchShape([*[(4000, 1)] * 16, (2000, 512)])
    assert models[0].error() < 0.05
    assert models[0].predict(shape) == pytest.approx(STAGES[0].seconds(shape), rel=0.06)


@pytest.mark.bench
@pytest.mark.slow
def test_jobs_end_sooner_when_prompts_are_spread_over_decodes():
    """Longest outputs first: as many rounds as the longest has tokens. Stages that read weights for few tokens."""
    rng = np.random.default_rng(3)
    sizes = rng.integers(50, 300, (96, 2)).tolist()
    requests = [Request(i, 0.0, prompt, output) for i, (prompt, output) in enumerate(sizes)]
    offline, uniform = (run(requests, name, sockets(), token_budget=8192) for name in ("offline", "uniform"))
    assert offline.seconds < 0.97 * uniform.seconds
    rounds = max(output for _, output in sizes)
    assert offline.quantile("tbt", 0.5) * rounds > 0.97 * offline.seconds
    assert offline.quantile("tbt", 0.99) < 1.5 * offline.quantile("tbt", 0.5)
