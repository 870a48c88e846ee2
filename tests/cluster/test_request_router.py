"""The request router between Serve's set of replicas and the fleet, with fakes of both."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from cluster import request_router
from cluster.request_router import Ask, PlacementRouter, ServePlacer, listen
from router.fleet.fleet import Fleet
from router.wire.errors import NoReplica

pytestmark = pytest.mark.anyio
DEPLOYMENT = DeploymentID("Replica", "shoal")


@dataclass
class FakeReplica:
    """What the request router sees of one of Serve's."""

    name: str
    address: str
    max_ongoing_requests: int = 5

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, DEPLOYMENT)

    @property
    def replica_metadata(self) -> dict[str, Any]:
        return {"address": self.address}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def fleet_of(replicas: list[FakeReplica]) -> Fleet:
    fleet = Fleet("round_robin", turn=0)
    for replica in replicas:
        fleet.join(replica.name)
    return fleet


def booked_on(fleet: Fleet, request_id: str) -> str | None:
    booking = fleet.booking(request_id)
    return None if booking is None else booking.replica_id


class FakeConnections:
    def __init__(self) -> None:
        self.ready: frozenset[str] = frozenset()
        self.closed: frozenset[str] = frozenset()
        self.event = asyncio.Event()

    async def changed(self) -> None:
        await self.event.wait()


def make_router() -> PlacementRouter:
    return PlacementRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)


def pending(ask: Ask) -> PendingRequest:
    return PendingRequest(args=[ask], kwargs={}, metadata=RequestMetadata(request_id="r", internal_request_id="r"))


@pytest.fixture
def announced() -> Any:
    seen: list[dict[str, dict[str, Any]]] = []
    listen("Replica", seen.append)
    yield seen
    request_router._listeners.clear()


TWO = [FakeReplica("a", "tcp://1"), FakeReplica("b", "tcp://2")]


async def test_the_fleet_decides_among_those_that_are_not_excluded() -> None:
    router, fleet = make_router(), fleet_of(TWO)
    for request_id, exclude, chosen in (("1", set(), TWO[0]), ("2", set(), TWO[1]), ("3", {"a"}, TWO[1])):
        ask = Ask(fleet, request_id, [1, 2], exclude)
        assert await router.choose_replicas(TWO, pending(ask)) == [[chosen]]  # type: ignore[arg-type]
        assert booked_on(fleet, request_id) == chosen.name
    with pytest.raises(NoReplica):
        await router.choose_replicas(TWO, pending(Ask(fleet, "4", [1], {"a", "b"})))  # type: ignore[arg-type]


async def test_the_listener_hears_of_every_change(announced: list[dict[str, dict[str, Any]]]) -> None:
    router = make_router()
    router.update_replicas(TWO)  # type: ignore[arg-type]
    router.update_replicas(TWO[:1])  # type: ignore[arg-type]
    router.update_replicas(TWO)  # type: ignore[arg-type]
    router.on_replica_actor_died(TWO[0].replica_id)
    a, b = {"a": {"address": "tcp://1"}}, {"b": {"address": "tcp://2"}}
    assert announced == [a | b, a, a | b, b]


class FakeHandle:
    """Serve's handle as ServePlacer uses it: no replica at all means to wait for ever."""

    def __init__(self, router: PlacementRouter) -> None:
        self.router = router
        self.options: dict[str, Any] = {}
        self.picks = 0

    def _init(self, **options: Any) -> None:
        self.options = options

    @asynccontextmanager
    async def choose_replica(self, ask: Ask, _reserve: bool) -> Any:
        assert not _reserve
        self.picks += 1
        replicas = list(self.router.curr_replicas.values())
        if not replicas:
            await asyncio.Event().wait()
        ranks = await self.router.choose_replicas(replicas, pending(ask))

        @dataclass
        class Selection:
            replica_id: str

        yield Selection(ranks[0][0].replica_id.unique_id)


def make_placer(
    replicas: list[FakeReplica], wait_s: float = 20
) -> tuple[ServePlacer, FakeHandle, Fleet, FakeConnections]:
    router = make_router()
    router.update_replicas(replicas)  # type: ignore[arg-type]
    handle, fleet, connections = FakeHandle(router), fleet_of(TWO), FakeConnections()
    return ServePlacer(handle, fleet, connections, wait_s), handle, fleet, connections  # type: ignore[arg-type]


async def test_a_placed_request_is_booked() -> None:
    placer, handle, fleet, _ = make_placer(TWO)
    assert await placer.place("1", [1], frozenset()) == "a"
    assert await placer.place("2", [1], frozenset("a")) == "b"
    assert (booked_on(fleet, "1"), booked_on(fleet, "2")) == ("a", "b")
    assert handle.options == {"_run_router_in_separate_loop": False}


async def test_a_request_waits_for_a_replica_to_come() -> None:
    placer, handle, _, _ = make_placer([])
    placing = asyncio.ensure_future(placer.place("1", [1], frozenset()))
    while handle.picks == 0:
        await asyncio.sleep(0)
    assert not placing.done()
    handle.router.update_replicas(TWO)  # type: ignore[arg-type]
    assert await placing == "a"


async def test_an_excluded_replica_that_came_back_is_taken() -> None:
    placer, handle, _, connections = make_placer(TWO[:1])
    placing = asyncio.ensure_future(placer.place("1", [1], frozenset("a")))
    while handle.picks == 0:
        await asyncio.sleep(0)
    assert not placing.done()
    connections.ready = frozenset("a")
    connections.event.set()
    assert await placing == "a"


async def test_one_that_is_closed_to_new_requests_gets_none() -> None:
    placer, _, _, connections = make_placer(TWO)
    connections.closed = frozenset("a")
    assert [await placer.place(name, [1], frozenset()) for name in "123"] == ["b"] * 3
    connections.closed = frozenset("b")
    assert await placer.place("4", [1], frozenset()) == "a"


async def test_one_that_refused_is_not_asked_again_and_nobody_waits_for_it() -> None:
    placer, _, fleet, connections = make_placer(TWO)
    connections.ready = frozenset("ab")
    assert await placer.place("1", [1], frozenset(), frozenset("a")) == "b"
    assert await placer.place("2", [1], frozenset(), frozenset("b")) == "a"
    with pytest.raises(NoReplica):
        await asyncio.wait_for(placer.place("3", [1], frozenset(), frozenset("ab")), 10)
    assert booked_on(fleet, "3") is None


async def test_requests_that_wait_for_a_replica_look_for_one_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may wait. Whatever changes wakes them before."""
    periods_s: list[float] = []

    def timeout(period_s: float) -> asyncio.Timeout:
        periods_s.append(period_s)
        return asyncio.Timeout(asyncio.get_running_loop().time())

    monkeypatch.setattr(request_router.asyncio, "timeout", timeout)
    placer, _, _, _ = make_placer([])
    placing = asyncio.ensure_future(placer.place("1", [1], frozenset()))
    while len(periods_s) < 14:
        await asyncio.sleep(0)
    placing.cancel()
    assert periods_s[:14:2] == [0.1] * 7  # asking Serve, which waits while it knows of none
    assert periods_s[1:14:2] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


@pytest.mark.parametrize("replicas", [[], TWO[:1]])
async def test_no_replica_in_time_is_an_error(replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_router, "RETRY_S", 0.01)
    placer, _, fleet, _ = make_placer(replicas, wait_s=0)
    with pytest.raises(NoReplica):
        await placer.place("1", [1], frozenset("a"))
    assert booked_on(fleet, "1") is None
