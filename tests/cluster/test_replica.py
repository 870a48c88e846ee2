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
from worker.progress import NewestSteps, WorkProgress

pytestmark = pytest.mark.anyio
LIMIT_S = 0.05  # of work without progress


class FakeRank:
    """Answers the first `answers` questions, by default all; those after them fail with `then`, or get no answer. Its
    work is at `numbers`, one an answer and then the last of them for ever; None while it has none. `steps`: how far it
    has come. `silent`: the ranks that it does not hear, as `numbers`."""

    def __init__(
        self,
        name: str,
        answers: float = math.inf,
        then: Exception | None = None,
        numbers: Iterable[int | None] = (None,),
        steps: NewestSteps | None = None,
        silent: Iterable[tuple[int, ...]] = ((),),
    ) -> None:
        self._name, self._answers, self._then = name, answers, then
        self._numbers, self._number = iter(numbers), None
        self._steps = steps
        self._silent, self._unheard = iter(silent), tuple[int, ...]()
        self.alive = self
        self.said: list[str] = []
        self.farewell = SimpleNamespace(remote=self._say)
        self.drained_within_s: list[float] = []
        self.drain = SimpleNamespace(remote=self.drained_within_s.append)
        self.asked = 0
        self.asked_often = asyncio.Event()

    def remote(self) -> asyncio.Future[Pulse]:
        answer: asyncio.Future[Pulse] = asyncio.get_running_loop().create_future()
        self._number = next(self._numbers, self._number)
        self._unheard = next(self._silent, self._unheard)
        self.asked += 1
        if self.asked > 20:
            self.asked_often.set()
        if self.asked <= self._answers:
            progress = None if self._number is None else WorkProgress(self._number, LIMIT_S)
            answer.set_result(Pulse(f"pid: of {self._name}", progress, self._steps, self._unheard))
        elif self._then is not None:
            answer.set_exception(self._then)
        return answer

    def _say(self, message: str) -> asyncio.Future[bool]:
        self.said.append(message)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        answer.set_result(True)
        return answer


def watching(*ranks: FakeRank) -> tuple[Replica, list[asyncio.Future[None]]]:
    """A replica whose ranks run: their futures end when the test says so."""
    replica = Replica.__new__(Replica)
    runs: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in ranks]
    replica._ended = None
    replica._tp, replica._leading, replica._drain_s = len(ranks), 0, 7.0
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


async def test_a_replica_that_is_taken_away_ends_with_its_leading_ranks_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[FakeRank] = []
    monkeypatch.setattr(replica_module.ray, "kill", killed.append)
    ranks = [FakeRank("0"), FakeRank("1")]
    replica, runs = watching(*ranks)
    leaving = replica.__del__()
    assert leaving is not None
    left = asyncio.create_task(leaving)
    await asyncio.sleep(0)
    assert ranks[0].drained_within_s == [7.0] and not ranks[1].drained_within_s
    await asyncio.sleep(0)
    assert not left.done()
    with caplog.at_level("INFO", "ray.serve"):
        runs[0].set_result(None)
        await asyncio.wait_for(left, 5)
    assert killed == ranks and replica.__del__() is None
    assert [record.levelname for record in caplog.records] == ["INFO"], "nothing that went wrong"


async def test_a_replica_that_is_taken_away_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "STOP_S", 0.01)
    replica, _ = watching(FakeRank("0"))
    replica._drain_s = 0.0
    leaving = replica.__del__()
    assert leaving is not None
    await asyncio.wait_for(leaving, 5)
    assert replica._watcher is not None
    replica._watcher.cancel()
    assert Replica.__new__(Replica).__del__() is None, "one that has not started"


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
    with pytest.raises(ReplicaError, match=rf"^rank 1: .*\({who}\): .* 0\.005 s$"):
        replica.check_health()
    assert killed == ranks


async def test_work_that_does_not_get_on_is_the_end_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[FakeRank] = []
    monkeypatch.setattr(replica_module.ray, "kill", killed.append)
    monkeypatch.setattr(replica_module, "ASK_S", 0.01)
    rank = FakeRank("0", numbers=[None, 1, 1, 1, 2], steps=NewestSteps(7, 6))
    replica, _ = watching(rank)
    await asyncio.wait_for(replica._watcher, 5)
    complaint = r"^rank 0 hangs \(pid: of 0, in step 7\): .* 0\.05 s$"
    with pytest.raises(ReplicaError, match=complaint):
        replica.check_health()
    assert killed == [rank]
    assert rank.asked == 5 + 5 + 1  # from the first answer with number 2 on, five periods; then to name it
    assert rank.said == [replica._ended], "routers are told"


