"""Connections to one server, for hundreds of calls at once."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import httpx

MAX_IDLE_CONNECTIONS = 1024  # connections that are kept open between calls


class Connections(httpx.AsyncBaseTransport):
    """A pool of connections, one for each request that is under way; the one that was used last goes first.

    httpx's own pool goes through all of its connections at every request and response. With 256 calls at once that took
    26 ms of CPU a call, and takes 1 ms here.
    """

    def __init__(self) -> None:
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._ssl: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        transport = self._idle.pop() if self._idle else self._opened(request)
        try:
            response = await transport.handle_async_request(request)
        except BaseException:
            await transport.aclose()
            raise
        body = _Body(cast(httpx.AsyncByteStream, response.stream), transport, self._release)
        return httpx.Response(
            response.status_code, headers=response.headers, stream=body, extensions=response.extensions
        )

    async def aclose(self) -> None:
        """Closes the connections that are idle. The others are closed with their response."""
        while self._idle:
            await self._idle.pop().aclose()

    def _opened(self, request: httpx.Request) -> httpx.AsyncHTTPTransport:
        if self._ssl is None and request.url.scheme == "https":
            self._ssl = httpx.create_ssl_context()  # takes 20 ms, and all connections may share it
        return httpx.AsyncHTTPTransport(
            verify=self._ssl or False, limits=httpx.Limits(max_connections=1, max_keepalive_connections=1)
        )

    async def _release(self, transport: httpx.AsyncHTTPTransport) -> None:
        if len(self._idle) < MAX_IDLE_CONNECTIONS:
            self._idle.append(transport)
        else:
            await transport.aclose()


class _Body(httpx.AsyncByteStream):
    """A response's body, which came by `transport`. `release` takes the transport back when the whole body was read.

    Any other transport is closed: what is left of the body cannot be skipped. A read or a close that was cancelled
    leaves httpcore's connection busy for good, and the next request on it would wait for ever.
    """

    def __init__(
        self,
        stream: httpx.AsyncByteStream,
        transport: httpx.AsyncHTTPTransport,
        release: Callable[[httpx.AsyncHTTPTransport], Awaitable[None]],
    ) -> None:
        self._stream = stream
        self._transport = transport
        self._release = release
        self._is_whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part
        self._is_whole = True

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        except BaseException:
            await self._transport.aclose()
            raise
        if self._is_whole:
            await self._release(self._transport)
        else:
            await self._transport.aclose()
