"""Connections to replicas: when one counts as ready, and what happens when it goes."""

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from radix.events import Stored
from radix.node import pack
from router.fleet.fleet import Fleet
from router.metrics.metrics import Metrics
from router.replicas import connection as connections
from router.replicas.replicas import Replicas
from router.replicas.stream import ReplicaLost
from tests.plane import SECRET
from worker.curve import REPLICA, Curve, Door
from worker.messages import (
    PROTOCOL,
    CacheEvents,
    Farewell,
    Generate,
    Leaving,
    Output,
    Outputs,
    ReplicaLoad,
    Routers,
    SamplingParams,
    Subscribe,
)

Make = Callable[..., Any]
HELLO = [{"role": "user", "content": "Hello"}]


def ready(stack: Any) -> int:
    return httpx.get(f"{stack.url}/ready").status_code


def indexed(stack: Any, replica_id: str) -> int | None:
    (view,) = [view for view in stack.fleet.snapshot() if view.replica_id == replica_id]
    return view.indexed_tokens


def test_ready_is_connected_and_has_told_its_load(make_stack: Make, make_replica: Make) -> None:
    silent = make_replica()
    silent.tells_load = False
    stack = make_stack()
    stack.replicas.set_replicas({"a": silent.address})
    silent.wait_for(lambda: silent.received)
    stack.until(lambda: stack.fleet.snapshot())
    assert ready(stack) == 503
    silent.tell(ReplicaLoad(incarnation="one"))
    stack.ready("a")
    assert ready(stack) == 200
    silent.die()
    stack.ready()
    assert ready(stack) == 503
    assert stack.fleet.snapshot() == []


@pytest.mark.usefixtures("looks_are_mine")
def test_a_silent_replica_gets_no_requests_until_it_is_heard(make_stack: Make, make_replica: Make) -> None:
    """Its connection stays, and so do its streams."""
    silent, other = make_replica().hold(), make_replica().hold()
    silent.speaks_idle = False
    stack = make_stack(silent)
    silent.allow(1)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        chunks = [next(stream)]
        looks(stack, connections.SILENT_LOOKS - 1)
        silent.tell(Outputs([]))
        stack.until(lambda: unheard(stack, "r0") == 0)
        looks(stack, connections.SILENT_LOOKS - 1)
        assert ready(stack) == 200
        looks(stack, 1)
        assert ready(stack) == 503 and stack.replicas.ready == frozenset()
        looks(stack, 5)
        assert stack.metric('shoal_replicas_taken_out_total{model="tiny",reason="silent"}') == 1
        assert stack.metric("shoal_replicas_ready") == 0
        stack.replicas.set_replicas({"r0": silent.address, "r1": other.address})
        stack.ready("r1")
        silent.tell(Outputs([]))
        stack.ready("r0", "r1")
        assert ready(stack) == 200
        silent.allow(None)
        chunks += stream
    assert chunks[-1].choices[0].finish_reason == "stop" and not other.requests()
    silent.die()
    stack.ready("r1")
    assert stack.metric('shoal_replicas_taken_out_total{model="tiny",reason="lost"}') == 1
    assert stack.metric("shoal_resumed_sequences_total") == 0
    other.die()


@pytest.mark.usefixtures("looks_are_mine")
def test_a_replica_that_is_gone_is_silent_no_longer(make_stack: Make, make_replica: Make) -> None:
    fake = make_replica()
    fake.speaks_idle = False
    stack = make_stack(fake)
    looks(stack, connections.SILENT_LOOKS)
    assert stack.replicas.ready == frozenset()
    fake.hang_up()
    stack.ready("r0")  # connected anew


@pytest.mark.usefixtures("looks_are_mine")
def test_a_frame_that_waits_for_its_turn_has_been_heard(make_stack: Make, make_replica: Make) -> None:
    fake = make_replica()
    fake.speaks_idle = False
    stack = make_stack(fake)
    stack.server.do(stack.replicas._large.acquire())
    fake.tell(CacheEvents("one", 1, [Stored(1, 0, pack(range(connections.LARGE_FRAME_BYTES)))], 16))
    stack.until(lambda: stack.replicas._connections["r0"]._is_in_queue)
    looks(stack, connections.SILENT_LOOKS)
    assert stack.replicas.ready == {"r0"}
    stack.server.loop.call_soon_threadsafe(stack.replicas._large.release)
    stack.until(lambda: indexed(stack, "r0"))


