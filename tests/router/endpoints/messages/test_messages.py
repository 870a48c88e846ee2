"""`/v1/messages` as Anthropic's own client sees it, from a replica that follows a script."""

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import httpx
import pytest
import tokenizers
from anthropic import Anthropic

from router.chat.chat_template import ChatTemplate
from router.config import RouterConfig
from router.text.tokenizer import Tokenizer
from tests.router.endpoints.thinking import CALL, THOUGHT
from tests.server.bodies import damaged_anywhere

REPLY = "The quick brown fox — naïve café 🦊👩‍👩‍👧 jumps over 12 lazy dogs."
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def says(make_stack: Any, make_replica: Any, thinker: Tokenizer) -> Callable[..., Any]:
    """A server whose model writes a text."""

    def make(text: str = REPLY, config: RouterConfig | None = None, **options: Any) -> Any:
        return make_stack(make_replica(text, **options), tokens=thinker, config=config)

    return make


@pytest.fixture
def client() -> Iterator[Callable[..., Anthropic]]:
    """Makes Anthropic's client of a stack."""
    with ExitStack() as stack:

        def make(of: Any, **options: Any) -> Anthropic:
            settings = {"api_key": "none", "max_retries": 0, "timeout": 20.0} | options
            return stack.enter_context(Anthropic(base_url=of.url, **settings))

        yield make


@pytest.fixture
def ask(client: Callable[..., Anthropic]) -> Callable[..., Any]:
    """Sends a request by Anthropic's client."""

    def send(stack: Any, **fields: Any) -> Any:
        return client(stack).messages.create(**({"model": "tiny", "max_tokens": 200, "messages": HELLO} | fields))

    return send


def prompt(stack: Any, number: int = -1) -> str:
    """The prompt of a request that the replica has had."""
    request = stack.fakes["r0"].requests()[number]
    text: str = stack.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    return text


# ---------------------------------------------------------------- answers


def test_a_message(says: Callable[..., Any], ask: Callable[..., Any], thinker: Tokenizer) -> None:
    stack = says()
    message = ask(stack, system="Be brief.", extra_headers={"X-Request-Id": "mine"})
    (block,) = message.content
    assert (block.type, block.text, message.role, message.type) == ("text", REPLY, "assistant", "message")
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "tiny")
    assert message.id.startswith("msg_") and message._request_id == "mine"
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(stack) == rendered
    usage = message.usage
    assert usage.cache_read_input_tokens == 3 and usage.cache_creation_input_tokens == 0
    assert usage.input_tokens == len(thinker.encode(rendered)) - 3
    assert usage.output_tokens == len(thinker.encode(REPLY)) + 1


@pytest.mark.parametrize("per_step", [1, 3, 100])
def test_a_stream(says: Callable[..., Any], client: Callable[..., Anthropic], per_step: int) -> None:
    stack = says(per_step=per_step)
    with client(stack).messages.stream(model="tiny", max_tokens=200, messages=HELLO) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(texts) == REPLY == message.content[0].text and "\ufffd" not in "".join(texts)
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 10
    first, *_ = client(stack).messages.create(model="tiny", max_tokens=9, messages=HELLO, stream=True)
    assert first.message.usage.input_tokens > 0 and first.message.usage.cache_read_input_tokens == 3


