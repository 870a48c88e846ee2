"""Traces: a request's spans add up to its time, belong to the trace of its client or its program, and cost nothing that
a client could notice, whatever becomes of the receiver."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from router.config import RouterConfig
from router.metrics import otlp, request_log
from router.metrics.otlp import Tracer
from router.metrics.traces import (
    MAX_TRACED_SEQUENCES,
    SequencePhases,
    TracedRequest,
    is_sampled,
    parent_of,
    program_trace,
)
from tests.otlp_receiver import Receiver, attributes
from worker.messages import Failure, Output

Make = Callable[..., Any]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "my secret"}]}
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
PHASES = ["router", "queue", "prefill", "decode", "answer"]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "BATCH_EVERY_S", 0.005)
    monkeypatch.setattr(otlp, "RETRY_S", 0.005)


@pytest.fixture
def traced(make_stack: Make, make_replica: Make, receiver: Receiver) -> Make:
    """Makes a server that traces."""

    def make(*fakes: Any, **settings: Any) -> Any:
        config = RouterConfig(otlp_traces_endpoint=receiver.url, **settings)
        return make_stack(*(fakes or (make_replica(),)), config=config)

    return make


def ask(stack: Any, body: dict[str, Any] = CHAT, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    return httpx.post(f"{stack.url}{path}", json=body, headers=headers)


def names(spans: list[Any]) -> list[str]:
    return [span.name for span in spans]


def check_sums(receiver: Receiver, own: Any, sequences: int = 1) -> None:
    """The phases of each sequence follow each other from the request's first moment to its last."""
    for sequence in range(sequences):
        phases = receiver.children(own, sequence)
        edges = [own.start_time_unix_nano, *(span.end_time_unix_nano for span in phases)]
        assert [span.start_time_unix_nano for span in phases] == edges[:-1]
        assert edges[-1] == own.end_time_unix_nano
        assert all(span.trace_id == own.trace_id for span in phases)


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize("stream", [True, False])
def test_the_phases_of_a_request_add_up(traced: Make, receiver: Receiver, stream: bool) -> None:
    stack = traced()
    assert ask(stack, CHAT | {"stream": stream}, **{"X-Request-Id": "mine"}).status_code == 200
    (own,) = receiver.requests(1)
    phases = receiver.children(own)
    assert names(phases) == PHASES and own.name == "POST /v1/chat/completions"
    check_sums(receiver, own)
    told = attributes(own)
    assert told["http.response.status_code"] == 200 and told["shoal.request_id"] == "mine"
    assert told["gen_ai.request.model"] == "tiny" and told["gen_ai.response.finish_reasons"] == ["stop"]
    assert told["gen_ai.usage.output_tokens"] == len(stack.fakes["r0"].script(None))
    assert told["gen_ai.usage.input_tokens"] > told["shoal.cached_tokens"] == 3
    assert not own.parent_span_id and not own.status.code
    assert all(attributes(span)["shoal.replica"] == "r0" for span in phases[1:4])
    assert receiver.sent_to == ["/v1/traces"]
    (who,) = receiver.resources
    assert who["service.name"] == "shoal" and who["service.version"] and who["service.instance.id"]
    assert not any(b"secret" in span.SerializeToString() for span in receiver.spans)
    stack.until(lambda: stack.metric('shoal_trace_spans_total{result="sent"}') == 6)


