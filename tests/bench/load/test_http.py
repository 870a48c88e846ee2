"""The client reads what servers send, however it is cut, and says how a connection ended."""

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.http import Broken, Events, Http

STREAM = b': ping\n\ndata: {"a": 1}\r\n\r\ndata: one\ndata: two\n\nevent: x\ndata:three\n\nretry: 1\n\ndata: [DONE]\n\n'
WANTED = [b'{"a": 1}', b"one\ntwo", b"three", b"[DONE]"]


@settings(deadline=None)
@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_events_come_whole_however_the_stream_is_cut(cuts: set[int]) -> None:
    events, found = Events(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(edges):
        found += events.feed(STREAM[start:end])
    assert found == WANTED


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def talk(answers: list[bytes], requests: int, close_after_each: bool = False) -> tuple[list[object], int]:
    """Send requests one after another to a server that answers them with these bytes, the last one for good; returns
    what came of each (status and body, or the exception) and how many connections were made."""
    connections = 0
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\nhello"):
                answer = left.pop(0) if len(left) > 1 else left[0]
                writer.write(answer)
                await writer.drain()
                if close_after_each or not answer.startswith(b"HTTP/1.1 200 OK\r\n"):
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    async def run() -> list[object]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        http = Http(f"127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        results: list[object] = []
        for _ in range(requests):
            body: list[bytes] = []
            try:
                status = await http.send("POST", "/x", b"hello", lambda data, _s, _n, body=body: body.append(data))
                results.append((status, b"".join(body)))
            except Broken as broken:
                results.append(broken)
        http.close()
        server.close()
        return results

    return asyncio.run(run()), connections


SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"


@pytest.mark.parametrize("answer", [SIZED, CHUNKED])
def test_a_connection_is_kept(answer: bytes) -> None:
    assert talk([answer], 3) == ([(200, b"abc")] * 3, 1)


def test_a_kept_connection_that_has_closed_is_replaced() -> None:
    assert talk([SIZED], 3, close_after_each=True) == ([(200, b"abc")] * 3, 3)


def test_a_server_that_closes_says_so_or_just_does() -> None:
    polite = b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno"
    assert talk([polite], 2) == ([(404, b"no")] * 2, 2)
    assert talk([b"HTTP/1.1 200 Fine\r\n\r\nuntil the end"], 2) == ([(200, b"until the end")] * 2, 2)


@pytest.mark.parametrize(
    ("answer", "clean"),
    [
        (b"", True),
        (b"HTTP/1.1 200 Fine\r\nContent-Length: 5\r\n\r\nabc", False),
        (b"HTTP/1.1 200 Fine\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", False),
        (b"SSH-2.0-OpenSSH_9.9\r\n", False),
    ],
)
def test_an_answer_that_is_cut_off_is_broken(answer: bytes, clean: bool) -> None:
    ((result,), _) = talk([answer], 1)
    assert isinstance(result, Broken) and result.clean == clean


def test_a_url_must_be_one() -> None:
    for url in ("ftp://host", "http://", "//"):
        with pytest.raises(ValueError, match=re.escape(repr(url))):
            Http(url)


def test_nobody_listens() -> None:
    async def run() -> None:
        unused = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = unused.sockets[0].getsockname()[1]
        unused.close()
        await unused.wait_closed()
        with pytest.raises(OSError, match="Connect call failed"):
            await Http(f"http://127.0.0.1:{port}").get("/")

    asyncio.run(run())
