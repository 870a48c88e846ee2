"""Deadlines and full queues: what cannot be answered in time is refused before it is tokenised, what takes too long
ends, and queues are bounded."""

import json
from typing import Any

import httpx
import msgspec
import openai
import pytest

from router.config import RouterConfig
from router.fleet.fleet import Fleet
from router.fleet.placement import Candidate, candidates_of
from router.fleet.queue_wait import wait_s
from router.streaming import deadline
from worker.messages import ReplicaLoad, StepCosts

COSTS = StepCosts(step_s=0.01, token_s=1e-3, product_s=0.0, decode_s=1e-3, context_s=0.0, full_s=0.1)
BUSY = ReplicaLoad(incarnation="one", kv_tokens_total=100_000, waiting_tokens=9000, waiting=9, running=10, costs=COSTS)
HELLO = [{"role": "user", "content": "Hello"}]


# ---------------------------------------------------------------- the predicted queue


def test_the_wait_is_that_of_the_prompts_ahead() -> None:
    costs = {name: getattr(COSTS, name) for name in COSTS.__struct_fields__}
    idle, one, busy, decoding, full = wait_s(
        candidates_of(
            [
                Candidate(**costs),
                Candidate(running=1, **costs),
                Candidate(waiting_tokens=9000, waiting=9, **costs),
                Candidate(waiting_tokens=9000, waiting=9, running=40, **costs),  # half of each step is decodes
                Candidate(context_tokens=1000, kv_tokens=1000, running=10, waiting_tokens=500, waiting=1, **costs),
            ]
        )
    )
    assert idle == 0 and one == pytest.approx(0.0055)
    assert busy == pytest.approx(9.0 / 0.9 + 0.05)
    assert decoding == pytest.approx(9.0 / 0.5 + 0.05)
    assert full > 0.6 * 200 * 0.02  # more than half of what runs must end first


def test_the_shortest_queue_of_a_fleet() -> None:
    fleet = Fleet()
    assert fleet.shortest_queue() is None
    for name, load in (("a", BUSY), ("b", msgspec.structs.replace(BUSY, waiting_tokens=4000))):
        fleet.join(name)
        fleet.apply_load(name, load)
    queue = fleet.shortest_queue()
    assert queue is not None and queue.tokens == 4000 and 4 < queue.wait_s < 6
    fleet.place("x", list(range(1000)), ["b"])  # what is on its way counts
    assert fleet.shortest_queue().tokens == 5000  # type: ignore[union-attr]


# ---------------------------------------------------------------- refused at once


@pytest.fixture
def busy(make_stack: Any, make_replica: Any) -> Any:
    """A server whose only replica has 10 s of work."""
    fake = make_replica()
    fake.load = BUSY
    return make_stack(fake)


