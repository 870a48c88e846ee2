"""Thousands of generated requests at the whole server: none gets a 5xx, disturbs another or leaves anything behind.

Each endpoint gets `SHOAL_FUZZ` damaged requests, 100 if that is not set; of all others there are more with it too.
"""

import asyncio
import gc
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from schemathesis.checks import CHECKS
from schemathesis.generation import GenerationMode

from .bodies import CHAT, COMPLETIONS, MESSAGES, MODEL, RESPONSES, SCHEMA, Sent, damaged, encoded, valid
from .broken_off import break_off
from .conftest import Whole, parse_events, until
from .endpoint_bodies import ENDPOINTS
from .soak import Load

DAMAGED = int(os.environ.get("SHOAL_FUZZ", "100"))  # requests at each endpoint

# Nothing here is about speed: what is lost would never come, however busy the machine is.
pytestmark = [
    pytest.mark.usefixtures("unharmed"),
    pytest.mark.slow,
    pytest.mark.timeout(max(300, 3 * DAMAGED)),
]
ANSWER_S = 240.0

VALID, VALID_AT_EACH, PER_OPERATION, BROKEN_OFF = DAMAGED * 5 // 4, DAMAGED // 4, DAMAGED // 16, 60
AT_ONCE = 12
SOAKED = 16 * DAMAGED // 100
LEFT = SOAKED // 4  # objects of a class
# But for caches, and for what a timer holds until its time has come, though it was cancelled.
CHECKED = {name for name in sys.modules if name.startswith("router.")} - {
    "router.wire.unknown_fields",
    "router.metrics.request_log",
}
REFUSED = {400, 403, 404, 405, 409, 413, 415}
ALONE = {"model": MODEL, "prompt": "The same for ever", "max_tokens": 12, "temperature": 0, "logprobs": 3}


# ---------------------------------------------------------------- before and after each test


@pytest.fixture(scope="module")
def told_at_first(whole: Whole) -> Any:
    return normal(whole)


@pytest.fixture
def unharmed(whole: Whole, told_at_first: Any) -> Any:
    """Whatever a test does, afterwards nothing goes on, nothing has been lost or kept, and answers are the same."""
    whole.settled()
    held = whole.held()
    yield
    whole.settled()
    assert normal(whole) == told_at_first
    until(lambda: no_more(whole.held(), held), lambda: f"{whole.held()}, but before {held}")
    whole.settled()