def test_a_router_looks_by_itself(make_stack: Make, make_replica: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.replicas.replicas.LOOK_EVERY_S", 0.001)
    silent = make_replica()
    silent.speaks_idle = False
    stack = make_stack()
    stack.replicas.set_replicas({"a": silent.address})
    stack.until(lambda: stack.metric('shoal_replicas_taken_out_total{model="tiny",reason="silent"}') == 1)
    assert ready(stack) == 503
    silent.die()


@pytest.fixture
def looks_are_mine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the test looks at the replicas, so only it says how much time has passed."""
    monkeypatch.setattr("router.replicas.replicas.LOOK_EVERY_S", 1e6)


def looks(stack: Any, number: int) -> None:
    """So many looks at once; no other comes between."""

    async def look() -> None:
        for _ in range(number):
            stack.replicas.look()

    stack.server.do(look())


def unheard(stack: Any, replica_id: str) -> int:
    count: int = stack.replicas._connections[replica_id]._unheard_looks
    return count


class Network:
    """Between routers and a replica. Bytes that come once it is cut are lost, and nobody is told."""

    def __init__(self, address: str) -> None:
        self._host, port = address.removeprefix("tcp://").split(":")
        self._port = int(port)
        self._is_cut = False
        self._server: asyncio.Server

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def cut(self) -> None:
        self._is_cut = True

    async def close(self) -> None:
        self._server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if not self._is_cut:
                    writer.write(data)
        writer.close()


@pytest.mark.slow
def test_a_host_that_vanishes_is_noticed(make_stack: Make, make_replica: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections stay open, and nobody answers on them. A stream goes on elsewhere."""
    assert connections.HEARTBEAT_MS + connections.HEARTBEAT_TIMEOUT_MS <= 3000
    monkeypatch.setattr(connections, "HEARTBEAT_MS", 200)
    monkeypatch.setattr(connections, "HEARTBEAT_TIMEOUT_MS", 800)
    vanishing, other = make_replica().hold(), make_replica()
    vanishing.allow(1)
    stack = make_stack()
    network = Network(vanishing.address)
    stack.replicas.set_replicas({"far": stack.server.do(network.open())})
    stack.ready("far")
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        chunks = [next(stream)]
        stack.server.do(network.cut())
        stack.ready()  # the connection counts as broken, though TCP has said nothing
        stack.replicas.set_replicas({"near": other.address})
        chunks += stream
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert other.requests()[0].output_ids
    stack.server.do(network.close())
    vanishing.die()
    other.die()


def test_a_busy_replica_is_ready(make_stack: Make, make_replica: Make) -> None:
    """One whose scheduler is in the middle of a long step says nothing, and its socket still lives."""
    stack = make_stack(make_replica())
    with stack.fakes["r0"].frozen():
        assert ready(stack) == 200


def test_replicas_come_go_and_move(make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica(), make_replica())
    third, fourth = make_replica(), make_replica()
    stack.replicas.set_replicas({"r1": stack.fakes["r1"].address, "r2": third.address})
    stack.ready("r1", "r2")
    stack.replicas.set_replicas({"r1": stack.fakes["r1"].address, "r2": fourth.address})
    fourth.wait_for(lambda: fourth.received)
    stack.until(lambda: stack.replicas.ready == {"r1", "r2"} and len(stack.replicas._tasks) == 2)
    assert [view.replica_id for view in stack.fleet.snapshot()] == ["r1", "r2"]
    assert len(stack.fakes["r1"].received) == 1  # it was left alone
    stack.replicas.set_replicas({"r3": "no address"})  # cannot be connected to, and does no harm
    stack.ready()
    stack.replicas.set_replicas({})
    assert stack.fleet.snapshot() == [] and stack.replicas.known == frozenset()
    for fake in (third, fourth):
        fake.die()


def test_requests_of_a_dropped_replica_go_on_elsewhere(make_stack: Make, make_replica: Make) -> None:
    fake = make_replica().hold()
    other = make_replica()
    stack = make_stack(fake)
    fake.allow(1)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        chunks = [next(stream)]
        stack.replicas.set_replicas({"new": other.address})
        chunks += stream
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert other.requests()[0].output_ids
    other.die()


def test_streams_of_a_replica_that_hangs_go_on_elsewhere_at_once(make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica().hold(), make_replica().hold())
    for fake in stack.fakes.values():
        fake.allow(1)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        chunks = [next(stream)]
        first, other = sorted(stack.fakes.values(), key=lambda fake: not fake.requests())
        other.allow(None)
        first.tell(Farewell("hung", "rank 3 hangs"))
        chunks += stream
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert other.requests()[0].output_ids
    assert stack.metric('shoal_replicas_taken_out_total{model="tiny",reason="hung"}') == 1


def test_a_replica_that_leaves_keeps_its_streams_and_gets_no_requests(make_stack: Make, make_replica: Make) -> None:
    leaving, other = make_replica().hold(), make_replica()
    stack = make_stack(leaving, drain_s=3600)
    leaving.allow(1)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        chunks = [next(stream)]
        stack.replicas.set_replicas({"r0": leaving.address, "new": other.address})
        stack.ready("r0", "new")
        leaving.tell(Leaving(3600))
        stack.ready("new")
        assert stack.replicas.closed == {"r0"}
        for _ in range(2):
            stack.client.chat.completions.create(model="tiny", messages=HELLO)
        stack.replicas.set_replicas({"new": other.address})
        leaving.allow(None)
        chunks += stream
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len(leaving.requests()) == 1 and len(other.requests()) == 2
    stack.until(lambda: stack.replicas._connections.keys() == {"new"})
    assert stack.replicas.closed == frozenset() and stack.metric("shoal_resumed_sequences_total") == 0
    other.die()


def test_streams_of_a_replica_that_was_drained_go_on_elsewhere(make_stack: Make, make_replica: Make) -> None:
    leaving, other = make_replica().hold(), make_replica()
    stack = make_stack(leaving, drain_s=3600)
    leaving.allow(1)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        chunks = [next(stream)]
        stack.replicas.set_replicas({"new": other.address})
        stack.ready("new")
        leaving.tell(Farewell("drained", "its time is over"))
        chunks += stream
    assert chunks[-1].choices[0].finish_reason == "stop" and other.requests()[0].output_ids
    assert stack.metric('shoal_resumed_sequences_total{model="tiny",reason="replica_left"}') == 1
    assert stack.metric("shoal_replicas_taken_out_total") == 0
    other.die()


def test_a_replica_that_never_says_that_it_ends_is_dropped_all_the_same(
    make_stack: Make, make_replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.replicas.replicas.LATER_S", 0)
    leaving, other = make_replica().hold(), make_replica()
    stack = make_stack(leaving, drain_s=0)
    leaving.allow(1)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        chunks = [next(stream)]
        stack.replicas.set_replicas({"new": other.address})
        chunks += stream
    assert chunks[-1].choices[0].finish_reason == "stop" and other.requests()[0].output_ids
    other.die()


def test_a_replica_that_stays_after_all_gets_requests_again(make_stack: Make, make_replica: Make) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake, drain_s=3600)
    fake.allow(1)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        chunks = [next(stream)]
        stack.replicas.set_replicas({})
        stack.ready()
        stack.replicas.set_replicas({"r0": fake.address})
        stack.ready("r0")
        fake.allow(None)
        chunks += stream
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert [type(message) for message in fake.received] == [Subscribe, Generate], "its connection stayed"


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_a_replica_of_a_neighbouring_version_answers(make_stack: Make, make_replica: Make, protocol: int) -> None:
    """A replica of number 1 tells none: its first message is its cache."""
    fake = make_replica()
    fake.protocol = protocol
    stack = make_stack(fake)
    answer = stack.client.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].finish_reason == "stop"
    assert fake.received[0].protocol == PROTOCOL