def test_each_choice_has_its_phases(traced: Make, receiver: Receiver) -> None:
    stack = traced()
    ask(stack, {"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 3, "seed": 1}, "/v1/completions")
    (own,) = receiver.requests(1)
    assert attributes(own)["shoal.sequences"] == 4 and len(receiver.children(own)) == 20
    check_sums(receiver, own, 4)


def test_a_resumed_stream_has_a_phase_for_it(traced: Make, make_replica: Make, receiver: Receiver) -> None:
    fakes = [make_replica().hold(), make_replica().hold()]
    stack = traced(*fakes)
    with stack.raw("/v1/chat/completions", CHAT | {"stream": True}) as connection:
        first, second = stack.lose_one()
        stack.read_until(connection, b"[DONE]")
        (own,) = receiver.requests(1)
    phases = receiver.children(own)
    assert names(phases) == [*PHASES[:4], "resume", "queue", "prefill", "decode", "answer"]
    check_sums(receiver, own)
    assert attributes(own)["shoal.resumed"] == 1
    assert attributes(phases[4])["shoal.reason"] == "replica_lost"
    assert [attributes(phases[n])["shoal.replica"] for n in (1, 5)] == [first, second]


def test_a_request_that_replicas_refuse(traced: Make, make_replica: Make, receiver: Receiver) -> None:
    fakes = [make_replica(), make_replica()]
    stack = traced(*fakes)
    full = Failure("overloaded", "full", retry_after_s=3.0)
    for fake in fakes:
        fake.reply = lambda request: Output(request_id=request.request_id, finish_reason="error", failure=full)
    assert ask(stack).status_code == 429
    (own,) = receiver.requests(1)
    assert names(receiver.children(own)) == ["router", "queue", "router", "queue", "router"]
    check_sums(receiver, own)
    told = attributes(own)
    assert told["http.response.status_code"] == 429 and told["error.type"] == "overloaded"
    assert not own.status.code  # the server has done what it should


def test_a_failure_is_marked(traced: Make, make_replica: Make, receiver: Receiver) -> None:
    fake = make_replica()
    fake.fail(Failure("internal", "broken"))
    stack = traced(fake)
    assert ask(stack).status_code == 500
    (own,) = receiver.requests(1)
    assert own.status.code == own.status.STATUS_CODE_ERROR
    check_sums(receiver, own)


def test_an_abandoned_request_ends(traced: Make, make_replica: Make, receiver: Receiver) -> None:
    fake = make_replica().hold()
    stack = traced(fake)
    with stack.raw("/v1/chat/completions", CHAT | {"stream": True}):
        stack.until(fake.requests)
    (own,) = receiver.requests(1)
    assert names(receiver.children(own)) == ["router", "queue"]
    assert attributes(own)["gen_ai.response.finish_reasons"] == ["abandoned"]
    check_sums(receiver, own)


def test_a_response_in_the_background_ends_with_its_text(
    traced: Make, make_replica: Make, receiver: Receiver, tmp_path: Any
) -> None:
    fake = make_replica().hold()
    stack = traced(fake, response_store_dir=tmp_path)
    assert ask(stack, {"model": "tiny", "input": "hi", "background": True}, "/v1/responses").status_code == 200
    stack.until(fake.requests)
    assert not receiver.spans
    fake.allow(None)
    (own,) = receiver.requests(1)
    assert names(receiver.children(own)) == PHASES
    check_sums(receiver, own)


def test_what_generates_nothing_has_no_trace(traced: Make, receiver: Receiver) -> None:
    stack = traced()
    for path in ("/health", "/metrics", "/v1/models"):
        httpx.get(f"{stack.url}{path}")
    ask(stack, {"model": "tiny", "prompt": "a"}, "/tokenize")
    ask(stack)
    assert len(receiver.requests(1)) == 1
    assert len(receiver.spans) == 6


# ---------------------------------------------------------------- whose trace it is


def test_a_clients_trace_goes_on(traced: Make, receiver: Receiver) -> None:
    stack = traced(trace_sampling_ratio=0.0)
    ask(stack)  # nobody has asked for its trace
    ask(stack, traceparent=f"00-{TRACE}-{SPAN}-00")
    ask(stack, traceparent=PARENT, tracestate="a=1,b=2")
    (own,) = receiver.requests(1)
    assert own.trace_id.hex() == TRACE and own.parent_span_id.hex() == SPAN and own.trace_state == "a=1,b=2"
    check_sums(receiver, own)


def test_calls_of_a_program_are_one_trace(traced: Make, receiver: Receiver) -> None:
    stack = traced()
    call = {"model": "tiny", "prompt": "a b", "max_tokens": 2}
    for program in ("one", "two", "one"):
        branch = {"id": program, "branch": "main"}
        assert ask(stack, call | {"program": branch}, "/v1/completions").status_code == 200
        receiver.until(lambda: True)
    traces = [span.trace_id for span in receiver.requests(3)]
    assert traces[0] == traces[2] != traces[1]
    ask(stack, call | {"program": {"id": "one", "branch": "main"}}, "/v1/completions", traceparent=PARENT)
    assert receiver.requests(4)[-1].trace_id.hex() == TRACE  # the client knows better


def test_the_calls_of_a_template_follow_each_other(traced: Make, receiver: Receiver) -> None:
    stack = traced()
    body = {
        "model": "tiny",
        "prompt": "a b",
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"whole_choices": True},
        "program": {"id": "p", "branch": "main", "template": [{"prompt": " c", "max_tokens": 3}]},
    }
    assert ask(stack, body, "/v1/completions").status_code == 200
    (own,) = receiver.requests(1)
    phases = receiver.children(own)
    assert names(phases) == [*PHASES[:4], *PHASES]
    edges = [own.start_time_unix_nano, *(span.end_time_unix_nano for span in phases)]
    assert [span.start_time_unix_nano for span in phases] == edges[:-1] and edges[-1] == own.end_time_unix_nano


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
    ],
)
def test_a_header_that_names_no_span(header: str) -> None:
    assert parent_of([(b"traceparent", header.encode())]) is None


