"""A model whose requests are passed on to another OpenAI-compatible endpoint.

The body goes on as it came, with the model's name there. The answer comes back byte by byte. The other endpoint checks
the parameters, and its errors are told in its words, in the form of the request's protocol.
"""

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from time import perf_counter
from typing import Any

import httpx
import msgspec
from fastapi import Request, Response

from router.config import UpstreamConfig
from router.metrics import request_log
from router.metrics.metrics import UPSTREAM_FAILURES, Metrics
from router.streaming.sse import Emit, EventStream, unless_gone
from router.wire import request_id
from router.wire.errors import ApiError

log = logging.getLogger(__name__)

PASSED_HEADERS = ("accept", "anthropic-version", "anthropic-beta", "openai-beta")  # of the client's
KEPT_HEADERS = ("retry-after",)  # of the other endpoint's errors
# Connections that are not used are closed before the other side may do so: a request on a connection that is just being
# closed would be lost. Servers keep idle connections for 5 s or more.
IDLE_S = 4.0
MAX_REASON_CHARS = 1000  # characters of an error that is not JSON
END = b"\n\n"  # of an event


class Head(msgspec.Struct):
    """The fields of a body that decide where it goes, and how the answer comes back."""

    model: str | None = None
    stream: Any = None


def head(sent: bytes) -> Head | None:
    """The head of a body; None if the body is no object with these fields."""
    try:
        return msgspec.json.decode(sent, type=Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class UpstreamError(ApiError):
    """An error of another endpoint. `told`: the object that OpenAI's form has under `error`."""

    def __init__(self, status: int, told: dict[str, Any], headers: dict[str, str]) -> None:
        param, code = told.get("param"), told.get("code")
        super().__init__(
            status,
            str(told["message"]),
            param=param if isinstance(param, str) else None,
            code=None if code is None else str(code),
            headers=headers,
        )
        self._told = told

    def body(self) -> bytes:
        return json.dumps({"error": self._told}).encode()


class Upstream:
    """A model at another endpoint. `model` is its name here, `aliases` are its further names."""

    def __init__(
        self,
        model: str,
        upstream: UpstreamConfig,
        metrics: Metrics,
        aliases: Sequence[str] = (),
        api_key: str | None = None,
    ) -> None:
        self.model = model
        self.aliases = aliases
        self._upstream = upstream
        self._metrics = metrics
        for reason in UPSTREAM_FAILURES:
            metrics.upstream_failures.labels(model, reason)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "shoal"}
        if api_key is not None:
            self._headers |= {"Authorization": f"Bearer {api_key}"}
        self._api_key = api_key
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(upstream.timeout_s, connect=upstream.connect_timeout_s, pool=None),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def answer(self, request: Request, sent: bytes, stream: bool) -> Response:
        """The other endpoint's answer to a request with the body `sent`. Raises ApiError. When the client disconnects,
        the request ends there too; raises ClientGone."""
        asked = self._request(request, sent)
        if not stream:
            return await unless_gone(request.scope, request.receive, self._whole(asked))

        async def produce(emit: Emit) -> None:
            await self._stream(asked, answer, emit)

        answer = EventStream(produce)
        return answer

    async def _whole(self, asked: httpx.Request) -> Response:
        async with self._answered(asked) as answer:
            body = await answer.aread()
            kind = answer.headers.get("content-type", "application/json")
            return Response(body, answer.status_code, headers={"Content-Type": kind})

    async def _stream(self, asked: httpx.Request, response: EventStream, emit: Emit) -> None:
        last = b""
        try:
            async with self._answered(asked) as answer:
                response.headers["Content-Type"] = answer.headers.get("content-type", EventStream.media_type)
                async for data in answer.aiter_bytes():
                    await emit(data)
                    last = (last + data)[-len(END) :]
                if not last:
                    await emit(b"")
        except ApiError:
            if last and last != END:
                await emit(END)  # what was begun is not the event that tells the error
            raise

    @contextlib.asynccontextmanager
    async def _answered(self, asked: httpx.Request) -> AsyncIterator[httpx.Response]:
        """The answer, once its status is known and good; the body is still to be read. Raises ApiError, also for what
        goes wrong while it is read."""
        began = perf_counter()
        told = request_log.current()
        phases = None if told is None else told.phases(told.request_id, began, None)
        if phases is not None:
            phases.passed_on()
        try:
            answer = await self._http.send(asked, stream=True)
            try:
                self._metrics.upstream_seconds.labels(self.model).observe(perf_counter() - began)
                if not answer.is_success:
                    raise self._error(answer, await answer.aread())
                yield answer
            finally:
                await answer.aclose()
                if phases is not None:
                    phases.last_token(perf_counter())
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self._failure("unreachable", "cannot be reached", error) from None
        except httpx.TimeoutException as error:
            raise self._failure("timeout", f"was silent for {self._upstream.timeout_s:g} s", error) from None
        except (httpx.TransportError, httpx.DecodingError, httpx.StreamError) as error:
            raise self._failure("broken", "broke off", error) from None

    def _request(self, request: Request, sent: bytes) -> httpx.Request:
        fields = msgspec.json.decode(sent, type=dict[str, msgspec.Raw])
        fields["model"] = msgspec.Raw(msgspec.json.encode(self._upstream.model or self.model))
        headers = self._headers | {name: value for name in PASSED_HEADERS if (value := request.headers.get(name))}
        headers[request_id.HEADER] = request.state.request_id
        if (told := request_log.current()) is not None:
            headers |= told.trace_headers()
        path = request.url.path
        if self._api_key is not None and path.startswith("/v1/messages"):
            headers["x-api-key"] = self._api_key  # as Anthropic's clients send it
        base = self._upstream.url
        if path.startswith("/v1/"):
            path = path.removeprefix("/v1")
        else:
            base = base.removesuffix("/v1")
        url = httpx.URL(base + path, query=request.url.query.encode() or None)
        return self._http.build_request("POST", url, content=msgspec.json.encode(fields), headers=headers)

    def _failure(self, reason: str, what: str, error: Exception) -> ApiError:
        self._metrics.upstream_failures.labels(self.model, reason).inc()
        log.warning("%s at %s %s: %s %s", self.model, self._upstream.url, what, type(error).__name__, error)
        return ApiError(502, f"The endpoint that answers for {self.model!r} {what}.", code=f"upstream_{reason}")

    def _error(self, answer: httpx.Response, body: bytes) -> ApiError:
        """The error for the client. It has not chosen the key, and cannot follow a redirect."""
        status = answer.status_code
        told = _told(body)
        if status == 401:
            self._metrics.upstream_failures.labels(self.model, "unauthorized").inc()
            message = f"The endpoint that answers for {self.model!r} refuses this server's API key."
            return ApiError(502, message, code="upstream_unauthorized")
        if status < 400:
            message = (
                f"The endpoint that answers for {self.model!r} answers {status}, which is not the status of an answer."
            )
            return ApiError(502, message, code="upstream_broken")
        headers = {name: value for name in KEPT_HEADERS if (value := answer.headers.get(name))}
        if told is None:
            said = body[:MAX_REASON_CHARS].decode(errors="replace").strip()
            message = f"The endpoint that answers for {self.model!r} answers {status}" + (f": {said}" if said else ".")
            return ApiError(status, message, code="upstream_error", headers=headers)
        return UpstreamError(status, told, headers)


def _told(body: bytes) -> dict[str, Any] | None:
    """The error in a body, in the forms of OpenAI, of Anthropic and of some servers; None if there is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    error = value.get("error", value)
    if isinstance(error, str):  # Ollama's
        error = {"message": error}
    if isinstance(error, dict) and "detail" in error and "message" not in error:  # FastAPI's
        error = {"message": error["detail"] if isinstance(error["detail"], str) else json.dumps(error["detail"])}
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    return {"type": "upstream_error", "param": None, "code": None} | error
