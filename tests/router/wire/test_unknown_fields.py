"""Fields that no type knows: passed over in messages, parts and tools, refused everywhere else. Histories of others."""

import json
from typing import Any

import pytest

from router.chat.conversation import Message, ToolCall
from router.endpoints.messages.reader import messages_conversation
from router.endpoints.responses.reader import Asked, responses_conversation
from router.http.body import parse
from router.prepare.chat_reader import chat_conversation
from router.wire.errors import ApiError
from router.wire.messages_types import MessagesRequest
from router.wire.requests import Body, ChatRequest, TokenizeRequest
from router.wire.responses_types import ResponsesRequest

USER = {"role": "user", "content": "x"}
TEXT = {"response_format": {"type": "text", "x": 1}}
UNMARKED = {"system": [{"type": "text", "text": "x", "cache_control": {"ttl": "5m"}}]}
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "x-ui": {"cache_control": 1}}  # a schema is nobody's


def passed_over(kind: type[Body], body: dict[str, Any]) -> tuple[Any, set[str]]:
    names: set[str] = set()
    return parse(kind, json.dumps({"model": "m"} | body).encode(), names), names


CALL = {
    "id": "c",
    "type": "function",
    "index": 0,
    "function": {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}},
    "extra_content": {"google": {"thought_signature": "x"}},
}
ANSWER = {
    "role": "assistant",
    "content": [{"type": "text", "text": "Yes.", "role": "assistant", "tool_calls": [CALL], "cache_control": {}}],
    "tool_calls": [CALL],
    "id": "msg_1",
    "parsed": {"a": 1},
    "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
    "thinking_blocks": [],
}
TOOL = {
    "type": "function",
    "cache_control": {"type": "ephemeral"},
    "function": {"name": "f", "parameters": PARAMETERS, "returns": {}},
}


def test_a_chat() -> None:
    request, names = passed_over(ChatRequest, {"messages": [USER | {"timestamp": 3}, ANSWER], "tools": [TOOL]})
    assert names == {
        "messages[].timestamp",
        "messages[].id",
        "messages[].parsed",
        "messages[].reasoning_details",
        "messages[].thinking_blocks",
        "messages[].content[].role",
        "messages[].content[].tool_calls",
        "messages[].content[].cache_control",
        "messages[].tool_calls[].extra_content",
        "messages[].tool_calls[].function.parsed_arguments",
        "tools[].cache_control",
        "tools[].function.returns",
    }
    conversation = chat_conversation(request)
    assert conversation.messages[1] == Message("assistant", "Yes.", calls=(ToolCall("c", "f", "{}"),))
    assert conversation.tools[0].parameters == PARAMETERS
    _, names = passed_over(TokenizeRequest, {"messages": [USER | {"id": "x"}]})
    assert names == {"messages[].id"}


