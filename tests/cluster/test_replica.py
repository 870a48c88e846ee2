"""A control actor without Ray around it: what it makes of the way in which its ranks end."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from cluster import replica as replica_module
from cluster.replica import Replica, ReplicaError, _end_of_process

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def watching(ranks: int) -> tuple[Replica, list[asyncio.Future[None]]]:
    """A replica whose ranks run: their futures end when the test says so."""
    replica = Replica.__new__(Replica)
    runs: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in range(ranks)]
    replica._ended = None
    replica._published = {"address": "tcp://127.0.0.1:1", "context_length": 64}
    replica._ranks = [f"rank {rank}" for rank in range(ranks)]  # type: ignore[misc]
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
    killed: list[str] = []
    monkeypatch.setattr(replica_module.ray, "kill", killed.append)
    replica, runs = watching(2)
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
    assert killed == ["rank 0", "rank 1"]


def test_of_a_process_that_has_gone_the_advice_is_left_out() -> None:
    said = (
        "The actor died unexpectedly. class_name: Rank pid: 77 namespace: serve ip: 192.0.2.2 Worker exit type: "
        "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with code 2. End of file. Some common causes "
        "include: (1) the process was killed by the OOM killer"
    )
    assert _end_of_process(said).startswith(
        "its process died (pid: 77, ip: 192.0.2.2): Worker unexpectedly exits with code 2. End of file. If nobody"
    )
