"""What a connection is held to: its sizes and times, HTTP's rules, and clients that stop sending or leave."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import httptools_impl as http_protocol

from router.config import RouterConfig
from router.http import connection
from router.http import listener as listeners
from router.http.listener import Listener

WAIT_S = 10.0
SHORT_S = 0.05
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

Loop = Callable[[Any], Any]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Loop:
    """Routers run with uvloop."""
    return request.param


@pytest.fixture(autouse=True)
def no_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a listener closes, nobody connects."""
    monkeypatch.setattr(listeners, "HANDSHAKE_S", 0)


class App:
    """Reads the body and answers with it. /events answers with events, the second only when `release` is set; /whole
    only then, with a length; /now without reading."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.release = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", scope["path"] != "/now"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body, more = body + message["body"], message["more_body"]
        self.asked.set()
        events = scope["path"] == "/events"
        if events:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        if scope["path"] in ("/events", "/whole"):
            gone = asyncio.ensure_future(receive())
            released = asyncio.ensure_future(self.release.wait())
            await asyncio.wait((gone, released), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.left.set()
            gone.cancel()
            released.cancel()
            body = b"data: 2\n\n"
        if not events:
            length = (b"content-length", b"%d" % len(body))
            await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Running:
    """A listener, and what asks it."""

    def __init__(self, app: App, listener: Listener) -> None:
        self.app = app
        self._listener = listener
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def connections(self) -> set[Any]:
        return self._listener._server.server_state.connections

    async def connect(self) -> Streams:
        reader, writer = await asyncio.open_connection(*self._listener.address)
        self._writers.append(writer)
        return reader, writer

    async def tell(self, data: bytes) -> bytes:
        """Everything that comes until the server closes."""
        reader, writer = await self.connect()
        writer.write(data)
        return await reader.read()

    def leave(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def running(**limits: Any) -> AsyncIterator[Running]:
    app = App()
    listener = Listener(app, "127.0.0.1", 0, RouterConfig(**limits))
    await listener.start()
    made = Running(app, listener)
    try:
        async with asyncio.timeout(WAIT_S):
            yield made
    finally:
        app.release.set()
        made.leave()
        await listener.close()


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    """The error of an answer of this status, which says that the connection ends."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head and b"x-request-id: " in head and b"application/json" in head
    return json.loads(body)["error"]


def told(data: bytes, loop: Loop = uvloop.run, **limits: Any) -> bytes:
    async def run() -> bytes:
        async with running(**limits) as server:
            return await server.tell(data)

    return loop(run())


# ---------------------------------------------------------------- times


def test_who_says_nothing_is_shown_out(loop: Loop) -> None:
    assert told(b"", loop, header_timeout_s=SHORT_S) == b""


@pytest.mark.parametrize("part", [b"G", HEAD, HEAD + b"X-Slow: a"])
def test_half_a_header_is_waited_for_so_long(part: bytes, loop: Loop) -> None:
    assert error_of(told(part, loop, header_timeout_s=SHORT_S), 408)["code"] == "timeout"


def test_the_next_request_has_a_time_too() -> None:
    async def run() -> None:
        async with running(header_timeout_s=SHORT_S) as server:
            answer = await server.tell(ASK + b"GET / HT")
            first, _, second = answer.partition(b"HTTP/1.1 408")
            assert first.startswith(b"HTTP/1.1 200") and b'"timeout"' in second

    uvloop.run(run())


@pytest.mark.parametrize("more", [b"", b"\r\n"])
def test_a_connection_that_is_idle_after_an_answer_is_closed(more: bytes, loop: Loop) -> None:
    answer = told(ASK + more, loop, keep_alive_s=SHORT_S)
    assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" not in answer


