"""What every answer has, whatever its route: an id that the logs have too, and what browsers want of other origins."""

import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from router.api import create_app
from router.config import RouterConfig
from router.http import middleware
from router.models import Models
from router.wire import request_id
from worker.messages import Failure

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {"model": "tiny", "messages": HELLO}
PAGE = "https://chat.example.com"

Make = Callable[..., Any]


# ---------------------------------------------------------------- ids


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", CHAT, 200),
        ("POST", "/v1/chat/completions", CHAT | {"stream": True}, 200),
        ("POST", "/v1/chat/completions", {}, 400),
        ("GET", "/health", None, 200),
        ("GET", "/metrics", None, 200),
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/completions", None, 405),
    ],
)
def test_every_answer_has_an_id(stack: Any, method: str, path: str, body: Any, status: int) -> None:
    ids = set()
    for given in (None, None, "mine-1.2:3", "with a space", "x" * 129, "é"):
        headers = {} if given is None else {request_id.HEADER: given.encode()}
        answer = httpx.request(method, stack.url + path, json=body, headers=headers)
        assert answer.status_code == status
        (known,) = answer.headers.get_list(request_id.HEADER)
        assert (known == given) == (given == "mine-1.2:3")
        ids.add(known)
    assert len(ids) == 6


def test_replicas_hear_the_id_and_completions_have_their_own(stack: Any) -> None:
    ids = []
    for _ in range(2):
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=CHAT, headers={request_id.HEADER: "mine"})
        ids.append(answer.json()["id"])
    assert all(completion.startswith("chatcmpl-") for completion in ids) and ids[0] != ids[1]
    names = [request.request_id for request in stack.fakes["r0"].requests()]
    assert all(name.startswith("mine-") for name in names) and names[0] != names[1]


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_is_logged_by_its_id(
    make_stack: Make, make_replica: Make, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    fake = make_replica()
    failure = Failure("internal", "the GPU is on fire")
    fake.fail(failure)
    stack = make_stack(fake)
    with caplog.at_level(logging.ERROR):
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=CHAT | {"stream": stream})
    assert answer.status_code == 500
    (line,) = [record.getMessage() for record in caplog.records if "on fire" in record.getMessage()]
    assert answer.headers[request_id.HEADER] in line


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_is_logged_by_its_id(
    make_stack: Make, make_replica: Make, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    fake = make_replica()
    failure = Failure("overloaded", "the queue is full", retry_after_s=3.0)
    fake.fail(failure)
    stack = make_stack(fake)
    headers = {request_id.HEADER: "mine"}
    with caplog.at_level(logging.INFO, "router.http.middleware"):
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=CHAT | {"stream": stream}, headers=headers)
        assert httpx.post(f"{stack.url}/v1/chat/completions", json={}).status_code == 400
    assert answer.status_code == 429
    (record,) = [record for record in caplog.records if record.name == "router.http.middleware"]
    assert record.levelname == "INFO"
    assert all(told in record.getMessage() for told in ("mine", "429", "overloaded", failure.message))


@pytest.mark.parametrize("stream", [True, False])
def test_what_fails_unforeseen_is_answered_and_logged(
    make_stack: Make,
    make_replica: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    stack = make_stack(make_replica(), config=RouterConfig(cors_origins=PAGE))
    monkeypatch.setattr("router.generation.OutputText.push", None)
    with caplog.at_level(logging.ERROR):
        answer = httpx.post(
            f"{stack.url}/v1/chat/completions",
            json=CHAT | {"stream": stream},
            headers={request_id.HEADER: "mine", "Origin": PAGE},
        )
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert answer.headers[request_id.HEADER] == "mine" and answer.headers["access-control-allow-origin"] == PAGE
    assert [record for record in caplog.records if "mine" in record.getMessage() and record.exc_info]


def test_behind_a_proxy_that_answers_the_id_it_is_not_there_twice(stack: Any) -> None:
    app = create_app(Models([stack.service], stack.metrics, RouterConfig()), answers_id=False)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.get("/health", headers={request_id.HEADER: "mine"})

    assert request_id.HEADER not in stack.server.do(ask()).headers


# ---------------------------------------------------------------- other origins


def preflight(url: str, origin: str) -> httpx.Response:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return httpx.options(f"{url}/v1/chat/completions", headers=asks | {"Origin": origin})


def test_a_page_of_a_known_origin_may_ask(make_stack: Make, make_replica: Make) -> None:
    config = RouterConfig(api_key="secret", cors_origins=f"https://other.example, {PAGE}")
    stack = make_stack(make_replica(), config=config)
    allowed = preflight(stack.url, PAGE)  # browsers send no key with it
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    assert "POST" in allowed.headers["access-control-allow-methods"] and request_id.HEADER in allowed.headers
    for key, stream, status in (("secret", True, 200), ("secret", False, 200), ("wrong", True, 401)):
        headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=CHAT | {"stream": stream}, headers=headers)
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == PAGE
        assert request_id.HEADER in answer.headers["access-control-expose-headers"]
    stranger = preflight(stack.url, "https://evil.example")
    assert stranger.status_code == 400 and "access-control-allow-origin" not in stranger.headers


