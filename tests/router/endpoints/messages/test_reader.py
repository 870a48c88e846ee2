"""Requests of Messages become conversations: every block, every way to say a thing, and what is refused."""

import base64
import json
from typing import Any

import pytest

from router.chat.conversation import Conversation, Message, Thinking, ToolCall, ToolChoice
from router.endpoints.messages.reader import generation_request, messages_conversation
from router.http.body import parse
from router.wire.errors import ApiError
from router.wire.messages_types import CountTokensRequest, MessagesRequest

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Tromsø", "days": 1.0}}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def read(**fields: Any) -> Conversation:
    body = {"model": "m", "max_tokens": 9, "messages": [HELLO]} | fields
    return messages_conversation(parse(MessagesRequest, json.dumps(body).encode()))


def said(*content: Any) -> str:
    """The text of a user's message with these blocks."""
    (message,) = read(messages=[{"role": "user", "content": list(content)}]).messages
    return message.text


def refused(**fields: Any) -> str | None:
    def read_all() -> None:
        read(**fields)
        generation_request(parse(MessagesRequest, json.dumps({"model": "m", "messages": [HELLO], **fields}).encode()))

    fields = {"max_tokens": 9} | fields
    with pytest.raises(ApiError) as error:
        read_all()
    assert error.value.status == 400 and error.value.param is not None
    return error.value.param


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def test_texts_and_the_system() -> None:
    assert read().messages == (Message("user", "Hello"),)
    system = [text("x-anthropic-billing-header: cc_version=2; cch=f00;"), text("Be brief.", **MARK), text("Be kind.")]
    assert read(system=system).messages[0] == Message("system", "Be brief.\nBe kind.")
    assert read(system="Be brief.").messages[0] == Message("system", "Be brief.")
    assert len(read(system=[]).messages) == len(read(system="").messages) == 1
    later = read(messages=[HELLO, {"role": "system", "content": "Now in French."}, HELLO])
    assert [message.role for message in later.messages] == ["user", "system", "user"]
    assert read(messages=[{"role": "user", "content": []}]).messages == (Message("user"),)


def test_turns_of_one_role_are_one() -> None:
    answered = {"role": "assistant", "content": "a"}
    turns = [HELLO, HELLO, answered, {"role": "assistant", "content": [text("b")]}, HELLO]
    assert read(messages=turns).messages == (
        Message("user", "Hello\nHello"),
        Message("assistant", "a\nb"),
        Message("user", "Hello"),
    )


def test_documents_and_search_results() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Once."}
    assert said(text("Read:"), {"type": "document", "source": plain, **MARK}) == "Read:\nOnce."
    titled = {
        "type": "document",
        "source": plain,
        "title": "A tale",
        "context": "Old.",
        "citations": {"enabled": False},
    }
    assert said(titled) == "A tale\nOld.\nOnce."
    encoded = {"type": "base64", "media_type": "text/plain", "data": base64.b64encode("naïve".encode()).decode()}
    assert said({"type": "document", "source": encoded}) == "naïve"
    for content in ("a\nb", [text("a"), text("b")]):
        assert said({"type": "document", "source": {"type": "content", "content": content}}) == "a\nb"
    found = {"type": "search_result", "source": "https://x", "title": "X", "content": [text("a"), text("b")]}
    assert said(found) == "X\nhttps://x\na\nb"


def reference(name: str) -> dict[str, str]:
    """What a client's search of tools has found."""
    return {"type": "tool_reference", "tool_name": name}


