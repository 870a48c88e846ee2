"""Traces, sent to a receiver of OpenTelemetry over HTTP (OTLP, protobuf).

    TracedRequest.end ──▶ a queue of at most `MAX_WAITING_SPANS` ──▶ a task, batch by batch

A request costs its router an entry in the queue. Where the receiver does not keep up, or is away, the queue fills, and
requests that end then have no trace; the metric `shoal_trace_spans_total` counts them.
"""

import asyncio
import contextlib
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache

import httpx
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status
from prometheus_client import Counter

from router.metrics.traces import TracedRequest, parent_of
from worker.sparse_log import SparseLog

log = logging.getLogger(__name__)

# A request of one sequence has some six spans, one of many up to 320: it is spans that take memory and time.
MAX_WAITING_SPANS = 48_000  # in the queue: some 16 MB
MAX_BATCH_SPANS = 1536  # of a message, but for its last request: some 300 kB
MAX_SPANS_A_TURN = 192  # that are encoded before the event loop goes on: about a millisecond
BATCH_EVERY_S = 1.0  # how long a request waits for others to go with it
ANSWER_TIMEOUT_S = 10.0  # what the receiver may take for a message
# A receiver that is away is tried again after the first of these, and then twice as late each time up to the second.
RETRY_S, MAX_RETRY_S = 1.0, 30.0
CLOSE_TIMEOUT_S = 2.0  # what is left when a router ends has this long
# The statuses after which OTLP wants a message to be sent again.
RETRIED_STATUSES = (408, 429, 502, 503, 504)
PATH = "/v1/traces"
LOST = ("queue_full", "refused", "closed")  # results of spans

Value = str | int | tuple[str, ...]
Sleep = Callable[[float], Awaitable[None]]


