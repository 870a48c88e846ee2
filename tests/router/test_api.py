"""The small endpoints, errors, limits and keys, as OpenAI's own client sees them."""

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from router.chat.chat_template import ChatTemplate
from router.config import RouterConfig
from router.text.tokenizer import Tokenizer
from worker.messages import Failure, Generate, Output

HELLO = [{"role": "user", "content": "Hello"}]


# ---------------------------------------------------------------- the small endpoints


def test_models(stack: Any) -> None:
    (model,) = stack.client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny", "model", 512)
    assert stack.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        stack.client.models.retrieve("org/other")


def test_tokenize_and_back(stack: Any, tokenizer: Tokenizer) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        return httpx.post(f"{stack.url}/{path}", json=body).raise_for_status().json()

    ids = tokenizer.encode("Hello <|im_end|>")
    assert post("tokenize", {"prompt": "Hello <|im_end|>"}) == {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": 512,
        "token_strs": None,
    }
    assert post("detokenize", {"tokens": ids, "model": "tiny"}) == {"prompt": "Hello <|im_end|>"}
    assert post("detokenize", {"tokens": ids, "skip_special_tokens": True}) == {"prompt": "Hello "}
    chat = "<|im_start|>user\nHello<|im_end|>\n"
    assert post("tokenize", {"messages": HELLO, "add_generation_prompt": False})["tokens"] == tokenizer.encode(chat)
    full = tokenizer.encode(chat + "<|im_start|>assistant\n")
    assert post("tokenize", {"messages": HELLO})["tokens"] == full
    opened = {"messages": HELLO, "chat_template_kwargs": {"opening": "Hello"}}
    assert post("tokenize", opened)["tokens"] == full + tokenizer.encode("Hello")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("tokenize", {"prompt": "a", "chat_template_kwargs": {"b": 1}}, 400, "chat_template_kwargs"),
        ("tokenize", {"messages": HELLO, "chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("tokenize", {"messages": [{"role": "assistant", "content": "a"}]}, 400, "messages"),
        ("detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
        ("v1/completions", {"model": "other", "prompt": "a"}, 404, "model"),
        ("v1/chat/completions", {"model": "other", "messages": HELLO}, 404, "model"),
        ("v1/chat/completions", {"model": "tiny", "messages": []}, 400, "messages"),
        ("v1/completions", {"model": "tiny", "prompt": "a", "nonsense": 1}, 400, "nonsense"),
        ("v1/completions", {"model": "tiny", "prompt": "xyz " * 5000}, 400, "prompt"),
    ],
)
def test_errors_name_their_parameter(stack: Any, path: str, body: dict[str, Any], status: int, param: str) -> None:
    response = httpx.post(f"{stack.url}/{path}", json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == param and error["message"] and error["type"] == "invalid_request_error"
    assert stack.fakes["r0"].requests() == []


@pytest.mark.parametrize("clamps", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("v1/chat/completions", {"messages": HELLO}, "max_tokens"),
        ("v1/chat/completions", {"messages": HELLO}, "max_completion_tokens"),
        ("v1/completions", {"prompt": "a"}, "max_tokens"),
        ("v1/responses", {"input": "a"}, "max_output_tokens"),
        ("v1/messages", {"messages": HELLO}, "max_tokens"),
    ],
)
def test_a_limit_beyond_the_context_is_refused_or_clamped(
    make_stack: Any, make_replica: Any, path: str, body: dict[str, Any], limit: str, clamps: bool
) -> None:
    stack = make_stack(make_replica(), config=RouterConfig(clamp_max_tokens=clamps, response_store_bytes=0))
    answer = httpx.post(f"{stack.url}/{path}", json={"model": "tiny", limit: 4096} | body)
    if not clamps and path != "v1/messages":
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, limit, "context_length_exceeded")
        return
    assert answer.status_code == 200, answer.text
    (asked,) = stack.fakes["r0"].requests()
    assert asked.sampling.max_tokens == stack.service.context_length - len(asked.prompt_ids)


