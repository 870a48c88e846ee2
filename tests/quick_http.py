"""What most tests over HTTP would otherwise spend more time on than on what they ask. Importing this module is enough.

- Servers of uvicorn's look every 5 ms whether they shall end, not every 100.
- Clients of httpx's, and so OpenAI's and Anthropic's, share one TLS context, of which no test has a use: for each client,
  and for each `httpx.get`, all certificates would be parsed again.
"""

import asyncio
import functools
from typing import Any

import httpx._transports.default
import uvicorn.server


class _ShortTicks:
    """`asyncio` as `uvicorn.server` sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay: float) -> None:
        await asyncio.sleep(delay / 20)


uvicorn.server.asyncio = _ShortTicks()  # type: ignore[assignment]
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)
