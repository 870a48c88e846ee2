"""Requests that arrive over time at an engine, and what is made of their times."""

import re
from collections import deque

import pytest

from bench.lengths import latency
from bench.lengths.latency import Served
from worker.messages import Failure, Generate, Output


class OneAtATime:
    """An engine that gives each request as many tokens as its prompt has, one a step, by arrival."""

    def __init__(self, failure: Failure | None = None) -> None:
        self.waiting: deque[Generate] = deque()
        self.given = 0
        self.failure = failure

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def add(self, request: Generate) -> None:
        self.waiting.append(request)

    def step(self) -> list[Output]:
        request = self.waiting[0]
        first, self.given = self.given == 0, self.given + 1
        ends = self.given == len(request.prompt_ids)
        if ends:
            self.waiting.popleft()
            self.given = 0
        return [
            Output(
                request_id=request.request_id,
                token_ids=[7],
                queue_s=0.5 if first else None,
                finish_reason="stop" if ends else None,
                failure=self.failure,
            )
        ]


def test_every_request_is_served_once_it_arrives() -> None:
    arrivals_s = [0.0, 0.0, 0.02]
    served = latency.serve(OneAtATime(), [[1] * 2, [1] * 5, [1] * 3], arrivals_s, 9)  # type: ignore[arg-type]
    assert [request.output_tokens for request in served] == [2, 5, 3]
    for request in served:
        assert request.arrived_s <= request.first_s <= request.last_s and request.queue_s == 0.5


def test_a_failure_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="too long"):
        latency.serve(OneAtATime(Failure("invalid", "too long")), [[1]], [0.0], 9)  # type: ignore[arg-type]


def test_waits_are_compared_with_what_their_work_allows() -> None:
    """5 s and a second for each step: 9 of the output and one of the prompt."""
    served = [Served(512, arrived_s=1.0, first_s=9.0, last_s=19.0, output_tokens=9, queue_s=7.5)]
    found = latency.summary(served, starvation_s=5.0)
    assert found["wait_p99_of_bound"] == pytest.approx(0.5) and found["latency"] == pytest.approx(2.0)
    assert found["ttft_p50_s"] == pytest.approx(8.0) and found["throughput"] == pytest.approx(9 / 19)
    half = found | {"latency": 1.0, "throughput": found["throughput"] / 2}
    ratios = {figure.name: figure.value for figure in latency.figures(1.2, {"fcfs": found, "shortest": half})}
    assert ratios == {
        "ranks.cpu.120.latency_vs_fcfs": pytest.approx(0.5),
        "ranks.cpu.120.wait_p99_of_bound": pytest.approx(0.5),
        "ranks.cpu.120.throughput_vs_fcfs": pytest.approx(0.5),
    }


def test_each_level_needs_a_number_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    """Unless there is one number, for all."""
    with pytest.raises(SystemExit):
        latency.main(["--levels", "0.5", "0.9", "1.2", "--requests", "10", "20"])
    assert re.search(r"--requests .*\b2\b.*--levels 3\b", capsys.readouterr().err)
