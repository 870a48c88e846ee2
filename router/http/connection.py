"""A client's HTTP connection: uvicorn's protocol class, plus limits of size and time, and error answers with the
fitting HTTP status."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.config import RouterConfig
from router.wire import request_id
from router.wire.errors import ApiError, invalid

# A client that is refused goes on sending for a moment. Closing at once would reset the connection, and the client
# might lose the answer that says why.
LINGER_S = 1.0
# Probes of a client that has stopped sending (FIN), to see whether it still reads: the first after a second, in which
# most clients that have not left get their answer; the second once a reset has had time to arrive; then at intervals.
PROBE_AFTER_S, PROBE_AGAIN_S, PROBE_EVERY_S = 1.0, 0.25, 5.0
# Bytes that may come for each byte of a body, with the framing of chunks: a chunk of one byte takes six.
FRAMING_BYTES = 8

_IPV4_MAPPED = bytes(10) + b"\xff\xff"  # where IPv6 sockets take IPv4, too
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b":\n\n"  # a comment among server-sent events


def protocol(config: RouterConfig, waiting: "WaitingConnections") -> Callable[..., "ClientConnection"]:
    """The protocol factory that uvicorn calls for each connection: the `http` of its configuration. `waiting`: those of
    the server."""
    return partial(ClientConnection, limits=config, waiting=waiting)


def too_many(limits: RouterConfig) -> ApiError:
    """The error of a connection for which there is no room."""
    message = f"This server's {limits.max_connections} connections are all in use: try again shortly."
    return ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"})


class WaitingConnections:
    """The connections of a server that wait for a request, or for the rest of one: those that may be closed to make
    room, since no client waits for an answer there. By the address of the other side, which may be a proxy's."""

    # Connections that have waited less than `FRESH_S` seconds are replaced `MAX_REPLACED` times a second by a peer that
    # has half as many as any has. One that opens connection after connection would keep the loop from all others.
    MAX_REPLACED, FRESH_S = 64, 2.0

    def __init__(self) -> None:
        self._by_peer: dict[str, dict[ClientConnection, float]] = {}  # with the time from which they wait
        self._by_number: dict[int, dict[str, None]] = {}  # peers, by their number of connections
        self._most = 0
        self._replaced, self._since_s = Counter[str](), 0.0

    def may_replace(self, peer: str) -> bool:
        """Whether a new connection of `peer` may take the place of one that waits, where there are too many."""
        if self._most == 0:
            return True  # `connection_made` refuses it, with an answer
        if 2 * len(self._by_peer.get(peer, ())) < self._most:
            return True
        now_s = time.monotonic()
        longest = next(iter(self._by_number[self._most]))
        if now_s - next(iter(self._by_peer[longest].values())) >= self.FRESH_S:
            return True
        if now_s - self._since_s >= 1.0:
            self._replaced, self._since_s = Counter(), now_s
        if self._replaced[peer] >= self.MAX_REPLACED:
            return False
        self._replaced[peer] += 1
        return True

    def add(self, connection: "ClientConnection") -> None:
        of_peer = self._by_peer.setdefault(connection.peer, {})
        if connection not in of_peer:
            self._counts(connection.peer, len(of_peer), len(of_peer) + 1)
            of_peer[connection] = time.monotonic()

    def discard(self, connection: "ClientConnection") -> None:
        of_peer = self._by_peer.get(connection.peer, {})
        if of_peer.pop(connection, None) is not None:
            self._counts(connection.peer, len(of_peer) + 1, len(of_peer))
            if not of_peer:
                del self._by_peer[connection.peer]

    def dispensable(self) -> "ClientConnection | None":
        """The one that has waited longest, of a peer that has the most."""
        if not self._most:
            return None
        return next(iter(self._by_peer[next(iter(self._by_number[self._most]))]))

    def _counts(self, peer: str, before: int, now: int) -> None:
        if before:
            del self._by_number[before][peer]
            if not self._by_number[before]:
                del self._by_number[before]
        if now:
            self._by_number.setdefault(now, {})[peer] = None
        self._most = max(self._most, now)
        if self._most not in self._by_number:  # its only peer has one less now
            self._most = now


def peer_of(address: str) -> str:
    """Returns the address by which a client is known: of IPv6 the network, whose 64 bits of addresses it has."""
    if ":" not in address:
        return address
    network = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    return address if network.startswith(_IPV4_MAPPED) else network[:8].hex()


