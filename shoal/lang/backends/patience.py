"""Waiting for a server that is full or cannot be reached."""

import asyncio
import json
import random
import time

import httpx

from shoal.lang.errors import BackendError

FULL_S = 600.0  # how long a call that a full server refuses is tried again
DOWN_S = 60.0  # the same for a server that cannot be reached, or has no replica
RETRY_S = 0.2  # before the first of these tries; doubled with each, up to RETRY_MAX_S. Retry-After goes first
RETRY_MAX_S = 5.0


class Patience:
    """Waits between tries of one request, and raises when there is no use in another."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._begun_s = time.monotonic()
        self._pause_s = RETRY_S

    async def unreachable(self, error: Exception) -> None:
        """Waits after a request that did not reach the server, or raises BackendError."""
        if time.monotonic() - self._begun_s > DOWN_S:
            raise BackendError(f"{self._url} cannot be reached: {error or type(error).__name__}") from error
        await self._sleep(None)

    async def refused(self, status: int, content: bytes, headers: httpx.Headers) -> None:
        """Waits after a refusal, as long as the server says, or raises BackendError with the server's reason."""
        limit_s = {429: FULL_S, 503: DOWN_S}.get(status, 0.0)
        if time.monotonic() - self._begun_s > limit_s or limit_s == 0:
            message, code = _error(content)
            raise BackendError(f"{self._url} answers {status}: {message}", status, code)
        await self._sleep(headers.get("Retry-After"))

    async def _sleep(self, retry_after: str | None) -> None:
        pause_s = float(retry_after) if retry_after and retry_after.isdigit() else self._pause_s
        self._pause_s = min(RETRY_MAX_S, self._pause_s * 2)
        await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))  # so that many do not come back at once


def _error(content: bytes) -> tuple[str, str | None]:
    """The message and code of an error's body."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace"), None