def no_more(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """What a process has of sockets and children may become less: a compiler that was too slow is ended."""
    same = all(now[name] == before[name] for name in ("tasks", "threads"))
    return same and all(now[name] <= before[name] for name in ("sockets and files", "children"))


def normal(whole: Whole) -> Any:
    """What normal requests of every kind get."""
    person = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    drawn = {"model": MODEL, "max_tokens": 9, "seed": 3, "messages": [{"role": "user", "content": "Hi"}]}
    asked = [
        (COMPLETIONS, ALONE),
        (CHAT, drawn),
        (CHAT, drawn | {"stream": True, "stream_options": {"include_usage": True}}),
        (CHAT, drawn | {"response_format": person}),
    ]
    told: list[Any] = []
    with httpx.Client(base_url=whole.url, timeout=ANSWER_S) as client:
        for path, body in asked:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            streamed = body.get("stream")
            told.append(joined(parse_events(answer.content)) if streamed else without_ids(answer.json()))
        for number, (path, make) in enumerate(ENDPOINTS.items()):
            answer = client.post(
                path, json=make(random.Random(number)) | ({"store": True} if path == RESPONSES else {})
            )
            assert answer.status_code == 200, answer.text
        long = client.post("/tokenize", json={"model": MODEL, "prompt": "Long texts have a thread. " * 100})
        assert long.status_code == 200, long.text
        assert client.get("/ready").status_code == 200
    return told


def all_at_once(whole: Whole, work: Iterable[Callable[[httpx.AsyncClient], Awaitable[None]]]) -> None:
    """Every piece of work, AT_ONCE of them beside each other."""

    async def run() -> None:
        waiting = iter(work)
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(base_url=whole.url, timeout=ANSWER_S, limits=limits) as client:

            async def worker() -> None:
                for piece in waiting:
                    await piece(client)

            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(worker())

    asyncio.run(run())


# ---------------------------------------------------------------- what may be answered


def check_error(status: int, body: bytes, path: str) -> None:
    """An error in the form of the route's protocol, with words that help and none of the inside."""
    assert status in REFUSED, (status, body)
    error = json.loads(body)["error"]
    if path.startswith(MESSAGES):
        assert error.keys() - {"details"} == {"message", "type"}
        assert error.get("details") in (None, {"error_code": "thread_unsupported_request"})
        assert error["type"] in {"invalid_request_error", "not_found_error", "request_too_large"}
    else:
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert isinstance(error["param"], str | None) and isinstance(error["code"], str | None)
    assert isinstance(error["message"], str) and 10 <= len(error["message"]) <= 12_000, len(error["message"])
    assert not re.search(r"Traceback|object at 0x|\.py\b|<class", error["message"])


def check_answer(sent: Sent, answer: httpx.Response) -> None:
    """Of any request, however damaged."""
    assert answer.status_code < 500, answer.text
    if sent.method == "HEAD" or answer.status_code == 204:
        assert not answer.content
    elif answer.status_code >= 400:
        check_error(answer.status_code, answer.content, sent.path)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        check_stream(sent.path, answer.content)
    elif answer.headers["content-type"] == "application/json":
        assert json.loads(answer.content)


def check_stream(path: str, body: bytes) -> None:
    """Server-sent events by the route's protocol, which end as they must."""
    if path not in (MESSAGES, RESPONSES):
        events = parse_events(body)
    else:
        events = [json.loads(block.partition("\ndata: ")[2]) for block in body.decode().split("\n\n") if block]
        assert events[-1]["type"] in ENDS[path], events[-1]
    for event in events:
        error = event.get("error") or (event.get("response") or {}).get("error")
        assert error is None or error.get("code") not in ("server_error", 500), event
        if "error" in event and path != RESPONSES:
            check_error(400, json.dumps(event).encode(), path)


ENDS = {
    MESSAGES: {"message_stop", "error"},
    RESPONSES: {"response.completed", "response.incomplete", "response.failed", "error"},
}


# ---------------------------------------------------------------- the tests


@pytest.mark.parametrize("path", ENDPOINTS)
def test_damaged_requests(whole: Whole, path: str) -> None:
    statuses: Counter[int] = Counter()
    took_s: dict[int, float] = {}

    def one(number: int) -> Callable[[httpx.AsyncClient], Awaitable[None]]:
        async def work(client: httpx.AsyncClient) -> None:
            chance = random.Random(number)
            sent = damaged(chance, path, ENDPOINTS[path](chance))
            began = time.monotonic()
            try:
                answer = await client.request(sent.method, sent.path, content=sent.content, headers=sent.headers)
                took_s[number] = time.monotonic() - began
                statuses[answer.status_code] += 1
                check_answer(sent, answer)
            except Exception as error:
                error.add_note(
                    f"{path}, Random({number}): {sent.method} {sent.path} {sent.headers} {sent.content[:2000]!r}"
                )
                raise
            if number % 25 == 0:  # one that is well, among them
                well = await client.post(COMPLETIONS, json=ALONE)
                assert well.status_code == 200, well.text
                texts.add(well.json()["choices"][0]["text"])

        return work

    texts: set[str] = set()
    all_at_once(whole, map(one, range(DAMAGED)))
    assert len(texts) == 1
    slowest = max(took_s, key=took_s.__getitem__)
    print(f"damaged, {path}: {dict(statuses)}, the slowest Random({slowest}) in {took_s[slowest]:.1f} s")
    assert statuses[400] > DAMAGED / 3 and statuses[200] > DAMAGED / 50  # or it tests one side only


@pytest.mark.parametrize("path", ENDPOINTS)
def test_valid_requests_at_each_endpoint(whole: Whole, path: str) -> None:
    """What is damaged elsewhere is taken as it is."""

    def one(number: int) -> Callable[[httpx.AsyncClient], Awaitable[None]]:
        async def work(client: httpx.AsyncClient) -> None:
            body = ENDPOINTS[path](random.Random(number))
            answer = await client.post(path, content=encoded(body))
            assert answer.status_code == 200, (answer.text, body)
            if body.get("stream"):
                check_stream(path, answer.content)
            else:
                assert isinstance(answer.json(), dict)

        return work

    all_at_once(whole, map(one, range(VALID_AT_EACH)))


def test_valid_requests_streamed_and_not(whole: Whole) -> None:
    def one(number: int) -> Callable[[httpx.AsyncClient], Awaitable[None]]:
        async def work(client: httpx.AsyncClient) -> None:
            path, body = valid(random.Random(number))
            try:
                options = {"include_usage": True}
                streaming = client.post(path, content=encoded(body | {"stream": True, "stream_options": options}))
                answer, stream = await asyncio.gather(client.post(path, content=encoded(body)), streaming)
                assert (answer.status_code, stream.status_code) == (200, 200), (answer.text, stream.text)
                check_whole(body, answer.json())
                assert joined(parse_events(stream.content)) == without_ids(answer.json())
            except Exception as error:
                error.add_note(f"valid(Random({number})): {path} {body}")
                raise

        return work

    all_at_once(whole, map(one, range(VALID)))


def test_what_the_openapi_page_allows_and_what_it_does_not(whole: Whole) -> None:
    statuses: Counter[int] = Counter()
    names = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
    page = schemathesis.openapi.from_dict(whole.app.openapi())
    checks = CHECKS.get_by_names(list(names))
    for result in page.get_all_operations():
        operation = result.ok()
        for mode in GenerationMode.POSITIVE, GenerationMode.NEGATIVE:
            if mode == GenerationMode.NEGATIVE and not operation.body:
                continue

            @hypothesis_seed(1)
            @settings(
                max_examples=PER_OPERATION if operation.body else 5,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                with_limit(case)
                answer = case.call(base_url=whole.url, timeout=ANSWER_S)
                statuses[answer.status_code] += 1
                if answer.status_code >= 400:
                    check_error(answer.status_code, answer.content, case.operation.path)
                case.validate_response(answer, checks=checks)

            ask()
    print(f"from the page: {dict(statuses)}")
    assert sum(statuses.values()) > PER_OPERATION * 6


def test_clients_that_break_off(whole: Whole) -> None:
    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(break_off, [whole.address] * BROKEN_OFF, range(BROKEN_OFF)))
    assert sum(1 for read in got if read) > BROKEN_OFF / 4
    until(lambda: not whole.busy(), whole.busy)
    assert whole.engine.load().aborts >= BROKEN_OFF / 4


def test_a_short_soak(whole: Whole) -> None:
    """Requests of all kinds leave nothing of the router's behind. `make soak` goes on for an hour, and measures
    processes."""
    load = Load(whole.url)

    def objects() -> Counter[str]:
        asyncio.run(load.round(SOAKED))
        whole.settled()
        gc.collect()
        kinds = (type(each) for each in gc.get_objects())
        return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__module__ in CHECKED)

    first, second, third = objects(), objects(), objects()
    assert load.errors == []
    assert {name.partition(" ")[0] for name in load.statuses} == {"valid", "damaged", "broken", "kept", "late", "read"}
    # In the first rounds caches are filled.
    grown = {name: more for name, more in (second - first).items() if min(more, third[name] - second[name]) > LEFT}
    assert not grown


