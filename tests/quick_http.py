"""What most tests over HTTP would otherwise spend more time on than on what they ask. Importing this module is enough.

- Servers of uvicorn's look every 5 ms whether they shall end, not every 100.
- All clients share one TLS context, of which no test has a use: for each OpenAI client and each `httpx.get`, the
  certificates of all authorities would be parsed again.
"""

import asyncio
import functools
import ssl
from typing import Any

import uvicorn.server


class _ShortTicks:
    """`asyncio` as `uvicorn.server` sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay: float) -> None:
        await asyncio.sleep(delay / 20)


uvicorn.server.asyncio = _ShortTicks()  # type: ignore[assignment]
ssl.create_default_context = functools.cache(ssl.create_default_context)
