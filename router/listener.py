"""A router's own HTTP server, on a port that all routers of a machine share."""

import asyncio
import socket
from collections.abc import Sequence

import uvicorn
from starlette.types import ASGIApp

BACKLOG = 2048  # connections that may wait to be accepted, as far as the kernel allows
KEEP_ALIVE_S = 90.0  # an idle connection is kept for so long


class Listener:
    """`app` on `host`:`port`. Where several listen there, the kernel gives every new connection to one of them, and to
    the others when one has died. The application's lifespan is the caller's to run."""

    def __init__(self, app: ASGIApp, host: str, port: int, drain_s: float) -> None:
        """Binds: raises OSError for an address that is not this machine's, or that a program of another kind has.
        `drain_s`: what answers that are being sent get to end, once it is closed. `address` is where it listens."""
        self._socket = bind(host, port)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            timeout_graceful_shutdown=int(drain_s),
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Returns when it accepts connections. Raises OSError if it cannot."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait((self._task, up), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._task.done():
            self._socket.close()
            self._task.result()

    async def close(self) -> None:
        """Takes no more connections, and returns when all that run have ended or their time is over."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait((self._task,))
        self._socket.close()


class _Server(uvicorn.Server):
    """`up` is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        await super().startup(None if sockets is None else list(sockets))
        self.up.set()


def bind(host: str, port: int, shared: bool = True) -> socket.socket:
    """A TCP socket at the address, not listening yet. Raises OSError. With `shared` others that are bound in the same
    way, by the same user, do not stand in its way."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
