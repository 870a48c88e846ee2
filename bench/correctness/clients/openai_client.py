"""OpenAI's own package: chat, completions, Responses, embeddings, and the errors that it tells apart."""

import asyncio
import json
import math
import re
from collections.abc import Iterable
from typing import Any

import openai
from openai import OpenAI

from bench.correctness.clients.checks import Checks, ServedModel, refused
from bench.correctness.clients.forecast import PARAMETERS, QUESTION, Forecast

checks = Checks()
HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
ASKED: Any = [{"role": "user", "content": QUESTION}]
GREEDY: Any = {"temperature": 0, "max_tokens": 8}


CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS, "strict": True}}]
RESPONSES_TOOLS: Any = [{"type": "function", "name": "forecast", "parameters": PARAMETERS, "strict": True}]
ONE_CALL: Any = {"temperature": 0, "max_tokens": 120, "tool_choice": "required", "parallel_tool_calls": False}
CALL_EVENTS = "response.function_call_arguments.delta", "response.function_call_arguments.done"


def _client(at: ServedModel) -> OpenAI:
    return OpenAI(base_url=at.v1, api_key="none", max_retries=0, timeout=120)


# ---------------------------------------------------------------- chat completions


@checks("models: list, retrieve")
def models(at: ServedModel) -> None:
    client = _client(at)
    assert at.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(at.model).id == at.model


@checks("chat: create")
def chat(at: ServedModel) -> None:
    made = _client(at).chat.completions.create(model=at.model, messages=HELLO, **GREEDY)
    assert made.choices[0].message.content and made.usage is not None
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    again = _client(at).chat.completions.create(model=at.model, messages=HELLO, **GREEDY)
    assert again.choices[0].message.content == made.choices[0].message.content


@checks("chat: streamed, usage last")
def chat_stream(at: ServedModel) -> None:
    client = _client(at)
    whole = client.chat.completions.create(model=at.model, messages=HELLO, **GREEDY)
    stream = client.chat.completions.create(
        model=at.model, messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage and not chunks[-1].choices
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
        whole.choices[0].finish_reason
    ]


@checks("chat: four at once, async")
def chat_async(at: ServedModel) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=at.v1, api_key="none", max_retries=0) as client:
            requests = [client.chat.completions.create(model=at.model, messages=HELLO, **GREEDY) for _ in range(4)]
            return [made.choices[0].message.content for made in await asyncio.gather(*requests)]

    assert len(set(asyncio.run(ask()))) == 1


@checks("chat: stream helper")
def chat_stream_helper(at: ServedModel) -> None:
    # The helper raises where an answer is cut off by its limit.
    whole: Any = {"extra_body": {"guided_choice": ["Hello there!"]}}
    with _client(at).chat.completions.stream(model=at.model, messages=HELLO, **whole) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    text = "".join(event.delta for event in events if event.type == "content.delta")
    assert text and text == final.choices[0].message.content
    assert events[-1].type == "content.done" and events[-1].content == text


@checks("chat: parse")
def chat_parse(at: ServedModel) -> None:
    made = _client(at).chat.completions.parse(
        model=at.model, messages=ASKED, response_format=Forecast, temperature=0, max_tokens=80
    )
    assert isinstance(made.choices[0].message.parsed, Forecast), made.choices[0]


@checks("chat: stream helper, parsed")
def chat_stream_parsed(at: ServedModel) -> None:
    with _client(at).chat.completions.stream(
        model=at.model, messages=ASKED, response_format=Forecast, temperature=0, max_tokens=80
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Forecast)


@checks("chat: json_schema without strict")
def chat_json_schema(at: ServedModel) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": PARAMETERS}}
    made = _client(at).chat.completions.create(
        model=at.model, messages=ASKED, response_format=form, temperature=0, max_tokens=80
    )
    Forecast.model_validate_json(made.choices[0].message.content or "")


