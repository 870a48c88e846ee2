"""API keys: a server that has some answers only requests that send one of them."""

import hashlib
import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from fastapi import Request

from router.access.key_file import ANYBODY, ApiClient, keyed, read_keys
from router.config import RouterConfig
from router.metrics.metrics import Metrics
from router.wire.errors import ApiError
from worker.sparse_log import SparseLog

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0  # how often the key file is looked at, while requests come
AUDIT_S, MAX_AUDIT_LINES = 60.0, 10  # lines about refused keys in a time: a client may try many
MAX_PATH_CHARS, DIGEST_CHARS = 200, 8  # characters in such a line


class Keys:
    """The accepted API keys of a configuration. Without any, the server is open.

    The key file is read again after it has changed. A new file that is missing or wrong is refused: the log says why,
    `shoal_key_file_errors` counts it, and the keys stay as they were.
    """

    def __init__(
        self,
        config: RouterConfig,
        metrics: Metrics | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Raises OSError and ValueError for a key file that is missing or wrong, and ValueError for an empty key, so
        that a mistake does not open the server. `clock`: seconds. `now`: the time of day."""
        self._file = config.api_key_file
        self._metrics = metrics
        self._clock, self._now = clock, now
        own = [] if config.api_key is None else [config.api_key.get_secret_value()]
        if "" in own:
            raise ValueError("an API key must not be empty")
        self._own = {key: keyed(key) for key in own}
        # The time of a search among digests says nothing about the keys: the digests are secret.
        self._salt = os.urandom(16)
        self._seen = None if self._file is None else file_state(self._file)
        self._clients = self._by_digest({} if self._file is None else _read(self._file))
        self._looked_s = clock()
        self._audit = SparseLog(log, AUDIT_S, clock, MAX_AUDIT_LINES)

    def __bool__(self) -> bool:
        return bool(self._clients)

    @property
    def highest_priority(self) -> int | None:
        """The highest of the priorities that keys allow; None if no key says one."""
        named = [client.max_priority for client in self._clients.values() if client.max_priority is not None]
        return max(named, default=None)

    async def check(self, request: Request) -> None:
        """Sets `request.state.client`. Raises ApiError (401) unless the request sends an accepted key. Asynchronous
        because FastAPI would run it in a thread of a pool otherwise, which costs more than the check."""
        if not self._clients:
            request.state.client = ANYBODY
            return
        self._look()
        tokens = _given(request)
        if not tokens:
            raise _unauthorized("Send your API key as `Authorization: Bearer KEY`, or as `x-api-key: KEY`.")
        for token in tokens:
            client = self._clients.get(self._digest(token))
            if client is not None:
                break
        else:
            self._refused(request, token, "it is not known")
            raise _unauthorized("The API key is not one that this server accepts.")
        if client.expires is not None and client.expires <= self._now():
            self._refused(request, token, f"that of {client.name} has expired")
            raise _unauthorized("The API key has expired.")
        request.state.client = client

    def tenant(self, request: Request) -> str:
        """`ApiClient.tenant` of a request that `check` has let through."""
        return client_of(request).tenant

    def _look(self) -> None:
        """Reads the key file again if it has changed."""
        if self._file is None or self._clock() < self._looked_s + LOOK_EVERY_S:
            return
        self._looked_s = self._clock()
        state = file_state(self._file)
        if state == self._seen:
            return
        self._seen = state
        try:
            self._clients = self._by_digest(_read(self._file))
        except (OSError, ValueError) as error:
            log.error("the new key file is refused, and the keys stay as they were: %s", error)
            if self._metrics is not None:
                self._metrics.key_file_errors.inc()
        else:
            log.info("read %s again: %d keys", self._file, len(self._clients))

    def _refused(self, request: Request, token: bytes, why: str) -> None:
        """Writes to the log where a refused key came from, and for which path; never the key itself."""
        peer = "nowhere" if request.client is None else request.client.host
        # As `sha256sum` has it, so that an operator can look for a key. A digest that short does not tell the key.
        digest = hashlib.sha256(token).hexdigest()[:DIGEST_CHARS]
        path = request.scope.get("path", "")[:MAX_PATH_CHARS]
        text = "a key was refused, since %s: %r asked by %s, SHA-256 of the key %s..."
        self._audit.warning(text, why, path, peer, digest)

    def _by_digest(self, clients: dict[str, ApiClient]) -> dict[bytes, ApiClient]:
        known = {self._digest(key.encode()): client for key, client in {**self._own, **clients}.items()}
        if self._metrics is not None:
            self._metrics.api_keys.set(len(known))
        return known

    def _digest(self, token: bytes) -> bytes:
        return hashlib.blake2b(token, key=self._salt, digest_size=16).digest()


def client_of(request: Request) -> ApiClient:
    """The client of a request that `Keys.check` has let through."""
    client: ApiClient = request.state.client
    return client


def claimant(request: Request) -> str:
    """Whose share of a router's bytes and threads a request takes: that of its client, or, on a server without keys,
    of the address that it comes from, which may be a proxy's. Empty where there is none."""
    tenant = client_of(request).tenant
    return tenant or ("" if request.client is None else request.client.host)


def _read(path: Path) -> dict[str, ApiClient]:
    try:
        return read_keys(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def file_state(path: Path) -> tuple[int, ...] | None:
    """Properties of the file that differ after a change; None if it is missing. Links, which Kubernetes' Secrets are,
    are followed."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_dev


def _given(request: Request) -> list[bytes]:
    """The keys that a request sends: as OpenAI's clients do, and as Anthropic's do."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    tokens = [token if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
    # Starlette decodes headers as Latin-1: back to bytes.
    return [token.strip().encode("latin-1") for token in tokens if token.strip()]


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