async def test_a_rank_that_the_leading_one_does_not_hear_is_the_end_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module.ray, "kill", lambda rank: None)
    monkeypatch.setattr(replica_module, "ASK_S", 0.001)
    ranks = FakeRank("0", silent=[(), (2,)]), FakeRank("1"), FakeRank("2", answers=1)
    replica, _ = watching(*ranks)
    await asyncio.wait_for(replica._watcher, 5)
    with pytest.raises(ReplicaError, match=r"^rank 2 hangs \(its process stands still"):
        replica.check_health()
    assert ranks[0].asked == 3 and ranks[0].said == [replica._ended], "heard of twice, and routers are told"


async def test_a_process_that_has_ended_is_not_said_to_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leading rank misses it before Ray tells of its end."""
    monkeypatch.setattr(replica_module.ray, "kill", lambda rank: None)
    monkeypatch.setattr(replica_module, "ASK_S", 0.05)
    ranks = FakeRank("0", silent=[(1,)]), FakeRank("1")
    replica, runs = watching(*ranks)
    while not ranks[0].asked:
        await asyncio.sleep(0)
    runs[1].set_exception(ActorDiedError())
    await asyncio.wait_for(replica._watcher, 5)
    with pytest.raises(ReplicaError, match=r"^rank 1: its process died"):
        replica.check_health()


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ({"steps": NewestSteps(6, 6)}, r"^rank 1 hangs \(pid: of 1, between two steps\): "),
        ({"steps": NewestSteps(7, 6)}, r"^rank 0 hangs .*, in step 7\), rank 1 hangs .*, in step 7\): "),
        ({"answers": 0}, r"^rank 1 hangs \(it does not answer\): "),
    ],
)
async def test_of_several_ranks_the_one_that_hangs_is_named(
    other: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leading rank's work stands still in each case: it waits for the other in a collective."""
    monkeypatch.setattr(replica_module.ray, "kill", lambda rank: None)
    monkeypatch.setattr(replica_module, "ASK_S", 0.01)
    ranks = FakeRank("0", numbers=[1], steps=NewestSteps(7, 6)), FakeRank("1", **other)
    replica, _ = watching(*ranks)
    await asyncio.wait_for(replica._watcher, 5)
    with pytest.raises(ReplicaError, match=complaint):
        replica.check_health()
    assert ranks[0].said == [replica._ended] and not ranks[1].said


@pytest.mark.parametrize("numbers", [(None,), range(1000), [number // 3 for number in range(1000)]])
async def test_ranks_that_answer_go_on(numbers: Iterable[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing to do, with a step an answer, and with long ones."""
    monkeypatch.setattr(replica_module, "ASK_S", 0.01)
    monkeypatch.setattr(replica_module, "HANG_S", 0.02)
    rank = FakeRank("0", numbers=numbers)
    replica, _ = watching(rank)
    await asyncio.wait_for(rank.asked_often.wait(), 5)
    replica.check_health()
    replica._watcher.cancel()


def test_a_rank_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.rank.ray.util.get_node_ip_address", lambda: "192.0.2.2")
    rank, at, steps = Rank(), WorkProgress(7, 15.0), NewestSteps(9, 8)
    assert rank.alive()[1:] == (None, None, ()) and "192.0.2.2" in rank.alive().who
    assert not rank.farewell("nobody hears it")
    rank._follower = SimpleNamespace(newest_steps=steps)  # type: ignore[assignment]
    assert rank.alive()[1:] == (None, steps, ())
    engine = SimpleNamespace(executor=SimpleNamespace(newest_steps=steps, silent_ranks=[3]))
    said: list[tuple[str, str]] = []
    drained: list[float] = []
    leading: Any = SimpleNamespace(
        progress=at, engine=engine, farewell=lambda *its: bool(said.append(its)) or True, drain=drained.append
    )
    rank._server = leading
    assert rank.alive()[1:] == (at, steps, (3,))
    assert rank.farewell("rank 1 hangs") and said == [("hung", "rank 1 hangs")]
    rank.drain(7.0)
    assert drained == [7.0]


async def test_a_start_that_does_not_end_names_the_ranks_that_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    futures = {rank: asyncio.get_running_loop().create_future() for rank in range(3)}
    futures[1].set_result("loaded")
    with pytest.raises(ReplicaError, match=r"^rank 0, 2: .*start_timeout_s=0\.01\b"):
        await _gather(futures, within_s=0.01)  # type: ignore[arg-type]
    assert caplog.messages[-1].startswith("replica does not start: rank 0, 2: ")  # as cluster.local reads it
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
