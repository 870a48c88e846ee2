"""The schedule for jobs of which only the end counts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cost import CostModel
from pipeline.padding import PaddedSizes
from pipeline.policy import Horizon, PolicySettings, SchedulerView
from pipeline.roofline import DEVICES, MODELS, ModelSpec, StageSpec
from pipeline.schedule import make_policy
from pipeline.shape import TILED_FROM, BatchShape

ROWS = PaddedSizes.of_graphs(512, 8192)
LARGE = StageSpec(MODELS["llama-8b"], DEVICES["h200"], 32, True, rows=ROWS)
SMALL = StageSpec(ModelSpec("small", 28, 1024, 3072, 16, 8, 128, 151936), DEVICES["h200"], 28, True, rows=ROWS)


def offline(stage=LARGE, stages=1, **settings):
    models = [CostModel(stage.seconds, rows=ROWS)] * stages
    return make_policy("offline", PolicySettings(stages, 8192, models, **settings))


def chunk(policy, decodes, horizon, *, waiting=100_000, **more):
    """Tokens of prompts beside so many decodes."""
    contexts = np.full(decodes, 500)
    view = SchedulerView(decodes, int(contexts.sum()), 1, waiting, horizon=horizon, **more)
    budget = policy.begin(view)
    taken = budget.take_decodes(contexts)
    return taken, budget.chunk(0, waiting, waiting)


def test_what_is_to_come():
    assert Horizon.from_lengths(np.array([0]), np.array([7])) == (7, 7, 0.0)
    # Whoever gets the most must begin at once; the next has 20 rounds to spare, which begin with this one.
    assert Horizon.from_lengths(np.array([300, 60]), np.array([100, 80])) == (100, 540, 300.0)
    assert Horizon.from_lengths(np.array([0, 60, 45]), np.array([100, 81, 60])) == (100, 346, 3.0)
    assert Horizon.from_lengths(np.array([9, 50]), np.array([50, 50])).due == 59


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 300)), min_size=1, max_size=40))
def test_nobody_ends_later_than_whoever_gets_the_most(sequences):
    """If each round computes what is due, longest first."""
    missing, to_come = (np.array(column) for column in zip(*sequences, strict=True))
    order = np.argsort(-to_come, kind="stable")
    left, come = missing[order].tolist(), to_come[order].tolist()
    end = Horizon.from_lengths(missing, to_come).rounds
    for now in range(end + 1):
        running = [i for i, rest in enumerate(left) if rest == 0 and come[i] > 0]
        waits = [i for i, rest in enumerate(left) if rest > 0]
        if not waits:
            break
        both = [*running, *waits]
        horizon = Horizon.from_lengths(np.array([left[i] for i in both]), np.array([come[i] for i in both]))
        assert now + horizon.rounds <= end
        tokens = math.ceil(horizon.due)
        for i in running:
            come[i] -= 1
        for i in waits:
            part = min(tokens, left[i])
            left[i] -= part
            tokens -= part
            come[i] -= part > 0 and left[i] == 0  # its first token comes of its last chunk
    assert not any(left)


def test_all_steps_have_as_many_tokens():
    """Up to what a graph has."""
    assert chunk(offline(), 60, Horizon(1000, 200_000, 50.0)) == (60, 208 - 60)
    assert chunk(offline(), 150, Horizon(1000, 200_000, 50.0)) == (150, 208 - 150)
    assert chunk(offline(), 40, Horizon(1000, 100_000, 160.0)) == (40, 208 - 40), "what is due goes"
    assert chunk(offline(), 100, Horizon(1000, 90_000, 3.0)) == (100, 112 - 100), "no more than are due"


def test_as_fast_as_can_be_where_there_is_no_room_beside_the_decodes():
    assert chunk(offline(), 0, Horizon(10, 100_000, 10_000.0)) == (0, 8192), "rounds are few"
    assert chunk(offline(), 200, Horizon(1000, 200_000, TILED_FROM - 200 + 1.0)) == (200, 8192 - 200)
    assert chunk(offline(), 60, None, blocked_tokens=500) == (60, 8192 - 60), "pages are scarce"


def test_where_the_tokens_of_prompts_are_cheaper_at_once():
    """Of a small model the constant part of a step with prompts is more than they cost together."""
    horizon = Horizon(1000, 200_000, 50.0)
    assert chunk(offline(SMALL), 60, horizon) == (60, 8192 - 60)
    policy = offline(SMALL)
    policy._of_prompts = float  # a second for each token
    assert chunk(policy, 60, horizon) == (60, 208 - 60)


def test_decodes_alone():
    assert offline().begin(SchedulerView(60, 3000)).chunk(0, 100, 100) == 0


def test_stages_share_a_round():
    """Evenly, and no more micro-batches are in flight than make it short."""
    horizon = Horizon(1000, 400_000, 50.0)
    flight = [BatchShape([(500, 1)] * 16)]
    assert chunk(offline(stages=4), 16, horizon, waiting=5000, in_flight=flight) == (16, 112 - 16)
    five = SchedulerView(64, 32_000, 1, 5000, in_flight=flight * 4, horizon=horizon)
    assert offline(stages=4).begin(five) is None
    assert offline(stages=4, exposed_s=0.05).begin(five) is not None
    back = SchedulerView(64, 32_000, 1, 5000, in_flight=flight * 5, horizon=horizon, ahead_s=0.001, returning_s=0.010)
    policy = offline(stages=4)
    assert policy.ask_again_s(back, False) == pytest.approx(0.010 - policy.LEAD_S), "prompts wait, and nobody for them"
    assert policy.may_overlap_oldest(SchedulerView(64, 32_000, 1, 5000, returning_s=0.001))
    # Not those that decide how many there are where the time is short.
    assert chunk(offline(stages=4), 16, Horizon(10, 400_000, 4000.0), waiting=5000)[1] > TILED_FROM


def test_it_needs_models():
    with pytest.raises(ValueError, match="schedule offline needs the stages' cost models"):
        make_policy("offline", PolicySettings(1, 512))
