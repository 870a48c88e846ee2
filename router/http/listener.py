"""A router's own HTTP server, on a port that all routers of a machine share."""

import asyncio
import contextlib
import ctypes
import logging
import socket
import ssl
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from router.config import RouterConfig
from router.http.certificate import Certificate
from router.http.connection import WaitingConnections, last_answer, peer_of, protocol, too_many
from worker.sparse_log import SparseLog

log = logging.getLogger(__name__)

BACKLOG = 2048  # connections that may wait to be accepted, as far as the kernel allows
# Connections that are accepted in a turn of the event loop. uvloop accepts one: a client that opens connections faster
# than the loop turns makes all others wait for theirs.
MAX_ACCEPTED_AT_ONCE = 256
NO_FILES_S = 0.1  # until the next attempt, where descriptors are lacking
# Seconds that a connection for which there is no room waits for the answer that says so: a client that opens the next
# one then opens fewer. Connections that may wait; further ones are answered immediately.
REFUSED_S, MAX_REFUSED = 1.0, 1024
MAX_UNREAD_BYTES = 256 << 10  # of a request that is refused so, which are read and dropped
HANDSHAKES_END_S = 1.0  # wait for TLS handshakes in flight when the server ends
# TCP keep-alive, for clients whose machine has vanished: seconds of silence before the kernel probes, seconds between
# probes, and how many go unanswered before it gives the connection up. In all two minutes.
VANISHED = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
# A closing listener still takes the connections whose handshake has begun, for this many seconds: a round trip.
HANDSHAKE_S = 0.25
SO_ATTACH_FILTER = 26  # <asm-generic/socket.h>
# A filter (classic BPF) over TCP segments that drops those that open a connection: SYN without ACK among the flags.
_NO_SYN = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in [
        (0x30, 0, 0, 13),  # load the byte of the flags
        (0x54, 0, 0, 0x12),  # of these SYN and ACK
        (0x15, 0, 1, 0x02),  # SYN alone?
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFFFFFF),  # keep
    ]
)