def test_headers_of_a_client() -> None:
    assert parent_of([]) is None
    given = (b"traceparent", PARENT.encode())
    assert parent_of([given, given]) is None
    found = parent_of([given, (b"tracestate", b"a=1"), (b"tracestate", b"b=2")])
    assert found is not None and found.sampled and found.state == "a=1,b=2"
    later = parent_of([(b"traceparent", f"01-{TRACE}-{SPAN}-03-more".encode()), (b"tracestate", b"x" * 600)])
    assert later is not None and later.sampled and later.state == ""


def test_the_part_that_is_kept() -> None:
    ids = [number.to_bytes(8) + (number << 54).to_bytes(8) for number in range(1024)]
    assert sum(is_sampled(each, 0.25) for each in ids) == 256
    assert all(is_sampled(each, 1.0) for each in [*ids, b"\xff" * 16])
    assert not any(is_sampled(each, 0.0) for each in ids)
    assert program_trace("a/b") == program_trace("a/b") != program_trace("a/c")


# ---------------------------------------------------------------- off


def test_without_a_receiver_nothing_is_traced(stack: Any) -> None:
    assert stack.models.tracer is None
    request = request_log.RequestLog("x")
    assert request.phases("x-0", 0.0, None) is None and request.trace_headers() == {}
    assert ask(stack, traceparent=PARENT).status_code == 200
    assert stack.metric("shoal_trace_spans_total{") == 0


@pytest.mark.parametrize(
    "url",
    ["collector:4317", "grpc://collector:4317", "http://collector:4318/v1/traces?x=1", "http://c:99999", "http://c:x"],
)
def test_a_receiver_that_cannot_be_one(url: str) -> None:
    with pytest.raises(ValueError, match="receiver's URL"):
        RouterConfig(otlp_traces_endpoint=url)


# ---------------------------------------------------------------- the receiver


