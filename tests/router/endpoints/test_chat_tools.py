"""Tools and thinking on `/v1/chat/completions`, as OpenAI's client sees them, from a replica that follows a script."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
import tokenizers

from router.chat.chat_template import ChatTemplate, TemplateError
from router.chat.conversation import Conversation, Message, Tool, ToolCall
from router.config import RouterConfig
from router.text.chat_prompt import chat_prompt
from router.text.tokenizer import Tokenizer
from tests.router.endpoints.thinking import CALL, THINKER
from worker.messages import Failure, Generate

# As gpt-oss's: one call of a message, thinking under another name, results after the last call's name.
HARMONY_TEMPLATE = (
    "{% set last = namespace(name='') %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}{% set last.name = call.name %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to={{ call.name }}<|channel|>commentary<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}<|start|>{{ last.name }}<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if tools %}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK = [{"role": "user", "content": "How is it in Oslo?"}]


@pytest.fixture
def thinker(byte_level_tokenizer_maker: Callable[[], tokenizers.Tokenizer]) -> Tokenizer:
    backend = byte_level_tokenizer_maker()
    backend.add_tokens(["<think>", "</think>"])
    return Tokenizer(backend, ChatTemplate(THINKER, {}))


@pytest.fixture
def says(make_stack: Any, make_replica: Any, thinker: Tokenizer) -> Callable[..., Any]:
    """A server whose model writes a text."""

    def make(text: str, **options: Any) -> Any:
        token_ids = [*thinker.encode(text), thinker.token_id("<|im_end|>")]
        return make_stack(make_replica(script=lambda request: token_ids, **options), tokens=thinker)

    return make


def chat(stack: Any, **fields: Any) -> Any:
    return stack.client.chat.completions.create(model="tiny", **({"messages": ASK, "tools": [WEATHER]} | fields))


@pytest.mark.parametrize("per_step", [1, 3, 100])
def test_a_call(says: Callable[..., Any], per_step: int) -> None:
    stack = says(CALL, per_step=per_step)
    (choice,) = chat(stack).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Oslo"},
    )
    assert call.id.startswith("call_")


@pytest.mark.parametrize("per_step", [1, 3, 100])
def test_a_call_in_a_stream(says: Callable[..., Any], per_step: int) -> None:
    """The id and the name come first and once, then fragments of the arguments, then the reason, then the usage."""
    stack = says("Let me look. " + CALL, per_step=per_step)
    chunks = list(chat(stack, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage is not None and not chunks[-1].choices
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas).strip() == "Let me look."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert calls[0].id and calls[0].function.name == "weather" and calls[0].function.arguments == ""
    assert all(call.id is None and call.function.name is None and call.index == 0 for call in calls[1:])
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Oslo"}
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}


@pytest.mark.parametrize("per_step", [1, 100])
@pytest.mark.parametrize(
    ("text", "fields", "content", "reason"),
    [
        ("<think>\nQuestion: so\n</think>\n\n" + CALL, {"tool_choice": "required"}, "", "tool_calls"),
        ("<think>\nQuestion: so\n</think>\n\nFour. Question: 3", {}, "Four. ", "stop"),
        ("<think>\nQuestion: so\n</think>\n\nFour.", {}, "Four.", "stop"),
        (CALL[:45], {}, "", "length"),
        ("<tool_call>\n{", {"tool_choice": "required"}, "", "length"),
    ],
)
def test_stop_strings_leave_thinking_and_calls_alone(
    says: Callable[..., Any], text: str, fields: dict[str, Any], content: str, reason: str, per_step: int
) -> None:
    """Streams are as whole answers."""
    stack = says(text, per_step=per_step)
    fields = {"stop": ["Question:", "}", "\n", "<tool"], **fields}
    (choice,) = chat(stack, **fields).choices
    assert (choice.message.content or "", choice.finish_reason) == (content, reason)
    chunks = [chunk.choices[0] for chunk in chat(stack, stream=True, **fields)]
    assert ("".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason) == (content, reason)
    if "<think>" in text:
        thought = "".join(getattr(chunk.delta, "reasoning_content", None) or "" for chunk in chunks)
        assert choice.message.reasoning_content == thought == "Question: so"
    called = "".join(call.function.arguments for chunk in chunks for call in chunk.delta.tool_calls or ())
    assert called == "".join(call.function.arguments for call in choice.message.tool_calls or ())
    assert reason != "tool_calls" or json.loads(called) == {"city": "Oslo"}


def test_parallel_calls_and_one_call(says: Callable[..., Any]) -> None:
    two = f"{CALL}\n{CALL.replace('Oslo', 'Rome')}"
    stack = says(two)
    calls = chat(stack).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Oslo", "Rome"]
    assert calls[0].id != calls[1].id
    (choice,) = chat(stack, parallel_tool_calls=False).choices
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
    (choice,) = chat(stack, tool_choice={"type": "function", "function": {"name": "weather"}}).choices
    assert len(choice.message.tool_calls) == 1


def test_without_tools_a_call_is_text(says: Callable[..., Any]) -> None:
    stack = says(CALL)
    for fields in ({"tools": openai.omit}, {"tools": []}, {"tool_choice": "none"}):
        (choice,) = chat(stack, **fields).choices
        assert choice.message.content == CALL and choice.finish_reason == "stop"


def test_thinking_is_apart_from_the_answer(says: Callable[..., Any]) -> None:
    stack = says("<think>\nIt is cold.\n</think>\n\nCold.")
    answer = chat(stack, tools=openai.omit)
    message = answer.choices[0].message
    assert message.content == "Cold." and message.reasoning_content.strip() == "It is cold."
    assert message.reasoning == message.reasoning_content
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    deltas = [chunk.choices[0].delta for chunk in chat(stack, tools=openai.omit, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "Cold."
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == message.reasoning_content


def test_effort_and_history_reach_the_template(says: Callable[..., Any], thinker: Tokenizer) -> None:
    stack = says("Cold.")
    history = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "look",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "-3"}]},
    ]
    chat(stack, messages=history, reasoning_effort="none")
    (request,) = stack.fakes["r0"].requests()
    prompt = thinker.decode(request.prompt_ids, skip_special_tokens=False)
    assert '<think>\nlook\n</think>\n\n<tool_call>\nweather {"city": "Oslo"}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>tool\n-3<|im_end|>" in prompt and prompt.endswith("<think>\n\n</think>\n\n")
    assert '"name": "weather"' in prompt


def test_a_budget_of_thinking(make_stack: Any, make_replica: Any, thinker: Tokenizer) -> None:
    """Thinking is ended for the model after as many tokens, and the answer follows what ended it."""

    def script(request: Generate) -> list[int]:
        produced = thinker.decode(request.output_ids)
        text = "<think>\n" + "a b c d e " * 20 if "</think>" not in produced else produced + "Cold."
        return [*thinker.encode(text), thinker.token_id("<|im_end|>")]

    stack = make_stack(make_replica(script=script), tokens=thinker)
    for stream in (False, True):
        answer = chat(stack, tools=openai.omit, stream=stream, extra_body={"thinking_token_budget": 12})
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
            assert 8 <= answer.usage.completion_tokens_details.reasoning_tokens <= 16
        assert text == "Cold."
    first, second, *_ = stack.fakes["r0"].requests()
    assert first.sampling.max_tokens == 12 and len(second.output_ids) > 12 and second.resumed


def test_required_calls_are_constrained(says: Callable[..., Any]) -> None:
    stack = says(CALL)
    named = {"type": "function", "function": {"name": "weather"}}
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for fields in ({"tool_choice": "required"}, {"tool_choice": named}, {"tool_choice": allowed}, {"tools": [strict]}):
        chat(stack, **fields)
    chat(stack)
    grammars = [request.sampling.grammar for request in stack.fakes["r0"].requests()]
    assert grammars[-1] is None
    read = [json.loads(grammar.text) for grammar in grammars[:-1]]
    assert [grammar.kind for grammar in grammars[:-1]] == ["tool_calls"] * 4
    assert [text["mode"] for text in read] == ["required", "required", "required", "auto"]
    assert all(text["tools"][0]["name"] == "weather" for text in read)


SCHEMA = {"type": "object", "properties": {"c": {"type": "integer"}}, "required": ["c"]}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def test_text_of_a_form_or_calls(says: Callable[..., Any]) -> None:
    """Under `auto` with `response_format` the answer is either; where a call is asked for it is a call."""
    stack = says(CALL)
    (choice,) = chat(stack, response_format=JSON).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    chat(stack, response_format=JSON, tool_choice="required")
    chat(stack, response_format=JSON, tool_choice="none")
    either, required, text = [request.sampling.grammar for request in stack.fakes["r0"].requests()]
    assert (either.kind, required.kind, text.kind) == ("tool_calls", "tool_calls", "json_schema")
    read = json.loads(either.text)
    assert (read["mode"], read["form"]["kind"], json.loads(read["form"]["text"])) == ("auto", "json_schema", SCHEMA)
    assert [tool["name"] for tool in read["tools"]] == ["weather"]
    assert json.loads(required.text)["form"] is None and json.loads(text.text) == SCHEMA
    (choice,) = chat(says('{"c": 3}'), response_format=JSON).choices
    assert choice.finish_reason == "stop" and choice.message.content == '{"c": 3}'


@pytest.mark.parametrize(
    ("fields", "before"),
    [
        ({}, ("</think>", "<think>")),
        ({"reasoning_effort": "high"}, ("</think>", "<think>")),
        ({"reasoning_effort": "none"}, (None, None)),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, (None, None)),  # the prompt has ended it
    ],
)
def test_thinking_may_come_before_what_has_a_form(
    says: Callable[..., Any], fields: dict[str, Any], before: tuple[str | None, str | None]
) -> None:
    stack = says('<think>\nHm.\n</think>\n\n{"c": 3}')
    message = chat(stack, response_format=JSON, tools=openai.omit, **fields).choices[0].message
    assert message.content == '{"c": 3}' and message.reasoning_content == "Hm."
    chat(stack, response_format=JSON, **fields)
    chat(stack, tool_choice="required", **fields)
    text, *others = [request.sampling.grammar for request in stack.fakes["r0"].requests()]
    assert (text.after, text.begin) == before
    thinking = None if before[0] is None else {"begin": "<think>", "end": "</think>", "open": False}
    assert [json.loads(other.text)["thinking"] for other in others] == [thinking, thinking]


def test_thinking_that_the_prompt_begins(
    make_stack: Any, make_replica: Any, byte_level_tokenizer_maker: Callable[[], tokenizers.Tokenizer]
) -> None:
    backend = byte_level_tokenizer_maker()
    backend.add_tokens(["<think>", "</think>"])
    opens = Tokenizer(backend, ChatTemplate(f"{THINKER}<think>\n", {}))
    token_ids = [*opens.encode('Hm.\n</think>\n\n{"c": 3}'), opens.token_id("<|im_end|>")]
    stack = make_stack(make_replica(script=lambda request: token_ids), tokens=opens)
    message = chat(stack, response_format=JSON, tools=openai.omit).choices[0].message
    assert message.content == '{"c": 3}' and message.reasoning_content == "Hm."
    chat(stack, response_format=JSON)
    text, either = [request.sampling.grammar for request in stack.fakes["r0"].requests()]
    assert (text.after, text.begin) == ("</think>", None)
    assert json.loads(either.text)["thinking"] == {"begin": "<think>", "end": "</think>", "open": True}


def test_whose_schema_is_at_fault_is_named(says: Callable[..., Any]) -> None:
    """The replicas' name for the form of a text becomes the client's; that of tools stays."""
    stack = says("x")
    for told, fields, param in (
        ("response_format", {"response_format": JSON}, "response_format"),
        ("response_format", {"extra_body": {"guided_choice": ["a"]}}, "guided_choice"),
        ("tools", {"response_format": JSON}, "tools"),
    ):
        stack.fakes["r0"].fail(Failure("invalid", "not at # is not supported", told))
        with pytest.raises(openai.BadRequestError) as raised:
            chat(stack, **fields)
        assert raised.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "reasoning": "c"}]}, "messages[0].reasoning"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": "%"}}]}]},
            "messages[0].content[0].file.file_data",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ],
)
def test_refusals(says: Callable[..., Any], fields: dict[str, Any], param: str) -> None:
    stack = says("x")
    body = {"model": "tiny", "messages": ASK, "tools": [WEATHER]} | fields
    response = httpx.post(f"{stack.url}/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not stack.fakes["r0"].requests()


def test_files_of_text(says: Callable[..., Any], thinker: Tokenizer) -> None:
    stack = says("x")
    part = {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,SGVsbG8="}}
    chat(stack, messages=[{"role": "user", "content": [{"type": "text", "text": "Read:"}, part]}])
    (request,) = stack.fakes["r0"].requests()
    assert "Read:\nHello<|im_end|>" in thinker.decode(request.prompt_ids, skip_special_tokens=False)


def test_a_template_without_tools_has_them_described(tokenizer: Tokenizer) -> None:
    call = ToolCall("c", "weather", '{"city": "Oslo"}')
    messages = (
        Message("system", "Be brief."),
        Message("user", "How is it?"),
        Message("assistant", calls=(call,)),
        Message("tool", "-3", call_id="c", name="weather"),
        Message("tool", "-4", call_id="d", name="weather"),
    )
    function: Any = WEATHER["function"]
    tools = (Tool(function["name"], function["description"], function["parameters"]),)
    prompt = chat_prompt(Conversation(messages, tools), tokenizer.output_format("auto", "auto"), tokenizer)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n") and json.dumps(function) in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>' in prompt
    results = "<tool_response>\n-3\n</tool_response>\n<tool_response>\n-4\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in prompt
    with pytest.raises(TemplateError):
        chat_prompt(Conversation(messages, tools), tokenizer.output_format("mistral", "auto"), tokenizer)


def test_harmony_has_a_message_for_each_call(byte_level_tokenizer_maker: Callable[[], tokenizers.Tokenizer]) -> None:
    """Each result follows its call, and thinking and text before calls are one."""
    tokenizer = Tokenizer(byte_level_tokenizer_maker(), ChatTemplate(HARMONY_TEMPLATE, {}))
    calls = ToolCall("c", "first", "{}"), ToolCall("d", "second", '{"a": 1}'), ToolCall("e", "third", "{}")
    messages = (
        Message("user", "Go."),
        Message("assistant", "I will look.", "Hm.", calls),
        Message("tool", "one", call_id="c"),
        Message("tool", "two", call_id="d"),
        Message("user", "And?"),
    )
    prompt = chat_prompt(Conversation(messages), tokenizer.output_format("auto", "auto"), tokenizer)
    assert prompt == (
        "<|start|>user<|message|>Go.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI will look.<|end|>"
        "<|start|>assistant to=first<|channel|>commentary<|message|>{}<|call|><|start|>first<|message|>one<|end|>"
        '<|start|>assistant to=second<|channel|>commentary<|message|>{"a": 1}<|call|>'
        "<|start|>second<|message|>two<|end|>"
        "<|start|>assistant to=third<|channel|>commentary<|message|>{}<|call|>"
        "<|start|>user<|message|>And?<|end|>"
    )


def test_parsers_by_setting(make_stack: Any, make_replica: Any, thinker: Tokenizer) -> None:
    """Without parsers, what the model writes is text."""
    text = f"<think>x</think>{CALL}"
    stack = make_stack(
        make_replica(text), tokens=thinker, config=RouterConfig(tool_call_parser="none", reasoning_parser="none")
    )
    assert chat(stack).choices[0].message.content == text
