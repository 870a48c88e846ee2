"""When stages computed what: set to one clock, and put together with what the engine does."""

import itertools
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.meter import Span
from pipeline.shape import BatchShape
from tests.worker.fakes import any_models
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore
from worker.engine.engine import Engine
from worker.engine.stage_timeline import LEADS_S, StageTimeline
from worker.executor.clock_sync import RECENT_MESSAGES, ClockOffset, ClockStamp, ClockSync, host_id
from worker.messages import Generate, SamplingParams
from worker.scheduler.scheduled_step import ScheduledStep
from worker.step import Chunk, Plan, StepTime

NOBODY = np.empty(0, dtype=np.int64)


def step(number: int, shape: BatchShape) -> ScheduledStep:
    plan = Plan.from_chunks(number, [Chunk(0, 0, [1], 0, [0], 1)])
    return ScheduledStep(plan, NOBODY, [], NOBODY, NOBODY, [], shape)


# ---------------------------------------------------------------- on the way to the leading rank


def test_the_difference_of_clocks_lies_between_its_bounds() -> None:
    offset = ClockOffset()
    for least, most in ((1.0, 5.0), (2.9, 3.9), (0.0, 3.3)):
        offset.at_least(least)
        offset.at_most(most)
    assert offset.seconds() == pytest.approx(3.1)


def test_times_of_another_machine_are_set_to_this_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr("worker.executor.clock_sync.time", SimpleNamespace(monotonic=lambda: now.s))
    clocks = ClockSync()
    for number in range(300):  # its clock is 4000 s ahead; messages take 1 to 3 ms
        way_s = 0.001 + 0.002 * (number % 7 / 7)
        clocks.sent(number)
        came_s = now.s + 4000 + way_s
        now.s += 0.05
        stamp = ClockStamp("another", now.s + 4000 - way_s, [(number, came_s)])
        assert clocks.offset_s(stamp) == pytest.approx(-4000, abs=0.002)
    assert clocks.offset_s(stamp) == pytest.approx(-4000, abs=1e-6)
    assert clocks.offset_s(ClockStamp(host_id(), 0.0, [])) == 0.0
    assert len(clocks._sent_s) <= 2 * RECENT_MESSAGES


# ---------------------------------------------------------------- put together


