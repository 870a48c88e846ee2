"""Servers of uvicorn's look every 5 ms whether they shall end, not every 100: most tests that start one would otherwise
spend more time on its end than on what they ask. Importing this module is enough.
"""

import asyncio
from typing import Any

import uvicorn.server


class _ShortTicks:
    """`asyncio` as `uvicorn.server` sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay: float) -> None:
        await asyncio.sleep(delay / 20)


uvicorn.server.asyncio = _ShortTicks()  # type: ignore[assignment]
