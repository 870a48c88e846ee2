"""The log's account of an HTTP request: who asked, where it ran, its tokens and times. Never what was said.

The middleware makes a `RequestLog` as a request arrives, and the parts that serve the request write into it. They find
it by `current`, which holds in the request's task and in the tasks that this one starts.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

log = logging.getLogger(__name__)

# The tasks of different requests have different values.
_current: ContextVar["RequestLog | None"] = ContextVar("request_log", default=None)


class Phases(Protocol):
    """The fate of a sequence, told as it happens, for its trace (`router.metrics.traces`)."""

    def sent(self, replica_id: str) -> None: ...

    def passed_on(self) -> None: ...

    def queued(self, queue_s: float) -> None: ...

    def first_token(self) -> None: ...

    def last_token(self, at: float | None) -> None: ...

    def lost(self, reason: str) -> None: ...

    def again(self) -> None: ...


@dataclass(slots=True)
class RequestLog:
    """A request, from its arrival to its end.

    | attribute | meaning |
    | --- | --- |
    | `request_id` | its id for its client |
    | `client` | the name of the client's key |
    | `model` | the model's own name |
    | `sequences` | how many were sent to replicas |
    | `prompt_tokens`, `cached_tokens`, `output_tokens` | of all its sequences; a prompt that they share counts once |
    | `queue_s` | the longest wait of a sequence in its replica |
    | `first_token_s` | from its arrival to the first token of any sequence |
    | `finish_reasons` | of its sequences, each once |
    | `replicas` | to which they were sent, each once |
    | `resumed` | times that a sequence went on after it was cut off |
    | `repaired` | what of its history goes to the model in another form than it was sent, each once |
    """

    request_id: str
    arrived: float = field(default_factory=perf_counter)
    client: str = ""
    model: str = ""
    sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_s: float | None = None
    first_token_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    resumed: int = 0
    repaired: list[str] = field(default_factory=list)

    def phases(self, sequence: str, arrived: float, program: str | None) -> Phases | None:
        """Where the phases of a sequence are told; None if its request is not traced. `sequence`: its name at replicas.
        `arrived`: `perf_counter` when its call came. `program`: the program that it belongs to."""
        return None

    def trace_headers(self) -> dict[str, str]:
        """The headers that name the request's span to another endpoint; none if the request is not traced."""
        return {}

    def began(self, replica_id: str) -> None:
        """A sequence was sent to a replica."""
        self.sequences += 1
        if replica_id not in self.replicas:
            self.replicas.append(replica_id)

    def queued(self, queue_s: float) -> None:
        """A sequence waited so long in its replica."""
        self.queue_s = max(queue_s, self.queue_s or 0.0)

    def first_token(self) -> None:
        """A sequence has its first token."""
        if self.first_token_s is None:
            self.first_token_s = perf_counter() - self.arrived

    def ended(self, finish_reason: str) -> None:
        """A sequence has ended."""
        if finish_reason not in self.finish_reasons:
            self.finish_reasons.append(finish_reason)

    def repaired_part(self, name: str) -> None:
        """A part of its history was repaired."""
        if name not in self.repaired:
            self.repaired.append(name)

    def fields(self) -> dict[str, str | int | float]:
        """The fields that are known, by the names that lines of the log have."""
        known: dict[str, str | int | float] = {"request_id": self.request_id}
        known |= {name: value for name in ("client", "model") if (value := getattr(self, name))}
        if self.sequences:
            known |= {name: getattr(self, name) for name in ("prompt_tokens", "cached_tokens", "output_tokens")}
            known |= {"finish_reason": ",".join(self.finish_reasons), "replica": ",".join(self.replicas)}
        for name in ("queue_s", "first_token_s"):
            if (seconds := getattr(self, name)) is not None:
                known[name] = round(seconds, 4)
        if self.resumed:
            known["resumed"] = self.resumed
        if self.repaired:
            known["repaired"] = ",".join(self.repaired)
        return known | {"total_s": round(perf_counter() - self.arrived, 4)}

    def write(self) -> None:
        """Writes the line of a request that was answered."""
        log.info("request %s ended", self.request_id, extra=self.fields())


def current() -> RequestLog | None:
    """The request that the running task works for; None outside of any."""
    return _current.get()


@contextmanager
def serving(request: RequestLog) -> Iterator[None]:
    """Lets code that runs meanwhile find the request by `current`."""
    token = _current.set(request)
    try:
        yield
    finally:
        _current.reset(token)