@checks("chat: logprobs, n, seed, stop, penalties, logit_bias")
def chat_parameters(at: ServedModel) -> None:
    client = _client(at)
    made = client.chat.completions.create(
        model=at.model,
        messages=HELLO,
        n=2,
        seed=7,
        temperature=0.8,
        top_p=0.9,
        logprobs=True,
        top_logprobs=2,
        stop=["\n\n\n"],
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"9": -1},
        user="me",
        metadata={"a": "b"},
        max_completion_tokens=5,
    )
    assert [choice.index for choice in made.choices] == [0, 1]
    for choice in made.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        for token in choice.logprobs.content:
            assert token.logprob <= 0 and len(token.top_logprobs) == 2


@checks("chat: raw response, request id")
def raw_response(at: ServedModel) -> None:
    client = _client(at)
    raw = client.chat.completions.with_raw_response.create(model=at.model, messages=HELLO, **GREEDY)
    made = raw.parse()
    assert made.choices and raw.headers["x-request-id"] and made._request_id == raw.headers["x-request-id"]


# ---------------------------------------------------------------- tools


@checks("chat tools: required, named, none")
def tools(at: ServedModel) -> None:
    client = _client(at)
    named: Any = {"type": "function", "function": {"name": "forecast"}}
    for choice in ("required", named):
        made = client.chat.completions.create(
            model=at.model, messages=ASKED, tools=CHAT_TOOLS, **ONE_CALL | {"tool_choice": choice}
        )
        (call,) = made.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.name == "forecast" and call.id
        Forecast.model_validate_json(call.function.arguments)
        assert made.choices[0].finish_reason in ("tool_calls", "stop") and not made.choices[0].message.content
    made = client.chat.completions.create(
        model=at.model, messages=ASKED, tools=CHAT_TOOLS, tool_choice="none", **GREEDY
    )
    assert not made.choices[0].message.tool_calls and made.choices[0].message.content


@checks("chat tools: streamed")
def tools_stream(at: ServedModel) -> None:
    client = _client(at)
    whole = client.chat.completions.create(model=at.model, messages=ASKED, tools=CHAT_TOOLS, **ONE_CALL)
    stream = client.chat.completions.create(model=at.model, messages=ASKED, tools=CHAT_TOOLS, stream=True, **ONE_CALL)
    choices = [choice for chunk in stream for choice in chunk.choices]
    pieces = [call for choice in choices for call in choice.delta.tool_calls or ()]
    functions = [piece.function for piece in pieces if piece.function is not None]
    assert pieces[0].id and functions[0].name == "forecast" and not any(piece.id for piece in pieces[1:])
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert "".join(function.arguments or "" for function in functions) == call.function.arguments
    assert choices[-1].finish_reason == whole.choices[0].finish_reason == "tool_calls"


@checks("chat tools: parse, stream helper with pydantic_function_tool")
def tools_parsed(at: ServedModel) -> None:
    client, tool = _client(at), openai.pydantic_function_tool(Forecast)
    made = client.chat.completions.parse(model=at.model, messages=ASKED, tools=[tool], **ONE_CALL)
    (call,) = made.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Forecast)
    with client.chat.completions.stream(model=at.model, messages=ASKED, tools=[tool], **ONE_CALL) as stream:
        events = list(stream)
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [call.function.parsed_arguments]


@checks("chat tools: a loop, with the client's own message sent back")
def tools_loop(at: ServedModel) -> None:
    client = _client(at)
    messages = [*ASKED]
    made = client.chat.completions.create(model=at.model, messages=messages, tools=CHAT_TOOLS, **ONE_CALL)
    message = made.choices[0].message
    (call,) = message.tool_calls or []
    for sent in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "blue"})}
        made = client.chat.completions.create(
            model=at.model, messages=[*messages, sent, result], tools=CHAT_TOOLS, tool_choice="none", **GREEDY
        )
        assert made.choices[0].message.content


