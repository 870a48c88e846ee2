"""A model at another endpoint: the request goes there as it came, and the answer comes back as it is."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.types import Receive, Scope, Send

from router.config import RouterConfig, UpstreamConfig
from router.http.upstream import Upstream
from router.metrics import otlp
from router.metrics.metrics import Metrics
from router.models import Models
from router.wire import request_id
from tests.otlp_receiver import Receiver, attributes

Make = Callable[..., Any]
WAIT_S = 20.0
HELLO = [{"role": "user", "content": "Hello"}]
EVENTS = [b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"]
SSE = b"text/event-stream; charset=utf-8"


class Elsewhere:
    """Another endpoint, which follows a script: `answer(send, receive)` is called once the body has been read."""

    def __init__(self) -> None:
        self.answer: Callable[[Send, Receive], Awaitable[None]] = says(b"{}")
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.left = threading.Event()  # the request of this endpoint's client has ended before its answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        path = scope["path"] + (f"?{scope['query_string'].decode()}" if scope["query_string"] else "")
        self.requests.append((path, {k.decode(): v.decode() for k, v in scope["headers"]}, body))
        await self.answer(send, receive)


def says(body: bytes, status: int = 200, kind: bytes = b"application/json", **headers: str) -> Any:
    async def answer(send: Send, receive: Receive) -> None:
        await begin(send, status, kind, **headers)
        await send({"type": "http.response.body", "body": body})

    return answer


async def begin(send: Send, status: int = 200, kind: bytes = SSE, **headers: str) -> None:
    more = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *more]})


async def part(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


class Door:
    """A router with one model of its own, `tiny`, and `far` (alias `afar`), which is `org/theirs` elsewhere."""

    def __init__(self, server: Any, elsewhere: Elsewhere) -> None:
        self.url: str = server.url
        self.server = server
        self.elsewhere = elsewhere
        self.client = server.client()

    def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return httpx.post(
            self.url + path, json=body or {"model": "far", "messages": HELLO}, headers=headers, timeout=WAIT_S
        )


@pytest.fixture
def make_door(make_service: Make, make_replica: Make, serve: Make, serve_app: Make) -> Callable[..., Door]:
    def make(url: str | None = None, config: RouterConfig | None = None, **upstream: Any) -> Door:
        elsewhere = Elsewhere()
        base = url or f"{serve_app(elsewhere, RouterConfig()).url}/v1"
        metrics = Metrics()
        settings = UpstreamConfig(url=base, **{"model": "org/theirs", **upstream})
        far = Upstream("far", settings, metrics, aliases=("afar",), api_key="sesame")
        models = Models([make_service(metrics, make_replica("one")), far], metrics, config or RouterConfig())
        return Door(serve(models), elsewhere)

    return make


@pytest.fixture
def door(make_door: Callable[..., Door]) -> Door:
    return make_door()


# ---------------------------------------------------------------- what goes there


def test_a_body_goes_on_with_another_name_and_nothing_else_changed(door: Door) -> None:
    sent = b'{"n":1e2, "model":"afar", "big":123456789012345678901234567890, "odd":[0.10, null], "stream":false}'
    headers = {"Content-Type": "application/json", "Authorization": "Bearer mine", "OpenAI-Beta": "x=1"}
    answer = httpx.post(f"{door.url}/v1/chat/completions?a=b&c", content=sent, headers=headers)
    assert (answer.status_code, answer.content) == (200, b"{}")
    ((path, got, body),) = door.elsewhere.requests
    assert path == "/v1/chat/completions?a=b&c"
    expected = b'{"n":1e2,"model":"org/theirs","big":123456789012345678901234567890,"odd":[0.10, null],"stream":false}'
    assert body == expected
    assert (got["authorization"], got["openai-beta"], got["accept-encoding"]) == ("Bearer sesame", "x=1", "identity")
    assert got["x-request-id"] == answer.headers["x-request-id"] and "x-api-key" not in got
    assert got["content-type"] == "application/json" and "mine" not in str(got)


@pytest.mark.parametrize("stream", [False, True])
def test_a_trace_goes_on_there(make_door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(otlp, "BATCH_EVERY_S", 0.005)
    with Receiver() as receiver:
        door = make_door(config=RouterConfig(otlp_traces_endpoint=receiver.url))
        mine = f"00-{'a' * 32}-{'b' * 16}-01"
        body = {"model": "far", "stream": stream}
        assert door.post("/v1/chat/completions", body, traceparent=mine, tracestate="a=1").status_code == 200
        (own,) = receiver.requests(1)
        ((_, got, _),) = door.elsewhere.requests
    assert got["traceparent"] == f"00-{'a' * 32}-{own.span_id.hex()}-01" and got["tracestate"] == "a=1"
    phases = receiver.children(own)
    assert [span.name for span in phases] == ["router", "upstream", "answer"]
    edges = [own.start_time_unix_nano, *(span.end_time_unix_nano for span in phases)]
    assert [span.start_time_unix_nano for span in phases] == edges[:-1] and edges[-1] == own.end_time_unix_nano
    assert attributes(own)["gen_ai.request.model"] == "far"


def test_without_traces_no_header_is_added(door: Door) -> None:
    door.post("/v1/chat/completions", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    ((_, got, _),) = door.elsewhere.requests
    assert "traceparent" not in got


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/choices",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/tokenize",
        "/detokenize",
    ],
)
def test_every_path_is_the_same_there(door: Door, path: str) -> None:
    assert door.post(path, {"model": "far", "unheard_of": 1}).content == b"{}"
    ((there, headers, body),) = door.elsewhere.requests
    assert there == path and json.loads(body) == {"model": "org/theirs", "unheard_of": 1}
    assert headers.get("x-api-key") == ("sesame" if "messages" in path else None)


def test_without_settings_the_name_is_the_same_and_there_is_no_key(serve: Make, serve_app: Make) -> None:
    elsewhere = Elsewhere()
    base = serve_app(elsewhere, RouterConfig()).url
    settings = UpstreamConfig(url=f"{base}/openai/")
    metrics = Metrics()
    server = serve(Models([Upstream("a/b", settings, metrics)], metrics, RouterConfig()))
    for path in ("/v1/completions", "/score"):
        assert httpx.post(server.url + path, json={"model": "a/b"}).status_code == 200
    (first, headers, body), (second, _, _) = elsewhere.requests
    assert (first, second, json.loads(body)) == ("/openai/completions", "/openai/score", {"model": "a/b"})
    assert "authorization" not in headers
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ok", "replicas": 0, "models": {}}


def test_the_model_of_this_server_still_answers_itself(door: Door) -> None:
    answer = door.client.chat.completions.create(model="tiny", messages=HELLO)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "one" and door.elsewhere.requests == []
    wrong = [b"", b"[]", b"{", b'{"model":3}', b'{"messages":[]}', b"\xff", b"[" * 100_000]
    for body in wrong:
        assert httpx.post(f"{door.url}/v1/chat/completions", content=body).status_code == 400
    unknown = door.post("/v1/chat/completions", {"model": "other", "messages": HELLO})
    assert unknown.status_code == 404 and "'tiny', 'far', 'afar'" in unknown.json()["error"]["message"]
    assert door.elsewhere.requests == []


def test_it_is_in_the_list(door: Door) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{door.url}/v1/models").json()["data"]}
    assert list(cards) == ["tiny", "far", "afar"]
    assert (cards["far"]["owned_by"], cards["far"]["root"], cards["far"]["parent"]) == ("upstream", "far", None)
    assert cards["afar"]["parent"] == "far" and "max_model_len" not in cards["afar"]
    page = httpx.get(f"{door.url}/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [(card["id"], card["max_input_tokens"]) for card in page["data"]][1:] == [("far", None), ("afar", None)]
    info = httpx.get(f"{door.url}/tokenizer_info?model=far")
    error = info.json()["error"]
    assert (info.status_code, error["param"], error["code"]) == (400, "model", "invalid_value")
    assert "'far'" in error["message"]
    # The only model with a tokenizer here.
    assert httpx.get(f"{door.url}/tokenizer_info").status_code == 200


def test_this_servers_own_keys_and_limits_hold(make_door: Callable[..., Door]) -> None:
    door = make_door(config=RouterConfig(api_key="mine", max_body_bytes=1024))  # type: ignore[arg-type]
    assert door.post("/v1/chat/completions").status_code == 401
    large = {"model": "far", "prompt": "a" * 2000}
    assert door.post("/v1/completions", large, authorization="Bearer mine").status_code == 413
    assert door.elsewhere.requests == []
    assert door.post("/v1/completions", authorization="Bearer mine").status_code == 200


# ---------------------------------------------------------------- what comes back


def test_a_stream_comes_as_it_is_made(door: Door) -> None:
    go_on = threading.Semaphore(0)

    async def answer(send: Send, receive: Receive) -> None:
        await begin(send)
        for event in EVENTS:
            await part(send, event)
            await loop_run(go_on.acquire)
        await part(send, b"", more=False)

    door.elsewhere.answer = answer
    body = {"model": "far", "stream": True}
    with httpx.stream("POST", f"{door.url}/v1/chat/completions", json=body, timeout=WAIT_S) as stream:
        assert stream.headers["content-type"] == SSE.decode()
        chunks = stream.iter_raw()
        for event in EVENTS:
            assert next(chunks) == event  # the next is not made yet
            go_on.release()
        assert b"".join(chunks) == b""


async def loop_run(work: Callable[[], Any]) -> Any:
    """Waits for a thread's doing outside of the event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