# ---------------------------------------------------------------- what a valid request must get


def with_limit(case: schemathesis.Case) -> None:
    """An answer that may go on to the end of the context, 128 times, is slow, not wrong."""
    names = {CHAT: "max_completion_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens"}
    name = names.get(case.operation.path)
    if name is None or not isinstance(case.body, dict):
        return
    if not isinstance(case.body.get("max_tokens"), int) and not isinstance(case.body.get(name), int):
        case.body[name] = 4


def check_whole(body: dict[str, Any], answer: dict[str, Any]) -> None:
    """The answer is one to this body."""
    n = body.get("n") or 1
    prompts = 1
    if isinstance(body.get("prompt"), list) and not isinstance(body["prompt"][0], int):
        prompts = len(body["prompt"])
    limit = body.get("max_tokens") or body.get("max_completion_tokens") or 16
    assert [choice["index"] for choice in answer["choices"]] == list(range(n * prompts))
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] <= limit * n * prompts
    for choice in answer["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert choice["finish_reason"] in ("stop", "length")
        assert (choice["logprobs"] is None) == (body.get("logprobs") is None)
        if body.get("echo") and isinstance(body["prompt"], str):
            assert text.startswith(body["prompt"])
        elif not body.get("echo"):
            check_text(body, text, choice["finish_reason"])


def check_text(body: dict[str, Any], text: str, finish_reason: str) -> None:
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    if not body.get("min_tokens") and any(stop in text for stop in stops):
        assert body.get("include_stop_str_in_output") and text.endswith(tuple(stops))
    if finish_reason != "stop" or stops or body.get("stop_token_ids"):
        return
    if body.get("include_stop_str_in_output") and body.get("skip_special_tokens") is False:
        text = text.removesuffix("<|end|>")  # the token that ends the turn, which was asked for twice
    form = body.get("response_format")
    if form and form["type"] == "json_object":
        assert isinstance(json.loads(text), dict)
    elif form and form["type"] == "json_schema":
        jsonschema.validate(json.loads(text), form["json_schema"]["schema"])
    elif body.get("regex"):
        assert re.fullmatch(body["regex"], text)
    elif body.get("choice"):
        assert text in body["choice"]
    elif body.get("ebnf"):
        assert re.fullmatch("[xy]{1,3}", text)


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """What is the same in a stream: by choice its text, log probabilities, nearly, and reason, and how many tokens."""
    told: dict[str, Any] = {"tokens": (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])}
    for choice in answer["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        told[choice["index"]] = [text, [near(token) for token in flat(choice["logprobs"])], choice["finish_reason"]]
    return told


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The chunks of a stream, as `without_ids` has the answer."""
    told: dict[str, Any] = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            said = told.setdefault(choice["index"], ["", [], None])
            said[0] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            said[1] += flat(choice["logprobs"])
            said[2] = choice["finish_reason"] or said[2]
        if chunk["usage"]:
            told["tokens"] = (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"])
    return told


def flat(logprobs: dict[str, Any] | None) -> list[tuple[Any, ...]]:
    """By token: its text, its log probability, and where it begins if that is said."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [(token["token"], token["logprob"]) for token in logprobs["content"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], strict=True))


def near(token: tuple[Any, ...]) -> tuple[Any, ...]:
    """Equal to what `flat` has of the same token in another batch: log probabilities differ in the last bits."""
    return tuple(pytest.approx(part, abs=0.01) if isinstance(part, float) else part for part in token)
