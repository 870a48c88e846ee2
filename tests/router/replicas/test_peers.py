"""Routers that tell each other their bookings."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import zmq.asyncio

from router.fleet.fleet import Fleet
from router.fleet.known_replica import PEER_EXPIRES_S, PeerBooking
from router.metrics.prefix_reuse import PrefixReuse
from router.replicas import peers as exchange
from router.replicas.peers import Peers
from tests.clock import Clock
from tests.plane import SECRET
from worker.messages import ReplicaLoad

PROMPT = list(range(64))


def fleet(clock: Callable[[], float] = Clock(), name: str = "me") -> Fleet:  # noqa: B008
    made = Fleet(clock=clock, turn=0, name=name)
    for replica_id in "ab":
        made.join(replica_id)
    return made


def waiting(of: Fleet) -> dict[str, int]:
    return {view.replica_id: view.waiting_tokens for view in of.snapshot()}


def told(router: str = "other", replica_id: str = "a", number: int = 1, tokens: int = 64) -> PeerBooking:
    return PeerBooking(router, replica_id, number, tokens, 16, [])


def test_a_booking_is_told_and_counts_with_the_others_as_with_its_own_router() -> None:
    one, other = fleet(), fleet(name="other")
    one.on_booking = other.hear
    for number in range(4):
        one.place(f"r{number}", [number] * 100, "ab")
    assert waiting(one) == waiting(other) == {"a": 200, "b": 200}
    assert all(view.bookings == 0 for view in other.snapshot()), "they are the other router's to release"


def test_a_peers_prompt_counts_as_cached_for_a_while() -> None:
    one, other = fleet(), fleet(name="other")
    one.on_booking = other.hear
    booking = one.place("r", PROMPT * 8, "ab")
    other.apply_load(booking.replica_id, ReplicaLoad(incarnation="x", peers_seen={"me": booking.number}))
    again = other.place("s", [*PROMPT * 8, 1], "ab")
    assert (again.replica_id, again.cached_tokens) == (booking.replica_id, 512)


def test_a_peers_booking_counts_until_the_replica_counts_it() -> None:
    mine = fleet()
    mine.hear(told(number=1))
    mine.hear(told(number=2))
    mine.hear(told("third", number=7))
    assert waiting(mine)["a"] == 3 * 48
    mine.apply_load("a", ReplicaLoad(incarnation="x", waiting_tokens=5, peers_seen={"other": 1, "third": 6}))
    assert waiting(mine)["a"] == 5 + 2 * 48
    mine.apply_load("a", ReplicaLoad(incarnation="x", peers_seen={"other": 2, "third": 7}))
    assert waiting(mine)["a"] == 0
    mine.hear(told(number=2))
    assert waiting(mine)["a"] == 0, "the load came before the booking"
    mine.hear(told(replica_id="unknown"))


def test_a_request_that_never_arrived_is_forgotten() -> None:
    clock = Clock()
    mine = fleet(clock)
    mine.hear(told())
    clock.now_s = PEER_EXPIRES_S
    mine.apply_load("a", ReplicaLoad(incarnation="x"))
    assert waiting(mine)["a"] == 0


def run(work: Callable[[list[Fleet], list[Peers]], object]) -> None:
    """Runs `work` with three routers that are not connected yet."""

    async def main() -> None:
        fleets = [fleet(name="") for _ in range(3)]
        peers = [Peers(each, "127.0.0.1", PrefixReuse(), SECRET) for each in fleets]
        with ExitStack() as contexts:
            for each in peers:
                each.start(contexts.enter_context(zmq.asyncio.Context()))
            try:
                await asyncio.wait_for(work(fleets, peers), 20)  # type: ignore[arg-type]
            finally:
                for each in peers:
                    await each.close()

    asyncio.run(main())


async def hears(told_by: Fleet, heard_by: Fleet) -> None:
    """Returns once bookings of one router reach the other: a new subscription takes a moment."""
    number = 0
    while not sum(waiting(heard_by).values()):
        number += 1
        told_by.place(f"{number}", [number] * 10, "ab")
        await asyncio.sleep(0.005)


def test_routers_find_each_other_by_what_replicas_tell() -> None:
    async def work(fleets: list[Fleet], peers: list[Peers]) -> None:
        everybody = {each.name: each.address for each in peers}
        assert len(everybody) == 3 and all(each.subscription().address == each.address for each in peers)
        peers[1].found("a", everybody)
        peers[1].found("b", everybody)
        await hears(fleets[0], fleets[1])
        assert sum(waiting(fleets[2]).values()) == 0, "nobody told it of the others"
        peers[2].found("b", {**everybody, "odd": "no address"})
        await hears(fleets[0], fleets[2])
        peers[1].found("a", {})
        assert set(peers[1]._listening) == {peers[0].address, peers[2].address}, "the other replica still knows them"
        peers[1].found("b", {})
        assert not peers[1]._listening

    run(work)


def test_routers_know_the_hit_rate_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "REUSE_EVERY_S", 0.005)

    async def work(fleets: list[Fleet], peers: list[Peers]) -> None:
        reuses = [each._reuse for each in peers]
        reuses[0].add(PROMPT * 4, cached_tokens=0)
        reuses[0].add(PROMPT * 4, cached_tokens=128)
        peers[1].found("a", {peers[0].name: peers[0].address})
        while reuses[1].hit_rate is None:
            await asyncio.sleep(0.005)
        assert reuses[1].hit_rate == reuses[0].hit_rate == 0.25
        assert reuses[1].ceiling == reuses[0].ceiling == pytest.approx(0.5, abs=0.01)
        reuses[1].add(PROMPT * 4, cached_tokens=256)
        assert reuses[1].hit_rate == 0.5, "of both"

    run(work)


def test_what_is_no_booking_is_passed_over() -> None:
    async def work(fleets: list[Fleet], peers: list[Peers]) -> None:
        peers[1].found("a", {peers[0].name: peers[0].address})
        await hears(fleets[0], fleets[1])
        peers[0]._out.send(b"nonsense")
        before = sum(waiting(fleets[1]).values())
        fleets[0].place("next", [7] * 10, "ab")
        while sum(waiting(fleets[1]).values()) == before:
            await asyncio.sleep(0.005)

    run(work)


def test_a_host_that_is_not_this_machine_is_an_error() -> None:
    async def main() -> None:
        with zmq.asyncio.Context() as context, pytest.raises(zmq.ZMQError):
            Peers(fleet(), "192.0.2.1", PrefixReuse(), SECRET).start(context)

    asyncio.run(main())