def test_the_client_understands_errors(stack: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        stack.client.chat.completions.create(model="tiny", messages=HELLO, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        stack.client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/health", 405), ("GET", "/v1", 404)],
)
def test_routes_that_do_not_exist(stack: Any, method: str, path: str, status: int) -> None:
    response = httpx.request(method, stack.url + path)
    assert response.status_code == status and path in response.json()["error"]["message"]
    assert (status == 405) == ("allow" in response.headers)


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_load_balancers_may_ask_for_the_head_alone(stack: Any, path: str) -> None:
    response = httpx.head(stack.url + path)
    assert (response.status_code, response.content) == (200, b"")


def test_the_version_and_a_ping(stack: Any) -> None:
    version = httpx.get(f"{stack.url}/version").json()["version"]
    assert version == httpx.get(f"{stack.url}/openapi.json").json()["info"]["version"] != ""
    assert httpx.get(f"{stack.url}/ping").status_code == httpx.post(f"{stack.url}/ping").status_code == 200


def test_the_tokenizer_tells_its_configuration(stack: Any, tokenizer: Tokenizer) -> None:
    """What lm-eval's remote tokenizer reads: a client can render chats itself."""
    info = httpx.get(f"{stack.url}/tokenizer_info").raise_for_status().json()
    assert info == tokenizer.info and {"bos_token", "eos_token", "pad_token"} <= set(info)
    rendered = ChatTemplate(info["chat_template"], {}).render(HELLO, True)
    assert rendered == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


# ---------------------------------------------------------------- failures of a replica


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("failure", "kind", "status"),
    [
        (Failure("invalid", "the schema does not compile", "response_format"), openai.BadRequestError, 400),
        (Failure("overloaded", "too many requests wait"), openai.RateLimitError, 429),
        (Failure("unavailable", "no memory for a grammar"), openai.InternalServerError, 503),
        (Failure("internal", "secret details"), openai.InternalServerError, 500),
    ],
)
def test_a_refusal_before_the_first_token_has_its_status(
    make_stack: Callable[..., Any],
    make_replica: Callable[..., Any],
    failure: Failure,
    kind: type[openai.APIStatusError],
    status: int,
    stream: bool,
) -> None:
    fake = make_replica()
    fake.fail(failure)
    stack = make_stack(fake)
    with pytest.raises(kind) as error:
        stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    assert error.value.status_code == status and error.value.param == failure.param
    assert ("secret" in str(error.value)) is False
    assert (status in (429, 503)) == ("retry-after" in error.value.response.headers)


