"""The id of a request: for its client, in its answer and in the logs."""

import re
import secrets

HEADER = "X-Request-Id"

_SANE = re.compile(rb"[!-~]{1,128}")  # printable ASCII without spaces


def new() -> str:
    return secrets.token_hex(16)


def given(headers: list[tuple[bytes, bytes]]) -> str | None:
    """The client's own id among these headers. None if it sent none, or one that is unfit for a log."""
    for name, value in headers:
        if name == b"x-request-id" and _SANE.fullmatch(value):
            return value.decode()
    return None