class Sending:
    """A tracer without a server. `slept`: how long it has waited after failures."""

    def __init__(self, url: str) -> None:
        self.spans = Counter("spans", "x", ("result",), registry=CollectorRegistry())
        self.slept: list[float] = []
        self.tracer = Tracer(url, 1.0, self.spans, "r", "1", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    def request(self) -> None:
        self.tracer.begin("x", [], "POST").end()

    def count(self, result: str) -> float:
        return float(self.spans.labels(result)._value.get())


async def sent(sending: Sending, number: int) -> None:
    while sending.count("sent") < number:
        await asyncio.sleep(0.001)


def test_a_receiver_that_is_away_for_a_while_loses_nothing(receiver: Receiver) -> None:
    receiver.statuses.extend([503, 429, 503])

    async def run() -> Sending:
        sending = Sending(f"{receiver.url}/elsewhere")
        sending.tracer.start()
        sending.request()
        await asyncio.wait_for(sent(sending, 2), 20)
        await sending.tracer.close()
        return sending

    sending = asyncio.run(run())
    first = otlp.RETRY_S
    assert sending.slept == [first, 2 * first, 4 * first]
    assert len(receiver.spans) == 2 and set(receiver.sent_to) == {"/elsewhere"}


def test_a_message_that_is_refused_is_counted(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    receiver.statuses.append(400)

    async def run() -> Sending:
        sending = Sending(receiver.url)
        sending.request()
        sending.tracer.start()
        while not sending.count("refused"):
            await asyncio.sleep(0.001)
        sending.request()
        await asyncio.wait_for(sent(sending, 2), 20)
        await sending.tracer.close()
        return sending

    assert asyncio.run(run()).count("refused") == 2
    assert len([record for record in caplog.records if "refuses" in record.getMessage()]) == 1


def test_a_full_queue_loses_the_newest(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MAX_WAITING_SPANS", 7)  # of three requests
    sending = Sending("http://127.0.0.1:9")
    for _ in range(5):
        sending.request()
    assert sending.count("queue_full") == 4
    assert len(caplog.records) == 1
    asyncio.run(sending.tracer.close())  # it was never started


def test_a_router_that_ends_sends_what_is_left(receiver: Receiver) -> None:
    async def run(url: str) -> Sending:
        sending = Sending(url)
        sending.tracer.start()
        sending.request()
        await sending.tracer.close()
        return sending

    assert asyncio.run(run(receiver.url)).count("sent") == 2
    assert len(receiver.spans) == 2
    assert asyncio.run(run("http://127.0.0.1:9")).count("closed") == 2  # the port of "discard": nothing listens


def test_a_request_that_cannot_be_written_holds_up_no_other(
    receiver: Receiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "MAX_BATCH_SPANS", 1)

    async def run() -> Sending:
        sending = Sending(receiver.url)
        sending.request()
        sending.tracer._waiting[0].over = None
        sending.request()
        sending.tracer.start()
        await asyncio.wait_for(sent(sending, 2), 20)
        await sending.tracer.close()
        return sending

    assert asyncio.run(run()).count("failed") == 2 and len(receiver.spans) == 2
    assert len(caplog.records) == 1


def test_batches_are_bounded(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MAX_BATCH_SPANS", 8)  # of four requests

    async def run() -> None:
        sending = Sending(receiver.url)
        for _ in range(10):
            sending.request()
        sending.tracer.start()
        await asyncio.wait_for(sent(sending, 20), 20)
        await sending.tracer.close()

    asyncio.run(run())
    assert len(receiver.sent_to) == 3 and len(receiver.spans) == 20


# ---------------------------------------------------------------- phases


def test_phases_never_overlap_whatever_a_replica_says() -> None:
    run = SequencePhases(0, 1.0)
    run.sent("r")
    run.queued(1e9)  # longer than the time that has passed
    run.first_token()
    run.last_token(0.0)
    run.close(0.5)
    edges = [1.0, *(phase.ended for phase in run.phases)]
    assert [phase.begun for phase in run.phases] == edges[:-1] and edges == sorted(edges)


def test_a_request_of_thousands_tells_of_some() -> None:
    request = TracedRequest("x")
    for number in range(MAX_TRACED_SEQUENCES + 5):
        request.phases(f"x-{number}", 0.0, None)
    assert len(request.runs) == MAX_TRACED_SEQUENCES


def test_a_sequence_that_is_sampled_again_goes_on() -> None:
    request = TracedRequest("x")
    for name in ("x-0", "x-0-again1", "x-0-answer"):
        run = request.phases(name, request.arrived, None)
        assert run is not None
        run.sent("r")
        run.queued(0.0)
        run.first_token()
        run.last_token(request.runs[0].last)
    request.end()
    assert len(request.runs) == 1
    assert [phase.name for phase in request.runs[0].phases] == [*PHASES[:4] * 3, "answer"]