@pytest.mark.parametrize(
    ("called", "fields", "param"),
    [
        ("prompt", {}, "messages"),
        ("response_format", {"guided_json": {}}, "guided_json"),
        ("regex", {"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
        ("regex", {"regex": "["}, "regex"),
    ],
)
def test_a_failure_names_the_parameter_of_the_client(
    make_stack: Callable[..., Any],
    make_replica: Callable[..., Any],
    called: str,
    fields: dict[str, Any],
    param: str,
) -> None:
    fake = make_replica()
    failure = Failure("invalid", "the replica cannot", called)
    fake.fail(failure)
    stack = make_stack(fake)
    with pytest.raises(openai.BadRequestError) as error:
        stack.client.chat.completions.create(model="tiny", messages=HELLO, extra_body=fields)
    assert error.value.param == param


def test_one_failing_choice_stops_the_others(make_stack: Callable[..., Any], make_replica: Callable[..., Any]) -> None:
    fake = make_replica().hold()

    def reply(request: Generate) -> Output | None:
        if not request.request_id.endswith("-1.0"):
            return None
        return Output(request_id=request.request_id, finish_reason="error", failure=Failure("invalid", "no", "seed"))

    fake.reply = reply
    stack = make_stack(fake)
    with pytest.raises(openai.BadRequestError):
        stack.client.chat.completions.create(model="tiny", messages=HELLO, n=3)
    fake.wait_for(lambda: not fake.running and len(fake.requests()) == 3)


def test_no_replica(make_stack: Callable[..., Any]) -> None:
    stack = make_stack(config=RouterConfig(replica_wait_s=0))
    assert httpx.get(f"{stack.url}/health").status_code == 200
    assert httpx.get(f"{stack.url}/ready").status_code == 503
    with pytest.raises(openai.InternalServerError) as error:
        stack.client.chat.completions.create(model="tiny", messages=HELLO)
    assert error.value.status_code == 503 and error.value.code == "no_replica"
    assert "retry-after" in error.value.response.headers


# ---------------------------------------------------------------- limits and keys


def test_large_bodies(make_stack: Callable[..., Any], make_replica: Callable[..., Any]) -> None:
    stack = make_stack(make_replica(), config=RouterConfig(max_body_bytes=2000))
    url = f"{stack.url}/v1/completions"
    for content in (b"x" * 2001, iter([b"x" * 1500, b"x" * 600])):  # announced, and in chunks
        response = httpx.post(url, content=content)
        assert response.status_code == 413 and "2000" in response.json()["error"]["message"]
    body = b'{"model":"tiny","prompt":"a"}'
    assert httpx.post(url, content=body.ljust(2000)).status_code == 200
    assert httpx.post(url, content=iter([body, b" " * 1900])).status_code == 200


def test_a_compressed_body_is_refused(stack: Any) -> None:
    url, body = f"{stack.url}/v1/completions", b'{"model":"tiny","prompt":"a"}'
    for encoding in ("gzip", "br", "gzip, identity"):
        response = httpx.post(url, content=body, headers={"Content-Encoding": encoding})
        assert response.status_code == 415 and response.headers["accept-encoding"] == "identity"
        assert response.json()["error"]["code"] == "unsupported_encoding"
    assert httpx.post(url, content=body, headers={"Content-Encoding": "identity"}).status_code == 200


def test_a_body_that_does_not_come(make_stack: Callable[..., Any], make_replica: Callable[..., Any]) -> None:
    stack = make_stack(make_replica(), config=RouterConfig(body_timeout_s=0.05))
    with contextlib.closing(socket.create_connection(stack.server.socket.getsockname(), timeout=10)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf")
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"code": "timeout"' in answer and b"connection: close" in answer


def test_priorities_are_bounded(make_stack: Callable[..., Any], make_replica: Callable[..., Any]) -> None:
    """Unless the operator allows it, nobody can put himself before the others."""
    for highest in (0, 7):
        stack = make_stack(make_replica(), config=RouterConfig(max_priority=highest))
        for priority in (-5, 0, highest):
            stack.client.completions.create(model="tiny", prompt="x", extra_body={"priority": priority})
        with pytest.raises(openai.BadRequestError, match=f"to {highest}") as error:
            stack.client.completions.create(model="tiny", prompt="x", extra_body={"priority": highest + 1})
        assert error.value.param == "priority"


def bearer(key: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {key}".encode()}


def test_keys(make_stack: Callable[..., Any], make_replica: Callable[..., Any], tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("second\n\n  third \nключ")
    stack = make_stack(make_replica(), config=RouterConfig(api_key="first", api_key_file=file))
    for key in ("first", "second", "third", "ключ"):
        assert httpx.get(f"{stack.url}/v1/models", headers=bearer(key)).status_code == 200
    assert stack.client.with_options(api_key="second").models.list().data
    for key in ("fourth", "firs", "firstt", "клю"):
        for path in ("/v1/models", "/v1/models/tiny"):
            response = httpx.get(stack.url + path, headers=bearer(key))
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    for headers in ({}, {"Authorization": "first"}, {"Authorization": "Basic first"}, {"Authorization": "Bearer"}):
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            assert httpx.post(stack.url + path, headers=headers, content=b"{").status_code == 401
    for path in ("/health", "/ready", "/metrics", "/openapi.json"):
        assert httpx.get(stack.url + path).status_code == 200
    page = httpx.get(f"{stack.url}/openapi.json").json()
    assert page["paths"]["/v1/completions"]["post"]["security"]


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_a_key_file_without_keys_does_not_open_the_server(
    make_stack: Callable[..., Any], tmp_path: Any, content: str
) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ValueError, match="no key"):
        make_stack(config=RouterConfig(api_key_file=tmp_path / "keys"))


def test_a_prediction_goes_to_the_replica_and_drafts_are_in_the_usage(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    fake = make_replica()

    def reply(request: Generate) -> Output:
        token_ids = tokenizer.encode("a b c")
        return Output(
            request_id=request.request_id, token_ids=token_ids, finish_reason="stop", num_drafted=5, num_accepted=2
        )

    fake.reply = reply
    stack = make_stack(fake)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    answer = stack.client.chat.completions.create(
        model="tiny", messages=HELLO, prediction={"type": "content", "content": parts}
    )
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2, 3)
    (request,) = fake.requests()
    assert request.prediction_ids == tokenizer.encode_continuation("one two")
