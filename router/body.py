"""Reading a request's body: its size, its JSON, its fields."""

import re
from typing import TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from router.errors import ApiError, invalid
from router.requests import Body
from router.sse import ClientGone

Known = TypeVar("Known", bound=Body)

_AT = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"Object (?P<fault>contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL)
_NOTHING_ALLOWED = ("Expected `null`", "Expected `array` of length <= 0", "Expected `object` of length <= 0")


async def read_body(request: Request, model: type[Known], max_bytes: int) -> tuple[Known, int]:
    """The body as `model`, and how many bytes it had. Raises ApiError: 413 for more than `max_bytes` (counted while
    reading, as a body need not announce its length), 400 for what is not JSON or not what `model` allows. Raises
    ClientGone if the client leaves before all of it is here."""
    too_large = ApiError(
        413, f"The body of the request is larger than the limit of {max_bytes} bytes.", code="request_too_large"
    )
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise too_large
    except ClientDisconnect:
        raise ClientGone from None
    return parse(model, bytes(body)), len(body)


def parse(model: type[Known], body: bytes) -> Known:
    """Raises ApiError with status 400 that names the parameter at fault. Stops at the first fault, so that a body full
    of them costs no more than a good one."""
    try:
        request = msgspec.json.decode(body, type=model)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body of the request is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise invalid("The body of the request is nested too deeply.", code="invalid_json") from None
    _refuse_flags(request, "")
    return request


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


def _explained(reason: str) -> ApiError:
    """msgspec's words about what is wrong where, as an error about a parameter."""
    at = _AT.search(reason)
    path = at["path"].replace("[...]", "") if at else ""  # that stands for some key of an object
    if at:
        reason = reason[: at.start()]
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
    return invalid(f"Invalid value for {path!r}: {reason[0].lower()}{reason[1:]}.", path, "invalid_value")
