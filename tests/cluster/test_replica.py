"""A control actor without Ray around it: what it makes of the way in which its ranks end."""

import asyncio
import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from cluster import replica as replica_module
from cluster.rank import Pulse, Rank
from cluster.replica import Replica, ReplicaError, _end_of_process, _gather

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class FakeRank:
    """Answers the first `answers` questions, by default all; those after them fail with `then`, or get no answer. Its
    loop is in `turns`, one an answer and then the last of them for ever."""

    def __init__(
        self,
        name: str,
        answers: float = math.inf,
        then: Exception | None = None,
        turns: Iterable[int | None] = (None,),
    ) -> None:
        self._name, self._answers, self._then = name, answers, then
        self._turns, self._turn = iter(turns), None
        self.alive = self
        self.asked = 0
        self.asked_often = asyncio.Event()

    def remote(self) -> asyncio.Future[Pulse]:
        answer: asyncio.Future[Pulse] = asyncio.get_running_loop().create_future()
        self._turn = next(self._turns, self._turn)
        self.asked += 1
        if self.asked > 20:
            self.asked_often.set()
        if self.asked <= self._answers:
            answer.set_result(Pulse(f"pid: of {self._name}", self._turn))
        elif self._then is not None:
            answer.set_exception(self._then)
        return answer


def watching(*ranks: FakeRank) -> tuple[Replica, list[asyncio.Future[None]]]:
    """A replica whose ranks run: their futures end when the test says so."""
    replica = Replica.__new__(Replica)
    runs: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in ranks]
    replica._ended = None
    replica._longest_step_s = 0.05
    replica._published = {"address": "tcp://127.0.0.1:1", "context_length": 64}
    replica._ranks = list(ranks)  # type: ignore[arg-type]
    replica._runs = runs  # type: ignore[assignment]
    replica._watcher = asyncio.create_task(replica._watch())
    return replica, runs


@pytest.mark.parametrize(
    ("end", "complaint"),
    [
        (None, "rank 1: its loop ended"),
        (RayTaskError("run", "a long traceback", ValueError("no pages left")), "rank 1: ValueError: no pages left"),
        (ActorDiedError(), "rank 1: its process died"),
    ],
)
async def test_the_end_of_a_rank_is_a_failed_health_check_and_the_end_of_the_others(
    end: Exception | None, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[FakeRank] = []
    monkeypatch.setattr(replica_module.ray, "kill", killed.append)
    ranks = [FakeRank("0"), FakeRank("1")]
    replica, runs = watching(*ranks)
    await asyncio.sleep(0)
    replica.check_health()
    assert replica.record_replica_metadata() == {"address": "tcp://127.0.0.1:1", "context_length": 64}
    if end is None:
        runs[1].set_result(None)
    else:
        runs[1].set_exception(end)
    await asyncio.wait_for(replica._watcher, 5)
    with pytest.raises(ReplicaError, match=complaint):
        replica.check_health()
    assert killed == ranks


@pytest.mark.parametrize(
    ("silent", "who"),
    [
        ({"answers": 3}, "pid: of 1"),
        ({"answers": 0}, "it never answered"),
        ({"answers": 3, "then": ActorUnavailableError("no way there", None)}, "pid: of 1"),
    ],
)
async def test_a_rank_that_answers_no_more_is_the_end_as_well(
    silent: dict[str, Any], who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[FakeRank] = []
    monkeypatch.setattr(replica_module.ray, "kill", killed.append)
    monkeypatch.setattr(replica_module, "ASK_S", 0.001)
    monkeypatch.setattr(replica_module, "HANG_S", 0.005)
    ranks = [FakeRank("0"), FakeRank("1", **silent)]
    replica, _ = watching(*ranks)
    await asyncio.wait_for(replica._watcher, 5)
    with pytest.raises(ReplicaError, match=rf"^rank 1: its process hangs \({who}\): no answer for 0\.005 s$"):
        replica.check_health()
    assert killed == ranks


async def test_a_loop_that_stays_in_one_turn_is_the_end_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[FakeRank] = []
    monkeypatch.setattr(replica_module.ray, "kill", killed.append)
    monkeypatch.setattr(replica_module, "ASK_S", 0.01)
    rank = FakeRank("0", turns=[None, 1, 1, 1, 2])
    replica, _ = watching(rank)
    await asyncio.wait_for(replica._watcher, 5)
    with pytest.raises(ReplicaError, match=r"^rank 0: .* hangs \(pid: of 0\).*step_timeout_s"):
        replica.check_health()
    assert killed == [rank]
    assert rank.asked == 5 + 5  # from the first answer of turn 2 on, five periods


@pytest.mark.parametrize("turns", [(None,), range(1000), [number // 3 for number in range(1000)]])
async def test_ranks_that_answer_go_on(turns: Iterable[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing to do, with a turn of its loop an answer, and with long ones."""
    monkeypatch.setattr(replica_module, "ASK_S", 0.01)
    monkeypatch.setattr(replica_module, "HANG_S", 0.02)
    rank = FakeRank("0", turns=turns)
    replica, _ = watching(rank)
    await asyncio.wait_for(rank.asked_often.wait(), 5)
    replica.check_health()
    replica._watcher.cancel()


def test_a_rank_says_in_which_turn_its_loop_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.rank.ray.util.get_node_ip_address", lambda: "192.0.2.2")
    rank = Rank()
    assert rank.alive().turn is None and "192.0.2.2" in rank.alive().who
    rank._server = SimpleNamespace(turn=7)  # type: ignore[assignment]
    assert rank.alive().turn == 7


async def test_a_start_that_does_not_end_names_the_ranks_that_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    futures = {rank: asyncio.get_running_loop().create_future() for rank in range(3)}
    futures[1].set_result("loaded")
    with pytest.raises(ReplicaError, match=r"^rank 0, 2: not loaded within start_timeout_s=0\.01; raise it"):
        await _gather(futures, within_s=0.01)  # type: ignore[arg-type]
    assert caplog.messages[-1].startswith("replica does not start: rank 0, 2: not loaded")  # as cluster.local reads it
    futures[2].set_exception(RayTaskError("load", "a long traceback", OSError("no such file")))
    with pytest.raises(ReplicaError, match=r"^rank 2: OSError: no such file$"):
        await _gather(futures, within_s=60)  # type: ignore[arg-type]
    assert caplog.messages[-1] == "replica does not start: rank 2: OSError: no such file"
    del futures[0], futures[2]
    assert await _gather(futures, within_s=60) == {1: "loaded"}  # type: ignore[arg-type]


def test_of_a_process_that_has_gone_the_advice_is_left_out() -> None:
    said = (
        "The actor died unexpectedly. class_name: Rank pid: 77 namespace: serve ip: 192.0.2.2 Worker exit type: "
        "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with code 2. End of file. Some common causes "
        "include: (1) the process was killed by the OOM killer"
    )
    assert _end_of_process(said).startswith(
        "its process died (pid: 77, ip: 192.0.2.2): Worker unexpectedly exits with code 2. End of file. If it was not"
    )