class Listener:
    """An HTTP server for `app` on `host`:`port`. Several processes may listen there: the kernel gives each new
    connection to one of them, and to the others once one has died. The caller runs the application's lifespan."""

    def __init__(self, app: ASGIApp, host: str, port: int, limits: RouterConfig, shared: bool = True) -> None:
        """Binds the socket; `address` is where it is bound. Raises OSError for an address that is not this machine's,
        or that another program has, and for a certificate that cannot be used. `limits`: those of connections, and the
        certificate. `shared`: whether other processes may listen there."""
        self._certificate = certificate_of(limits)
        self._socket = bind(host, port, shared)
        if not shared:  # only a socket that listens keeps others from the address
            try:
                self._socket.listen(BACKLOG)
            except OSError:
                self._socket.close()
                raise
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        waiting = WaitingConnections()
        config = uvicorn.Config(
            app,
            http=protocol(limits, waiting),  # type: ignore[arg-type]  # any factory of protocols works
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            backlog=BACKLOG,
            ssl_context_factory=self._context if self._certificate is not None else None,
        )
        self._server = _Server(config, limits, waiting)
        self._task: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Returns once the server accepts connections. Raises OSError if it cannot."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait((self._task, up), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._task.done():
            self._socket.close()
            self._task.result()
        if self._certificate is not None:
            self._following = asyncio.create_task(self._certificate.follow())

    async def close(self) -> None:
        """Stops accepting connections; each that was accepted, by the kernel too, gets an answer. Returns when all
        requests in flight have ended."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait((self._task,))
        if self._following is not None:
            self._following.cancel()
        self._socket.close()

    def _context(self, *_: object) -> ssl.SSLContext:
        assert self._certificate is not None
        return self._certificate.context


def certificate_of(limits: RouterConfig) -> Certificate | None:
    """The certificate that a configuration names, if it does. Raises OSError for one that cannot be used."""
    if limits.ssl_certfile is None or limits.ssl_keyfile is None:
        return None
    return Certificate(limits.ssl_certfile, limits.ssl_keyfile)


class _Server(uvicorn.Server):
    """A uvicorn server. `up` is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config, limits: RouterConfig, waiting: WaitingConnections) -> None:
        """`waiting`: the connections that wait for requests."""
        super().__init__(config)
        self._limits, self._waiting = limits, waiting
        self._no_room = last_answer(too_many(limits))
        self._failures = SparseLog(log)
        self._refused: deque[socket.socket] = deque()
        self._connecting: set[asyncio.Task[Any]] = set()
        self.up = asyncio.Event()

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Listens on the sockets. Unlike uvicorn's own, accepts all that waits, and bounds TLS handshakes."""
        self.servers = []
        for each in sockets or ():
            each.setblocking(False)
            each.listen(self.config.backlog)
            self._take_from(each)
        self.started = True
        self.up.set()

    def _take_from(self, listening: socket.socket) -> None:
        if not self.should_exit and listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accepts connections that wait. Called when there is one."""
        loop = asyncio.get_running_loop()
        try:
            for _ in range(MAX_ACCEPTED_AT_ONCE):
                client, address = listening.accept()
                if self._has_room_for(address[0]):
                    self._connect(client)
                else:
                    self._turn_away(client)
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except OSError as error:
            self._failures.warning("a connection cannot be accepted: %s", error)
            self._end_refused()
            if (dispensable := self._waiting.dispensable()) is not None:
                dispensable.make_room()
            loop.remove_reader(listening)
            loop.call_later(NO_FILES_S, self._take_from, listening)

    def _accept_rest(self, listening: socket.socket) -> None:
        """Accepts all connections that the kernel has."""
        while True:
            try:
                self._connect(listening.accept()[0])
            except ConnectionAbortedError:
                continue
            except OSError:
                return

    def _has_room_for(self, peer: str) -> bool:
        num_open = len(self.server_state.connections)
        return num_open < self._limits.max_connections or self._waiting.may_replace(peer_of(peer))

    def _turn_away(self, client: socket.socket) -> None:
        """Closes a connection, after a while, without the cost of one that is served."""
        if len(self._refused) < MAX_REFUSED:
            self._refused.append(client)
            if len(self._refused) == 1:
                asyncio.get_running_loop().call_later(REFUSED_S, self._end_refused)
        else:
            self._refuse(client)

    def _end_refused(self) -> None:
        """Ends the connections that were turned away in the last `REFUSED_S`."""
        while self._refused:
            self._refuse(self._refused.popleft())

    def _refuse(self, client: socket.socket) -> None:
        """Closes a connection with an answer that says why, if it is one without TLS."""
        with client:
            client.setblocking(False)
            if self.config.ssl is not None:
                return
            with contextlib.suppress(OSError):  # what was sent and not read would reset the connection, and the answer
                client.recv(MAX_UNREAD_BYTES)
            with contextlib.suppress(OSError):
                client.send(self._no_room)
                client.shutdown(socket.SHUT_WR)

    def _connect(self, client: socket.socket) -> None:
        """Serves a connection. One that ends in its TLS handshake is no error."""
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        connecting = loop.create_task(loop.connect_accepted_socket(self._connection, client, **self._tls()))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connected)

    def _connected(self, connecting: "asyncio.Task[Any]") -> None:
        self._connecting.discard(connecting)
        if not connecting.cancelled():
            connecting.exception()

    def _tls(self) -> dict[str, Any]:
        context = self.config.ssl
        return {} if context is None else {"ssl": context, "ssl_handshake_timeout": self._limits.header_timeout_s}

    async def shutdown(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Closes the listening sockets so that no connection is reset, then ends as uvicorn does."""
        open_sockets = list(sockets or ())
        for each in open_sockets:
            refuse_handshakes(each)
        await asyncio.sleep(HANDSHAKE_S)
        loop = asyncio.get_running_loop()
        for each in open_sockets:
            loop.remove_reader(each)
        # The first of those that wait in the kernel may be answered before uvicorn has closed the last.
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        for each in open_sockets:
            self._accept_rest(each)
        self._end_refused()
        if self._connecting:
            _, late = await asyncio.wait(self._connecting, timeout=HANDSHAKES_END_S)
            for connecting in late:
                connecting.cancel()
        await super().shutdown(open_sockets)

    def _connection(self) -> asyncio.Protocol:
        """A connection as uvicorn makes them."""
        make: Any = self.config.http_protocol_class
        made: asyncio.Protocol = make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return made


def refuse_handshakes(listening: socket.socket) -> None:
    """Makes the kernel drop what opens further connections to a listening socket. Their clients try again after a
    second; by then, other sockets have the port to themselves. Where the kernel has no such filters, does nothing."""
    program = ctypes.create_string_buffer(_NO_SYN)
    with contextlib.suppress(OSError):
        described = struct.pack("@HP", len(_NO_SYN) // 8, ctypes.addressof(program))
        listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)


def bind(host: str, port: int, shared: bool = True, listens: bool = True) -> socket.socket:
    """A TCP socket bound to the address, not listening yet. Raises OSError. `shared`: the same user's other sockets may
    be bound to this address too, if they are also shared. `listens`: whether it will; one that will not keeps sockets
    from the address that are not shared."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(listens))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # like VANISHED, also for accepted connections
    for option, value in VANISHED.items():
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if shared:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