def test_a_body_that_nobody_reads_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0)
    slow = b"POST /now HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf"
    assert told(slow, body_timeout_s=SHORT_S).startswith(b"HTTP/1.1 200")


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"X-Large: " + b"x" * 5000, 431),  # and no end
        (HEAD + b"X-Large: " + b"x" * 900 + b"\r\n\r\n", 431),
        (HEAD + b"".join(b"X-%d: y\r\n" % number for number in range(90)) + b"\r\n", 431),
        (b"GET /" + b"x" * 5000, 414),
        (b"GET /" + b"x" * 900 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Trailer: " + b"x" * 5000, 431),
    ],
)
def test_large_headers(data: bytes, status: int, loop: Loop) -> None:
    error = error_of(told(data, loop, max_header_bytes=800), status)
    assert error["code"] == "request_too_large" and "800" in error["message"]


def test_a_large_body_is_not_taken_for_headers() -> None:
    async def run() -> None:
        body = b"1\r\nx\r\n" * 1000 + b"7d0\r\n" + b"x" * 2000 + b"\r\n0\r\n\r\n"
        async with running(max_header_bytes=800, keep_alive_s=SHORT_S) as server:
            answer = await server.tell(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body + ASK)
            assert answer.count(b"HTTP/1.1 200") == 2 and b"x" * 3000 in answer

    uvloop.run(run())


def test_a_benchmark_of_thousands_fits_into_what_is_let_in_unasked() -> None:
    assert RouterConfig().max_connections >= 4096


def test_more_connections_than_there_may_be(loop: Loop) -> None:
    async def run() -> None:
        async with running(max_connections=2) as server:
            first, second = await server.connect(), await server.connect()
            for _, writer in (first, second):
                server.app.asked.clear()
                writer.write(b"GET /whole HTTP/1.1\r\nHost: x\r\n\r\n")
                await server.app.asked.wait()
            refusal = await server.tell(ASK)
            assert error_of(refusal, 503)["code"] == "too_many_connections" and b"Retry-After" in refusal
            server.app.release.set()
            for reader, _ in (first, second):
                assert (await reader.readuntil(b"data: 2\n\n")).startswith(b"HTTP/1.1 200")

    loop(run())


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"GET / HT",
        ASK,
        HEAD + b"Content-Length: 9\r\n\r\nhalf",
        b"POST /now HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
    ],
)
def test_who_waits_longest_makes_room(part: bytes, loop: Loop) -> None:
    """Connections on which nobody waits for an answer keep nobody out, however they are kept alive."""

    async def run() -> None:
        async with running(max_connections=3, header_timeout_s=600, body_timeout_s=600) as server:
            reader, busy = await server.connect()
            busy.write(b"GET /whole HTTP/1.1\r\nHost: x\r\n\r\n")
            await server.app.asked.wait()
            idle = [await server.connect() for _ in range(2)]
            for one, writer in idle:
                writer.write(part)
                if part == ASK:
                    await one.readuntil(b"\r\n\r\n")
            for other, writer in [await server.connect() for _ in range(2)]:
                writer.write(ASK)
                assert (await other.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            for one, _ in idle:
                await one.read()  # to its end
            server.app.release.set()
            assert b"data: 2\n\n" in await reader.readuntil(b"data: 2\n\n")

    loop(run())


def test_the_peer_with_most_connections_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = iter(["other", *["greedy"] * 9])
    monkeypatch.setattr(http_protocol, "get_remote_addr", lambda transport: (next(peers), 1))

    async def run() -> None:
        async with running(max_connections=4) as server:
            connections = []
            for _ in range(6):
                connections.append(await server.connect())
                connections[-1][1].write(ASK)
                await connections[-1][0].readuntil(b"\r\n\r\n")
            assert [await reader.read() for reader, _ in connections[1:3]] == [b"", b""]
            connections[0][1].write(ASK)
            assert await connections[0][0].readuntil(b"\r\n\r\n")

    uvloop.run(run())


@pytest.mark.parametrize("ending", [b"", b"Connection: close\r\n"])
def test_who_reads_no_answer_is_cut_off(ending: bytes) -> None:
    """Closing a connection would wait for its client, for ever."""

    async def run() -> None:
        async with running(keep_alive_s=SHORT_S) as server:
            _, writer = await server.connect()
            body = b"x" * (10 << 20)  # more than the kernel takes
            writer.write(HEAD + ending + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await server.app.asked.wait()
            while server.connections:
                await asyncio.sleep(0)

    uvloop.run(run())


# ---------------------------------------------------------------- HTTP's rules


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nBad Name: 1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    ],
)
def test_what_is_no_http(data: bytes) -> None:
    error = error_of(told(data), 400)
    assert error["code"] == "invalid_http" and error["type"] == "invalid_request_error"