def test_a_replica_of_the_first_version_without_the_newer_fields_answers(make_stack: Make, make_replica: Make) -> None:
    """Its load and its cache, byte for byte as it sent them."""
    fake = make_replica()
    fake.protocol, fake.tells_load = 1, False
    stack = make_stack()
    stack.replicas.set_replicas({"old": fake.address})
    fake.wait_for(lambda: fake.received)
    load = {"type": "ReplicaLoad", "incarnation": "one", "bookings_seen": 0, "waiting_tokens": 5, "running": 1}
    costs = [5e-3, 2.4e-5, 1e-9, 6e-6, 3.5e-8, 0.046]
    event = {"type": "CacheEvents", "incarnation": "one", "first_seq": 1, "events": [], "page_size": 16}
    fake.tell(*(msgspec.msgpack.encode(message) for message in (event, load | {"costs": costs})))
    stack.ready("old")
    assert stack.metric("shoal_waiting_tokens") == 5 and stack.metric("shoal_refused_routers_total") == 0
    answer = stack.client.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].finish_reason == "stop"
    fake.die()


@pytest.mark.parametrize(("mine", "other"), [(PROTOCOL, PROTOCOL + 2), (3, 1)])
def test_a_replica_of_a_far_version_is_refused_by_name(
    make_stack: Make,
    make_replica: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mine: int,
    other: int,
) -> None:
    monkeypatch.setattr(connections, "PROTOCOL", mine)
    fake, near = make_replica(), make_replica()
    fake.protocol, near.protocol = other, mine
    stack = make_stack(near)
    stack.replicas.set_replicas({"far": fake.address, "r0": near.address})
    stack.until(lambda: stack.metric('shoal_replicas_taken_out_total{model="tiny",reason="protocol"}') == 1)
    stack.until(lambda: stack.replicas._tasks["far"].done())  # it is not tried again
    assert stack.replicas.ready == {"r0"}
    assert re.search(rf"\bfar\b.*{re.escape(fake.address)}.*\b{other}\b.*\b{mine}\b", caplog.text)
    stack.replicas.set_replicas({"r0": near.address})
    stack.until(lambda: "far" not in stack.replicas._tasks)
    fake.die()


