"""Times of steps, and those of a device that runs behind its host and by a clock of its own."""

import itertools
from collections.abc import Callable

import pytest
import torch

from worker.executor import step_timer
from worker.executor.step_timer import MAX_KEPT_STEPS, StepTimer


class Device:
    """Its clock is `rate` times as fast as the host's, and began elsewhere. Events come when the host says so."""

    def __init__(self, rate: float) -> None:
        self.rate, self.now_s, self.past = rate, 100.0, -1.0

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, float("inf")

    def record(self) -> None:
        self.at_s = self.device.now_s

    def delay(self, at_s: float) -> None:
        self.at_s = at_s

    def query(self) -> bool:
        return self.at_s <= self.device.now_s

    def synchronize(self) -> None:
        assert self.query()

    def elapsed_time(self, other: "Event") -> float:
        assert self.query() and other.query()
        return (other.at_s - self.at_s) * self.device.rate * 1e3


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Device, StepTimer]]:
    def make(rate: float = 1.0) -> tuple[Device, StepTimer]:
        device = Device(rate)
        monkeypatch.setattr(torch.cuda, "Event", device.event)
        monkeypatch.setattr(step_timer.time, "monotonic", lambda: device.now_s)
        return device, StepTimer.for_device(torch.device("cuda"))

    return make


def test_a_gpu_tells_when_it_is_past_a_step(on_gpu) -> None:
    device, watch = on_gpu()
    assert not watch.is_running
    device.now_s += 1
    watch.came(7)
    watch.begin()
    watch.end(7)
    begun, ended = watch._open[0][2].event, watch._open[0][3].event
    begun.delay(102.0)
    ended.delay(105.0)
    device.now_s = 104.0
    assert watch.take_spans() == [] and watch.is_running
    device.now_s = 105.5
    assert watch.take_spans() == [(7, (101.0, 102.0, 105.0))]
    assert watch.take_spans() == [] and not watch.is_running


def test_one_that_waited_and_others_that_did_not(on_gpu) -> None:
    device, watch = on_gpu()
    for step, waits in enumerate((True, False, True, False)):
        if waits:
            watch.ready()
        device.now_s += 1
        watch.begin()
        device.now_s += 2
        watch.end(step)
    assert watch.take_spans() == [
        (0, (100.0, 101.0, 103.0)),
        (1, (104.0, 104.0, 106.0)),
        (2, (106.0, 107.0, 109.0)),
        (3, (110.0, 110.0, 112.0)),
    ]


def test_without_a_plan_of_its_own_a_step_is_there_when_it_begins(on_gpu) -> None:
    device, watch = on_gpu()
    device.now_s = 101.0
    watch.begin()
    device.now_s = 103.0
    watch.end(1)
    assert watch.take_spans() == [(1, (101.0, 101.0, 103.0))]


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_stage_may_be_ready_before_it_can_begin(on_gpu, place: str) -> None:
    device, watch = on_gpu()
    if place == "cpu":
        watch = StepTimer.for_device(torch.device("cpu"))
    for step, start_s in ((1, 101.0), (2, 105.0)):
        device.now_s = start_s
        watch.ready()
        device.now_s += 1
        watch.begin()
        device.now_s += 2
        watch.end(step)
        assert watch.take_spans() == [(step, (start_s, start_s + 1, start_s + 3))]


@pytest.mark.parametrize("rate", [1.001, 0.999])
def test_clocks_that_drift_stay_together(on_gpu, rate: float) -> None:
    """What is recorded on a device that does nothing comes at once, and is seen at once: no difference adds up."""
    device, watch = on_gpu(rate)
    for step in range(200):
        device.now_s += 1.0
        watch.begin()
        device.now_s += 0.5
        watch.end(step)
        ((_, span),) = watch.take_spans()
        assert span.end_s == pytest.approx(device.now_s, abs=2e-3)
        assert span.begin_s == pytest.approx(device.now_s - 0.5, abs=2e-3)
        assert span.begin_s <= span.end_s


def test_events_are_used_again(on_gpu) -> None:
    device, watch = on_gpu()
    for step in range(10):
        watch.begin()
        watch.end(step)
        device.now_s += 1.0
        assert [number for number, _ in watch.take_spans()] == [step]
    assert len(watch._spare) <= 3


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_what_nobody_takes_does_not_pile_up(on_gpu, place: str) -> None:
    _, watch = on_gpu()
    if place == "cpu":
        watch = StepTimer.for_device(torch.device("cpu"))
    for step in range(MAX_KEPT_STEPS + 5):
        watch.begin()
        watch.end(step)
    steps = [step for step, _ in watch.take_spans()]
    assert len(steps) == MAX_KEPT_STEPS and steps[-1] == MAX_KEPT_STEPS + 4
    assert all(b == a + 1 for a, b in itertools.pairwise(steps))
