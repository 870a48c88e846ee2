"""Anthropic's own package: messages, streams, tools, thinking, the count of tokens, and the errors that it tells
apart."""

import json
import re
from typing import Any

import anthropic
from anthropic import Anthropic, beta_tool

from bench.correctness.clients.checks import Checks, ServedModel, refused
from bench.correctness.clients.forecast import PARAMETERS, QUESTION, Forecast, forecast

checks = Checks()
HELLO: Any = [{"role": "user", "content": "Hello!"}]
ASKED: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"name": "forecast", "description": "The weather.", "input_schema": PARAMETERS, "strict": True}]
# This version of the package leaves sampling to the service, but for `extra_body`.
AT_0: Any = {"extra_body": {"temperature": 0}}
GREEDY: Any = AT_0 | {"max_tokens": 8}
ONE_CALL: Any = AT_0 | {"max_tokens": 120, "tools": TOOLS}
ANY: Any = {"type": "any", "disable_parallel_tool_use": True}


def _client(at: ServedModel) -> Anthropic:
    return Anthropic(base_url=at.url, api_key="none", max_retries=0, timeout=120)


@checks("models: list, retrieve")
def models(at: ServedModel) -> None:
    client = _client(at)
    assert at.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(at.model).id == at.model


@checks("messages: create")
def message(at: ServedModel) -> None:
    made = _client(at).messages.create(model=at.model, system="Be brief.", messages=HELLO, **GREEDY)
    assert made.content[0].type == "text" and made.content[0].text and made.role == "assistant"
    assert made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0) > 0 and made.usage.output_tokens > 0
    assert made.stop_reason in ("end_turn", "max_tokens") and made._request_id


@checks("messages: streamed events")
def stream(at: ServedModel) -> None:
    events = list(_client(at).messages.create(model=at.model, messages=HELLO, stream=True, **GREEDY))
    kinds = [event.type for event in events if event.type != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"], kinds
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds
    usage = events[0].message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > 0


@checks("messages: stream helper")
def stream_helper(at: ServedModel) -> None:
    client = _client(at)
    whole = client.messages.create(model=at.model, messages=HELLO, **GREEDY)
    with client.messages.stream(model=at.model, messages=HELLO, **GREEDY) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == _text(whole) == _text(final)
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens


@checks("messages: stop_sequences, the beginning of an answer, several system blocks")
def parameters(at: ServedModel) -> None:
    client = _client(at)
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}] * 2
    begun = [*HELLO, {"role": "assistant", "content": "One, two,"}]
    made = client.messages.create(
        model=at.model, system=system, messages=begun, stop_sequences=["e"], metadata={"user_id": "me"}, max_tokens=40,
        extra_body={"top_k": 5, "top_p": 0.9},
    )  # fmt: skip
    assert made.stop_reason in ("stop_sequence", "end_turn", "max_tokens")
    assert (made.stop_sequence == "e") == (made.stop_reason == "stop_sequence")
    assert "e" not in _text(made)


@checks("messages: parse")
def parse(at: ServedModel) -> None:
    made = _client(at).messages.parse(model=at.model, messages=ASKED, output_format=Forecast, max_tokens=80, **AT_0)
    assert isinstance(made.parsed_output, Forecast), made


@checks("messages: count_tokens as the answer's usage")
def count_tokens(at: ServedModel) -> None:
    client = _client(at)
    counted = client.messages.count_tokens(model=at.model, messages=ASKED, tools=TOOLS, system="Be brief.")
    usage = client.messages.create(model=at.model, messages=ASKED, tools=TOOLS, system="Be brief.", max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@checks("messages: thinking enabled, adaptive, disabled")
def thinking(at: ServedModel) -> None:
    kinds: Any = ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"})
    for kind in kinds:
        assert _client(at).messages.create(model=at.model, messages=HELLO, max_tokens=8, thinking=kind).content


def _text(made: Any) -> str:
    return "".join(block.text for block in made.content)


def _call(made: Any) -> Any:
    (call,) = [block for block in made.content if block.type == "tool_use"]
    assert made.stop_reason == "tool_use" and call.name == "forecast" and call.id
    Forecast.model_validate(call.input)
    return call


@checks("tools: any, a named one, none")
def tools(at: ServedModel) -> None:
    client = _client(at)
    named: Any = {"type": "tool", "name": "forecast", "disable_parallel_tool_use": True}
    for choice in (ANY, named):
        _call(client.messages.create(model=at.model, messages=ASKED, tool_choice=choice, **ONE_CALL))
    made = client.messages.create(model=at.model, messages=ASKED, tools=TOOLS, tool_choice={"type": "none"}, **GREEDY)
    assert {block.type for block in made.content} == {"text"}


@checks("tools: streamed input")
def tools_stream(at: ServedModel) -> None:
    client = _client(at)
    with client.messages.stream(model=at.model, messages=ASKED, tool_choice=ANY, **ONE_CALL) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        call = _call(events.get_final_message())
    assert json.loads("".join(pieces)) == call.input


@checks("tools: a loop, with the client's own blocks sent back")
def tools_loop(at: ServedModel) -> None:
    client = _client(at)
    made = client.messages.create(model=at.model, messages=ASKED, tool_choice=ANY, **ONE_CALL)
    result: Any = {"type": "tool_result", "tool_use_id": _call(made).id, "content": "The sky is blue."}
    again = client.messages.create(
        model=at.model,
        messages=[*ASKED, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}],
        tools=TOOLS,
        tool_choice={"type": "none"},
        **GREEDY,
    )
    assert again.content[0].type == "text" and again.content[0].text


@checks("tools: the package's own tool runner")
def tool_runner(at: ServedModel) -> None:
    runner = _client(at).beta.messages.tool_runner(
        model=at.model,
        messages=ASKED,
        tools=[beta_tool(forecast)],
        tool_choice=ANY,
        max_tokens=120,
        max_iterations=2,
        **AT_0,
    )
    answers = list(runner)
    assert answers and all(any(block.type == "tool_use" for block in answer.content) for answer in answers)


@checks("a full context, in the words that agents know")
def full_context(at: ServedModel) -> None:
    long: Any = [{"role": "user", "content": at.long_text}]
    create = _client(at).messages.create
    error: Any = refused(anthropic.BadRequestError, lambda: create(model=at.model, messages=long, max_tokens=8))
    said = error.body["error"]
    assert said["type"] == "invalid_request_error"
    assert re.match(r"prompt is too long[^0-9]*\d+ tokens > \d+", said["message"]), said


@checks("errors: each as the package's own class")
def errors(at: ServedModel) -> None:
    create = _client(at).messages.create
    hot: Any = {"extra_body": {"temperature": 9}}
    error = refused(anthropic.BadRequestError, lambda: create(model=at.model, messages=HELLO, max_tokens=8, **hot))
    assert "temperature" in str(error) and error.request_id
    refused(anthropic.NotFoundError, lambda: create(model="no-such-model", messages=HELLO, max_tokens=8))
