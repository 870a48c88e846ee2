"""The schedules of other systems."""

import pytest

from bench.pipeline.baselines import BASELINES, Hybrid
from bench.pipeline.layout import SCHEDULES, Setting
from pipeline.policy import PolicySettings
from pipeline.schedule import POLICIES, make_policy
from pipeline.shape import BatchShape
from tests.pipeline.filling import fill, view
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore


def policy(name, token_budget=1024):
    return make_policy(BASELINES[name], PolicySettings(4, token_budget))


def test_baselines_are_choices_of_the_benchmark_and_not_of_a_replica():
    assert set(SCHEDULES) == {"uniform", "fixed_chunk", "prefill_first", "hybrid", "throttle"}
    assert not set(BASELINES) & set(POLICIES)
    with pytest.raises(ValueError, match="schedule"):
        WorkerConfig(schedule="hybrid")
    config = Setting("hybrid", 512).applied(WorkerConfig(pp=2))
    assert isinstance(CostStore().policy(config, overlap=True), Hybrid)
    config = Setting("uniform", 2048, 0.25).applied(WorkerConfig(pp=2))
    assert (config.schedule, config.token_budget, config.tbt_slo) == ("uniform", 2048, 0.25)


@pytest.mark.parametrize("name", BASELINES)
def test_no_more_are_in_flight_than_there_are_stages(name):
    flight = [BatchShape([(0, 100)])] * 4
    assert policy(name).begin(view([100] * 8, [5000], in_flight=flight[1:])) is not None
    assert policy(name).begin(view([100] * 8, [5000], in_flight=flight)) is None


@pytest.mark.parametrize("name", BASELINES)
def test_a_preempted_chunk_can_be_added_again(name):
    budget = policy(name).begin(view([500] * 4, [300]))
    fill(budget, prompts=[(0, 300)])
    size = budget.shape.tokens
    assert size > 0
    budget.remove(0, size)
    assert budget.shape.tokens == 0 and budget.tokens_left == 1024 and budget.chunk(0, 300, 300) == size


def test_prompts_go_first_and_alone():
    first = policy("prefill_first")
    assert fill(first.begin(view([50] * 24, [700, 400])), [50] * 24, [(0, 700), (0, 400)]) == (0, [700, 0])
    assert fill(first.begin(view([50] * 24)), [50] * 24, [(0, 700)]) == (24, [0])
    # The token after a prompt whose last chunk is in flight needs no room for prompts.
    assert fill(first.begin(view([500])), [500], [(30, 1), (0, 2)]) == (1, [1, 0])


def test_hybrid_batches_hold_whole_prompts_and_decodes():
    orca = policy("hybrid")
    prompts = [(0, 700), (0, 400), (0, 300)]
    assert fill(orca.begin(view([50] * 24, [1400])), [50] * 24, prompts) == (24, [700, 0, 300])
    # A prompt that no micro-batch could hold is cut, or it would never start.
    assert fill(orca.begin(view([50] * 24, [3000])), [50] * 24, [(0, 3000)]) == (24, [1000])


def test_a_prompt_that_does_not_fit_next_to_the_decodes_is_cut():
    """Otherwise the rest of a long prompt would wait for as long as others decode."""
    hybrid = policy("hybrid", token_budget=512)
    assert fill(hybrid.begin(view([50] * 40, [488])), [50] * 40, [(512, 488), (0, 100)]) == (40, [472, 0])
    assert fill(hybrid.begin(view([50] * 40, [470])), [50] * 40, [(0, 300), (0, 470)]) == (40, [300, 0])


@pytest.mark.parametrize(
    ("waiting", "free_kv", "tokens"),
    [
        ([3000], 1.0, 1024),  # one sequence alone is not spread
        ([3000, 1000], 1.0, 500),  # 4,000 tokens over 8 iterations
        ([30000, 10000], 1.0, 1024),
        ([100, 10], 1.0, 32),
        ([30000, 10000], 0.525, 512),  # half of what is free beyond a twentieth
        ([30000, 10000], 0.03, 0),
    ],
)
def test_throttled_prompt_tokens(waiting, free_kv, tokens):
    budget = policy("throttle").begin(view([], waiting, free_kv=free_kv, in_flight=[BatchShape()]))
    assert fill(budget, prompts=[(0, 30000)]) == (0, [tokens])


def test_throttled_prompts_move_where_nothing_else_does():
    assert fill(policy("throttle").begin(view([], [3000], free_kv=0.0)), prompts=[(0, 3000)]) == (0, [32])


def test_throttled_decodes_are_a_part_of_all_and_the_remainder_goes_round():
    throttle = policy("throttle")
    taken = [fill(throttle.begin(view([50] * 30)), [50] * 30)[0] for _ in range(8)]
    assert sorted(taken) == [7, 7, 7, 7, 8, 8, 8, 8]
    assert fill(throttle.begin(view([50] * 2)), [50] * 2)[0] == 1
