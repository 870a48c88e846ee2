"""How long work may go on without a step that ends."""

import numpy as np
import pytest

from pipeline.shape import BatchShape
from tests.clock import Clock
from tests.worker.fakes import any_models
from worker.engine.cost_store import CostStore
from worker.engine.step_watch import FACTOR, MIN_S, WARM_STEPS, StepWatch
from worker.scheduler.scheduled_step import ScheduledStep
from worker.step import Chunk, Plan

LONGEST_S = 600.0
NOBODY = np.empty(0, dtype=np.int64)


def step(number: int, tokens: int = 1, drafts: dict[int, list[int]] | None = None) -> ScheduledStep:
    plan = Plan.from_chunks(number, [Chunk(0, 0, [1], 0, [0], 1)])
    shape = BatchShape([(0, tokens)])
    return ScheduledStep(plan, NOBODY, [], NOBODY, NOBODY, [], shape, drafts=drafts or {})


def warmed(seconds: float, costs: CostStore | None = None, longest_s: float = LONGEST_S) -> tuple[StepWatch, Clock]:
    """A watch that has seen decodes of that many seconds, and no other steps."""
    clock = Clock()
    watch = StepWatch(costs or CostStore(), longest_s, "cuda", clock)
    for number in range(WARM_STEPS):
        watch.began(step(number))
        clock.now_s += seconds
        watch.finished(step(number))
    return watch, clock


def test_a_kind_of_step_that_is_new_may_take_as_long_as_any() -> None:
    watch, _ = warmed(0.01)
    assert (watch.limit_s, watch.ended) == (MIN_S["cuda"], WARM_STEPS)
    for other in (step(100, tokens=5), step(100, tokens=900), step(100, drafts={0: [1]})):
        watch.began(other)
        assert watch.limit_s == LONGEST_S
        watch.finished(other)
    watch.began(step(101))
    assert watch.limit_s == MIN_S["cuda"]


@pytest.mark.parametrize(("seconds", "limit_s"), [(0.01, MIN_S["cuda"]), (2.0, FACTOR * 2.0), (50.0, LONGEST_S)])
def test_a_known_kind_may_take_a_multiple_of_its_time(seconds: float, limit_s: float) -> None:
    watch, _ = warmed(seconds)
    watch.began(step(100))
    assert watch.limit_s == pytest.approx(limit_s)


def test_of_steps_in_flight_the_times_add_up() -> None:
    watch, _ = warmed(2.0)
    for number in (100, 101, 102):
        watch.began(step(number))
    assert watch.limit_s == pytest.approx(3 * FACTOR * 2.0)
    watch.finished(step(100))
    watch.finished(step(101), computed=False)
    assert watch.limit_s == pytest.approx(FACTOR * 2.0)
    assert watch.ended == WARM_STEPS + 2


def test_steps_that_overlap_take_the_time_between_their_ends() -> None:
    watch, clock = warmed(1.0)
    for number in range(100, 200):
        watch.began(step(number))
        if number > 100:
            clock.now_s += 2.0
            watch.finished(step(number - 1))
    assert watch.limit_s == pytest.approx(FACTOR * 2.0, rel=1e-3)


def test_the_cost_model_is_asked() -> None:
    costs = CostStore(any_models(1))
    watch, _ = warmed(1e-6, costs)
    costs.seconds = lambda shape: 3.0  # type: ignore[method-assign]
    watch.began(step(100))
    assert watch.limit_s == pytest.approx(FACTOR * 3.0)


def test_one_step_that_compiled_is_forgotten() -> None:
    clock = Clock()
    watch = StepWatch(CostStore(), LONGEST_S, "cuda", clock)
    for number in range(100):
        watch.began(step(number))
        clock.now_s += 40.0 if number == 0 else 0.01
        watch.finished(step(number))
    watch.began(step(100))
    assert watch.limit_s == MIN_S["cuda"]


def test_no_step_may_exceed_step_timeout_s_and_one_that_was_never_begun_does_not_count() -> None:
    watch, _ = warmed(0.01, longest_s=5.0)
    watch.finished(step(7))
    assert (watch.limit_s, watch.ended) == (5.0, WARM_STEPS)
