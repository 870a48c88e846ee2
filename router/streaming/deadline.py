"""Deadlines of requests: the field `timeout` of a body, or the header X-Request-Timeout, in seconds from arrival."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from time import perf_counter
from typing import Any

from fastapi import Request

from router.wire.errors import ApiError, invalid

HEADER = "X-Request-Timeout"
# The clients of OpenAI and Anthropic would send the request again otherwise, when its answer is of no use any more.
NO_RETRY = {"x-should-retry": "false"}


def timeout_of(request: Request, body: Any) -> float | None:
    """The seconds that a request may take, the shorter of header and body; None if neither says. Raises ApiError."""
    given = request.headers.get(HEADER)
    asked = [] if getattr(body, "timeout", None) is None else [float(body.timeout)]
    if given is not None:
        try:
            asked.append(float(given))
        except ValueError:
            asked.append(math.nan)
        if not (0 < asked[-1] < math.inf):
            raise invalid(f"{HEADER} is {given[:100]!r}; it must be a number of seconds over 0.", HEADER)
    return min(asked, default=None)


@contextlib.asynccontextmanager
async def within(timeout_s: float | None, arrived: float, on_expiry: Callable[[], None]) -> AsyncIterator[None]:
    """Cancels what is inside when `timeout_s` seconds have passed since `arrived` (of `perf_counter`). Then calls
    `on_expiry` and raises ApiError (504)."""
    if timeout_s is None:
        yield
        return
    limit = asyncio.timeout(max(0.0, arrived + timeout_s - perf_counter()))
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        on_expiry()
        message = f"The request took longer than its timeout of {timeout_s:g} s, and was ended."
        raise ApiError(504, message, param="timeout", code="deadline_exceeded", headers=NO_RETRY) from None
