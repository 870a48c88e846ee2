"""What most tests over HTTP would otherwise spend more time on than on what they ask, and how long they wait. Importing
this module is enough.

- Servers of uvicorn's look every 5 ms whether they shall end, not every 100.
- All clients share one TLS context, of which no test has a use: for each OpenAI client and each `httpx.get`, the
  certificates of all authorities would be parsed again.
- Who says nothing else waits for an answer for WAIT_S. httpx's own 5 s are too short beside other tests and builds.

And `local_socket` is one to listen on, `served` an application that listens on it.
"""

import asyncio
import functools
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
import uvicorn.server
from httpx._config import DEFAULT_TIMEOUT_CONFIG

WAIT_S = 60.0


class _ShortTicks:
    """`asyncio` as `uvicorn.server` sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay: float) -> None:
        await asyncio.sleep(delay / 20)


uvicorn.server.asyncio = _ShortTicks()  # type: ignore[assignment]
ssl.create_default_context = functools.cache(ssl.create_default_context)
for each in ("connect", "read", "write", "pool"):  # of the one that is the default everywhere in httpx
    setattr(DEFAULT_TIMEOUT_CONFIG, each, WAIT_S)
assert httpx.get.__kwdefaults__["timeout"].read == WAIT_S


def local_socket() -> socket.socket:
    """Listens on a port of its own of this machine. asyncio sees TCP by the protocol, which `socket.create_server` does
    not name: it would leave Nagle's algorithm on, and every second answer on a connection would wait for 40 ms."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.bind(("127.0.0.1", 0))
    made.listen(512)
    return made


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Runs an ASGI application behind uvicorn, in a thread, and yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    listening = local_socket()  # from now on a connection waits for the server instead of being refused
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