def test_who_kept_a_stage_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr("worker.engine.stage_timeline.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    costs = CostStore(any_models(2))
    line = StageTimeline(2, costs)
    steps = [step(number, BatchShape([(10 * number, 1)])) for number in (1, 2)]
    for each in steps:
        line.planned(each)
    assert line.ahead_s() == pytest.approx(sum(costs.models[0].predict(each.shape) for each in steps))
    # The second stage is ready for step 2 after 0.2 s, 0.1 s after its input was sent, and has it 0.3 s later.
    line.record([StepTime(0, 1, Span(100.0, 100.0, 101.0)), StepTime(0, 2, Span(100.0, 101.0, 102.1))])
    clock.now_s = 102.1
    assert line.ahead_s() == 0.0
    line.record([StepTime(1, 1, Span(100.0, 101.1, 102.0)), StepTime(1, 2, Span(102.2, 102.5, 103.5))])
    line.record([StepTime(1, 9, Span(1.0, 2.0, 3.0))])  # nobody has heard of it
    for each in steps:
        line.finished(each)
    line.finished(steps[0])
    assert line.meter.num_batches == 2
    spent = line.spent()
    assert spent[0]["compute"] == pytest.approx(2.1) and spent[1]["compute"] == pytest.approx(1.9)
    waited = {cause: seconds for cause, seconds in spent[1].items() if seconds > 0 and cause != "compute"}
    assert waited == {
        "host": pytest.approx(0.1),
        "communication": pytest.approx(0.3),
        "unequal_stages": pytest.approx(0.1),
    }
    assert [model.num_observed for model in costs.models] == [2, 2]


def test_a_step_that_failed_is_left_out() -> None:
    line = StageTimeline(1, CostStore())
    line.planned(step(1, BatchShape([(1, 1)])))
    line.finished(step(1, BatchShape()), computed=False)
    line.planned(step(2, BatchShape([(1, 1)])))
    line.record([StepTime(0, 2, Span(1.0, 1.0, 2.0))])
    line.finished(step(2, BatchShape()))
    assert line.meter.num_batches == 1 and not line._open


def test_the_next_step_is_put_off_until_the_device_is_nearly_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead before that grows where the device had to wait, and shrinks where it had not."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr("worker.engine.stage_timeline.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    least_s, first_s, most_s = LEADS_S
    shape = BatchShape([(0, 2048)])
    for waited_s, expected_s in ((0.001, most_s), (0.0, least_s)):
        costs = CostStore(any_models(1))
        line = StageTimeline(1, costs)
        seconds = costs.models[0].predict(shape)
        number = 1
        line.planned(step(number, shape))
        assert line.spare_s() == pytest.approx(seconds - first_s)
        for number in range(2, 800):
            begin_s = clock.now_s
            clock.now_s += seconds
            line.record([StepTime(0, number - 1, Span(begin_s - 1, begin_s, clock.now_s))])
            line.finished(step(number - 1, shape))
            clock.now_s += waited_s
            line.planned(step(number, shape))
            spare_s = line.spare_s()
        assert spare_s == pytest.approx(costs.models[0].predict(shape) - expected_s, abs=1e-4)
    assert StageTimeline(1, CostStore()).spare_s() == 0.0, "nobody predicts"


def test_nothing_is_put_off_where_so_much_waits_that_an_arrival_would_not_begin(fake_parts: Any) -> None:
    config = WorkerConfig(overlap=True, page_size=4, token_budget=16)
    engine = Engine(Path("none"), config, load=fake_parts())
    with closing(engine):
        engine.timeline.spare_s = lambda: 0.5
        assert engine.spare_s() == 0.0, "nothing runs"
        engine.add(Generate(request_id="a", prompt_ids=[1] * 20, sampling=SamplingParams(max_tokens=3)))
        engine.step()
        assert engine.spare_s() == 0.5
        engine.add(Generate(request_id="b", prompt_ids=[2] * 60, sampling=SamplingParams(max_tokens=3)))
        engine.step()
        assert engine.spare_s() == 0.0
        engine.abort(["a", "b"])


@pytest.mark.parametrize("busy_s", [[0.05, 0.01], [0.05]], ids=["becomes due", "was due when it was first asked"])
def test_a_pipeline_sends_its_next_step_when_the_policy_wants_it(fake_parts: Any, busy_s: list[float]) -> None:
    """While the device computes, and not before the first stage is nearly done."""
    engine = Engine(Path("none"), WorkerConfig(pp=2, overlap=True, page_size=4), load=fake_parts())
    with closing(engine):
        engine.add(Generate(request_id="a", prompt_ids=[1] * 40, sampling=SamplingParams(max_tokens=3)))
        ahead_s = itertools.chain(busy_s, itertools.repeat(0.0))
        engine._loop.ahead_s = lambda: next(ahead_s)
        assert engine.scheduler.schedule().step is None
        asked = iter([False, False, True])
        sent_before = len(engine.executor.expected)
        event = SimpleNamespace(query=lambda: next(asked), synchronize=lambda: None)
        engine._loop._fill_stages_until(event)
        assert len(engine.executor.expected) > sent_before


def test_what_is_due_while_a_step_is_launched_sets_out_before(fake_parts: Any) -> None:
    engine = Engine(Path("none"), WorkerConfig(pp=2, overlap=True, page_size=4, token_budget=16), load=fake_parts())
    with closing(engine):
        engine.add(Generate(request_id="a", prompt_ids=[1] * 100, sampling=SamplingParams(max_tokens=3)))
        engine.timeline.ahead_s = lambda: 0.008 if engine._loop._announced else 0.0
        engine._loop._fill_stages()
        engine._loop._launch_s = 0.001
        assert engine._loop._next_step() is not None and not engine._loop._announced
        engine._loop._fill_stages()
        engine._loop._launch_s = 0.006
        assert engine._loop._next_step() is not None and len(engine._loop._announced) == 1
