"""Reading a request's body: its size, its JSON, its fields."""

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from router.access.auth import claimant
from router.access.shares import Shares
from router.config import RouterConfig
from router.http.memory import Trim
from router.streaming.sse import ClientGone
from router.wire.errors import ApiError, busy, invalid
from router.wire.literals import allowed_values
from router.wire.neutral_fields import without_neutral
from router.wire.requests import Body
from router.wire.unknown_fields import without_unknown

Known = TypeVar("Known", bound=Body)

MAX_REASON_CHARS = 1000  # characters of a fault
MIN_BODY_BYTES = 8 << 10  # of a body in each `header_timeout_s`, unless it ends

_AT = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"Object (?P<fault>contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)
_OTHER_LITERAL = re.compile(r"Invalid (?:enum )?value (?=['\d-])")
_NOTHING_ALLOWED = ("Expected `null`", "Expected `array` of length <= 0", "Expected `object` of length <= 0")


class HeldBytes:
    """The bytes of all bodies that a router holds, against a limit. Bytes count once they are here: those that a client
    only announces refuse no other request. Each client has a share of the limit (`Shares`)."""

    def __init__(self, limit: int, wait_s: Callable[[], float]) -> None:
        """`wait_s`: how long the queue is, in seconds."""
        self.shares = Shares(limit)
        self.trim = Trim()
        self._wait_s = wait_s

    def body_of(self, client: str, state: dict[str, Any]) -> "HeldBody":
        """A body of this client, held until the request of this `state` ends, when the middleware calls its
        `at_end`."""
        body = HeldBody(self, client)
        state.setdefault("at_end", []).append(body.give)
        return body

    def refusal(self) -> ApiError:
        """The error (503) for a body that has no room."""
        return busy("The server holds too many requests; try again in {} s.", self._wait_s(), status=503)


class HeldBody:
    """A body as it comes."""

    def __init__(self, held: HeldBytes, client: str) -> None:
        self._held, self._client = held, client
        self._bytes = 0

    def check(self, num_bytes: int) -> None:
        """Raises ApiError (503) if it may not have this number of bytes in all."""
        if not self._held.shares.has_room(self._client, num_bytes, self._bytes):
            raise self._held.refusal()

    def add(self, num_bytes: int) -> None:
        """Holds more of it. Raises ApiError (503) where there is no room."""
        self.check(self._bytes + num_bytes)
        self._held.shares.take(self._client, num_bytes)
        self._bytes += num_bytes

    def give(self) -> None:
        """Holds it no longer."""
        self._held.shares.give(self._client, self._bytes)
        self._held.trim.after(self._bytes)
        self._bytes = 0


async def read_sent(request: Request, limits: RouterConfig, held: HeldBytes) -> bytes:
    """Returns the body as it was sent. Raises ClientGone if the client disconnects before the whole body is here, and
    ApiError:

    | status | reason |
    | --- | --- |
    | 408 | the body took longer than `body_timeout_s`, or `header_timeout_s` brought less than `MIN_BODY_BYTES` of it |
    | 413 | the body has more than `max_body_bytes`, counted while reading: a body need not announce its length |
    | 415 | the body is compressed |
    | 503 | its client's share of the bytes that `held` may have is used up |
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise ApiError(
            415,
            f"The body of the request has Content-Encoding {encoding[:100]!r}: send it as it is, uncompressed.",
            code="unsupported_encoding",
            headers={"Accept-Encoding": "identity"},
        )
    max_bytes = limits.max_body_bytes
    too_large = ApiError(
        413, f"The body of the request is larger than the limit of {max_bytes} bytes.", code="request_too_large"
    )
    announced = request.headers.get("content-length", "0")
    expected = int(announced) if announced.isdecimal() else 0
    if expected > max_bytes:
        raise too_large
    counted = held.body_of(claimant(request), request.scope.setdefault("state", {}))
    counted.check(expected)
    clock = asyncio.get_running_loop().time
    ends_s = clock() + limits.body_timeout_s
    body, due = bytearray(), MIN_BODY_BYTES
    try:
        async with asyncio.timeout_at(min(ends_s, clock() + limits.header_timeout_s)) as timeout:
            async for chunk in request.stream():
                counted.add(len(chunk))
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
                if len(body) >= due:
                    due = len(body) + MIN_BODY_BYTES
                    timeout.reschedule(min(ends_s, clock() + limits.header_timeout_s))
    except TimeoutError:
        message = f"The body of the request took longer than {limits.body_timeout_s:g} s."
        if clock() < ends_s:
            least = f"less than {MIN_BODY_BYTES} bytes of it in {limits.header_timeout_s:g} s"
            message = f"The body of the request comes too slowly: {least}."
        raise ApiError(408, message, code="timeout", headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def parse(model: type[Known], body: bytes, passed_over: set[str] | None = None) -> Known:
    """Decodes `body` as `model`. Raises ApiError (400) that names the parameter at fault. Stops at the first fault, so
    that a body full of faults costs no more than a good one. `passed_over` gets the names of what is passed over."""
    try:
        request = _decoded(model, body, passed_over)
    except msgspec.ValidationError as error:
        raise _explained(str(error), model) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body of the request is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise invalid("The body of the request is nested too deeply.", code="invalid_json") from None
    _refuse_flags(request, "")
    return request


def _decoded(model: type[Known], body: bytes, passed_over: set[str] | None) -> Known:
    """The body as `model`, without what asks for nothing: fields of other servers at their neutral values, and what
    `without_unknown` passes over. Raises msgspec's exceptions: that of JSON which is broken before that of a field."""
    try:
        return msgspec.json.decode(body, type=model)
    except msgspec.ValidationError:
        value = msgspec.json.decode(body)  # the fault may come before the end that is missing
        kept, passed = without_unknown(without_neutral(value, model), model)
        if kept == value:
            raise
    read = msgspec.convert(kept, model)
    if passed_over is not None:
        passed_over.update(passed)
    return read


