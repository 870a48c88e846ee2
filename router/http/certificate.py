"""The certificate of a server that speaks TLS: read again when its files change."""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

from router.access.auth import file_state

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class Certificate:
    """The certificate and the key of a server, as `context` for its sockets.

    New files hold for connections that begin from then on; those that are there go on. Files that are missing or do not
    belong together are refused: the log says why, and the certificate stays as it was. Between the replacements of the
    two files, there is one such refusal.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises OSError for files that are missing, or that are no certificate with its key."""
        self._files = certificate, key
        self._seen = self._states()
        self._current = self._read()
        self.context = self._read()
        self.context.sni_callback = self._choose

    async def follow(self) -> None:
        """Looks at the files once a second, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Reads the files again if they have changed."""
        states = self._states()
        if states == self._seen:
            return
        self._seen = states
        try:
            self._current = self._read()
        except OSError as error:
            log.error("the new certificate in %s is refused, and the old one stays: %s", self._files[0], error)
        else:
            log.info("read the certificate in %s again", self._files[0])

    def _choose(self, connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        """Called for each connection that begins, also where the client names no server."""
        connection.context = self._current

    def _states(self) -> list[tuple[int, ...] | None]:
        return [file_state(file) for file in self._files]

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A password would be asked for on a terminal.
        context.load_cert_chain(*self._files, password=lambda: "")
        return context
