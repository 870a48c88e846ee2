"""The HTTP server without sockets: an `httpx` transport that calls the ASGI application in another event loop.

`httpx.ASGITransport` would run the application in the caller's loop, and hold a stream back until its end.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Scope

# An answer that the caller does not read waits when so much of it is unread, as with a connection that is full.
MAX_UNREAD_BYTES = 256 << 10

Submit = Callable[[Coroutine[Any, Any, None]], "Future[None]"]


class AsgiTransport(httpx.AsyncBaseTransport):
    """Requests to an ASGI application that runs in an event loop of its own. May be used from any number of event
    loops. Closing it does nothing: the application belongs to the owner of its loop."""

    def __init__(self, app: ASGIApp, submit: Submit) -> None:
        """`submit` runs a coroutine in the application's loop. When that loop has ended, it closes the coroutine and
        raises RuntimeError."""
        self._app = app
        self._submit = submit

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Returns the answer as soon as it begins. Raises httpx.ConnectError if the application has ended, and
        httpx.ReadError if it ends before the answer does."""
        exchange = _Exchange(self._app, _scope(request), await request.aread())
        try:
            exchange.begin(self._submit)
            status, headers = await exchange.head()
        except BaseException:
            await exchange.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=exchange, request=request)


def _scope(request: httpx.Request) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.split(b"?")[0],
        "query_string": request.url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": (request.url.host, request.url.port),
        "client": ("127.0.0.1", 0),
    }


class _Exchange(httpx.AsyncByteStream):
    """A request and its answer. `_run`, `_receive`, `_send`, `_tell` and `_took` run in the application's loop, all
    others in the caller's."""

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes) -> None:
        self._app = app
        self._scope = scope
        self._body: bytes | None = body
        self._callers = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()  # None: the application has ended
        self._ended = False  # None was taken from the queue
        self._call: Future[None] | None = None  # until the whole answer has come
        self._apps: asyncio.AbstractEventLoop | None = None
        self._read_bytes = 0  # and not acknowledged yet
        self._unread_bytes = 0
        self._was_read = asyncio.Event()

    def begin(self, submit: Submit) -> None:
        try:
            self._call = submit(self._run())
        except RuntimeError as error:
            raise httpx.ConnectError(str(error)) from None

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """The status and the headers. Raises httpx.ReadError if the application ends without them."""
        message = await self._next()
        return message["status"], message["headers"]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._call is not None:
            parts = [(await self._next())["body"]]
            while self._call is not None and not self._messages.empty():
                parts.append((await self._next())["body"])
            data = b"".join(parts)
            self._acknowledge(len(data))
            yield data

    async def aclose(self) -> None:
        """Cancels the application's work, unless the whole answer has come."""
        if self._call is not None:
            self._call.cancel()

    async def _next(self) -> Message:
        """The application's next message. Raises httpx.ReadError if it has ended."""
        message = None if self._ended else await self._messages.get()
        if message is None:
            self._ended = True
            raise httpx.ReadError("the application ended before its answer did")
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._call = None
        return message

    def _acknowledge(self, num_bytes: int) -> None:
        """Tells the application how much was read, now and then: each time wakes its loop."""
        self._read_bytes += num_bytes
        if self._read_bytes >= MAX_UNREAD_BYTES // 4 and self._apps is not None:
            with contextlib.suppress(RuntimeError):  # the application's loop has ended
                self._apps.call_soon_threadsafe(self._took, self._read_bytes)
            self._read_bytes = 0

    async def _run(self) -> None:
        self._apps = asyncio.get_running_loop()
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            with contextlib.suppress(ConnectionError):
                self._tell(None)

    async def _receive(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()  # a caller that goes away cancels the whole call
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Message) -> None:
        self._unread_bytes += len(message.get("body", b""))
        self._tell(message)
        while self._unread_bytes > MAX_UNREAD_BYTES:
            self._was_read.clear()
            await self._was_read.wait()

    def _took(self, num_bytes: int) -> None:
        self._unread_bytes -= num_bytes
        self._was_read.set()

    def _tell(self, message: Message | None) -> None:
        """Hands a message to the caller. Raises ConnectionResetError if the caller's loop has ended."""
        try:
            self._callers.call_soon_threadsafe(self._messages.put_nowait, message)
        except RuntimeError:
            raise ConnectionResetError("the caller's event loop has ended") from None
