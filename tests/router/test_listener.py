"""Routers that listen themselves: a port that several share, and an end that cuts nothing off."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from router.config import RouterConfig
from router.listener import Listener, bind

LOOPBACK = "127.0.0.1"
WAIT_S = 10.0


class App:
    """Answers with its name; of /hold the rest only when `release` is set."""

    def __init__(self, name: bytes = b"one") -> None:
        self.name = name
        self.release = asyncio.Event()
        self.cancelled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/hold":
            await send({"type": "http.response.body", "body": b"half ", "more_body": True})
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        await send({"type": "http.response.body", "body": self.name})


@asynccontextmanager
async def listening(app: App, port: int = 0, drain_s: float = WAIT_S) -> AsyncIterator[Listener]:
    listener = Listener(app, LOOPBACK, port, drain_s, RouterConfig())
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
    """Returns once no connection is taken: closing is another task's doing. One that the kernel took, and the server
    had not when it closed, is reset."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await ask(listener)
            except httpx.ConnectError:
                return
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                continue


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


def test_an_answer_that_takes_too_long_is_given_up() -> None:
    async def run() -> None:
        app = App()
        async with listening(app, drain_s=0) as listener, httpx.AsyncClient(timeout=WAIT_S) as client:
            with contextlib.suppress(httpx.RemoteProtocolError):
                async with client.stream("GET", f"http://{LOOPBACK}:{listener.address[1]}/hold") as answer:
                    pieces = answer.aiter_text()
                    assert await anext(pieces) == "half "
                    await asyncio.wait_for(listener.close(), WAIT_S)
                    assert app.cancelled
                    assert not [piece async for piece in pieces]

    asyncio.run(run())


def test_an_address_that_cannot_be_had() -> None:
    async def run() -> None:
        with socket.create_server((LOOPBACK, 0)) as other, pytest.raises(OSError, match="in use"):
            Listener(App(), LOOPBACK, other.getsockname()[1], WAIT_S, RouterConfig())
        with pytest.raises(OSError, match="assign"):
            Listener(App(), "192.0.2.99", 0, WAIT_S, RouterConfig())

    asyncio.run(run())


def test_an_address_of_ip_version_6() -> None:
    try:
        made = bind("::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    with made:
        assert made.family == socket.AF_INET6
