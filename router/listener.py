"""A router's own HTTP server, on a port that all routers of a machine share."""

import asyncio
import socket
from collections.abc import Sequence

import uvicorn
from starlette.types import ASGIApp

from router.config import RouterConfig
from router.connection import protocol

BACKLOG = 2048  # connections that may wait to be accepted, as far as the kernel allows
# TCP keep-alive, for clients whose machine has vanished: seconds of silence before the kernel probes, seconds between
# probes, and how many go unanswered before it gives the connection up. In all two minutes.
VANISHED = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class Listener:
    """An HTTP server for `app` on `host`:`port`. Several processes may listen there: the kernel gives each new
    connection to one of them, and to the others once one has died. The caller runs the application's lifespan."""

    def __init__(self, app: ASGIApp, host: str, port: int, drain_s: float, limits: RouterConfig) -> None:
        """Binds the socket; `address` is where it is bound. Raises OSError for an address that is not this machine's,
        or that another program has. `drain_s`: how long answers in flight may take once the server is closed. `limits`:
        those of connections."""
        self._socket = bind(host, port)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            app,
            http=protocol(limits),  # type: ignore[arg-type]  # any factory of protocols works
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=int(drain_s),
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

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

    async def close(self) -> None:
        """Stops accepting connections. Returns when all requests in flight have ended, or after `drain_s`."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait((self._task,))
        self._socket.close()


class _Server(uvicorn.Server):
    """A uvicorn server. `up` is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        await super().startup(None if sockets is None else list(sockets))
        self.up.set()


def bind(host: str, port: int, shared: bool = True) -> socket.socket:
    """A TCP socket bound to the address, not listening yet. Raises OSError. `shared`: the same user's other sockets may
    be bound to this address too, if they are also shared."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
