"""Repairs of what clients send, before the model gets it. The log names each once, and so does the request's answer."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

log = logging.getLogger(__name__)

_tell: ContextVar[Callable[[str], None] | None] = ContextVar("repairs", default=None)


def repaired(part: str, what: str) -> None:
    """A part of a request was repaired. `part`: for the request's answer. `what`: for the log."""
    warn(what)
    if (tell := _tell.get()) is not None:
        tell(part)


@contextmanager
def telling(tell: Callable[[str], None] | None) -> Iterator[None]:
    """Passes the names of repaired parts on, in this context and in its copies."""
    token = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(token)


@cache
def warn(what: str) -> None:
    """Warns, once in a process."""
    log.warning("%s", what)