def test_messages() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}, "toolset_name": "s"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a", "y": 1}]}
    turns = [USER | {"id": "m"}, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    request, names = passed_over(
        MessagesRequest,
        {
            "max_tokens": 1,
            "system": [{"type": "text", "text": "s", "id": 1}],
            "messages": turns,
            "tools": [{"name": "f", "input_schema": PARAMETERS, "returns": {}, "cache_control": {"type": "ephemeral"}}],
        },
    )
    assert names == {
        "messages[].id",
        "system[].id",
        "messages[].content[].toolset_name",
        "messages[].content[].content[].y",
        "tools[].returns",
    }
    assert messages_conversation(request).messages[2].calls == (ToolCall("t", "f", '{"x": 1}'),)


def test_responses() -> None:
    tool = {"type": "function", "name": "f", "parameters": PARAMETERS, "returns": {}}
    said = {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "yes", "parsed": None, "id": 1}],
        "agent": "a",
    }
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": "é"}, "parsed_arguments": {}}
    request, names = passed_over(ResponsesRequest, {"input": [USER, said, called], "tools": [tool]})
    assert not names  # items and tools are read later
    conversation = responses_conversation(Asked(request, passed_over=names))
    assert names == {
        "input[].agent",
        "input[].content[].parsed",
        "input[].content[].id",
        "input[].parsed_arguments",
        "tools[].returns",
    }
    assert conversation.messages[1] == Message("assistant", "yes", calls=(ToolCall("c", "f", '{"a": "é"}'),))


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatRequest, {"messages": [USER | {"id": 1}], "x": 1}, "x"),
        (ChatRequest, {"messages": [USER], "stream_options": {"x": 1}}, "stream_options.x"),
        (ChatRequest, {"messages": [USER | {"id": 1}], **TEXT}, "response_format.x"),
        (ChatRequest, {"messages": [USER | {"id": 1, "name": 3}]}, "messages[0].name"),
        (ChatRequest, {"messages": [{"id": 1, "content": "x"}]}, "messages[0].role"),
        (ChatRequest, {"messages": [USER | {"content": [{"type": "text", "text": 1, "x": 1}]}]},
         "messages[0].content[0].text"),
        (ChatRequest, {"messages": [USER | {"content": [{"type": "x", "x": 1}]}]}, "messages[0].content[0].type"),
        (ChatRequest, {"messages": [USER], "tools": [TOOL | {"type": "x"}]}, "tools[0].type"),
        (ChatRequest, {"messages": [USER], "tools": [TOOL | {"function": {"name": "a b", "x": 1}}]},
         "tools[0].function.name"),
        (ChatRequest, {"messages": [USER], "tool_choice": {"type": "function", "function": {"name": "f"}, "x": 1}},
         "tool_choice.x"),
        (MessagesRequest, {"max_tokens": 1, "messages": [USER | {"id": 1}], "metadata": {"x": 1}}, "metadata.x"),
        (MessagesRequest, {"max_tokens": 1, "messages": [USER | {"content": [{"type": "text", "x": 1}]}]},
         "messages[0].content[0].text"),
        (MessagesRequest, {"max_tokens": 1, "messages": [USER], **UNMARKED}, "system[0].cache_control.type"),
        (ResponsesRequest, {"input": "x", "text": {"x": 1}}, "text.x"),
    ],
)  # fmt: skip
def test_what_is_still_refused(kind: type[Body], body: dict[str, Any], param: str) -> None:
    names: set[str] = set()
    with pytest.raises(ApiError) as caught:
        parse(kind, json.dumps({"model": "m"} | body).encode(), names)
    assert caught.value.param == param and caught.value.status == 400


def test_a_body_that_breaks_off_is_no_json_whatever_came_before() -> None:
    with pytest.raises(ApiError) as caught:
        parse(ChatRequest, b'{"nonsense": 1, "messages": [')
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    "kind",
    ["web_search", "web_search_preview_2025_03_11", "web_search_2025_08_26", "image_generation", "tool_search", "mcp"],
)
def test_hosted_tools_are_left_out(kind: str) -> None:
    hosted = {"type": kind, "external_web_access": False}
    request, names = passed_over(ChatRequest, {"messages": [USER], "tools": [hosted, TOOL]})
    assert f"tools[type={kind}]" in names and [tool.name for tool in chat_conversation(request).tools] == ["f"]
    request, names = passed_over(ResponsesRequest, {"input": "x", "tools": [hosted]})
    assert not responses_conversation(Asked(request, passed_over=names)).tools and names == {f"tools[type={kind}]"}


@pytest.mark.parametrize("kind", ["web_search_20250305", "web_fetch_20250910", "code_execution_20250825"])
def test_hosted_tools_of_messages_are_left_out_beside_others(kind: str) -> None:
    hosted, own = {"type": kind, "name": "web"}, {"name": "f", "input_schema": {}}
    asked: dict[str, Any] = {"max_tokens": 1, "messages": [USER]}
    request, names = passed_over(MessagesRequest, asked | {"tools": [own, hosted]})
    assert [tool.name for tool in request.tools] == ["f"] and names == {f"tools[type={kind}]"}
    with pytest.raises(ApiError) as caught:  # it asks for a search, and nothing else
        parse(
            MessagesRequest, json.dumps({"model": "m", "max_tokens": 1, "messages": [USER], "tools": [hosted]}).encode()
        )
    assert (caught.value.param, caught.value.code) == ("tools[0].type", "unsupported_tool")


