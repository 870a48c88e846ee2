"""A conversation as the prompt of a model: its messages as chat templates take them, and the template's text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.chat_template import TemplateError
from router.conversation import Conversation, Message, Tool
from router.formats.format import OutputFormat
from router.tokenizer import Tokenizer


def chat_prompt(conversation: Conversation, format: OutputFormat, tokenizer: Tokenizer, answer: bool = True) -> str:
    """The text of a conversation, up to where the model's answer begins, or without that with `answer` False. It has
    its special tokens. Raises TemplateError."""
    tools = conversation.callable_tools
    messages: Sequence[Message] = conversation.messages
    if format.describes_tools:  # the model's template knows no tools
        messages = _described(messages, tools, format)
        tools = ()
    text = tokenizer.render_chat(
        [_for_template(message) for message in messages],
        answer,
        _thinking(conversation) | conversation.arguments,
        [_tool(tool) for tool in tools] or None,
    )
    return text + _prefill(conversation.prefill, text, format) if answer and conversation.prefill else text


def _prefill(prefill: str, prompt: str, format: OutputFormat) -> str:
    """The beginning of an answer, after the end of thinking that the prompt has opened. Raises TemplateError."""
    if format.channels is not None:
        raise TemplateError("the last one must not be the assistant's: this model's answers cannot be begun for it")
    if format.thinking is not None and format.opens_thinking(prompt):
        return f"{format.thinking.end}\n\n{prefill}"
    return prefill


def check_arguments(conversation: Conversation) -> None:
    """Raises TemplateError for a template's variable that has a parameter of its own."""
    for name in ("tools", "reasoning_effort"):
        if name in conversation.arguments:
            raise TemplateError(f"{name!r} is a parameter of the request: send it there", "chat_template_kwargs")


def _thinking(conversation: Conversation) -> dict[str, Any]:
    """The variables by which templates are told how to think. The names are those of Qwen and GLM, DeepSeek, gpt-oss."""
    thinking = conversation.thinking
    variables: dict[str, Any] = {}
    if thinking.enabled is not None:
        variables |= {"enable_thinking": thinking.enabled, "thinking": thinking.enabled}
    if thinking.effort not in (None, "none"):
        variables["reasoning_effort"] = thinking.effort
    return variables


def _for_template(message: Message) -> dict[str, Any]:
    """The message as templates expect it, with the arguments of calls as objects."""
    made: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.name is not None:
        made["name"] = message.name
    if message.thinking:
        made["reasoning_content"] = message.thinking
    if message.calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _object(call.arguments)},
            }
            for call in message.calls
        ]
    if message.call_id is not None:
        made["tool_call_id"] = message.call_id
    return made


def _object(arguments: str) -> Any:
    try:
        read = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return read if isinstance(read, dict) else arguments


def _tool(tool: Tool) -> Mapping[str, Any]:
    """The tool as templates expect it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _described(messages: Sequence[Message], tools: Sequence[Tool], format: OutputFormat) -> list[Message]:
    """The messages for a template without tools: the system's message describes them, calls are the assistant's text,
    results the user's."""
    made: list[Message] = []
    for message in messages:
        if message.role == "tool":
            result = format.result_text(message.text)
            if made and made[-1].role == "user" and message is not messages[0] and _was_result(made[-1], format):
                made[-1] = Message("user", f"{made[-1].text}\n{result}")
            else:
                made.append(Message("user", result))
        elif message.calls:
            calls = [format.call_text(call.name, call.arguments) for call in message.calls]
            made.append(Message("assistant", "\n".join([*([message.text] if message.text else []), *calls])))
        else:
            made.append(message)
    if tools:
        description = format.tools_text([dict(_tool(tool)) for tool in tools])
        if made and made[0].role == "system":
            made[0] = Message("system", f"{made[0].text}\n\n{description}", name=made[0].name)
        else:
            made.insert(0, Message("system", description))
    return made


def _was_result(message: Message, format: OutputFormat) -> bool:
    return message.text.startswith(format.result_text("").partition("\n")[0])
