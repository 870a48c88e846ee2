"""The protocol that a request speaks, told by its path: it decides how errors look, and which headers have the id.

Known before there is a route, because errors without one (401, 404, 405) must have the right form too.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi.responses import Response
from starlette.types import Scope

from router.wire import request_id
from router.wire.errors import ApiError

ANTHROPIC_VERSION = b"anthropic-version"
CONTEXT_EXCEEDED = "context_length_exceeded"  # clients know the message by its first words
THREAD_UNSUPPORTED = "thread_unsupported_request"  # Anthropic's clients then go on without a thread
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


@dataclass(frozen=True)
class Dialect:
    """How a protocol tells errors.

    | field | meaning |
    | --- | --- |
    | `body` | the JSON of an error, with the request's id |
    | `event` | the name of a stream's event that is an error; None if events have no names |
    | `id_header` | a header for the request's id, besides X-Request-Id |
    """

    body: Callable[[ApiError, str | None], bytes]
    event: str | None = None
    id_header: str | None = None

    def error_event(self, error: ApiError, request_id: str | None) -> bytes:
        """The server-sent event for an error in the middle of a stream."""
        name = b"" if self.event is None else b"event: " + self.event.encode() + b"\n"
        return name + b"data: " + self.body(error, request_id) + b"\n\n"


def dialect(scope: Scope) -> Dialect:
    """The dialect of a request: Anthropic's for /v1/messages and what is below, and for models if the request has
    Anthropic's header."""
    path = scope["path"]
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return ANTHROPIC
    if path == "/v1/models" or path.startswith("/v1/models/"):
        return ANTHROPIC if wants_anthropic(scope) else OPENAI
    return OPENAI


def wants_anthropic(scope: Scope) -> bool:
    """Whether a request has the header that all of Anthropic's clients send."""
    return any(name == ANTHROPIC_VERSION for name, _ in scope["headers"])


def error_response(error: ApiError, scope: Scope) -> Response:
    """The answer to a request that failed, in its dialect. `scope["state"]["error"]` says why, for the middleware."""
    scope.setdefault("state", {})["error"] = error
    body = dialect(scope).body(error, _id(scope))
    return Response(body, error.status, error.headers, "application/json")


def error_event(error: ApiError, scope: Scope) -> bytes:
    """The server-sent event for an error in the middle of a request's stream, in its dialect. As in `error_response`,
    `scope` keeps the error."""
    scope.setdefault("state", {})["error"] = error
    return dialect(scope).error_event(error, _id(scope))


def id_headers(scope: Scope, answers_id: bool) -> list[tuple[bytes, bytes]]:
    """The headers of an answer that have the request's id. `answers_id`: whether X-Request-Id is among them."""
    known = _id(scope)
    if known is None:
        return []
    names = [request_id.HEADER] if answers_id else []
    extra = dialect(scope).id_header
    names += [] if extra is None else [extra]
    return [(name.lower().encode(), known.encode()) for name in names]


def _id(scope: Scope) -> str | None:
    known: str | None = scope.get("state", {}).get("request_id")
    return known


def _openai_body(error: ApiError, request_id: str | None) -> bytes:
    return error.body()


def _anthropic_body(error: ApiError, request_id: str | None) -> bytes:
    """Anthropic's form, which has no field for the parameter: the message names it."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.param is not None and error.param not in message and error.code != CONTEXT_EXCEEDED:
        message = f"{error.param}: {message}"
    said: dict[str, Any] = {"type": kind, "message": message}
    if error.code == THREAD_UNSUPPORTED:
        said["details"] = {"error_code": error.code}
    return json.dumps({"type": "error", "error": said, "request_id": request_id}).encode()


OPENAI = Dialect(_openai_body)
ANTHROPIC = Dialect(_anthropic_body, event="error", id_header="request-id")
