"""Routers that listen themselves: a port that several share, and an end that cuts nothing off."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from router.config import RouterConfig
from router.http import connection
from router.http import listener as module
from router.http.listener import Listener, bind

LOOPBACK = "127.0.0.1"
WAIT_S = 10.0


class App:
    """Answers with its name; of /hold the rest only when `release` is set."""

    def __init__(self, name: bytes = b"one") -> None:
        self.name = name
        self.release = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/hold":
            await send({"type": "http.response.body", "body": b"half ", "more_body": True})
            await self.release.wait()
        await send({"type": "http.response.body", "body": self.name})


@asynccontextmanager
async def listening(app: App, port: int = 0, **limits: Any) -> AsyncIterator[Listener]:
    listener = Listener(app, LOOPBACK, port, RouterConfig(**limits))
    await listener.start()
    try:
        yield listener
    finally:
        app.release.set()
        await listener.close()


async def ask(listener: Listener) -> str:
    """Over a connection of its own."""
    async with httpx.AsyncClient(timeout=WAIT_S, verify=False) as client:
        return (await client.get(f"http://{LOOPBACK}:{listener.address[1]}/")).text


async def refused(listener: Listener) -> None:
    """Returns once no connection is taken: closing is another task's doing. Until then each is answered."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await ask(listener)
            except httpx.ConnectError:
                return


@pytest.fixture(autouse=True)
def no_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.0)


def connected(listener: Listener, source: str = LOOPBACK) -> socket.socket:
    """A connection that the kernel has accepted, and the listener may not have."""
    return socket.create_connection(listener.address, timeout=WAIT_S, source_address=(source, 0))


async def answer_on(client: socket.socket) -> str:
    """All that comes on a connection to a request for /, up to its end."""
    with client:
        client.setblocking(False)
        loop, found = asyncio.get_running_loop(), b""
        async with asyncio.timeout(WAIT_S):
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            while piece := await loop.sock_recv(client, 1 << 16):
                found += piece
    return found.decode()


def test_all_connections_that_wait_are_accepted_in_a_turn_of_the_event_loop() -> None:
    """Whatever a turn takes, nobody waits for as many turns as others have opened connections. (uvloop's own servers
    accept one in a turn.)"""

    async def run() -> None:
        async with listening(App()) as listener:
            clients = [connected(listener) for _ in range(50)]
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(listener._server.server_state.connections) == len(clients)
            for client in clients:
                client.close()

    uvloop.run(run())


def test_who_opens_connection_after_connection_is_turned_away_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that each turn costs next to nothing. (The first come in the same turn, before any is served.)"""
    monkeypatch.setattr(module, "REFUSED_S", 0.0)
    monkeypatch.setattr(module.WaitingConnections, "MAX_REPLACED", 0)
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: 1.0))  # all within a second

    async def run() -> None:
        async with listening(App(), max_connections=4) as listener:
            with contextlib.ExitStack() as open_to_the_end:
                held = [open_to_the_end.enter_context(connected(listener)) for _ in range(4 + 2)]
                for client in held[:2]:  # closed to make room
                    assert await asyncio.to_thread(client.recv, 1) == b""
                refused = open_to_the_end.enter_context(connected(listener))
                refused.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")  # unread, it would reset the connection
                refusal = (await asyncio.to_thread(refused.recv, 1 << 16)).decode()
                assert refusal.startswith("HTTP/1.1 503 ") and "too_many_connections" in refusal
                assert "retry-after: 1" in refusal.lower()
                assert await asyncio.to_thread(refused.recv, 1) == b""
                other = open_to_the_end.enter_context(connected(listener, "127.0.0.2"))
                other.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await asyncio.to_thread(other.recv, 1 << 16)).startswith(b"HTTP/1.1 200 ")

    asyncio.run(run())


def test_a_place_is_found_for_who_has_few_connections_and_for_whom_others_have_waited_long() -> None:
    class Connection:
        def __init__(self, peer: str) -> None:
            self.peer = peer

    now_s, waiting = 0.0, connection.WaitingConnections()
    many = [Connection("a") for _ in range(5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: now_s))
        patch.setattr(waiting, "MAX_REPLACED", 1)
        assert waiting.may_replace("a") and waiting.dispensable() is None
        for each in [*many, Connection("b"), Connection("b"), Connection("c"), Connection("c"), Connection("c")]:
            waiting.add(each)
        assert waiting.dispensable() is many[0]
        assert [waiting.may_replace(peer) for peer in "aaccbb"] == [True, False, True, False, True, True]
        now_s = 2.0  # others have waited long: they may go
        assert [waiting.may_replace(peer) for peer in "aa"] == [True, True]
        for each in many[:3]:
            waiting.discard(each)
            waiting.discard(each)
        assert waiting.dispensable().peer == "c"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
    ],
)
def test_a_client_of_ipv6_has_a_network(one: str, other: str, same: bool) -> None:
    assert (connection.peer_of(one) == connection.peer_of(other)) is same


def test_a_listener_goes_on_where_descriptors_were_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NO_FILES_S", 0.0)

    async def run() -> None:
        async with listening(App()) as listener:
            failed = []

            def accept(listening: socket.socket) -> tuple[socket.socket, Any]:
                failed.append(listening)
                monkeypatch.undo()
                raise OSError(errno.EMFILE, "too many open files")

            monkeypatch.setattr(socket.socket, "accept", accept)
            assert (await ask(listener)) == "one" and len(failed) == 1

    asyncio.run(run())


def test_a_port_is_shared_and_one_that_ends_leaves_it_to_the_others() -> None:
    async def run() -> None:
        one, two = App(b"one"), App(b"two")
        async with listening(one) as first:
            async with listening(two, first.address[1]) as second:
                assert second.address == first.address
                answers = {await ask(first) for _ in range(64)}
                assert answers == {"one", "two"}  # all 64 by one: 2 to the power of -63
            assert not second.alive and first.alive
            assert {await ask(first) for _ in range(16)} == {"one"}

    asyncio.run(run())


def test_what_is_being_answered_is_answered_to_its_end() -> None:
    async def run() -> None:
        app = App()
        async with listening(app) as listener, httpx.AsyncClient(timeout=WAIT_S) as client:
            async with client.stream("GET", f"http://{LOOPBACK}:{listener.address[1]}/hold") as answer:
                pieces = answer.aiter_text()
                assert await anext(pieces) == "half "
                closing = asyncio.create_task(listener.close())
                await refused(listener)
                assert not closing.done()
                app.release.set()
                assert [piece async for piece in pieces] == ["one"]
            await asyncio.wait_for(closing, WAIT_S)
            assert not listener.alive

    asyncio.run(run())


def test_connections_that_only_the_kernel_has_accepted_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come in the very moment in which the listener closes. Their answers are the last on them."""
    clients: list[socket.socket] = []

    async def run() -> None:
        async with listening(App()) as listener:
            loop = asyncio.get_running_loop()

            def no_longer(listening: socket.socket) -> bool:
                clients.extend(connected(listener) for _ in range(8))
                return removed(listening)

            removed = loop.remove_reader
            monkeypatch.setattr(loop, "remove_reader", no_longer)
            monkeypatch.setattr(module, "refuse_handshakes", lambda listening: None)
            closing = asyncio.create_task(listener.close())
            async with asyncio.timeout(WAIT_S):
                while not clients:
                    await asyncio.sleep(0.001)
            for client in clients:
                answer = await answer_on(client)
                assert answer.endswith("one\r\n0\r\n\r\n") and "connection: close" in answer
            await asyncio.wait_for(closing, WAIT_S)

    asyncio.run(run())


