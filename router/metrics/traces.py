"""Traces of requests: where the time of each has gone, for receivers of OpenTelemetry.

    POST /v1/chat/completions  ├─────────────────────────────────────────────────────────────┤
    its phases                 ├router┼queue┼prefill┼decode┼resume┼queue┼prefill┼decode┼answer┤

The phases of a sequence follow each other without gaps, so they add up to the request's time. A request of several
sequences has the phases of each, with its number in `shoal.sequence`.

All of it is told by the router. A replica has said how long a request waited there since it first spoke to routers, so
replicas of other versions are traced, too.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from router.metrics.request_log import RequestLog

# The header as W3C's Trace Context has it: version, trace, span, flags. Later versions may have more behind these.
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
PHASES = {
    "router": "at the router: the body comes, is checked and tokenised, and a replica is looked for, until it is sent",
    "upstream": "of a model at another endpoint: from sending it there to the end of that answer",
    "queue": "in the replica's queue, and the way there",
    "prefill": "from its first step to its first token",
    "decode": "from its first to its last token",
    "resume": "cut off, it waits to go on elsewhere; `shoal.reason` says why, as `shoal_resumed_sequences_total` does",
    "answer": "from its last token until the answer has ended, for its client too",
}
"""The spans within a request's, by name."""
MAX_STATE_CHARS = 512  # characters of `tracestate`, which W3C wants to be passed on up to this length
MAX_TRACED_SEQUENCES = 64  # of one request whose phases are told: a request may have thousands
_AGAIN = re.compile(r"-(again\d+|answer)$")  # a sequence that goes on, as `Generation` names it


@dataclass(frozen=True, slots=True)
class Parent:
    """The span of a client in which a request was made."""

    trace_id: bytes
    span_id: bytes
    sampled: bool
    state: str = ""


def parent_of(headers: list[tuple[bytes, bytes]]) -> Parent | None:
    """The client's span among these headers. None if it sent none, or none that is valid."""
    given = [value for name, value in headers if name == b"traceparent"]
    found = _PARENT.fullmatch(given[0].strip()) if len(given) == 1 else None
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5] is not None):
        return None
    trace_id, span_id = bytes.fromhex(found[2].decode()), bytes.fromhex(found[3].decode())
    if not any(trace_id) or not any(span_id):
        return None
    states = [value.decode("latin-1").strip() for name, value in headers if name == b"tracestate"]
    state = ",".join(states)
    return Parent(trace_id, span_id, bool(int(found[4], 16) & _SAMPLED), state if len(state) <= MAX_STATE_CHARS else "")


def program_trace(program: str) -> bytes:
    """The id of the trace to which all calls of a program belong, whichever routers they come to."""
    return hashlib.blake2b(program.encode(), digest_size=16).digest()


def is_sampled(trace_id: bytes, ratio: float) -> bool:
    """Whether a trace is among the sampled part of all, as OpenTelemetry's TraceIdRatioBased decides it."""
    return int.from_bytes(trace_id[8:]) < round(ratio * (1 << 64))


@dataclass(slots=True)
class Phase:
    """A part of a sequence's life, from `begun` to `ended`, by `perf_counter`."""

    name: str
    begun: float
    ended: float
    attributes: dict[str, str | int]


class SequencePhases:
    """The phases of one sequence, each of which begins where the one before ends. `number`: the sequence's own."""

    __slots__ = ("_attributes", "_begun", "_name", "number", "phases")

    def __init__(self, number: int, begun: float) -> None:
        self.number = number
        self.phases: list[Phase] = []
        self._name, self._begun = "router", begun
        self._attributes: dict[str, str | int] = {}

    @property
    def last(self) -> float:
        """The time until which its phases are known."""
        return self._begun

    @property
    def is_answering(self) -> bool:
        """Whether all tokens have come, as far as is known."""
        return self._name in ("answer", "")

    def sent(self, replica_id: str) -> None:
        """The sequence was sent to a replica."""
        self._next("queue", perf_counter(), {"shoal.replica": replica_id})

    def passed_on(self) -> None:
        """The request was sent to another endpoint."""
        self._next("upstream", perf_counter(), {})

    def queued(self, queue_s: float) -> None:
        """The sequence waited so long in its replica, which tells it later."""
        self._next("prefill", min(self._begun + queue_s, perf_counter()), self._attributes)

    def first_token(self) -> None:
        """The first token of this run has come."""
        self._next("decode", perf_counter(), self._attributes)

    def last_token(self, at: float | None) -> None:
        """The run is over; its last token came at this `perf_counter`, if any came."""
        if at is not None:
            self._next("answer", at, {})

    def lost(self, reason: str) -> None:
        """The run was cut off, after the last of its tokens."""
        self._instead("resume", {"shoal.reason": reason})

    def again(self) -> None:
        """The router goes on with the sequence, or offers it to another replica."""
        self._instead("router", {})

    def close(self, at: float) -> None:
        """Ends the phase that goes on."""
        self._next("", at, {})

    def hand_over(self) -> None:
        """The time after its last token is another sequence's."""
        self._name = ""

    def _instead(self, name: str, attributes: dict[str, str | int]) -> None:
        if self._name == "answer":  # as it seemed
            self._name, self._attributes = name, attributes
        else:
            self._next(name, perf_counter(), attributes)

    def _next(self, name: str, at: float, attributes: dict[str, str | int]) -> None:
        at = max(at, self._begun)
        if self._name:
            self.phases.append(Phase(self._name, self._begun, at, self._attributes))
        self._name, self._begun, self._attributes = name, at, attributes