def read_as(kind: Any, value: Any, param: str, passed_over: set[str] | None = None) -> Any:
    """Reads what is inside a body, decoded already, as `kind`: a type of `Body`, or a union of some. Raises ApiError
    (400) that names the parameter at fault, below `param`. `passed_over` gets the names of what is passed over."""
    try:
        try:
            read = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            read = _leniently(value, kind, param, error, passed_over)
    except RecursionError:
        raise invalid(f"{param!r} is nested too deeply.", param) from None
    _refuse_flags(read, f"{param}.")
    return read


def _leniently(value: Any, kind: Any, param: str, fault: msgspec.ValidationError, passed_over: set[str] | None) -> Any:
    """The value as `kind`, without what may be passed over. Raises the ApiError for `fault` where that is nothing, or
    for another fault."""
    kept, passed = without_unknown(value, kind, param)
    if not passed:
        raise _explained(str(fault), kind, param) from None
    try:
        read = msgspec.convert(kept, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind, param) from None
    if passed_over is not None:
        passed_over.update(passed)
    return read


def _refuse_flags(body: Body, path: str) -> None:
    for name in body.neutral_flags:
        if getattr(body, name):
            raise _unsupported(path + name)
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Body):
            _refuse_flags(value, f"{path}{name}.")


def _unsupported(param: str) -> ApiError:
    return invalid(f"{param!r} is not supported by this server: leave it out.", param, "unsupported_parameter")


def _explained(reason: str, kind: Any, inside: str = "") -> ApiError:
    """The ApiError for a message of msgspec about a value of type `kind`: what is wrong and where, `inside` a
    parameter."""
    at = _AT.search(reason)
    literals = allowed_values(kind, at["path"]) if at and _OTHER_LITERAL.match(reason) else ()
    path = at["path"].replace("[...]", "") if at else ""  # "[...]" stands for some key of an object
    path = f"{inside}.{path}".removesuffix(".").replace(".[", "[") if inside else path
    if at:
        reason = reason[: at.start()]
    if len(reason) >= MAX_REASON_CHARS:  # it may repeat what was sent
        reason = f"{reason[:MAX_REASON_CHARS]}..."
    field = _FIELD.match(reason)
    if field:
        param = f"{path}.{field['name']}" if path else field["name"]
        if field["fault"].startswith("missing"):
            return invalid(f"Missing required parameter: {param!r}.", param, "missing_required_parameter")
        return invalid(f"Unknown parameter: {param!r}. This server does not support it.", param, "unknown_parameter")
    if not path:
        return invalid("The body of the request must be a JSON object.")
    if reason.startswith(_NOTHING_ALLOWED):
        return _unsupported(path)
    if literals:
        value = _OTHER_LITERAL.sub("", reason)
        known = f"none of {', '.join(map(repr, literals))}" if len(literals) > 1 else f"not {literals[0]!r}"
        return invalid(f"Invalid value for {path!r}: {value} is {known}.", path, "invalid_value")
    return invalid(f"Invalid value for {path!r}: {reason[0].lower()}{reason[1:]}.", path, "invalid_value")