def refusal(stack: Any, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        stack.client.chat.completions.create(model="tiny", messages=HELLO, **fields)
    assert caught.value.code == "overloaded"
    return caught.value


def test_what_cannot_begin_in_time_is_refused_before_it_costs_anything(
    busy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy.service, "in_thread", None)  # nothing is tokenised
    for stream in (False, True):
        error = refusal(busy, stream=stream, extra_body={"timeout": 2})
        assert error.status_code == 429 and error.param == "timeout"
        assert error.response.headers["retry-after"] == "10" and " 2 s" in str(error)
    refusal(busy, extra_headers={deadline.HEADER: "2.5"})
    assert not busy.fakes["r0"].requests()
    assert busy.metric('shoal_missed_deadlines_total{how="refused",model="tiny"}') == 3
    anthropic = {"model": "tiny", "max_tokens": 1, "messages": HELLO}
    answer = httpx.post(f"{busy.url}/v1/messages", json=anthropic, headers={deadline.HEADER: "2"})
    assert answer.status_code == 429 and answer.json()["error"]["type"] == "rate_limit_error"
    assert httpx.post(f"{busy.url}/v1/embeddings", json={}, headers={deadline.HEADER: "2"}).status_code == 400


def test_what_may_begin_in_time_is_answered(busy: Any) -> None:
    for fields in ({}, {"extra_body": {"timeout": 60}}, {"extra_headers": {deadline.HEADER: "60"}}):
        assert busy.client.chat.completions.create(model="tiny", messages=HELLO, **fields).choices
    tokens = {"model": "tiny", "prompt": "a"}
    assert httpx.post(f"{busy.url}/tokenize", json=tokens, headers={deadline.HEADER: "1"}).status_code == 200


@pytest.mark.parametrize("given", ["", "soon", "0", "-1", "inf", "nan", "1s"])
def test_a_timeout_is_a_number_of_seconds(stack: Any, given: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        stack.client.completions.create(model="tiny", prompt="x", extra_headers={deadline.HEADER: given})
    assert caught.value.param == deadline.HEADER


@pytest.mark.parametrize("given", [0, -1, "2", True])
def test_so_it_is_in_the_body(stack: Any, given: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        stack.client.completions.create(model="tiny", prompt="x", extra_body={"timeout": given})
    assert caught.value.param == "timeout"


# ---------------------------------------------------------------- ended


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"])
def test_a_request_ends_with_its_time(make_stack: Any, make_replica: Any, path: str) -> None:
    """While it waits for its first token. The replica is told, so its pages are free again."""
    fake = make_replica().hold()
    stack = make_stack(fake)
    body = {"model": "tiny", "max_tokens": 5, "messages": HELLO}
    if path not in ("/v1/chat/completions", "/v1/messages"):
        body = {"model": "tiny", "input": "x"}
    answer = httpx.post(stack.url + path, json=body, headers={deadline.HEADER: "0.05"})
    assert answer.status_code == 504 and answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert "0.05 s" in error["message"] and error.get("code", "deadline_exceeded") == "deadline_exceeded"
    fake.wait_for(lambda: not fake.running and fake.aborted())
    assert stack.metric('shoal_missed_deadlines_total{how="expired",model="tiny"}') == 1


def test_a_stream_ends_with_its_time(make_stack: Any, make_replica: Any) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake)
    fake.allow(2)
    body = {"model": "tiny", "messages": HELLO, "stream": True, "n": 2, "timeout": 0.1}
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert answer.status_code == 200 and json.loads(events[0])["choices"]
    assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
    fake.wait_for(lambda: len(fake.aborted()) == 2 and not fake.running)


def test_a_request_that_waits_for_a_replica_ends_with_its_time(make_stack: Any, make_replica: Any) -> None:
    fake = make_replica()
    stack = make_stack(fake)
    fake.die()
    stack.ready()
    with pytest.raises(openai.APIStatusError) as caught:
        stack.client.completions.create(model="tiny", prompt="x", extra_body={"timeout": 0.05})
    assert caught.value.status_code == 504


# ---------------------------------------------------------------- bounded queues


def test_no_more_tokens_wait_than_the_setting_says(make_stack: Any, make_replica: Any) -> None:
    fakes = make_replica(), make_replica()
    for fake, tokens in zip(fakes, (9000, 5000), strict=True):
        fake.load = msgspec.structs.replace(BUSY, waiting_tokens=tokens)
    stack = make_stack(*fakes, config=RouterConfig(max_waiting_tokens=5000))
    error = refusal(stack)
    assert (error.status_code, error.param) == (429, None) and "5000" in str(error)
    assert error.response.headers["retry-after"] == "4"
    fakes[1].tell(msgspec.structs.replace(BUSY, waiting_tokens=4999))
    stack.until(lambda: stack.fleet.shortest_queue().tokens == 4999)
    assert stack.client.completions.create(model="tiny", prompt="x").choices


def test_a_stream_that_has_begun_goes_on_though_all_queues_are_full(make_stack: Any, make_replica: Any) -> None:
    """It is not a new request: its client has a part of the answer."""
    fakes = {"r0": make_replica().hold(), "r1": make_replica().hold()}
    stack = make_stack(*fakes.values(), config=RouterConfig(max_waiting_tokens=5000))
    for fake in fakes.values():
        fake.allow(2)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        chunks = [next(stream)]
        victim = fakes.pop(stack.placer.placed[0][2])
        (other,) = fakes.values()
        other.tell(BUSY)
        stack.until(lambda: any(view.load == BUSY for view in stack.fleet.snapshot()))
        victim.die()
        stack.ready(*(name for name, fake in stack.fakes.items() if fake is other))
        refusal(stack)
        other.allow(None)
        chunks += stream
    assert chunks[-1].choices[0].finish_reason == "stop"
    (resumed,) = other.requests()
    assert resumed.resumed and resumed.output_ids


def test_a_router_holds_no_more_bytes_than_the_setting_says(make_stack: Any, make_replica: Any) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake, config=RouterConfig(max_held_bytes=2000))
    waiting = stack.raw("/v1/completions", {"model": "tiny", "prompt": "x", "user": "u" * 1500})
    fake.wait_for(fake.requests)
    with pytest.raises(openai.APIStatusError) as caught:
        stack.client.completions.create(model="tiny", prompt="x", user="u" * 600)
    assert caught.value.status_code == 503 and caught.value.code == "overloaded"
    assert caught.value.response.headers["retry-after"] == "1"

    def unannounced() -> Any:
        yield json.dumps({"model": "tiny", "prompt": "x", "user": "u" * 600}).encode()

    assert httpx.post(f"{stack.url}/v1/completions", content=unannounced()).status_code == 503
    waiting.close()
    fake.wait_for(fake.aborted)
    fake.allow(None)
    stack.until(lambda: not stack.models._held.shares.taken)
    # A request alone has room, whatever its size.
    assert stack.client.completions.create(model="tiny", prompt="x", user="u" * 2500).choices
