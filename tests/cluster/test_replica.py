"""A control actor without Ray around it: what it makes of the way in which its ranks end."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from cluster.replica import Replica, ReplicaError

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
async def test_the_end_of_a_rank_is_a_failed_health_check(end: Exception | None, complaint: str) -> None:
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