@checks("chat tools: loops with the messages of parse and of the stream helper")
def parsed_loops(at: ServedModel) -> None:
    client = _client(at)
    tools: Any = [openai.pydantic_function_tool(Forecast)]
    made = client.chat.completions.parse(model=at.model, messages=ASKED, tools=tools, **ONE_CALL)
    with client.chat.completions.stream(model=at.model, messages=ASKED, tools=tools, **ONE_CALL) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    for answer in (made, streamed):
        message: Any = answer.choices[0].message
        (call,) = message.tool_calls
        assert isinstance(call.function.parsed_arguments, Forecast)
        for sent in (message, message.model_dump(warnings=False)):
            messages: Any = [*ASKED, sent, {"role": "tool", "tool_call_id": call.id, "content": "blue"}]
            again = client.chat.completions.create(
                model=at.model, messages=messages, tools=tools, tool_choice="none", **GREEDY
            )
            assert again.choices[0].message.content
    form: Any = {"model": at.model, "response_format": Forecast, "temperature": 0, "max_tokens": 80}
    first = client.chat.completions.parse(messages=ASKED, **form).choices[0].message
    turns: Any = [*ASKED, first, {"role": "user", "content": "And then?"}]
    assert client.chat.completions.parse(messages=turns, **form).choices[0].message.parsed


@checks("a full context has a code, and words that clients know")
def full_context(at: ServedModel) -> None:
    client = _client(at)
    long = at.long_text
    create: Any = client.chat.completions.create
    for ask in (
        lambda: create(model=at.model, messages=[{"role": "user", "content": long}]),
        lambda: client.responses.create(model=at.model, input=long),
        lambda: client.completions.create(model=at.model, prompt=long),
    ):
        error = refused(openai.BadRequestError, ask)
        assert error.code == "context_length_exceeded"
        assert re.search(r"prompt is too long[^0-9]*\d+\s*tokens?\s*>\s*\d+", str(error)), error
        assert re.search(r"maximum context length is \d+ tokens", str(error)), error


# ---------------------------------------------------------------- completions, embeddings


@checks("completions: list, echo, logprobs, n, streamed")
def completions(at: ServedModel) -> None:
    client = _client(at)
    made = client.completions.create(model=at.model, prompt=["One, two,", "a, b,"], n=2, max_tokens=4, seed=1)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    made = client.completions.create(model=at.model, prompt="One, two,", echo=True, logprobs=1, **GREEDY)
    choice = made.choices[0]
    assert choice.text.startswith("One, two,") and choice.logprobs is not None
    assert choice.logprobs.token_logprobs and choice.logprobs.token_logprobs[0] is None
    stream = client.completions.create(model=at.model, prompt="One, two,", stream=True, **GREEDY)
    assert "One, two," + "".join(chunk.choices[0].text for chunk in stream) == choice.text


@checks("embeddings: base64 as by default, float, dimensions, tokens")
def embeddings(at: ServedModel) -> None:
    client = _client(at)
    (plain,) = client.embeddings.create(model=at.model, input="Hello!").data
    (floats,) = client.embeddings.create(model=at.model, input="Hello!", encoding_format="float").data
    assert plain.embedding == floats.embedding or max(map(_difference, plain.embedding, floats.embedding)) < 1e-6
    assert math.isclose(sum(value * value for value in floats.embedding), 1, rel_tol=1e-3)
    short = client.embeddings.create(model=at.model, input=["Hello!", "Bye!"], dimensions=8)
    assert [len(each.embedding) for each in short.data] == [8, 8] and short.usage.prompt_tokens > 0
    assert len(client.embeddings.create(model=at.model, input=[[1, 2, 3], [4]]).data) == 2


def _difference(one: float, other: float) -> float:
    return abs(one - other)


# ---------------------------------------------------------------- responses


@checks("responses: create")
def responses(at: ServedModel) -> None:
    made = _client(at).responses.create(
        model=at.model, instructions="Be brief.", input="Hello!", temperature=0, max_output_tokens=16
    )
    assert made.output_text and made.usage is not None and made.usage.output_tokens > 0
    assert made.status in ("completed", "incomplete") and made.model == at.model