def test_what_hosted_tools_have_done_is_left_out_of_a_history() -> None:
    use = {"type": "server_tool_use", "id": "srv", "name": "web_search", "input": {"query": "q"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srv", "content": []}
    text = {"type": "text", "text": "Yes.", "citations": [{"type": "web_search_result_location"}]}
    turns = [USER, {"role": "assistant", "content": [use, found, text]}, USER]
    request, names = passed_over(MessagesRequest, {"max_tokens": 1, "messages": turns})
    assert names == {f"messages[].content[type={kind}]" for kind in ("server_tool_use", "web_search_tool_result")}
    assert messages_conversation(request).messages[1] == Message("assistant", "Yes.")


@pytest.mark.parametrize("kind", ["custom", "local_shell", "computer_use_preview", "apply_patch", "web_searching"])
def test_tools_that_the_client_would_run_are_refused(kind: str) -> None:
    request, names = passed_over(ResponsesRequest, {"input": "x", "tools": [{"type": kind, "name": "x"}]})
    with pytest.raises(ApiError) as caught:
        responses_conversation(Asked(request, passed_over=names))
    assert (caught.value.param, caught.value.code) == ("tools[0].type", "unsupported_tool")


# ---------------------------------------------------------------- histories of other servers


def read(*messages: dict[str, Any]) -> tuple[Message, ...]:
    return chat_conversation(passed_over(ChatRequest, {"messages": [USER, *messages]})[0]).messages[1:]


@pytest.mark.parametrize(
    ("answer", "read_as"),
    [
        ({"content": []}, Message("assistant")),
        ({"content": None}, Message("assistant")),
        ({}, Message("assistant")),
        ({"content": None, "reasoning_content": "hm"}, Message("assistant", "", "hm")),
        ({"content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "y"}]},
         Message("assistant", "y", "hm")),
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": t} for t in "hm"]}]},
         Message("assistant", "", "hm")),
        ({"content": [{"type": "reasoning", "text": "a"}, {"type": "reasoning", "reasoning": "b"}]},
         Message("assistant", "", "a\nb")),
        ({"content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "y"}]},
         Message("assistant", "y")),
        ({"content": [{"type": "thinking", "thinking": "a"}], "reasoning": "b"}, Message("assistant", "", "b")),
        ({"content": "", "refusal": "no", "annotations": [{"type": "url_citation"}]}, Message("assistant", "no")),
    ],
)  # fmt: skip
def test_answers_of_all_kinds(answer: dict[str, Any], read_as: Message) -> None:
    assert read({"role": "assistant"} | answer) == (read_as,)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"q": "é", "n": [1]}, '{"q": "é", "n": [1]}'), (None, "{}"), ("{}", "{}"), ("{", "{")],
)
def test_arguments_of_past_calls(arguments: Any, text: str) -> None:
    call = {"id": "c", "type": None, "function": {"name": "f", "arguments": arguments}}
    (message,) = read({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message.calls == (ToolCall("c", "f", text),)
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    asked = Asked(passed_over(ResponsesRequest, {"input": [USER, item]})[0])
    assert responses_conversation(asked).messages[1].calls == message.calls
    use = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    turns = [USER, {"role": "assistant", "content": [use]}, USER]
    request, _ = passed_over(MessagesRequest, {"max_tokens": 1, "messages": turns})
    assert messages_conversation(request).messages[1].calls == message.calls


def test_a_message_may_be_the_beginning_of_the_answer() -> None:
    begun = {"role": "assistant", "content": "Yes,"}
    ways: list[dict[str, Any]] = [{"messages": [USER, begun | {"prefix": True}]}]
    ways += [{"messages": [USER, begun], "continue_final_message": True}]
    for sent in ways:
        conversation = chat_conversation(passed_over(ChatRequest, sent)[0])
        assert conversation.prefill == "Yes," and len(conversation.messages) == 1
    assert not chat_conversation(passed_over(ChatRequest, {"messages": [begun | {"prefix": True}, USER]})[0]).prefill


def test_calls_from_before_they_had_ids() -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    messages = read(called, {"role": "function", "name": "f", "content": "3"})
    (call,) = messages[0].calls
    assert (call.name, call.arguments) == ("f", "{}")
    assert messages[1] == Message("tool", "3", call_id=call.id, name="f")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}, "messages[1].content"),
        ({"role": "user", "content": "x", "function_call": {"name": "f"}}, "messages[1].function_call"),
        ({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": [1]}}]},
         "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": 3}]}, "messages[1].content[0].thinking"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_in_a_history(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(message)
    assert caught.value.param == param
