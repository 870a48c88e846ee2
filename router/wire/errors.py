"""Errors as clients get them, in OpenAI's form."""

import json
import math

SERVER_ERROR = "server_error"
INVALID = "invalid_request_error"


class ApiError(Exception):
    """An answer with HTTP status `status` instead of a result.

    `message` is for people and says what to do. `code` is for programs. `param` names the parameter at fault.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        """The JSON object that clients of OpenAI's API expect."""
        kind = INVALID if self.status < 500 and self.status != 429 else SERVER_ERROR
        if self.status == 429:
            kind = "rate_limit_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def internal() -> ApiError:
    """A 500 that reveals no internals. The cause is in the log."""
    return ApiError(500, "Something went wrong inside the server; it has been logged.", code="internal_error")


def busy(message: str, retry_after_s: float, *, status: int = 429, param: str | None = None) -> ApiError:
    """A 429, or 503, because of the load. A `{}` in the message stands for the seconds until a retry, 1 to 60: the load
    further ahead is unknown."""
    seconds = min(60, max(1, math.ceil(retry_after_s)))
    headers = {"Retry-After": str(seconds)}
    return ApiError(status, message.replace("{}", str(seconds)), param=param, code="overloaded", headers=headers)


def program_unknown(reason: str) -> ApiError:
    """A 409: the text that the request continues is not known here. Nothing was computed."""
    message = f"Cannot continue: {reason}. Send the whole text, with 'continues' false."
    return ApiError(409, message, param="program", code="program_unknown")


class NoReplica(ApiError):
    """No replica could take the request in time. Raised by a placer."""

    def __init__(self, message: str | None = None) -> None:
        """`message`: the reason, where it is known."""
        text = message or "No replica is ready to answer; try again shortly."
        super().__init__(503, text, code="no_replica", headers={"Retry-After": "2"})
        self._has_reason = message is not None

    def of(self, model: str) -> "NoReplica":
        """The same error with the model's name, unless it has a reason."""
        if self._has_reason:
            return self
        return NoReplica(f"No replica of {model!r} is ready to answer; try again shortly.")
