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


@pytest.mark.parametrize(
    ("sent", "body", "reused"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=1\r\n0123456789\r\n0\r\nx: y\r\n\r\n",
         b"abc0123456789", True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab", b"ab", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nab", b"ab", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab", b"ab", False),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", b"to the end", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", None, False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", None, False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n", None, False),
        (b"nonsense\r\n\r\n", None, False),
        (b"", None, False),
    ],
)  # fmt: skip
def test_bodies_and_their_ends(sent: bytes, body: bytes | None, reused: bool) -> None:
    """A body that is whole, or an error of the transport."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(2 if reused else 1):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(sent)
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/a?b=c"
            async with httpx.AsyncClient(transport=Connections()) as client:
                if body is None:
                    with pytest.raises(httpx.TransportError):
                        await client.get(url)
                    return
                for _ in range(2):
                    assert (await client.get(url)).content == body
        assert connections == (1 if reused else 2)

    asyncio.run(run())


def test_a_server_that_is_not_there_is_an_error_of_connecting() -> None:
    async def run() -> None:
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
        async with httpx.AsyncClient(transport=Connections()) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://127.0.0.1:{port}/")

    asyncio.run(run())