def test_the_bytes_of_a_stream(says: Callable[..., Any]) -> None:
    body = {"model": "tiny", "messages": HELLO, "stream": True, "max_tokens": 1}
    response = httpx.post(f"{says().url}/v1/messages?beta=true", json=body, headers={"anthropic-beta": "x,y"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"] == response.headers["x-request-id"]
    names = [block.partition("\n")[0] for block in response.text.removesuffix("\n\n").split("\n\n")]
    blocks = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == [f"event: {name}" for name in ["message_start", "ping", *blocks, "message_delta", "message_stop"]]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_their_results(says: Callable[..., Any], client: Callable[..., Anthropic], stream: bool) -> None:
    """The answer, sent back with a result, is the history that the template expects."""
    stack = says(f"<think>\nWhere?\n</think>\n\nLet me look. {CALL}\n{CALL.replace('Oslo', 'Rome')}")
    messages = client(stack).messages
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "tools": [TOOL]}
    if stream:
        with messages.stream(messages=HELLO, **fields) as events:
            message = events.get_final_message()
    else:
        message = messages.create(messages=HELLO, **fields)
    thinking, text, *calls = message.content
    assert (thinking.thinking, thinking.signature, text.text.strip()) == ("Where?", "", "Let me look.")
    assert [(call.type, call.name, call.input["city"]) for call in calls] == [
        ("tool_use", "weather", "Oslo"),
        ("tool_use", "weather", "Rome"),
    ]
    assert message.stop_reason == "tool_use" and len({call.id for call in calls}) == 2
    assert '"name": "weather"' in prompt(stack)

    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "-3"} for call in calls]
    turn = {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}
    messages.create(messages=[*HELLO, {"role": "assistant", "content": message.content}, turn], **fields)
    history = prompt(stack)
    assert "<think>\nWhere?\n</think>\n\nLet me look." in history
    assert '<tool_call>\nweather {"city": "Rome"}\n</tool_call><|im_end|>' in history
    assert "<|im_start|>tool\n-3<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>" in history