class Tracer:
    """Traces the requests of one router."""

    def __init__(
        self, endpoint: str, ratio: float, spans: Counter, router: str, version: str, sleep: Sleep = asyncio.sleep
    ) -> None:
        """`endpoint`: the receiver's URL; one without a path gets OTLP's. `ratio`: the part of the traces that is kept
        where a client does not say so. `spans` counts by `result`. `router`: the router's name."""
        url = httpx.URL(endpoint)
        self._url = url.copy_with(path=PATH) if url.path in ("", "/") else url
        self._ratio = ratio
        self._spans = spans
        for result in LOST:
            spans.labels(result)  # starts at 0: the rate of a counter that begins with 1 misses it
        told = {"service.name": "shoal", "service.version": version, "service.instance.id": router or "router"}
        resource = Resource(attributes=[_pair(*each) for each in told.items()])
        self._resource = ResourceSpans(resource=resource).SerializeToString()
        scope = InstrumentationScope(name="shoal", version=version)
        self._scope = ScopeSpans(scope=scope).SerializeToString()
        self._sleep = sleep
        self._waiting: deque[TracedRequest] = deque()
        self._waiting_spans = 0
        self._news = asyncio.Event()
        self._enough = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failures = SparseLog(log)

    # ------------------------------------------------ requests

    def begin(self, request_id: str, headers: list[tuple[bytes, bytes]], method: str) -> TracedRequest:
        """The account of a request that arrives."""
        return TracedRequest(request_id, parent=parent_of(headers), ratio=self._ratio, method=method, at_end=self._take)

    def _take(self, request: TracedRequest) -> None:
        """Puts a request that has ended into the queue."""
        if not request.is_sampled:
            return
        spans = _num_spans(request)
        if self._waiting_spans + spans > MAX_WAITING_SPANS:
            self._lost("queue_full", [request])
            return
        self._waiting.append(request)
        self._waiting_spans += spans
        self._news.set()
        if self._waiting_spans >= MAX_BATCH_SPANS:
            self._enough.set()

    # ------------------------------------------------ sending

    def start(self) -> None:
        """Begins to send. Call it in the event loop that serves."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Sends what is left, as far as that takes no longer than `CLOSE_TIMEOUT_S`."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        async with httpx.AsyncClient(timeout=CLOSE_TIMEOUT_S) as http:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    while self._waiting and await self._sent(http):
                        pass
        if self._waiting:
            self._lost("closed", list(self._waiting))
            self._waiting.clear()
            self._waiting_spans = 0

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S) as http:
            retry_s = RETRY_S
            while True:
                await self._news.wait()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._enough.wait(), BATCH_EVERY_S)
                if await self._sent(http):
                    retry_s = RETRY_S
                else:
                    await self._sleep(retry_s)
                    retry_s = min(2 * retry_s, MAX_RETRY_S)
                if self._waiting_spans < MAX_BATCH_SPANS:
                    self._enough.clear()
                if not self._waiting:
                    self._news.clear()

    async def _sent(self, http: httpx.AsyncClient) -> bool:
        """Sends one batch. Returns whether the receiver has taken, or refused it: whether the next may follow."""
        batch = self._batch()
        try:
            data = await self._encoded(batch)
            answer = await http.post(self._url, content=data, headers={"Content-Type": "application/x-protobuf"})
        except httpx.HTTPError as error:
            self._failures.warning("the traces' receiver at %s fails: %s %s", self._url, type(error).__name__, error)
            return False
        except Exception:  # a fault of ours in one of them: the others, which come after it, have theirs
            log.exception("%d requests have no trace", len(batch))
            self._drop(batch)
            self._lost("failed", batch)
            return True
        if answer.status_code in RETRIED_STATUSES:
            self._failures.warning("the traces' receiver at %s answers %d", self._url, answer.status_code)
            return False
        self._drop(batch)
        if answer.is_success:
            self._spans.labels("sent").inc(sum(map(_num_spans, batch)))
        else:
            self._lost("refused", batch)
            self._failures.warning(
                "the traces' receiver at %s refuses them: %d %s", self._url, answer.status_code, answer.text[:200]
            )
        return True

    def _batch(self) -> list[TracedRequest]:
        """The first requests of the queue, which go into one message."""
        batch, spans = [], 0
        for request in self._waiting:
            if spans >= MAX_BATCH_SPANS:
                break
            batch.append(request)
            spans += _num_spans(request)
        return batch

    def _drop(self, batch: Sequence[TracedRequest]) -> None:
        """Takes a batch out of the queue."""
        for _ in batch:
            self._waiting_spans -= _num_spans(self._waiting.popleft())

    async def _encoded(self, batch: Sequence[TracedRequest]) -> bytes:
        """The message of a batch, an `ExportTraceServiceRequest`. Lets the event loop go on from time to time."""
        parts, spans = [self._scope], 0
        for request in batch:
            parts.append(_encoded_spans(request))
            spans += _num_spans(request)
            if spans >= MAX_SPANS_A_TURN:
                await asyncio.sleep(0)
                spans = 0
        whole = self._resource + _field(2, b"".join(parts))
        return _field(1, whole)

    def _lost(self, reason: str, requests: Sequence[TracedRequest]) -> None:
        self._spans.labels(reason).inc(sum(map(_num_spans, requests)))
        if reason == "queue_full":
            text = "no trace of a request: %d wait already for the receiver at %s"
            self._failures.warning(text, len(self._waiting), self._url)


def _num_spans(request: TracedRequest) -> int:
    return 1 + sum(len(run.phases) for run in request.runs)


def _encoded_spans(request: TracedRequest) -> bytes:
    """The spans of a request that has ended, as fields of a `ScopeSpans`: its own, and those of its sequences' phases.

    A phase is a few fields around what many phases have alike. These are written here: a message object of each would
    take five times as long.
    """

    def nanoseconds(at: float) -> int:
        return round((at + request.epoch_s) * 1e9)

    assert request.over is not None
    failed = request.status >= 500 or (request.error != "" and request.status < 400)
    parent = request.parent
    own = Span(
        trace_id=request.trace_id,
        span_id=request.span_id,
        parent_span_id=b"" if parent is None else parent.span_id,
        trace_state="" if parent is None else parent.state,
        name=f"{request.method} {request.path}",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=nanoseconds(request.arrived),
        end_time_unix_nano=nanoseconds(request.over),
        status=Status(code=Status.STATUS_CODE_ERROR, message=request.error) if failed else None,
    )
    own_id = _REQUEST_ID, request.request_id
    told = b"".join([own.SerializeToString(), _attribute(*own_id), *map(_known_attribute, request.attributes())])
    parts = [_field(2, told)]
    number = int.from_bytes(request.span_id)
    before = b"\x0a\x10" + request.trace_id + b"\x12\x08"  # fields 1 and 2: bytes
    after = b"\x22\x08" + request.span_id  # field 4, the parent
    for run in request.runs:
        for phase in run.phases:
            number = (number + 1) % (1 << 64) or 1
            times = _TIMES.pack(0x39, nanoseconds(phase.begun), 0x41, nanoseconds(phase.ended))  # fields 7 and 8
            alike = _alike(phase.name, run.number, tuple(phase.attributes.items()))
            parts.append(_field(2, before + number.to_bytes(8) + after + times + alike))
    return b"".join(parts)


_REQUEST_ID = "shoal.request_id"
_TIMES = struct.Struct("<BQBQ")


@lru_cache(maxsize=4096)
def _alike(name: str, sequence: int, attributes: tuple[tuple[str, str | int], ...]) -> bytes:
    """The fields of a phase's span that other phases have, too."""
    kind = Span.SPAN_KIND_CLIENT if name == "upstream" else Span.SPAN_KIND_INTERNAL
    told = [_pair("shoal.sequence", sequence), *(_pair(*each) for each in attributes)]
    return Span(name=name, kind=kind, attributes=told).SerializeToString()


def _field(number: int, told: bytes) -> bytes:
    """A field that is bytes or a message, as protobuf writes it."""
    head, length = bytearray([number << 3 | 2]), len(told)
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + told


def _attribute(key: str, value: Value) -> bytes:
    """An attribute, as a field of a `Span`."""
    return Span(attributes=[_pair(key, value)]).SerializeToString()


_known_attribute = lru_cache(maxsize=4096)(lambda pair: _attribute(*pair))


def _pair(key: str, value: Value) -> KeyValue:
    match value:
        case str():
            return KeyValue(key=key, value=AnyValue(string_value=value))
        case int():
            return KeyValue(key=key, value=AnyValue(int_value=value))
        case _:
            values = [AnyValue(string_value=each) for each in value]
            return KeyValue(key=key, value=AnyValue(array_value=ArrayValue(values=values)))