def test_an_error_waits_for_the_answers_before_it() -> None:
    async def run() -> None:
        async with running() as server:
            reader, writer = await server.connect()
            writer.write(b"GET /whole HTTP/1.1\r\nHost: x\r\n\r\nnonsense\r\n\r\n")
            await server.app.asked.wait()
            server.app.release.set()
            assert (await reader.read()).endswith(b"\r\n\r\ndata: 2\n\n")

    uvloop.run(run())


def test_an_old_client_is_answered_in_its_own_way(loop: Loop) -> None:
    async def run() -> None:
        async with running() as server:
            server.app.release.set()
            head, _, body = (await server.tell(b"GET /events HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
            assert body == b"data: 1\n\ndata: 2\n\n"
            assert b"transfer-encoding" not in head and b"connection: close" in head
            counted = await server.tell(b"POST / HTTP/1.0\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nhi")
            assert b"content-length: 2" in counted and counted.endswith(b"\r\n\r\nhi")

    loop(run())


def test_who_expects_to_be_told_to_go_on_is_told() -> None:
    async def run() -> None:
        async with running() as server:
            reader, writer = await server.connect()
            writer.write(HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"hi")
            assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200")

    uvloop.run(run())


def test_an_upgrade_is_declined_and_the_request_answered() -> None:
    """As browsers of Java ask for HTTP/2: the parser reads nothing after it, so the connection ends."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n"
    answer = told(b"GET /now HTTP/1.1\r\nHost: x\r\n" + upgrade)
    assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer


# ---------------------------------------------------------------- who stops sending, and who leaves


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_stream_outlives_the_end_of_sending(version: bytes, loop: Loop) -> None:
    async def run() -> None:
        async with running() as server:
            reader, writer = await server.connect()
            writer.write(b"GET /events HTTP/%b\r\nHost: x\r\n\r\n" % version)
            got = await reader.readuntil(b"data: 1\n\n")
            writer.write_eof()
            got += await reader.readuntil(b":\n\n")  # which is no event: the server has seen it
            assert not server.app.left.is_set()
            server.app.release.set()
            got += await reader.read()
            assert got.endswith(b"data: 2\n\n" + (b"\r\n0\r\n\r\n" if version == b"1.1" else b""))

    loop(run())


@pytest.mark.parametrize("path", [b"/events", b"/whole"])
def test_the_end_of_sending_right_after_the_request(path: bytes, loop: Loop) -> None:
    async def run() -> None:
        async with running() as server:
            reader, writer = await server.connect()
            writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            writer.write_eof()
            seen = await reader.readuntil(b":\n\n" if path == b"/events" else connection.CONTINUE)
            server.app.release.set()
            seen += await reader.read()
            assert seen.count(b"HTTP/1.1 200 OK") == 1 and b"data: 2\n\n" in seen and not server.app.left.is_set()

    loop(run())


@pytest.mark.parametrize("path", [b"/events", b"/whole"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_who_closes_has_left_though_nothing_is_sent(path: bytes, version: bytes, loop: Loop) -> None:
    async def run() -> None:
        async with running() as server:
            reader, writer = await server.connect()
            writer.write(b"GET %b HTTP/%b\r\nHost: x\r\n\r\n" % (path, version))
            await server.app.asked.wait()
            if path == b"/events":
                await reader.readuntil(b"data: 1\n\n")
            writer.close()
            await server.app.left.wait()

    loop(run())


def test_who_leaves_in_its_body_has_left() -> None:
    async def run() -> None:
        async with running() as server:
            _, writer = await server.connect()
            writer.write(HEAD + b"Content-Length: 9\r\n\r\nhalf")
            writer.write_eof()
            await server.app.left.wait()

    uvloop.run(run())
