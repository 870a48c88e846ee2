"""Long answers: sent as they are made (server-sent events), and given up when the client disconnects."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from router.streaming.dialects import error_event, error_response
from router.streaming.shutdown import EarlyEnd
from router.wire.errors import ApiError, internal

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Emit = Callable[[bytes], Awaitable[None]]

_encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection."""


def event(data: msgspec.Struct) -> bytes:
    """A server-sent event with `data` as JSON."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


def named_event(name: str, data: msgspec.Struct) -> bytes:
    """A server-sent event with a name, and with `data` as JSON."""
    return b"event: " + name.encode() + b"\n" + event(data)


async def unless_gone(scope: Scope, receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`. If the client disconnects first, cancels `work` at once and raises ClientGone; if
    the `Shutdown` of the request's state comes first, or its `Aborted`, the ApiError of that."""
    state = scope.get("state", {})
    ends: list[EarlyEnd] = [end for name in ("shutdown", "aborted") if (end := state.get(name)) is not None]
    for end in ends:
        if end.has_come:
            work.close()
            raise end.error()
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    for end in ends:
        end.watch(watch)
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise next((end.error() for end in ends if end.has_come), ClientGone())
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Streams the server-sent events that `produce` emits. Emitting waits while the client's connection is full.

    The status is sent with the first event. An error before it becomes an answer with its own status; a later error
    becomes an event. Both have the form of the request's protocol.
    """

    media_type = "text/event-stream"

    def __init__(self, produce: Callable[[Emit], Coroutine[Any, Any, None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        starting = asyncio.Lock()  # choices of one answer emit concurrently
        # No middleware has anything to do with the body before its end, and each would cost time for every token.
        send_body: Send = scope.get("state", {}).get("send", send)

        async def emit(data: bytes) -> None:
            nonlocal started
            if not started:
                async with starting:
                    if not started:
                        start = {"status": self.status_code, "headers": self.raw_headers}
                        await send({"type": "http.response.start", **start})
                        started = True
            await send_body({"type": "http.response.body", "body": data, "more_body": True})

        error: ApiError | None = None
        try:
            await unless_gone(scope, receive, self._produce(emit))
        except (ClientGone, OSError):  # the server may report a disconnect by an error of `send`
            return
        except ApiError as known:
            error = known
        except Exception:
            log.exception("request %s failed in its stream", scope.get("state", {}).get("request_id"))
            error = internal()
        if error is not None:
            if not started:
                await error_response(error, scope)(scope, receive, send)
                return
            await emit(error_event(error, scope))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