def test_one_call_and_calls_that_must_be(says: Callable[..., Any], ask: Callable[..., Any]) -> None:
    stack = says(f"{CALL}\n{CALL}")
    message = ask(stack, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(message.content) == 1 and message.stop_reason == "tool_use"
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        ask(stack, tools=[TOOL], tool_choice=choice)
        grammar = stack.fakes["r0"].requests()[-1].sampling.grammar
        assert grammar.kind == "tool_calls" and json.loads(grammar.text)["mode"] == "required"
    text = ask(stack, tools=[TOOL], tool_choice={"type": "none"})
    assert text.content[0].type == "text" and text.stop_reason == "end_turn"


def test_thinking(says: Callable[..., Any], ask: Callable[..., Any]) -> None:
    stack = says(THOUGHT)
    message = ask(stack, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("It is cold.", "Cold.")
    hidden = ask(stack, thinking={"type": "adaptive", "display": "omitted"})
    assert (hidden.content[0].thinking, hidden.content[1].text) == ("", "Cold.")
    ask(stack, thinking={"type": "disabled"})
    assert prompt(stack).endswith("<think>\n\n</think>\n\n")


def test_stop_sequences(says: Callable[..., Any], ask: Callable[..., Any], client: Callable[..., Anthropic]) -> None:
    stack = says()
    message = ask(stack, stop_sequences=["lazy", " fox", "brown fox jumps"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " fox")
    assert message.content[0].text == "The quick brown"
    with client(stack).messages.stream(model="tiny", max_tokens=99, messages=HELLO, stop_sequences=[" fox"]) as stream:
        message = stream.get_final_message()
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " fox")


@pytest.mark.parametrize("per_step", [1, 100])
def test_stop_sequences_leave_thinking_and_calls_alone(
    says: Callable[..., Any], ask: Callable[..., Any], client: Callable[..., Anthropic], per_step: int
) -> None:
    fields: dict[str, Any] = {"stop_sequences": ["cold", "Oslo", "\n", "}"], "tools": [TOOL]}
    for text, kinds, reason in (
        (THOUGHT, ["thinking", "text"], ("end_turn", None)),
        (THOUGHT + " So cold.", ["thinking", "text"], ("stop_sequence", "cold")),
        (THOUGHT.replace("Cold.", CALL), ["thinking", "tool_use"], ("tool_use", None)),
        (CALL[:45], ["tool_use"], ("max_tokens", None)),  # the model has ended a call in the middle
    ):
        stack = says(text, per_step=per_step)
        whole = ask(stack, **fields)
        with client(stack).messages.stream(model="tiny", max_tokens=99, messages=HELLO, **fields) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            assert [block.type for block in message.content] == kinds
            assert (message.stop_reason, message.stop_sequence) == reason
        assert [block.model_dump(exclude={"id"}) for block in whole.content if block.type != "tool_use"] == [
            block.model_dump(exclude={"id"}) for block in streamed.content if block.type != "tool_use"
        ]
        if reason[0] == "tool_use":
            assert whole.content[1].input == streamed.content[1].input == {"city": "Oslo"}


def test_limits(says: Callable[..., Any], ask: Callable[..., Any]) -> None:
    """An answer longer than the context is cut there, as newer models do. Without an answer, the prompt is computed."""
    stack = says("a b c d e f g h " * 100)
    assert ask(stack, max_tokens=2).stop_reason == "max_tokens"
    assert ask(stack, max_tokens=32_000).stop_reason == "model_context_window_exceeded"
    nothing = ask(stack, max_tokens=0)
    assert nothing.content == [] and nothing.usage.output_tokens == 0 and nothing.stop_reason == "max_tokens"


def test_an_answer_that_is_begun(says: Callable[..., Any], ask: Callable[..., Any]) -> None:
    stack = says(" quick")
    message = ask(stack, messages=[*HELLO, {"role": "assistant", "content": "The"}])
    assert message.content[0].text == " quick"
    assert prompt(stack).endswith("<think>\n\n</think>\n\nThe")


def test_an_answer_that_is_begun_where_the_template_opens_thinking(
    make_stack: Any, make_replica: Any, ask: Callable[..., Any], byte_level_tokenizer: tokenizers.Tokenizer
) -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
    stack = make_stack(make_replica(" quick"), tokens=Tokenizer(byte_level_tokenizer, ChatTemplate(template, {})))
    message = ask(stack, messages=[*HELLO, {"role": "assistant", "content": "The"}])
    assert message.content[0].text == " quick" and prompt(stack) == "Hello\n<think>\n</think>\n\nThe"


def test_a_form(says: Callable[..., Any], ask: Callable[..., Any]) -> None:
    stack = says("{}")
    schema = {"type": "object", "properties": {}}
    ask(stack, output_config={"format": {"type": "json_schema", "schema": schema}}, thinking={"type": "disabled"})
    grammar = stack.fakes["r0"].requests()[-1].sampling.grammar
    assert grammar.kind == "json_schema" and json.loads(grammar.text) == schema


def test_count_tokens(says: Callable[..., Any], ask: Callable[..., Any], client: Callable[..., Anthropic]) -> None:
    """As many as a message of the same conversation has."""
    stack = says()
    fields: dict[str, Any] = {"system": [{"type": "text", "text": "Be brief."}], "tools": [TOOL]}
    for turns in (HELLO, [*HELLO, {"role": "assistant", "content": "The"}]):
        counted = client(stack).messages.count_tokens(model="tiny", messages=turns, **fields)
        usage = ask(stack, messages=turns, **fields).usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens > 20


def test_models(says: Callable[..., Any], client: Callable[..., Anthropic]) -> None:
    stack = says()
    (model,) = client(stack).models.list()
    assert (model.id, model.display_name, model.type) == ("tiny", "tiny", "model") and model.created_at.year > 2024
    assert client(stack).models.retrieve("tiny").max_input_tokens == 512
    with pytest.raises(anthropic.NotFoundError, match="'other'"):
        client(stack).models.retrieve("other")
    assert stack.client.models.list().data[0].object == "model"  # OpenAI's


# ---------------------------------------------------------------- errors


def test_errors(says: Callable[..., Any], ask: Callable[..., Any], client: Callable[..., Anthropic]) -> None:
    stack = says()
    with pytest.raises(anthropic.BadRequestError) as bad:
        ask(stack, extra_body={"temperature": 1.5}, stream=True)
    body: Any = bad.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert "'temperature'" in body["error"]["message"] and body["request_id"] == bad.value.request_id
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(stack, model="other")
    body = missing.value.body
    assert body["error"]["type"] == "not_found_error" and "model" in body["error"]["message"]
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client(stack).messages.count_tokens(model="tiny", messages=[])


def test_keys(says: Callable[..., Any], client: Callable[..., Anthropic]) -> None:
    stack = says(config=RouterConfig(api_key="right"))
    ask = {"model": "tiny", "max_tokens": 9, "messages": HELLO}
    assert client(stack, api_key="right").messages.create(**ask).content
    assert client(stack, api_key=None, auth_token="right").messages.create(**ask).content
    both = {"x-api-key": "right", "authorization": "Bearer wrong"}
    assert httpx.post(f"{stack.url}/v1/messages", json=ask, headers=both).status_code == 200
    for given in ({"api_key": "wrong"}, {"api_key": None, "auth_token": "wrong"}):
        with pytest.raises(anthropic.AuthenticationError) as refused:
            client(stack, **given).messages.create(**ask)
        body: Any = refused.value.body
        assert body["error"]["type"] == "authentication_error"
    assert httpx.post(f"{stack.url}/v1/messages", json=ask).json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{stack.url}/v1/models", headers={"anthropic-version": "x"}).json()["type"] == "error"
    assert "param" in httpx.get(f"{stack.url}/v1/models").json()["error"]  # OpenAI's


def test_errors_before_a_request_is_read(says: Callable[..., Any]) -> None:
    stack = says(config=RouterConfig(max_body_bytes=2000, body_timeout_s=0.3))
    url = f"{stack.url}/v1/messages"

    def slow() -> Iterator[bytes]:
        yield b"{"
        time.sleep(0.6)
        yield b"}"

    answers = {
        405: (httpx.get(url), "invalid_request_error"),
        404: (httpx.post(f"{url}/other"), "not_found_error"),
        413: (httpx.post(url, content=b" " * 3000), "request_too_large"),
        415: (httpx.post(url, content=b"", headers={"Content-Encoding": "gzip"}), "invalid_request_error"),
        408: (httpx.post(url, content=slow()), "invalid_request_error"),
    }
    for status, (answer, kind) in answers.items():
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        assert answer.json()["request_id"] == answer.headers["request-id"]


def test_errors_of_the_service(
    make_stack: Any, make_replica: Any, ask: Callable[..., Any], thinker: Tokenizer, caplog: Any
) -> None:
    """No replica before the stream; a replica that fails in the middle of one."""
    at_once = RouterConfig(replica_wait_s=0)
    empty = make_stack(config=at_once)
    with pytest.raises(anthropic.InternalServerError) as none:
        ask(empty)
    body: Any = none.value.body
    assert none.value.status_code == 503 and body["error"]["type"] == "overloaded_error"

    fake = make_replica().hold()
    stack = make_stack(fake, config=at_once)
    fake.allow(3)
    stream = ask(stack, stream=True)
    events = [next(stream) for _ in range(3)]
    assert events[0].type == "message_start"
    fake.die()
    with pytest.raises(anthropic.APIStatusError) as broken:
        list(stream)
    body = broken.value.body
    assert body["type"] == "error" and body["error"]["type"] in ("overloaded_error", "api_error")


# ---------------------------------------------------------------- damaged requests

VALID: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "x", "signature": ""},
                {"type": "text", "text": "y"},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "-3"}]},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
                {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "r"}]},
            ],
        },
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 3},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "output_config": {"effort": "low"},
    "stream": False,
}


def test_damaged_requests(says: Callable[..., Any]) -> None:
    """None is the server's fault, and all errors have Anthropic's form."""
    statuses = []
    with httpx.Client(base_url=says().url, timeout=20) as http:
        assert http.post("/v1/messages", json=VALID).status_code == 200
        for number in range(300):
            chance = random.Random(number)
            path = chance.choice(["/v1/messages", "/v1/messages", "/v1/messages/count_tokens"])
            content = damaged_anywhere(chance, VALID)
            answer = http.post(path, content=content)
            statuses.append(answer.status_code)
            assert answer.status_code < 500, (number, content, answer.text)
            if answer.status_code >= 400:
                error = answer.json()
                assert error.keys() == {"type", "error", "request_id"} and error["error"].keys() == {"type", "message"}
    assert statuses.count(200) > 15 and statuses.count(400) > 150
