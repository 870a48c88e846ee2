"""Middleware for every answer, whatever its route."""

import logging
import re
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.access.rate_limits import Ticket
from router.http.upstream import UpstreamError
from router.metrics import request_log
from router.metrics.metrics import Metrics
from router.metrics.otlp import Tracer
from router.metrics.traces import TracedRequest
from router.streaming.dialects import error_response, id_headers
from router.streaming.shutdown import Shutdown
from router.wire import request_id
from router.wire.errors import ApiError, internal

log = logging.getLogger(__name__)

REFUSALS = (429, 503)
IGNORED = "X-Shoal-Ignored"
REPAIRED = "X-Shoal-Repaired"
MAX_NAMES = 20  # names in a header
MAX_NAME_CHARS = 100
MAX_LOGGED_NAMES = 1000  # names that a process remembers
_NO_NAME = re.compile(r"[^!-+\--~]")  # what would be no header, or look like two names


class Observed:
    """Names every request, and counts answers by model, route and status.

    | key in `scope["state"]` | meaning |
    | --- | --- |
    | `request_id` | the id for the client: its own X-Request-Id if it sent one, otherwise a new id |
    | `name` | the name for replicas: `request_id`, made unique by a suffix if the client chose it |
    | `model` | the model's own name; the route sets it, once it knows the model |
    | `error` | the ApiError that ends the request; `router.streaming.dialects` sets it |
    | `at_end` | what to do when the answer has ended: functions |
    | `send` | the server's own `send`, for parts of a body that others follow: no middleware looks at these |
    | `shutdown` | the router's `Shutdown`, which may come before the answer has ended |
    | `aborted` | as `shutdown`, by the client's own wish; a route that generates sets it |
    | `ticket` | the client's; a route that limits count sets it. Answers have its headers, and it ends with them |
    | `passed_over` | names of what the request has and this server passes over; `Models` makes it |

    The answer names what is passed over in its header X-Shoal-Ignored, the log when it comes for the first time. What
    of the history goes to the model in another form is in X-Shoal-Repaired.

    The request's `RequestLog` is written when it has ended, or by the runner of a request that goes on.

    `answers_id`: whether the answer carries `request_id` as X-Request-Id. `tracer`: traces requests that generate.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, shutdown: Shutdown, answers_id: bool, tracer: Tracer | None = None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._shutdown = shutdown
        self._answers_id = answers_id
        self._tracer = tracer
        self._passed_over: set[str] = set()  # what the log has named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = request_id.given(scope["headers"])
        known = given or request_id.new()
        state = scope.setdefault("state", {})
        state["request_id"], state["name"] = known, request_id.name(known) if given else known
        state["send"], state["shutdown"] = send, self._shutdown
        traced = None if self._tracer is None else self._tracer.begin(known, scope["headers"], scope["method"])
        told = request_log.RequestLog(known) if traced is None else traced
        header = id_headers(scope, self._answers_id)

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                ticket: Ticket | None = state.get("ticket")
                told.client = "" if ticket is None else ticket.client.name
                limits = [] if ticket is None else [(k.encode(), v.encode()) for k, v in ticket.headers().items()]
                passed_over = self._told(state.get("passed_over"))
                repaired = [(REPAIRED.lower().encode(), ", ".join(told.repaired).encode())] if told.repaired else []
                added = [*header, *limits, *passed_over, *repaired]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
                route = scope.get("route")
                path = "unknown" if route is None else route.path
                model = told.model = state.get("model", "")
                self._metrics.responses.labels(model, path, message["status"]).inc()
                if traced is not None:
                    traced.path, traced.status = path, message["status"]
                error: ApiError | None = state.get("error")
                if error is not None and error.status in REFUSALS:
                    self._metrics.refused.labels(model, error.status, _reason(error)).inc()
            elif not message.get("more_body", False):
                _end_ticket(state)  # before the client knows its answer: its next request may come at once
            await send(message)

        try:
            with request_log.serving(told):
                await self._app(scope, receive, observed)
        finally:
            for work in state.get("at_end", ()):
                work()
            _end_ticket(state)
            _write_log(state, told)
            if traced is not None:
                _end_trace(state, traced)

    def _told(self, passed_over: set[str] | None) -> list[tuple[bytes, bytes]]:
        """The header that names what is passed over. The log names it once."""
        if not passed_over:
            return []
        names = sorted({_NO_NAME.sub("?", name[:MAX_NAME_CHARS]) for name in passed_over})
        for name in names:
            if name not in self._passed_over and len(self._passed_over) < MAX_LOGGED_NAMES:
                self._passed_over.add(name)
                log.info("requests have %s, which is passed over, now and from now on", name)
        rest = ["..."] if len(names) > MAX_NAMES else []
        return [(IGNORED.lower().encode(), ", ".join([*names[:MAX_NAMES], *rest]).encode())]


def _reason(error: ApiError) -> str:
    """The reason of a refusal, as a label of a metric."""
    return "upstream" if isinstance(error, UpstreamError) else error.code or "unknown"


def _write_log(state: dict[str, Any], told: request_log.RequestLog) -> None:
    """Writes the line of a request that has ended: it generated and was answered (info), it was refused (info), or
    the server failed (warning). Of a client's own mistake, nothing is written."""
    error: ApiError | None = state.get("error")
    if error is None:
        ticket: Ticket | None = state.get("ticket")
        if ticket is not None and ticket.generates and not ticket.kept:
            told.write()
    elif error.status >= 500 or error.status in REFUSALS:
        level = logging.INFO if error.status in REFUSALS else logging.WARNING
        text = "request %s ended with %d %s: %s"
        what = told.request_id, error.status, _reason(error), error.message
        log.log(level, text, *what, extra=told.fields() | {"status": error.status})


def _end_trace(state: dict[str, Any], traced: TracedRequest) -> None:
    """Ends the trace of a request that generates, unless it goes on after its answer."""
    ticket: Ticket | None = state.get("ticket")
    error: ApiError | None = state.get("error")
    if error is not None:
        traced.error = _reason(error)
    if ticket is not None and ticket.generates and not ticket.kept:
        traced.end()


def _end_ticket(state: dict[str, Any]) -> None:
    ticket: Ticket | None = state.get("ticket")
    if ticket is not None and not ticket.kept:
        ticket.end()


class HeadAsGet:
    """Answers HEAD as GET, without the body: load balancers, and programs that look whether something is there, ask so
    at any address."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


class Guarded:
    """Answers 500 for unforeseen errors. The innermost middleware, so that this answer passes through all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:
            if scope["type"] != "http":
                raise
            log.exception("request %s failed", scope.get("state", {}).get("request_id"))
            # If an answer has begun, the server breaks it off.
            await error_response(internal(), scope)(scope, receive, send)
