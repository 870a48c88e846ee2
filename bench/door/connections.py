"""Connections from a loopback address of one's own: a server tells clients apart by address before it knows their
key."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.load.http import Http, HttpConnection


class HttpFrom(Http):
    """A pool of connections from `source`, an address of this machine."""

    def __init__(self, url: str, api_key: str, source: str) -> None:
        super().__init__(url, api_key)
        self._source = source

    async def connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        made = await loop.create_connection(HttpConnection, self._host, self._port, local_addr=(self._source, 0))
        return made[1]

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection for bytes of any kind, which is reset at the end, with all that was not sent. Raises OSError."""
        reader, writer = await asyncio.open_connection(self._host, self._port, local_addr=(self._source, 0))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()
