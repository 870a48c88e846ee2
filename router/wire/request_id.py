"""The id of a request: for its client, in its answer and in the logs."""

import re
import secrets

HEADER = "X-Request-Id"

_SUFFIX_BYTES = 8
# As `Generation` and `Service` name sequences after a request's name.
_SEQUENCE = re.compile(rf"(.+?)(?:-[0-9a-f]{{{2 * _SUFFIX_BYTES}}})?-\d+(?:-(?:again\d+|answer|then))?(?:\.\d+)?")
_SANE = re.compile(rb"[!-~]{1,128}")  # printable ASCII without spaces


def new() -> str:
    return secrets.token_hex(16)


def name(known: str) -> str:
    """A unique name for a request whose id its client chose."""
    return f"{known}-{secrets.token_hex(_SUFFIX_BYTES)}"


def of_sequence(sequence_id: str) -> str:
    """The id of the request that a sequence belongs to, by the name of the sequence at a replica."""
    found = _SEQUENCE.fullmatch(sequence_id)
    return sequence_id if found is None else found[1]


def given(headers: list[tuple[bytes, bytes]]) -> str | None:
    """The client's own id among these headers. None if it sent none, or one that is unfit for a log."""
    for name, value in headers:
        if name == b"x-request-id" and _SANE.fullmatch(value):
            return value.decode()
    return None
