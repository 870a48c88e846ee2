"""API keys: a server that has some answers only requests that send one of them."""

import hashlib
import hmac

from fastapi import Request

from router.config import RouterConfig
from router.errors import ApiError


class Keys:
    """The accepted API keys of a configuration. Without any, the server is open. Raises ValueError for an empty key and
    for a key file without keys, so that a mistake does not open the server."""

    def __init__(self, config: RouterConfig) -> None:
        keys = []
        if config.api_key is not None:
            keys.append(config.api_key.get_secret_value())
        if config.api_key_file is not None:
            lines = [line.strip() for line in config.api_key_file.read_text().splitlines()]
            keys += [line for line in lines if line]
            if not any(lines):
                raise ValueError(f"{config.api_key_file} has no key in it: write one key per line")
        if "" in keys:
            raise ValueError("an API key must not be empty")
        self._keys = [key.encode() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    async def check(self, request: Request) -> None:
        """Raises ApiError (401) unless the request sends an accepted key. Takes the same time for every wrong key.
        Asynchronous because FastAPI would run it in a thread of a pool otherwise, which costs more than the check."""
        if not self._keys:
            return
        tokens = _given(request)
        if not tokens:
            raise _unauthorized("Send your API key as `Authorization: Bearer KEY`, or as `x-api-key: KEY`.")
        if not any(self._is_known(token) for token in tokens):
            raise _unauthorized("The API key is not one that this server accepts.")

    def tenant(self, request: Request) -> str:
        """A name for the sender of a request that `check` has let through: one for each key, and one for all on an open
        server. Does not reveal the key."""
        if not self._keys:
            return ""
        token = next(token for token in _given(request) if self._is_known(token))
        return hashlib.blake2b(token, digest_size=12).hexdigest()

    def _is_known(self, token: bytes) -> bool:
        known = [hmac.compare_digest(token, key) for key in self._keys]  # all: time must tell nothing
        return any(known)


def _given(request: Request) -> list[bytes]:
    """The keys that a request sends: as OpenAI's clients do, and as Anthropic's do."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    tokens = [token if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
    # Starlette decodes headers as Latin-1: back to bytes.
    return [token.strip().encode("latin-1") for token in tokens if token.strip()]


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