@checks("responses: streamed")
def responses_stream(at: ServedModel) -> None:
    stream = _client(at).responses.create(
        model=at.model, input="Hello!", temperature=0, max_output_tokens=16, stream=True
    )
    events = list(stream)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[0].type == "response.created"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete"), last.type
    assert text and text == last.response.output_text


@checks("responses: stream helper")
def responses_stream_helper(at: ServedModel) -> None:
    with _client(at).responses.stream(
        model=at.model, input=ASKED, text_format=Forecast, temperature=0, max_output_tokens=80
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Forecast)


@checks("responses: parse")
def responses_parse(at: ServedModel) -> None:
    made = _client(at).responses.parse(
        model=at.model, input=ASKED, text_format=Forecast, temperature=0, max_output_tokens=80
    )
    assert isinstance(made.output_parsed, Forecast)


def _calls(response: Any) -> list[Any]:
    return [item for item in response.output if item.type == "function_call"]


def _ask_for_a_call(at: ServedModel, **options: Any) -> Any:
    return _client(at).responses.create(
        model=at.model,
        input=ASKED,
        tools=RESPONSES_TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=120,
        **options,
    )


@checks("responses tools: a loop, by items sent back and by previous_response_id")
def responses_tools(at: ServedModel) -> None:
    client, made = _client(at), _ask_for_a_call(at)
    (call,) = _calls(made)
    Forecast.model_validate_json(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "blue"}'}
    follow: Any = {"model": at.model, "temperature": 0, "max_output_tokens": 16}
    follow |= {"tools": RESPONSES_TOOLS, "tool_choice": "none"}
    said = [
        client.responses.create(input=[*ASKED, *made.output, result], **follow).output_text,
        client.responses.create(input=[result], previous_response_id=made.id, **follow).output_text,
    ]
    assert said[0] and said[0] == said[1], said


@checks("responses tools: streamed")
def responses_tools_stream(at: ServedModel) -> None:
    events: Iterable[Any] = _ask_for_a_call(at, stream=True)
    pieces = [event for event in events if event.type in CALL_EVENTS]
    assert "".join(event.delta for event in pieces[:-1]) == pieces[-1].arguments
    Forecast.model_validate_json(pieces[-1].arguments)


@checks("responses: previous_response_id, retrieve, input_items, delete")
def responses_stored(at: ServedModel) -> None:
    client = _client(at)
    options: Any = {"model": at.model, "temperature": 0, "max_output_tokens": 16}
    first = client.responses.create(input="My name is Ada.", **options)
    second = client.responses.create(input="What is my name?", previous_response_id=first.id, **options)
    assert second.previous_response_id == first.id and first.usage and second.usage
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert len(client.responses.input_items.list(second.id).data) >= 1
    client.responses.delete(first.id)
    refused(openai.NotFoundError, lambda: client.responses.retrieve(first.id))


@checks("responses: background, retrieve until done, cancel")
def responses_background(at: ServedModel) -> None:
    client = _client(at)
    made = client.responses.create(model=at.model, input="Hello!", max_output_tokens=16, background=True)
    assert made.status in ("queued", "in_progress", "completed", "incomplete")
    while made.status in ("queued", "in_progress"):
        made = client.responses.retrieve(made.id)
    assert made.status in ("completed", "incomplete") and made.output_text
    long: Any = {"ignore_eos": True}
    made = client.responses.create(model=at.model, input="Hello!", background=True, extra_body=long)
    assert client.responses.cancel(made.id).status in ("cancelled", "incomplete")  # the latter if it was quick


# ---------------------------------------------------------------- errors


@checks("errors: each as the package's own class")
def errors(at: ServedModel) -> None:
    create = _client(at).chat.completions.create
    error = refused(openai.BadRequestError, lambda: create(model=at.model, messages=HELLO, temperature=9))
    assert error.param == "temperature" and error.request_id
    refused(openai.NotFoundError, lambda: create(model="no-such-model", messages=HELLO))
    refused(openai.NotFoundError, lambda: _client(at).responses.retrieve("resp_none"))