def test_who_does_not_encrypt_or_has_another_secret_is_named(
    make_stack: Make, make_replica: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A replica of a version before encryption is not tried again. Another server's may be about to end."""
    near = make_replica()
    stack = make_stack(near)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as plain, context.socket(zmq.ROUTER) as foreign:
        door = Door(context, Curve(bytes(32), REPLICA), {foreign: 1000})
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (plain, foreign)]
        addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        stack.replicas.set_replicas({"old": addresses[0], "foreign": addresses[1], "r0": near.address})
        stack.until(lambda: stack.metric('shoal_replicas_taken_out_total{model="tiny",reason="protocol"}') == 1)
        stack.until(lambda: stack.replicas._tasks["old"].done())
        stack.until(lambda: door.refused > 2)
        stack.replicas.set_replicas({"r0": near.address})
        stack.until(lambda: len(stack.replicas._tasks) == 1)
        door.close()
    assert stack.replicas.ready == {"r0"}
    assert f"refused replica old at {addresses[0]}" in caplog.text
    assert caplog.text.count(f"replica foreign at {addresses[1]} hangs up") == 1


def test_what_is_no_message_breaks_the_connection(make_stack: Make, make_replica: Make) -> None:
    """A replica of another version must not leave requests hanging."""
    fake = make_replica()
    stack = make_stack(fake)
    fake.tell(b"nonsense")
    fake.wait_for(lambda: len(fake.received) == 2)  # connected anew
    stack.ready("r0")


def test_a_gap_in_the_events_asks_for_a_snapshot_once(make_stack: Make, make_replica: Make) -> None:
    fake = make_replica()
    stack = make_stack(fake)
    leaf = Stored(1, 0, pack(range(16)))
    fake.tell(CacheEvents("one", 1, [leaf], 16))
    stack.until(lambda: indexed(stack, "r0") == 16)
    fake.tell(*(CacheEvents("one", seq, [Stored(seq, 0, pack(range(16)))], 16) for seq in (7, 8)))
    fake.wait_for(lambda: len(fake.received) == 2)
    stack.until(lambda: indexed(stack, "r0") == 0)
    assert [type(message) for message in fake.received] == [Subscribe, Subscribe]