def test_calls_and_results_in_order() -> None:
    thought = {"type": "thinking", "thinking": "look", "signature": "sig"}
    turns = [
        HELLO,
        {
            "role": "assistant",
            "content": [thought, {"type": "redacted_thinking", "data": "x"}, text("Let me see."), CALL],
        },
        {
            "role": "user",
            "content": [
                text("first"),
                {"type": "tool_result", "tool_use_id": "t1", "content": "-3", **MARK},
                {"type": "tool_result", "tool_use_id": "t2", "content": [text("a"), text("b")], "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "tool_result", "tool_use_id": "t4", "content": [reference("a"), reference("b")]},
                text("then"),
                text("last"),
            ],
        },
    ]
    assert read(messages=turns, tools=[TOOL]).messages[1:] == (
        Message("assistant", "Let me see.", "look", (ToolCall("t1", "weather", '{"city": "Tromsø", "days": 1.0}'),)),
        Message("user", "first"),
        Message("tool", "-3", call_id="t1", name="weather"),
        Message("tool", "Error: a\nb", call_id="t2"),
        Message("tool", "", call_id="t3"),
        Message("tool", "a\nb", call_id="t4"),
        Message("user", "then\nlast"),
    )


def test_an_answer_may_be_begun() -> None:
    conversation = read(messages=[HELLO, {"role": "assistant", "content": [text("The best"), text("is (")]}])
    assert conversation.prefill == "The best\nis (" and len(conversation.messages) == 1
    assert conversation.thinking == Thinking(enabled=False)
    begun = {"role": "assistant", "content": "x"}
    assert refused(messages=[HELLO, begun], thinking={"type": "adaptive"}) == "thinking"
    assert refused(messages=[HELLO, {"role": "assistant", "content": [CALL]}]) == "messages[1].content[0]"
    schema = {"type": "json_schema", "schema": {}}
    assert refused(messages=[HELLO, begun], output_config={"format": schema}) == "messages"


def test_tools_and_choices() -> None:
    full = TOOL | {"type": "custom", "description": "Weather.", "strict": True, "eager_input_streaming": True} | MARK
    full |= {"input_examples": [{"city": "Oslo"}], "allowed_callers": ["direct"], "defer_loading": True}
    (tool,) = read(tools=[full]).tools
    assert (tool.name, tool.parameters, tool.strict) == ("weather", TOOL["input_schema"], True)
    assert tool.description == 'Weather.\nExample of the input: {"city": "Oslo"}'

    def choice(**fields: Any) -> tuple[ToolChoice, bool]:
        conversation = read(tools=[TOOL], tool_choice=fields)
        return conversation.choice, conversation.parallel

    assert choice(type="auto") == (ToolChoice("auto"), True)
    assert choice(type="any", disable_parallel_tool_use=True) == (ToolChoice("required"), False)
    named = ToolChoice("required", ("weather",))
    assert choice(type="tool", name="weather") == (named, False)
    assert choice(type="tool", name="weather", disable_parallel_tool_use=False) == (named, True)
    assert choice(type="none") == (ToolChoice("none"), True)


def test_thinking_and_effort() -> None:
    assert read().thinking == Thinking()
    enabled = {"type": "enabled", "budget_tokens": 2000, "display": "omitted"}
    assert read(thinking=enabled).thinking == Thinking(enabled=True, budget=2000)
    adaptive = read(thinking={"type": "adaptive"}, output_config={"effort": "xhigh"})
    assert adaptive.thinking == Thinking(enabled=True, effort="xhigh")
    assert read(thinking={"type": "disabled"}, output_config={"effort": "low"}).thinking == Thinking(enabled=False)


def test_sampling_and_form() -> None:
    fields = {"stop_sequences": ["x"], "temperature": 1, "top_p": 0.5, "top_k": 7, "stream": True}
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    for form in ({"output_config": {"format": schema}}, {"output_format": schema}):
        body = {"model": "m", "max_tokens": 9, "messages": [HELLO]} | fields | form
        request = generation_request(parse(MessagesRequest, json.dumps(body).encode()))
        assert (request.stop, request.temperature, request.top_p, request.top_k) == (["x"], 1, 0.5, 7)
        assert request.response_format is not None and request.response_format.json_schema.schema == {"type": "object"}


def test_what_clients_send_and_means_nothing_here() -> None:
    read(
        metadata={"user_id": "user_1"},
        service_tier="auto",
        container=None,
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        mcp_servers=[],
        inference_geo="eu",
        diagnostics={"previous_message_id": None},
        speed="standard",
        cache_control={"type": "ephemeral", "ttl": "5m", "scope": "global"},
    )
    parse(CountTokensRequest, json.dumps({"model": "m", "messages": [HELLO], "tools": [TOOL]}).encode())


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x"}}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([IMAGE], "messages[0].content[0]"),
        ([text("a"), {"type": "document", "source": PDF}], "messages[0].content[1].source"),
        ([{"type": "document", "source": {"type": "url", "url": "x"}}], "messages[0].content[0].source"),
        ([{"type": "document", "source": {"type": "file", "file_id": "x"}}], "messages[0].content[0].source"),
        (
            [{"type": "document", "source": {"type": "base64", "media_type": "text/csv", "data": "%"}}],
            "messages[0].content[0].source.data",
        ),
        ([{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}], "messages[0].content[0].content[0]"),
        ([CALL], "messages[0].content[0].type"),
        ([{"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}], "messages[0].content[0].type"),
        (
            [{"type": "search_result", "source": "x", "title": "x", "content": [], "citations": {"enabled": True}}],
            "messages[0].content[0].citations.enabled",
        ),
    ],
)
def test_content_that_is_refused(content: list[Any], param: str) -> None:
    assert refused(messages=[{"role": "user", "content": content}]) == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "output_format": {"type": "json_schema", "schema": {"type": "object"}},
            },
            "output_format",
        ),
        ({"temperature": 1.5}, "temperature"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"n": 2}, "n"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)  # fmt: skip
def test_fields_that_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == param


def test_max_tokens_must_be_there() -> None:
    with pytest.raises(ApiError) as missing:
        parse(MessagesRequest, json.dumps({"model": "m", "messages": [HELLO]}).encode())
    assert (missing.value.param, missing.value.code) == ("max_tokens", "missing_required_parameter")
