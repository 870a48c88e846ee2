"""A port of one router alone, where several share the port of the API: each scrape of it finds this router."""

import asyncio
import contextlib
import errno
import logging

from starlette.types import ASGIApp

from router.config import RouterConfig
from router.http.listener import Listener

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0  # for scrapes that go on when the router ends
MAX_PORTS_TRIED = 64  # from the first on: more than a machine has routers, also while they are replaced


class OwnPort:
    """An HTTP server for `app`, at the first port from `first` on that is free on `host`. `port`: that one; None while
    it does not listen."""

    def __init__(self, app: ASGIApp, host: str, first: int, limits: RouterConfig) -> None:
        self._app, self._host, self._first, self._limits = app, host, first, limits
        self._listener: Listener | None = None

    @property
    def port(self) -> int | None:
        return None if self._listener is None else self._listener.address[1]

    async def start(self) -> None:
        """Returns once the server accepts connections. A router whose figures cannot be had is better than none: if
        no port is free, the log says so."""
        for port in range(self._first, min(self._first + MAX_PORTS_TRIED, 1 << 16)):
            try:
                listener = Listener(self._app, self._host, port, self._limits, shared=False)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                log.error("metrics_port: nothing listens at %s:%d: %s", self._host, port, error)
                return
            await listener.start()
            self._listener = listener
            log.info("this router's metrics are at %s:%d", self._host, port)
            return
        log.error(
            "metrics_port: none of the %d ports from %d on is free at %s", MAX_PORTS_TRIED, self._first, self._host
        )

    async def close(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._listener.close(), CLOSE_TIMEOUT_S)
