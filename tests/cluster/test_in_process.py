"""The placer of a server in one process, and which settings it takes. `tests/shoal/test_engine.py` has the server."""

import asyncio
from typing import Any

import pytest

from cluster.config import Config, ConfigError
from cluster.in_process import MAX_WAITING, SETTINGS, OneReplicaPlacer, configured
from router.fleet.fleet import Fleet
from router.metrics.metrics import Metrics
from router.replicas.replicas import Replicas
from router.wire.errors import NoReplica
from tests.plane import SECRET
from worker.messages import ReplicaLoad

pytestmark = pytest.mark.anyio


class Known:
    """A fleet with one replica, which answers from `answer` on, and its placer."""

    def __init__(self, wait_s: float = 20.0) -> None:
        self.fleet, self.metrics = Fleet(), Metrics().model("m")
        self.replicas = Replicas(self.fleet, self.metrics, SECRET)
        self.placer = OneReplicaPlacer(self.fleet, self.replicas, wait_s)
        self.fleet.join("0")

    def answer(self) -> None:
        self.metrics.loads["0"] = ReplicaLoad(incarnation="")
        self.replicas._notify()

    async def place(self, refused: frozenset[str] = frozenset()) -> str:
        return await self.placer.place("name", [1, 2, 3], frozenset(), refused)


async def test_a_request_waits_for_the_replica_and_is_booked() -> None:
    known = Known()
    placed = asyncio.ensure_future(known.place())
    await asyncio.sleep(0)
    assert not placed.done()
    known.answer()
    assert await placed == "0"
    assert known.fleet.booking("name") is not None


async def test_a_replica_that_does_not_answer_is_given_up() -> None:
    with pytest.raises(NoReplica, match="replica_wait_s is 0"):
        await Known(wait_s=0).place()


async def test_a_replica_that_has_ended_is_not_waited_for() -> None:
    known = Known()
    placed = asyncio.ensure_future(known.place())
    await asyncio.sleep(0)
    known.placer.ended = "it is gone"
    with pytest.raises(NoReplica, match="it is gone"):
        await placed


async def test_a_request_that_the_replica_refused_has_nowhere_to_go() -> None:
    known = Known()
    known.answer()
    with pytest.raises(NoReplica):
        await known.place(refused=frozenset({"0"}))


@pytest.mark.parametrize("settings", [{}, {"max_waiting": 5}])
def test_the_queue_is_long_unless_it_is_said(settings: dict[str, Any]) -> None:
    config = configured("./model", settings)
    assert (config.model, config.max_waiting) == ("./model", settings.get("max_waiting", MAX_WAITING))


def test_settings_of_a_server_are_refused() -> None:
    assert set(SETTINGS) <= Config.model_fields.keys()
    for name in Config.model_fields.keys() - set(SETTINGS) - {"model"}:
        with pytest.raises(ConfigError, match=f"{name}: "):
            configured("./model", {name: 1})
