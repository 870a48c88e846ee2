"""Streams that meet with trouble: clients that leave or read slowly, replicas that die."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from time import perf_counter
from typing import Any

import httpx
import openai
import pytest

from router import service
from router.config import RouterConfig
from router.replicas import connection as connections
from router.streaming.shutdown import Shutdown
from router.streaming.sse import Emit, EventStream
from router.text.tokenizer import Tokenizer
from worker.messages import Failure, Generate, Output, Outputs, SamplingParams

REPLY = "The quick brown fox — naïve café 🦊👩‍👩‍👧 jumps over 12 lazy dogs."
HELLO = [{"role": "user", "content": "Hello"}]
WAIT_S = 20.0

Make = Callable[..., Any]


def text_of(chunks: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def names_of(chunks: list[Any]) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
    return [entry.token for choice in choices for entry in choice.logprobs.content]


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_its_replica(make_stack: Make, make_replica: Make, stream: bool, n: int) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake)
    body = {"model": "tiny", "messages": HELLO, "stream": stream, "n": n}
    with contextlib.closing(stack.raw("/v1/chat/completions", body)) as connection:
        fake.wait_for(lambda: len(fake.running) == n)
        if stream:
            fake.allow(n)
            got = b""  # the head may come alone
            while b"data: " not in got:
                part = connection.recv(1 << 16)
                assert part
                got += part
    fake.wait_for(lambda: len(fake.aborted()) == n)
    assert sorted(fake.aborted()) == sorted(request.request_id for request in fake.requests())
    stack.idle()
    assert stack.metric('shoal_sequences_total{finish_reason="abandoned",model="tiny"}') == n
    fake.allow(None)  # and nobody else is disturbed
    assert stack.client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content == REPLY


def test_a_finished_request_is_not_aborted(stack: Any) -> None:
    for stream in (True, False):
        answer = stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
        if stream:
            list(answer)
    stack.idle()
    assert stack.fakes["r0"].aborted() == []


def test_a_body_that_never_ends(stack: Any) -> None:
    """The client goes away in the middle of its body: nothing is started."""
    host, port = stack.server.socket.getsockname()[:2]
    with socket.create_connection((host, port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    gone = 'shoal_http_responses_total{model="",path="/v1/completions",status="499"}'
    stack.until(lambda: stack.metric(gone) == 1)
    assert stack.fakes["r0"].requests() == []


# ---------------------------------------------------------------- replicas that die


@pytest.mark.parametrize("before", [1, 6])
def test_a_stream_outlives_its_replica(make_stack: Make, make_replica: Make, tokenizer: Tokenizer, before: int) -> None:
    fakes = {"r0": make_replica().hold(), "r1": make_replica().hold()}
    stack = make_stack(*fakes.values())
    for fake in fakes.values():
        fake.allow(before)
    options = {"logprobs": True, "stream_options": {"include_usage": True}}
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True, **options) as stream:
        chunks: list[Any] = []
        while len(names_of(chunks)) < before:
            chunks.append(next(stream))
        victim = fakes.pop(stack.placer.placed[0][2])
        (other,) = fakes.values()
        other.allow(None)
        victim.die()
        chunks += stream
    assert text_of(chunks) == REPLY
    (begun,), (resumed,) = victim.requests(), other.requests()
    ids = tokenizer.encode(REPLY)
    assert resumed.output_ids == ids[:before] and begun.output_ids == []
    assert resumed.prompt_ids == begun.prompt_ids and resumed.sampling.seed == begun.sampling.seed
    assert resumed.request_id != begun.request_id and resumed.booking == 1
    assert resumed.resumed and not begun.resumed  # so that a full queue does not refuse it
    assert stack.placer.placed[1][1] == begun.prompt_ids + ids[:before]  # where most of it may be cached
    assert chunks[-1].usage.completion_tokens == len(ids) + 1
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3
    assert names_of(chunks) == [*map(tokenizer.token_text, ids), "<|im_end|>"]
    assert stack.metric('shoal_resumed_sequences_total{model="tiny",reason="replica_lost"}') == 1


def test_a_request_that_has_no_token_yet_begins_elsewhere(make_stack: Make, make_replica: Make) -> None:
    fakes = {"r0": make_replica().hold(), "r1": make_replica().hold()}
    stack = make_stack(*fakes.values())
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(stack.client.completions.create, model="tiny", prompt="a b", echo=True, logprobs=1)
        stack.until(lambda: any(fake.running for fake in fakes.values()))
        victim = fakes.pop(stack.placer.placed[0][2])
        (other,) = fakes.values()
        victim.die()
        other.allow(None)
        choice = answer.result(WAIT_S).choices[0]
    assert choice.text == "a b" + REPLY
    assert choice.logprobs.token_logprobs[0] is None and len(choice.logprobs.tokens) == 2 + other.sent
    assert other.requests()[0].sampling.prompt_logprobs == 1 and other.requests()[0].resumed


def test_the_replica_may_come_back_as_itself(make_stack: Make, make_replica: Make) -> None:
    """A broken connection is not a dead replica: with only one there is, the stream waits for it and goes on."""
    fake = make_replica().hold()
    stack = make_stack(fake)
    fake.allow(2)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True, logprobs=True) as stream:
        chunks: list[Any] = []
        while len(names_of(chunks)) < 2:
            chunks.append(next(stream))
        fake.hang_up()
        fake.wait_for(lambda: len(fake.requests()) == 2)
        fake.allow(None)
        chunks += stream
    assert text_of(chunks) == REPLY


def test_a_request_that_kills_replicas_does_not_travel_for_ever(make_stack: Make, make_replica: Make) -> None:
    fakes = [make_replica() for _ in range(5)]

    def deadly(fake: Any) -> Callable[[Generate], Output | None]:
        def reply(request: Generate) -> Output | None:
            if request.sampling.max_tokens == 13:
                fake.crash()
            return None

        return reply

    for fake in fakes:
        fake.reply = deadly(fake)
    stack = make_stack(*fakes)
    with pytest.raises(openai.InternalServerError):
        stack.client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=13)
    assert sum(bool(fake.requests()) for fake in fakes) == 3
    assert stack.metric('shoal_sequences_total{finish_reason="failed",model="tiny"}') == 1
    answer = stack.client.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].message.content == REPLY


def test_replicas_that_are_taken_away_do_not_count_as_dead(make_stack: Make, make_replica: Make) -> None:
    """A roll-out takes away one replica after the other; a long stream goes on over all of them."""
    fakes = [make_replica().hold() for _ in range(6)]
    stack = make_stack(fakes[0])
    for fake in fakes:
        fake.allow(1)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True, logprobs=True) as stream:
        chunks: list[Any] = []
        for count, fake in enumerate(fakes[1:], 1):
            while len(names_of(chunks)) < count:
                chunks.append(next(stream))
            stack.replicas.set_replicas({f"next{count}": fake.address})
        fakes[-1].allow(None)
        chunks += stream
    assert text_of(chunks) == REPLY
    for fake in fakes[1:]:
        fake.die()


@pytest.mark.parametrize(
    ("kind", "code", "ending"), [("internal", "internal_error", "failed"), ("invalid", "invalid_value", "error")]
)
def test_a_failure_in_the_middle_is_an_error_event(
    make_stack: Make, make_replica: Make, kind: Any, code: str, ending: str
) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake)
    fake.allow(1)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        next(stream)
        (request,) = fake.requests()
        failure = Failure(kind, "the GPU is on fire")
        fake.tell(Outputs([Output(request_id=request.request_id, finish_reason="error", failure=failure)]))
        with pytest.raises(openai.APIError) as error:
            list(stream)
    assert not isinstance(error.value, openai.APIStatusError)
    assert error.value.code == code and ("fire" in str(error.value)) == (kind == "invalid")
    counter = 'shoal_sequences_total{{finish_reason="{}",model="tiny"}}'
    endings = {name: stack.metric(counter.format(name)) for name in ("error", "failed")}
    assert endings == {"error": 0, "failed": 0} | {ending: 1}


def test_no_replica_left_in_the_middle(make_stack: Make, make_replica: Make) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake, config=RouterConfig(replica_wait_s=0))
    fake.allow(1)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        next(stream)
        fake.die()
        with pytest.raises(openai.APIError) as error:
            list(stream)
    assert error.value.code == "no_replica"
    assert stack.metric('shoal_sequences_total{finish_reason="failed",model="tiny"}') == 1
    assert httpx.get(f"{stack.url}/ready").status_code == 503
    assert httpx.get(f"{stack.url}/health").status_code == 200


def test_a_placer_that_names_replicas_that_are_gone_is_asked_so_often_however_long_it_takes(
    make_stack: Make, make_replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_PLACE_TRIES", 3)
    monkeypatch.setattr(service, "PLACE_RETRY_S", 0)
    stack = make_stack(make_replica())
    excluded: list[frozenset[str]] = []

    async def place(
        request_id: str,
        prompt_ids: list[int],
        exclude: frozenset[str],
        refused: frozenset[str],
        home: None,
        output_limit: int,
    ) -> str:
        excluded.append(exclude)
        return f"gone{len(excluded)}"

    stack.placer.place = place
    with pytest.raises(openai.InternalServerError) as error:
        stack.client.chat.completions.create(model="tiny", messages=HELLO)
    assert error.value.status_code == 503 and error.value.code == "no_replica"
    assert excluded == [frozenset(), {"gone1"}, {"gone1", "gone2"}]


# ---------------------------------------------------------------- replicas that are full


def refusing(make_replica: Make, retry_after_s: float | None) -> Any:
    """A replica that takes only what was taken before."""
    fake = make_replica()
    failure = Failure("overloaded", f"come back in {retry_after_s} s", retry_after_s=retry_after_s)

    def reply(request: Generate) -> Output | None:
        refused = Output(request_id=request.request_id, finish_reason="error", failure=failure)
        return None if request.resumed else refused

    fake.reply = reply
    return fake


@pytest.mark.parametrize("stream", [True, False])
def test_what_one_replica_refuses_another_may_take(make_stack: Make, make_replica: Make, stream: bool) -> None:
    full = [refusing(make_replica, 9.0) for _ in range(2)]
    stack = make_stack(*full, make_replica())
    for _ in range(3):  # whichever it is placed on first
        answer = stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
        assert (text_of(answer) if stream else answer.choices[0].message.content) == REPLY
    assert len(stack.fakes["r2"].requests()) == 3 and any(fake.requests() for fake in full)
    assert not any(request.resumed for fake in stack.fakes.values() for request in fake.requests())
    assert stack.metric("shoal_resumed_sequences_total") == 0


@pytest.mark.parametrize(
    ("retry_after_s", "header"), [((30.0, 7.2), "8"), ((30.0, 7.2, 12.0), "8"), ((None,) * 3, "1"), ((9.0,) * 5, "9")]
)
def test_where_they_are_full_the_client_hears_when_to_come_back(
    make_stack: Make, make_replica: Make, retry_after_s: tuple[float | None, ...], header: str
) -> None:
    stack = make_stack(*(refusing(make_replica, after_s) for after_s in retry_after_s))
    with pytest.raises(openai.RateLimitError) as error:
        stack.client.chat.completions.create(model="tiny", messages=HELLO)
    assert error.value.response.headers["retry-after"] == header and error.value.code == "overloaded"
    asked = [len(fake.requests()) for fake in stack.fakes.values()]
    assert max(asked) == 1 and sum(asked) == min(3, len(retry_after_s))


def test_a_replica_that_refused_a_request_may_take_it_when_it_is_resumed(make_stack: Make, make_replica: Make) -> None:
    full, other = refusing(make_replica, 5.0), make_replica().hold()
    stack = make_stack(full, other)
    other.allow(2)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True, logprobs=True) as stream:
        chunks: list[Any] = []
        while len(names_of(chunks)) < 2:
            chunks.append(next(stream))
        other.die()
        chunks += stream
    assert text_of(chunks) == REPLY


# ---------------------------------------------------------------- slow readers


def test_a_slow_reader_is_paused_and_loses_nothing(
    make_stack: Make, make_replica: Make, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_UNREAD_TOKENS", 5)
    ids = tokenizer.encode(REPLY)
    fake = make_replica(script=lambda request: ids)
    stack = make_stack(fake)

    async def read_slowly() -> list[int]:
        sampling = SamplingParams(max_tokens=400, seed=1)
        got: list[int] = []
        async with contextlib.aclosing(stack.service.generate("a", [5], sampling, 0, perf_counter())) as outputs:
            async for output in outputs:
                got += output.token_ids
                while len(fake.requests()) == len(fake.aborted()) + 1 and fake.running:
                    await asyncio.sleep(0.001)  # reads nothing until the replica has been told to stop
        return got

    assert stack.server.do(read_slowly()) == ids
    assert len(fake.aborted()) >= 1
    for one, other in pairwise(fake.requests()):
        assert len(other.output_ids) > len(one.output_ids)
        assert other.output_ids == ids[: len(other.output_ids)]
    assert stack.metric('shoal_resumed_sequences_total{model="tiny",reason="slow_reader"}') == len(fake.aborted())


def test_emitting_waits_for_the_client() -> None:
    """The server's `send` blocks while the connection is full, and nothing is produced meanwhile."""

    async def run() -> None:
        room = asyncio.Semaphore(2)
        sent: list[bytes] = []
        produced = 0

        async def send(message: Any) -> None:
            await room.acquire()
            sent.append(message.get("body", b""))

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def produce(emit: Emit) -> None:
            nonlocal produced
            while produced < 10:
                produced += 1
                await emit(b"x")

        task = asyncio.ensure_future(EventStream(produce)({"type": "http"}, receive, send))
        for _ in range(20):
            await asyncio.sleep(0)
        assert produced == 2 and len(sent) == 2  # the head and one event are through
        for _ in range(10):
            room.release()
        await task
        assert produced == 10 and sent.count(b"x") == 10

    asyncio.run(run())


def test_the_end_of_a_router_is_an_error_in_each_answer() -> None:
    """Of those that go on, and of those that come later."""

    async def run() -> None:
        shutdown = Shutdown()
        scope = {"type": "http", "path": "/v1/completions", "state": {"shutdown": shutdown}}

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def produce(emit: Emit) -> None:
            await emit(b"x")
            begun.set()
            await asyncio.Event().wait()

        async def answer() -> list[dict[str, Any]]:
            sent: list[dict[str, Any]] = []

            async def send(message: Any) -> None:
                sent.append(message)

            await EventStream(produce)(scope, receive, send)
            return sent

        begun = asyncio.Event()
        going = asyncio.ensure_future(answer())
        await begun.wait()
        shutdown.come()
        head, first, error, last = await going
        assert head["status"] == 200 and first["body"] == b"x" and last["more_body"] is False
        assert json.loads(error["body"].removeprefix(b"data: "))["error"]["code"] == "server_ends"
        refused = (await answer())[0]
        assert refused["status"] == 503

    asyncio.run(run())
