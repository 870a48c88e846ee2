"""The count of programs that survive a lost replica."""

import asyncio
from typing import Any

import pytest

from bench.programs import lost_replica
from bench.programs.workloads import WORKLOADS


class Rank:
    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize("lost", [0, 2])
def test_programs_are_counted_by_whether_they_end_and_are_right(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, turns = Rank(), iter(range(4))

    async def answers(workload: Any, arguments: Any, backend: Any) -> list[Any]:
        turn = next(turns)
        if turn != 1:
            backend.token_usage.calls += len(arguments)
            return [str(number) for number in range(len(arguments))]
        backend.token_usage.calls += 2  # a quarter of them
        while not rank.killed:
            await asyncio.sleep(0)
        failed = [RuntimeError("gone")] * lost
        return ["other", *failed, *(str(number) for number in range(1 + lost, len(arguments)))]

    monkeypatch.setattr(lost_replica, "answers", answers)
    monkeypatch.setattr(lost_replica, "ranks", lambda: [rank])
    found = asyncio.run(lost_replica.measure("http://nowhere", WORKLOADS["vote"], 8, 5))
    assert (found["ended"], found["right"], found["differ_anyway"]) == (8 - lost, 7 - lost, 0)
    assert (found["answered_calls"], found["calls"], len(found["failures"])) == (2, 8, lost)
