"""The pool of connections to a server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from shoal.lang.backends.connections import Connections


class Server:
    """Answers each request with its path, once `open` is set. `/break` breaks the connection off, and `/long` has a
    body that never ends."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.open = asyncio.Event()
        self.open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while line := await reader.readline():
                while await reader.readline() != b"\r\n":
                    pass
                await self.open.wait()
                path = line.split()[1]
                if path == b"/break":
                    return
                length = 1 << 40 if path == b"/long" else len(path)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (length, path))
                await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    server = Server()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with httpx.AsyncClient(transport=Connections(), base_url=f"http://127.0.0.1:{port}") as client:
            yield server, client


def test_each_request_has_a_connection_and_the_next_ones_use_them_again() -> None:
    async def run() -> None:
        async with serving() as (server, client):
            server.open.clear()
            calls = [asyncio.create_task(client.get(f"/{i}")) for i in range(20)]
            while server.num_connections < 20:
                await asyncio.sleep(0)
            server.open.set()
            assert [(await call).text for call in calls] == [f"/{i}" for i in range(20)]
            for _ in range(3):
                answers = await asyncio.gather(*(client.get(f"/{i}") for i in range(20)))
                assert [answer.text for answer in answers] == [f"/{i}" for i in range(20)]
            assert server.num_connections == 20

    asyncio.run(run())


def test_a_broken_connection_or_an_unread_body_is_not_used_again() -> None:
    async def run() -> None:
        async with serving() as (server, client):
            with pytest.raises(httpx.TransportError):
                await client.get("/break")
            async with client.stream("GET", "/long") as response:
                assert response.status_code == 200
            assert (await client.get("/after")).text == "/after"
            assert server.num_connections == 3

    asyncio.run(run())


def test_a_cancelled_call_takes_its_connection_along() -> None:
    async def run() -> None:
        async with serving() as (server, client):
            server.open.clear()
            call = asyncio.create_task(client.get("/first"))
            while server.num_connections == 0:
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            server.open.set()
            assert (await client.get("/second")).text == "/second"

    asyncio.run(run())


def test_a_close_that_is_cancelled_holds_up_no_later_request() -> None:
    async def run() -> None:
        async with serving() as (_server, client):
            for turns in range(4):  # of the event loop, before the close is cancelled
                async with client.stream("GET", "/long") as response:
                    closing = asyncio.create_task(response.aclose())
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    closing.cancel()
                    await asyncio.wait([closing])
                assert (await asyncio.wait_for(client.get("/next"), 10)).text == "/next"

    asyncio.run(run())