def test_connections_that_the_event_loop_is_just_taking_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop takes them in the turn before the one in which the listener closes."""

    async def run() -> None:
        end = asyncio.Event()
        monkeypatch.setattr(module._Server, "main_loop", lambda server: end.wait())
        async with listening(App()) as listener:
            clients = [connected(listener) for _ in range(8)]
            end.set()
            for client in clients:
                assert (await answer_on(client)).endswith("one\r\n0\r\n\r\n")
            await asyncio.wait_for(listener.close(), WAIT_S)

    asyncio.run(run())


def test_a_connection_without_a_request_has_one_answered_and_one_that_waits_for_the_next_is_closed() -> None:
    async def run() -> None:
        app = App()
        async with listening(app) as listener, httpx.AsyncClient(timeout=WAIT_S) as idle:
            fresh = connected(listener)
            await idle.get(f"http://{LOOPBACK}:{listener.address[1]}/")  # by now, both are accepted
            (kept,) = (each for each in listener._server.server_state.connections if each.cycle is not None)
            closing = asyncio.create_task(listener.close())
            async with asyncio.timeout(WAIT_S):
                while not kept.transport.is_closing():
                    await asyncio.sleep(0.001)
            assert not closing.done()
            assert "connection: close" in await answer_on(fresh)
            await asyncio.wait_for(closing, WAIT_S)

    asyncio.run(run())


def test_a_socket_that_refuses_handshakes_keeps_its_connections() -> None:
    with bind(LOOPBACK, 0) as listening, socket.socket() as late:
        listening.listen()
        with socket.create_connection(listening.getsockname(), timeout=WAIT_S) as early:
            module.refuse_handshakes(listening)
            late.setblocking(False)
            late.connect_ex(listening.getsockname())
            late_state = late.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            assert late_state == b"\2", "SYN_SENT: nobody has answered"
            taken, _ = listening.accept()
            with taken:
                early.sendall(b"ping")
                assert taken.recv(4) == b"ping"
                taken.sendall(b"pong")
                assert early.recv(4) == b"pong"


def test_an_address_that_cannot_be_had() -> None:
    async def run() -> None:
        with socket.create_server((LOOPBACK, 0)) as other, pytest.raises(OSError, match="in use"):
            Listener(App(), LOOPBACK, other.getsockname()[1], RouterConfig())
        with pytest.raises(OSError, match="assign"):
            Listener(App(), "192.0.2.99", 0, RouterConfig())

    asyncio.run(run())


def test_an_address_of_ip_version_6() -> None:
    try:
        made = bind("::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    with made:
        assert made.family == socket.AF_INET6