@dataclass(slots=True)
class TracedRequest(RequestLog):
    """A request whose trace is told when it has ended.

    | attribute | meaning |
    | --- | --- |
    | `parent` | the client's span, which says whether the trace is kept; None if it sent none |
    | `ratio` | the part of traces that is kept where no client says so |
    | `method`, `path`, `status`, `error` | of the answer: its route, its HTTP status, the error's code |
    | `trace_id`, `span_id` | of the request's own span |
    | `runs` | its sequences, as far as they are told |
    | `epoch_s` | what `perf_counter` lacks to the seconds since 1970 |
    | `over` | `perf_counter` at its end; None while it runs |
    | `at_end` | takes the request when it has ended |
    """

    parent: Parent | None = None
    ratio: float = 1.0
    method: str = ""
    path: str = ""
    status: int = 0
    error: str = ""
    trace_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    span_id: bytes = field(default_factory=lambda: secrets.token_bytes(8))
    runs: list[SequencePhases] = field(default_factory=list)
    epoch_s: float = field(default_factory=lambda: time.time() - perf_counter())
    over: float | None = None
    at_end: Callable[["TracedRequest"], None] = lambda request: None
    _known: dict[str, SequencePhases] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.trace_id = self.parent.trace_id

    def phases(self, sequence: str, arrived: float, program: str | None) -> SequencePhases | None:
        """See `RequestLog.phases`."""
        if program is not None and self.parent is None:
            self.trace_id = program_trace(program)
        name = _AGAIN.sub("", sequence)
        run = self._known.get(name)
        if run is not None:
            run.again()
            return run
        if len(self.runs) == MAX_TRACED_SEQUENCES:
            return None
        begun = self.arrived
        if self.runs and all(run.is_answering for run in self.runs):
            last = max(run.last for run in self.runs)
            if arrived >= last:  # the next call of a template, which follows the one before
                begun = last
                for run in self.runs:
                    run.hand_over()
        run = self._known[name] = SequencePhases(len(self.runs), begun)
        self.runs.append(run)
        return run

    def trace_headers(self) -> dict[str, str]:
        """See `RequestLog.trace_headers`."""
        headers = {"traceparent": f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{self.is_sampled:02x}"}
        state = "" if self.parent is None else self.parent.state
        return headers | ({"tracestate": state} if state else {})

    @property
    def is_sampled(self) -> bool:
        """Whether its trace is kept."""
        return is_sampled(self.trace_id, self.ratio) if self.parent is None else self.parent.sampled

    def write(self) -> None:
        """See `RequestLog.write`: of a request that goes on after its HTTP answer, this is the end."""
        RequestLog.write(self)
        self.end()

    def end(self) -> None:
        """Ends the request now, if that has not been told before."""
        if self.over is not None:
            return
        self.over = perf_counter()
        if not self.runs:
            self.runs.append(SequencePhases(0, self.arrived))
        for run in self.runs:
            run.close(self.over)
        self._known.clear()
        self.at_end(self)

    def attributes(self) -> list[tuple[str, str | int | tuple[str, ...]]]:
        """Attributes of the request's own span, besides its id. Nothing of what was said is in them."""
        told: list[tuple[str, str | int | tuple[str, ...]]] = [
            ("http.request.method", self.method),
            ("http.route", self.path),
            ("http.response.status_code", self.status),
        ]
        if self.sequences:
            told += [
                ("gen_ai.usage.input_tokens", self.prompt_tokens),
                ("gen_ai.usage.output_tokens", self.output_tokens),
                ("gen_ai.response.finish_reasons", tuple(self.finish_reasons)),
                ("shoal.cached_tokens", self.cached_tokens),
                ("shoal.sequences", self.sequences),
            ]
        texts = ("gen_ai.request.model", self.model), ("shoal.client", self.client), ("error.type", self.error)
        told += [pair for pair in texts if pair[1]]
        return [*told, ("shoal.resumed", self.resumed)] if self.resumed else told
