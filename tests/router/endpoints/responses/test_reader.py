"""Items, tools and parameters of a request for a response, as a conversation."""

import base64
from typing import Any

import msgspec
import pytest

from router.chat.conversation import Conversation, Message, Tool, ToolCall, ToolChoice
from router.endpoints.responses.reader import Asked, fitted, responses_conversation
from router.http.body import parse
from router.wire.errors import ApiError, invalid
from router.wire.responses_types import ResponsesRequest

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes", "annotations": []}]}
USER = {"role": "user", "content": "x"}


def read(input: Any = "x", before: list[dict[str, Any]] | None = None, **fields: Any) -> Conversation:
    body = msgspec.json.encode({"model": "m", "input": input} | fields)
    return responses_conversation(Asked(parse(ResponsesRequest, body), before or []))


def test_a_text_is_the_users_message() -> None:
    assert read("Hello").messages == (Message("user", "Hello"),)


def test_one_turn_of_the_model_is_one_message() -> None:
    other = CALL | {"call_id": "c2", "name": "g"}
    messages = read([USER, THOUGHT, SAID, CALL, other, OUTPUT, THOUGHT, CALL, SAID, SAID]).messages
    calls = (ToolCall("c1", "f", "{}"), ToolCall("c2", "g", "{}"))
    assert messages[1:] == (
        Message("assistant", "yes", "hm", calls),
        Message("tool", "3", call_id="c1", name="f"),
        Message("assistant", "", "hm", calls[:1]),
        Message("assistant", "yes"),
        Message("assistant", "yes"),
    )


def test_parts() -> None:
    file = {"type": "input_file", "filename": "a", "file_data": base64.b64encode(b"file").decode()}
    parts = [{"type": "input_text", "text": "one"}, {"type": "refusal", "refusal": "no"}, file]
    assert read([{"role": "user", "content": parts}]).messages[0].text == "one\nno\nfile"
    assert read([USER, CALL, OUTPUT | {"output": parts[:1]}]).messages[-1].text == "one"


def test_thinking_comes_of_content_else_of_the_summary() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "x"}
    assert read([USER, summary, SAID]).messages[1] == Message("assistant", "yes", "short")
    nothing = {"type": "reasoning", "summary": [], "content": None}
    assert read([USER, nothing, SAID]).messages[1] == Message("assistant", "yes")


def test_systems_messages_at_the_beginning_are_one() -> None:
    system, developer = ({"role": role, "content": role} for role in ("system", "developer"))
    before = [{"type": "message"} | item for item in (developer, USER)]
    messages = read([system, USER, developer], before, instructions="first").messages
    assert [message.role for message in messages] == ["system", "user", "system", "user", "system"]
    assert messages[0].text == "first\n\ndeveloper"


def test_calls_that_were_cut_off_are_left_out() -> None:
    assert len(read([USER, CALL | {"status": "incomplete"}]).messages) == 1


def test_tools_and_choices() -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
    tools = [tool, {"type": "function", "name": "g", "strict": False, "parameters": None}]
    conversation = read(tools=tools, parallel_tool_calls=False)
    assert conversation.tools == (Tool("f", "d", {"type": "object"}, True), Tool("g"))
    assert conversation.choice == ToolChoice() and not conversation.parallel
    named = read(tools=tools, tool_choice={"type": "function", "name": "g"})
    assert named.choice == ToolChoice("required", ("g",)) and not named.parallel
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    assert read(tools=tools, tool_choice=allowed).choice == ToolChoice("auto", ("f",))


def test_thinking() -> None:
    thinking = read(reasoning={"effort": "low", "summary": "auto"}, thinking_token_budget=9).thinking
    assert (thinking.enabled, thinking.effort, thinking.budget) == (True, "low", 9)
    assert read(reasoning={"effort": "none"}).thinking.enabled is False
    assert read(reasoning=None).thinking.enabled is None


CODEX = {
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "", "strict": False, "parameters": {}},
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Sub-agents.",
            "tools": [{"type": "function", "name": "wait", "description": "", "strict": False, "parameters": {}}],
        },
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x": "y"},
}
OPENAI_DUMP = {  # items as `model_dump()` of the openai package writes them
    "model": "m",
    "input": [
        USER,
        {"id": "rs_1", "summary": [], "type": "reasoning", "content": None, "encrypted_content": None, "status": None},
        {
            "id": "msg_1",
            "content": [{"annotations": [], "text": "yes", "type": "output_text", "logprobs": None}],
            "role": "assistant",
            "status": "completed",
            "type": "message",
            "phase": None,
        },
        CALL | {"id": "fc_1", "async_": None, "caller": None, "namespace": None, "status": "completed"},
        OUTPUT,
    ],
    "max_tool_calls": None,
    "n": None,
}


@pytest.mark.parametrize("body", [CODEX, OPENAI_DUMP])
def test_what_clients_send(body: dict[str, Any]) -> None:
    messages = responses_conversation(Asked(parse(ResponsesRequest, msgspec.json.encode(body)))).messages
    assert [message.role for message in messages][-2:] == ["assistant", "tool"]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([CALL | {"arguments": 3}], "input[0].arguments"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"type": 3}], "input[0].type"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "input[0].content[0].file_data"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], "input[0].content[0].file_id"),
        ([USER, OUTPUT | {"output": [{"type": "input_image"}]}], "input[1].output[0]"),
        ([{"id": "x"}], "input[0].id"),
    ],
)
def test_faults_have_their_places(items: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(items)
    assert caught.value.param == param


def test_the_fewest_messages_are_left_out() -> None:
    """The system's messages and the last question stay; no result is without its call."""
    said = [Message("system", "s"), Message("user", "1"), Message("assistant", "2"), Message("user", "3")]
    for number in range(4):
        said += [Message("assistant", str(number)), Message("tool", str(number))]

    def prepare(most: int) -> Any:
        def made(conversation: Conversation) -> str:
            if len(conversation.messages) > most:
                raise invalid("too long", "input", "context_length_exceeded")
            return "".join(message.text for message in conversation.messages)

        return made

    conversation = Conversation(tuple(said))
    assert fitted(conversation, prepare(12)) == "s12300112233"
    assert fitted(conversation, prepare(11)) == "s300112233"
    assert fitted(conversation, prepare(9)) == "s3112233"
    assert fitted(conversation, prepare(4)) == "s333"
    with pytest.raises(ApiError) as refused:
        fitted(conversation, prepare(3))
    assert refused.value.code == "context_length_exceeded"