def last_answer(error: ApiError, default_headers: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """The answer with which a connection ends, as it is sent."""
    body = error.body()
    headers = {
        **{name.decode(): value.decode() for name, value in default_headers},
        "content-type": "application/json",
        "content-length": str(len(body)),
        request_id.HEADER.lower(): request_id.new(),
        **(error.headers or {}),
        "connection": "close",
    }
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
    lines = [status, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


class _BadRequest(Exception):
    """Ends parsing: the request line or the headers are invalid."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class ClientConnection(HttpToolsProtocol):
    """Serves one client's requests, one after the other, each within limits of time and size.

    A client that stops sending (FIN) may still read. TCP does not tell such a client from one that has closed its
    connection: only the latter's kernel answers further data with a reset. So while an answer is due, the client is
    probed with data that any client ignores: an interim response (100 Continue), or a comment in an event stream. A
    client that still reads gets its whole answer. A client that has gone is noticed by the second probe.

    HTTP/1.0 has no interim responses: there, a FIN before the answer has begun ends the request, as it does for proxies
    that speak HTTP/1.0 (nginx by default).
    """

    def __init__(self, *args: Any, limits: RouterConfig, waiting: WaitingConnections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting, self._peer = waiting, ""
        self._unread = 0  # bytes of the last answer that the client had not read when its time was over
        self.timeout_keep_alive = limits.keep_alive_s  # type: ignore[assignment]  # a float works too
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._refused = False
        self._received = self._of_body = 0  # bytes so far of the message being received, and of its body
        self._running: RequestResponseCycle | None = None
        self._is_ending = False  # the server is: the next answer is the last
        self._until_close = False  # closing the connection marks the end of the answer

    # ------------------------------------------------------------ the connection

    @property
    def peer(self) -> str:
        """The address of the other side, as `peer_of` has it."""
        return self._peer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Where there are too many connections, makes room by closing one that waits for a request; refuses this one
        if none does."""
        super().connection_made(transport)  # type: ignore[arg-type]  # always a stream transport
        self._peer = peer_of(self.client[0]) if self.client else ""
        if len(self.connections) > self._limits.max_connections:
            dispensable = self._waiting.dispensable()
            if dispensable is None:
                self.connections.discard(self)
                self._refuse(too_many(self._limits))
                return
            dispensable.make_room()
        self._waiting.add(self)
        self._within(self._limits.header_timeout_s, self._late_head)

    def make_room(self) -> None:
        """Closes the connection now, whatever of an answer its client has not read."""
        self._waiting.discard(self)
        self.connections.discard(self)
        if self.scheme == "https" or self.transport.get_write_buffer_size():  # closing would wait for the client
            self.transport.abort()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.discard(self)
        self._no_deadline()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Ends a connection that was idle for too long. One whose client still reads the last answer is not. One whose
        client has read nothing of it meanwhile is cut off: closing would wait for it."""
        unread = self.transport.get_write_buffer_size()
        if unread and unread != self._unread:
            self._unread = unread
            self._within(self._limits.keep_alive_s, self.timeout_keep_alive_handler)
        elif unread:
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """Ends the connection with the answer to the request that is here, on its way, or the first to come. The server
        calls this when it ends. A connection that waits for a further request is closed at once."""
        if self.cycle is None or (self._received and self.cycle.response_complete):
            self._is_ending = True
        else:
            super().shutdown()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's always closes
        """Handles a client that stops sending. Returns whether the connection stays open for what is still to be
        sent."""
        cycle, running = self.cycle, self._running
        if self.scheme == "https":  # there, who stops sending has left
            return False
        if cycle is None or running is None or cycle.response_complete or cycle.more_body:
            return False
        if cycle.scope["http_version"] == "1.0" and not cycle.response_started:
            return False
        cycle.keep_alive = False
        self._within(PROBE_AFTER_S, partial(self._probe, PROBE_AGAIN_S))
        return True

    def _probe(self, again_s: float) -> None:
        running = self._running
        assert running is not None
        if self.transport.is_closing():
            return
        if not self.flow.write_paused:
            if not running.response_started:
                self.transport.write(CONTINUE)
            elif self._until_close:
                self.transport.write(COMMENT)
            elif running.chunked_encoding and not running.response_complete:  # events: nothing else is sent in chunks
                self.transport.write(b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT))
        self._within(again_s, partial(self._probe, PROBE_EVERY_S))

    # ------------------------------------------------------------ deadlines

    def _within(self, seconds: float, late: Callable[[], None]) -> None:
        self._no_deadline()
        self._deadline = self.loop.call_later(seconds, late)

    def _no_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late_head(self) -> None:
        if self._received:
            seconds = self._limits.header_timeout_s
            self._refuse(ApiError(408, f"The headers of the request took longer than {seconds:g} s.", code="timeout"))
        else:
            self.transport.close()

    def _late_body(self) -> None:
        """Closes a connection whose body is late. The application has answered 408 by now, unless it never read the
        body."""
        if self.flow.read_paused:  # the application does not read: not the client's fault
            self._within(self._limits.body_timeout_s, self._late_body)
        else:
            self.transport.close()

    # ------------------------------------------------------------ receiving

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._received += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request is answered without the upgrade. The parser takes no more data, so the client's next request
            # needs another connection.
            self.cycle.keep_alive = False
            self._refused = True
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, _BadRequest):
                self._refuse(cause.error)
            else:
                reason = "the request line" if isinstance(error, httptools.HttpParserCallbackError) else str(error)
                self._refuse(invalid(f"The request is not valid HTTP/1.1: {reason}.", code="invalid_http"))
        else:
            # Everything but the body is headers, trailers or chunk framing, and the parser keeps it in memory.
            if self._received - FRAMING_BYTES * self._of_body > self._limits.max_header_bytes:
                self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._received = self._received or 1  # its first bytes may have come with the end of the previous message
        if self._deadline is None:
            self._within(self._limits.header_timeout_s, self._late_head)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            raise _BadRequest(self._too_large())
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            raise _BadRequest(invalid("A request of HTTP/1.1 has exactly one Host header.", code="invalid_http"))
        super().on_headers_complete()
        if self._is_ending:
            self.cycle.keep_alive = False  # its task has not begun
        self._within(self._limits.body_timeout_s + LINGER_S, self._late_body)

    def on_body(self, body: bytes) -> None:
        self._of_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._received = self._of_body = 0  # bytes of the next message from the same read are not counted
        self._no_deadline()
        if not self.cycle.response_complete:
            self._waiting.discard(self)
        super().on_message_complete()

    def _too_large(self) -> ApiError:
        limit = self._limits.max_header_bytes
        if len(self.url) > limit:
            return ApiError(414, f"The URL is larger than the limit of {limit} bytes.", code="request_too_large")
        message = f"The headers of the request are larger than the limit of {limit} bytes."
        return ApiError(431, message, code="request_too_large")

    # ------------------------------------------------------------ answering

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # No other request is here already, or the rest of it is waited for.
        if self.cycle.response_complete or self.cycle.more_body:
            self._waiting.add(self)
            if self.transport.is_closing():  # once the client has read the answer
                self._within(self._limits.keep_alive_s, self.timeout_keep_alive_handler)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, self._ended_by_closing(cycle, app) if _is_old(cycle) else app)

    def _ended_by_closing(self, cycle: RequestResponseCycle, app: ASGIApp) -> Any:
        """Wraps `app` for HTTP/1.0, which has no chunks: closing the connection ends an answer whose length is not
        known."""

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def unchunked(message: Message) -> None:
                if message["type"] == "http.response.start":
                    names = {name.lower() for name, _ in message.get("headers", ())}
                    if b"content-length" not in names:
                        self._until_close, cycle.chunked_encoding = True, False
                elif self._until_close:
                    cycle.expected_content_length = len(message.get("body", b""))
                await send(message)

            await app(scope, receive, unchunked)

        return answer

    def _refuse(self, error: ApiError) -> None:
        """Takes no more data, answers with `error`, and closes. While an earlier request is being answered, closes
        after that answer instead, without sending `error`."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._no_deadline()
        self._unset_keepalive_if_required()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:  # an earlier request: the connection ends with its answer
                cycle.keep_alive = False
                return
            cycle.disconnected = True  # wakes the application if it waits for the rest of the body
            cycle.message_event.set()
            if self.pipeline or cycle.response_started:
                self.transport.close()
                return
        self.transport.write(last_answer(error, self.server_state.default_headers))
        if self.transport.can_write_eof():  # TLS has no such end
            self.transport.write_eof()
        self._within(LINGER_S, self.transport.close)


def _is_old(cycle: RequestResponseCycle) -> bool:
    return cycle.scope["http_version"] == "1.0"