def test_outputs_of_nobody_are_passed_over(make_stack: Make, make_replica: Make) -> None:
    fake = make_replica()
    stack = make_stack(fake)
    fake.tell(Outputs([Output(request_id="stranger", token_ids=[1])]))
    answer = stack.client.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].finish_reason == "stop"


def test_outputs_that_wait_become_one(make_stack: Make, make_replica: Make) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake)

    async def read() -> list[Output]:
        stream = stack.replicas.generate("r0", Generate(request_id="a", prompt_ids=[1], sampling=PARAMS))
        fake.allow(3)
        while stream.unread_tokens < 3:
            await asyncio.sleep(0.001)
        fake.allow(None)
        return [output async for output in stream]

    first, *rest = stack.server.do(read())
    assert len(first.token_ids) >= 3 and len(first.logprobs) == len(first.token_ids)
    assert (first.cached_tokens, first.queue_s) == (3, 0.25)
    last = [first, *rest][-1]
    assert last.finish_reason == "stop" and last.stop_token_id is not None
    assert sum(len(output.token_ids) for output in [first, *rest]) == len(fake.script(fake.requests()[0]))


def test_closing_a_stream_aborts_it_only_while_it_runs(make_stack: Make, make_replica: Make) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake)

    async def run() -> None:
        one = stack.replicas.generate("r0", Generate(request_id="one", prompt_ids=[1], sampling=PARAMS))
        two = stack.replicas.generate("r0", Generate(request_id="two", prompt_ids=[1], sampling=PARAMS))
        one.close()
        fake.allow(None)
        async for _ in two:
            pass
        two.close()

    stack.server.do(run())
    fake.wait_for(lambda: not fake.running)
    assert fake.aborted() == ["one"]


def test_a_request_that_no_replica_would_take_is_refused(
    make_stack: Make, make_replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_FRAME_BYTES", 100)
    fake = make_replica()
    stack = make_stack(fake)
    stack.ready("r0")
    body = {"model": "tiny", "prompt": "word " * 50, "max_tokens": 1}
    assert httpx.post(f"{stack.url}/v1/completions", json=body).status_code == 400
    assert not fake.requests() and ready(stack) == 200


def test_a_replica_that_is_not_there() -> None:
    async def run() -> None:
        replicas = Replicas(Fleet(), Metrics().model("tiny"), SECRET)
        request = Generate(request_id="a", prompt_ids=[1], sampling=PARAMS)
        with pytest.raises(ReplicaLost, match="nobody"):
            replicas.generate("nobody", request)
        await replicas.start()
        replicas.set_replicas({"late": "tcp://127.0.0.1:9"})  # nobody listens
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(ReplicaLost):
            replicas.generate("late", request)
        await replicas.close()
        replicas.set_replicas({})  # too late, and harmless
        assert replicas.ready == frozenset()

    asyncio.run(run())


def test_a_replica_hears_of_the_router_and_tells_the_router_of_others(make_replica: Make) -> None:
    fake = make_replica()

    async def run() -> None:
        replicas = Replicas(Fleet(), Metrics().model("tiny"), SECRET, peer_host="127.0.0.1")
        replicas.set_replicas({"a": fake.address})
        await replicas.start()
        while not replicas.ready:
            await replicas.changed()
        peers = replicas._peers
        assert peers is not None and fake.received == [Subscribe(peers.name, peers.address, PROTOCOL, adapters=True)]
        assert peers.address.startswith("tcp://127.0.0.1:")
        fake.tell(Routers({peers.name: peers.address, "other": "tcp://127.0.0.1:9"}))
        while not peers._listening:
            await asyncio.sleep(0.002)
        assert peers._listening.keys() == {"tcp://127.0.0.1:9"}
        fake.die()
        while replicas.ready:
            await replicas.changed()
        assert not peers._listening
        await replicas.close()

    asyncio.run(asyncio.wait_for(run(), 20))


PARAMS = SamplingParams(max_tokens=400, logprobs=0, seed=1)