def test_the_log_has_a_line_for_it(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    async def written() -> None:
        while not caplog.records:  # it comes after the answer
            await asyncio.sleep(0.002)

    with caplog.at_level(logging.INFO, "router.metrics.request_log"):
        assert door.post("/v1/chat/completions", **{request_id.HEADER: "mine"}).status_code == 200
        door.server.do(asyncio.wait_for(written(), WAIT_S))
    (line,) = caplog.records
    assert (vars(line)["request_id"], vars(line)["model"]) == ("mine", "far") and "replica" not in vars(line)


def test_an_answer_that_is_no_stream_comes_as_what_it_is(door: Door) -> None:
    door.elsewhere.answer = says(b'{"whole": true}')
    for stream in (True, False):
        answer = door.post("/v1/chat/completions", {"model": "far", "stream": stream})
        assert (answer.headers["content-type"], answer.json()) == ("application/json", {"whole": True})
    door.elsewhere.answer = says(b"", kind=SSE)
    assert door.post("/v1/chat/completions", {"model": "far", "stream": True}).content == b""


def test_clients_read_it(door: Door) -> None:
    chat = {"id": "x", "object": "chat.completion", "created": 1, "model": "org/theirs", "choices": []}
    door.elsewhere.answer = says(json.dumps(chat).encode())
    assert door.client.chat.completions.create(model="far", messages=HELLO).model == "org/theirs"  # type: ignore[arg-type]
    door.elsewhere.answer = says(
        b'{"object":"list","model":"m","data":[{"object":"embedding","index":0,"embedding":[1.5]}]}'
    )
    assert door.client.embeddings.create(model="far", input="a", encoding_format="float").data[0].embedding == [1.5]
    door.elsewhere.answer = says(b'{"input_tokens": 7}')
    with anthropic.Anthropic(base_url=door.url, api_key="none", max_retries=0) as client:
        assert client.messages.count_tokens(model="far", messages=HELLO).input_tokens == 7  # type: ignore[arg-type]
    assert door.elsewhere.requests[-1][1]["anthropic-version"]


# ---------------------------------------------------------------- errors

THEIRS = {"message": "too hot", "type": "BadRequestError", "param": "temperature", "code": 400}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"error": THEIRS}, 400, THEIRS),
        ({"object": "error", **THEIRS}, 400, {"object": "error", **THEIRS}),
        ({"error": "no such model"}, 404, {"message": "no such model", "param": None, "code": None}),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "full"}}, 529, {"message": "full"}),
        ({"detail": [{"loc": ["a"]}]}, 422, {"message": '[{"loc": ["a"]}]'}),
    ],
)
def test_an_error_is_told_in_its_words(door: Door, body: Any, status: int, error: Any, stream: bool) -> None:
    door.elsewhere.answer = says(json.dumps(body).encode(), status, retry_after="7")
    answer = door.post("/v1/chat/completions", {"model": "far", "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "7")
    assert error.items() <= answer.json()["error"].items()
    answer = door.post("/v1/messages", {"model": "far", "stream": stream})
    told = answer.json()
    assert (answer.status_code, told["type"]) == (status, "error") and error["message"] in told["error"]["message"]


@pytest.mark.parametrize(
    ("script", "status", "code", "part"),
    [
        (says(b"<html>down</html>", 503, b"text/html"), 503, "upstream_error", "503: <html>down</html>"),
        (says(b"", 500), 500, "upstream_error", "500."),
        (says(b'{"error":{"message":"bad key"}}', 401), 502, "upstream_unauthorized", "API key"),
        (says(b"", 302, location="http://127.0.0.1:1/"), 502, "upstream_broken", "302"),
    ],
)
def test_an_error_without_words_names_the_model(door: Door, script: Any, status: int, code: str, part: str) -> None:
    door.elsewhere.answer = script
    for stream in (True, False):
        answer = door.post("/v1/completions", {"model": "far", "stream": stream})
        told = answer.json()["error"]
        assert (answer.status_code, told["code"]) == (status, code)
        assert "'far'" in told["message"] and part in told["message"]
    with pytest.raises(openai.APIStatusError) as error:
        door.client.completions.create(model="far", prompt="a")
    assert error.value.status_code == status


def test_an_endpoint_that_is_not_there(make_door: Callable[..., Door]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # it does not listen
        door = make_door(f"http://127.0.0.1:{closed.getsockname()[1]}/v1")
        for stream in (True, False):
            answer = door.post("/v1/chat/completions", {"model": "afar", "stream": stream})
            assert answer.status_code == 502
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "upstream_unreachable")
            assert "'far'" in error["message"]
        told = door.post("/v1/messages", {"model": "far"}).json()
        assert (told["type"], told["error"]["type"]) == ("error", "api_error")
    page = httpx.get(f"{door.url}/metrics").text.splitlines()
    assert 'shoal_upstream_failures_total{model="far",reason="unreachable"} 3.0' in page
    assert 'shoal_http_responses_total{model="far",path="/v1/chat/completions",status="502"} 2.0' in page


@pytest.mark.parametrize("begins", [False, True])
def test_an_endpoint_that_says_no_more(make_door: Callable[..., Door], begins: bool) -> None:
    door = make_door(timeout_s=0.2)

    async def answer(send: Send, receive: Receive) -> None:
        if begins:
            await begin(send)
            await part(send, EVENTS[0] + b'data: {"half')
        assert (await receive())["type"] == "http.disconnect"

    door.elsewhere.answer = answer
    got = door.post("/v1/chat/completions", {"model": "far", "stream": True})
    if begins:
        first, half, last = got.content.split(b"\n\n")[:3]
        assert got.status_code == 200 and first + b"\n\n" == EVENTS[0] and half == b'data: {"half'
        error = json.loads(last.removeprefix(b"data: "))["error"]
    else:
        assert got.status_code == 502
        error = got.json()["error"]
    assert error["code"] == "upstream_timeout" and "'far'" in error["message"] and "0.2 s" in error["message"]


def test_an_endpoint_that_breaks_off(door: Door) -> None:
    async def answer(send: Send, receive: Receive) -> None:
        await begin(send)
        await part(send, EVENTS[0])
        raise ConnectionAbortedError

    door.elsewhere.answer = answer
    got = door.post("/v1/messages", {"model": "far", "stream": True})
    first, last = got.content.split(b"\n\n")[:2]
    assert first + b"\n\n" == EVENTS[0] and last.startswith(b"event: error\ndata: ")
    assert "'far'" in json.loads(last.split(b"data: ")[1])["error"]["message"]
    assert 'shoal_upstream_failures_total{model="far",reason="broken"} 1.0' in httpx.get(f"{door.url}/metrics").text
    whole = door.post("/v1/messages", {"model": "far"})
    assert whole.status_code == 502 and whole.json()["type"] == "error"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_request_there(door: Door, stream: bool) -> None:
    asked = threading.Event()

    async def answer(send: Send, receive: Receive) -> None:
        if stream:
            await begin(send)
            await part(send, EVENTS[0])
        asked.set()
        assert (await receive())["type"] == "http.disconnect"
        door.elsewhere.left.set()

    door.elsewhere.answer = answer
    data = json.dumps({"model": "far", "stream": stream}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
    address = door.server.socket.getsockname()
    with contextlib.closing(socket.create_connection(address, timeout=WAIT_S)) as connection:
        connection.sendall(head + data)
        assert asked.wait(WAIT_S)
        got = b""
        while stream and EVENTS[0] not in got:
            got += connection.recv(1 << 16)
    assert door.elsewhere.left.wait(WAIT_S)
