"""What a pod says before it ends, and how long it waits."""

from typing import Any

import pytest

from cluster.leave_node import POLL_S, NotAccepted, drain, running, wait


class FakeGcs:
    def __init__(self, is_accepted: bool) -> None:
        self.answer = is_accepted, "" if is_accepted else "it is the last one"
        self.asked: list[Any] = []

    def drain_node(self, *its: Any) -> tuple[bool, str]:
        self.asked.append(its)
        return self.answer


def test_ray_is_told_until_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.leave_node.time.time", lambda: 1000.0)
    gcs = FakeGcs(is_accepted=True)
    drain(gcs, "abc", 7)
    assert gcs.asked == [("abc", 2, "its pod ends", 1007_000)]
    with pytest.raises(NotAccepted, match="abc: it is the last one"):
        drain(FakeGcs(is_accepted=False), "abc", 7)


@pytest.mark.parametrize(("looks", "in_time"), [(1, True), (5, True), (100, False)])
def test_it_waits_for_the_processes_of_the_application_and_no_longer(looks: int, in_time: bool) -> None:
    now_s, asked = [0.0], []

    def names() -> list[str]:
        asked.append(now_s[0])
        others = ["ray::IDLE", "raylet", "ray::ServeReplica:other:Replica"]
        return others if len(asked) == looks else [*others, "ray::Rank.run", "ray::ServeReplica:shoal:Router"]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    assert wait(20 * POLL_S, names, lambda: now_s[0], sleep) is in_time
    assert now_s[0] == (min(looks, 21) - 1) * POLL_S


def test_it_knows_what_runs_here() -> None:
    assert any("pytest" in name for name in running())