def test_any_origin_or_none(make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica(), config=RouterConfig(cors_origins="*"))
    assert preflight(stack.url, PAGE).headers["access-control-allow-origin"] == "*"
    closed = make_stack(make_replica())
    assert preflight(closed.url, PAGE).status_code == 405
    assert "access-control-allow-origin" not in httpx.get(f"{closed.url}/health", headers={"Origin": PAGE}).headers


@pytest.mark.parametrize("origins", ["", "chat.example.com", f"{PAGE}/", f"{PAGE}/path", f"{PAGE},", "null"])
def test_what_is_no_origin(origins: str) -> None:
    with pytest.raises(ValidationError, match="cors_origins"):
        RouterConfig(cors_origins=origins)


# ---------------------------------------------------------------- what is passed over


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/messages", CHAT | {"max_tokens": 3}),
        ("/v1/messages/count_tokens", CHAT),
        ("/v1/responses", {"model": "tiny", "input": HELLO}),
        ("/v1/responses", {"model": "tiny", "input": HELLO, "stream": True}),
        ("/tokenize", {"messages": HELLO}),
    ],
)
def test_unknown_fields_are_named_in_a_header_and_once_in_the_log(
    stack: Any, caplog: pytest.LogCaptureFixture, path: str, body: Any
) -> None:
    caplog.set_level(logging.INFO, middleware.__name__)
    where = "input" if "input" in body else "messages"
    odd = HELLO[0] | {"x": 1, "a, b\r\nSet-Cookie: é": 2}
    for _ in range(2):
        answer = httpx.post(stack.url + path, json=body | {where: [odd]})
        assert answer.status_code == 200, answer.text
        (named,) = answer.headers.get_list(middleware.IGNORED)
        assert named.split(", ") == [f"{where}[].a??b??Set-Cookie:??", f"{where}[].x"]
    told = [record.message for record in caplog.records if record.name == middleware.__name__]
    assert sum(f"{where}[].x" in message for message in told) == 1
    assert middleware.IGNORED not in httpx.post(stack.url + path, json=body).headers


def test_a_header_names_only_some_of_many(stack: Any) -> None:
    odd = HELLO[0] | {f"{number:04}{'x' * 300}": 1 for number in range(500)}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=CHAT | {"messages": [odd]})
    names = answer.headers[middleware.IGNORED].split(", ")
    assert names[-1] == "..." and len(names) == 21 and len(answer.headers[middleware.IGNORED]) < 2500


# ---------------------------------------------------------------- HEAD


@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/ready", "/metrics", "/version", "/v1/models", "/v1/models/tiny"]
)
def test_head_is_get_without_the_body(stack: Any, path: str) -> None:
    asked, got = httpx.head(stack.url + path), httpx.get(stack.url + path)
    assert asked.status_code == got.status_code == 200 and not asked.content
    assert asked.headers["content-type"] == got.headers["content-type"]
    route = path.replace("tiny", "{model_id:path}")
    assert stack.metric(f'shoal_http_responses_total{{model="",path="{route}"') == 2


def test_head_of_what_only_post_answers(stack: Any) -> None:
    assert httpx.head(f"{stack.url}/v1/chat/completions").status_code == 405
    assert httpx.head(f"{stack.url}/nowhere").status_code == 404
