"""Connections to one server, for thousands of calls at once.

httpx's own pool goes through all of its connections at every request and response: 26 ms of CPU a call with 256 calls
at once. Its connections take another 1.4 ms a call, and one whose close was cancelled stays busy for good. So requests
go over plain streams of asyncio here, as HTTP/1.1.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterator

import httpx

MOST_IDLE = 1024  # connections that are kept open between calls
PIECE_BYTES = 64 << 10  # most of a body that is read at a time
MOST_HEADERS = 256

Headers = list[tuple[bytes, bytes]]


class Connections(httpx.AsyncBaseTransport):
    """A pool of connections, one for each request that is under way; the one that was used last goes first.

    A connection belongs to one event loop. Of a request's timeouts, that of connecting is kept; there are no others.
    A connection whose response was not read to its end is closed.
    """

    def __init__(self) -> None:
        self._idle: list[_ClientConnection] = []
        self._ssl: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Returns the response once its headers have come. Raises httpx.TransportError."""
        content = await request.aread()
        connection = self._reusable() or await self._opened(request)
        try:
            await connection.send(request, content)
            status, headers, body = await connection.receive(request.method)
        except BaseException:
            connection.close()
            raise
        return httpx.Response(status, headers=headers, stream=_Body(connection, body, self._release), request=request)

    async def aclose(self) -> None:
        """Closes the connections that are idle. The others are closed with their response."""
        while self._idle:
            self._idle.pop().close()

    def _reusable(self) -> "_ClientConnection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            connection.close()  # the server has closed it
        return None

    async def _opened(self, request: httpx.Request) -> "_ClientConnection":
        url = request.url
        secure = url.scheme == "https"
        if self._ssl is None and secure:
            self._ssl = httpx.create_ssl_context()  # takes 20 ms, and all connections may share it
        port = url.port or (443 if secure else 80)
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("connect")):
                reader, writer = await asyncio.open_connection(url.host, port, ssl=self._ssl if secure else None)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection to {url.host}:{port} in time", request=request) from error
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        return _ClientConnection(reader, writer)

    def _release(self, connection: "_ClientConnection") -> None:
        if len(self._idle) < MOST_IDLE and connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()


class _ClientConnection:
    """A connection, with one request at a time. After an exception, it can only be closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._keeps = True  # open after the response

    @property
    def is_open(self) -> bool:
        return self._keeps and not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    async def send(self, request: httpx.Request, content: bytes) -> None:
        """Sends a request. Whether it has arrived is known by its response: a server may refuse it before its end."""
        lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
        lines += [b"%s: %s" % header for header in request.headers.raw]
        self._writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + content)
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def receive(self, method: str) -> tuple[int, Headers, AsyncIterator[bytes]]:
        """The status, headers and body of a response. Raises httpx.TransportError."""
        with _transport_errors():
            status, headers = await self._head()
            while 100 <= status < 200:
                status, headers = await self._head()
            known = {name.lower(): value.strip().lower() for name, value in headers}
            self._keeps = self._keeps and known.get(b"connection") != b"close"
            if method == "HEAD" or status in (204, 304):
                return status, headers, self._sized(0)
            if known.get(b"transfer-encoding", b"identity") != b"identity":
                return status, headers, self._chunked()
            if (length := known.get(b"content-length")) is not None:
                return status, headers, self._sized(int(length))
        self._keeps = False
        return status, headers, self._to_the_end()

    async def _head(self) -> tuple[int, Headers]:
        version, status, *_ = (await self._line()).split(b" ", 2)
        self._keeps = version == b"HTTP/1.1"
        headers: Headers = []
        while line := await self._line():
            name, colon, value = line.partition(b":")
            if not colon or len(headers) == MOST_HEADERS:
                raise ValueError(f"these are no headers: {line[:80]!r}")
            headers.append((name, value.strip()))
        return int(status), headers

    async def _line(self) -> bytes:
        return (await self._reader.readuntil(b"\n")).rstrip(b"\r\n")

    async def _sized(self, length: int) -> AsyncIterator[bytes]:
        with _transport_errors():
            while length:
                piece = await self._reader.read(min(length, PIECE_BYTES))
                if not piece:
                    raise asyncio.IncompleteReadError(b"", length)
                length -= len(piece)
                yield piece

    async def _chunked(self) -> AsyncIterator[bytes]:
        with _transport_errors():
            while size := int((await self._line()).split(b";")[0], 16):
                async for piece in self._sized(size):
                    yield piece
                if await self._line():
                    raise ValueError("a chunk is longer than it says")
            while await self._line():
                pass  # what follows the last chunk

    async def _to_the_end(self) -> AsyncIterator[bytes]:
        with _transport_errors():
            while piece := await self._reader.read(PIECE_BYTES):
                yield piece


class _Body(httpx.AsyncByteStream):
    """The body of a response, which frees its connection at its end. `release` takes a connection that may be used
    again."""

    def __init__(
        self, connection: _ClientConnection, pieces: AsyncIterator[bytes], release: Callable[[_ClientConnection], None]
    ) -> None:
        self._connection: _ClientConnection | None = connection
        self._pieces = pieces
        self._release = release

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces:
            yield piece
        if self._connection is not None:
            self._release(self._connection)
            self._connection = None

    async def aclose(self) -> None:
        if self._connection is not None:  # what is left of the body cannot be skipped
            self._connection.close()
            self._connection = None


@contextlib.contextmanager
def _transport_errors() -> Iterator[None]:
    """Raises httpx's errors."""
    try:
        yield
    except asyncio.IncompleteReadError as error:
        raise httpx.RemoteProtocolError("the server closed the connection before the end of its response") from error
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise httpx.RemoteProtocolError(f"the server's response is no HTTP: {error}") from error
    except OSError as error:
        raise httpx.ReadError(str(error)) from error
