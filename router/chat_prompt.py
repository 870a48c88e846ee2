"""A conversation as the prompt of a model: its messages as chat templates take them, and the template's text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.chat_template import TemplateError
from router.conversation import Conversation, Message, Tool
from router.formats.format import OutputFormat
from router.tokenizer import Tokenizer


def chat_prompt(conversation: Conversation, format: OutputFormat, tokenizer: Tokenizer) -> str:
    """The text of a conversation, up to where the model's answer begins or goes on. It has its special tokens. Raises
    TemplateError."""
    tools = conversation.callable_tools
    messages: Sequence[Message] = conversation.messages
    if "tools" not in (tokenizer.template_source or "tools"):
        messages = _described(messages, tools, format)
        tools = ()
    if format.channels is not None:
        messages = _one_call_each(messages)
    text = tokenizer.render_chat(
        [_for_template(message, format) for message in messages],
        conversation.begins_answer,
        {**_thinking(conversation), **conversation.arguments},
        [_tool(tool) for tool in tools] or None,
    )
    is_begun = conversation.prefill or conversation.prefill_thinking
    return text + _prefill(conversation, text, format) if is_begun else text


def _prefill(conversation: Conversation, prompt: str, format: OutputFormat) -> str:
    """The beginning of an answer, after thinking that it or the prompt has opened. Raises TemplateError."""
    if format.channels is not None:
        raise TemplateError("the last one must not be the assistant's: this model's answers cannot be begun for it")
    prefill, thinking, marks = conversation.prefill, conversation.prefill_thinking, format.thinking
    if marks is None:
        return prefill
    is_open = format.opens_thinking(prompt)
    if thinking:
        thinking = thinking if is_open else f"{marks.begin}{marks.label}\n{thinking}"
        return f"{thinking}\n{marks.end}\n\n{prefill}" if prefill else thinking
    return f"{marks.end}\n\n{prefill}" if is_open else prefill


def check_arguments(conversation: Conversation) -> None:
    """Raises TemplateError for a template's variable that has a parameter of its own."""
    for name in ("tools", "reasoning_effort"):
        if name in conversation.arguments:
            raise TemplateError(f"{name!r} is a parameter of the request: send it there", "chat_template_kwargs")


def _thinking(conversation: Conversation) -> dict[str, Any]:
    """The variables that tell templates how to think, by the names of Qwen and GLM, of DeepSeek, of gpt-oss."""
    thinking = conversation.thinking
    variables: dict[str, Any] = {}
    if thinking.enabled is not None:
        variables |= {"enable_thinking": thinking.enabled, "thinking": thinking.enabled}
    if thinking.effort not in (None, "none"):
        variables["reasoning_effort"] = thinking.effort
    return variables


def _for_template(message: Message, format: OutputFormat) -> dict[str, Any]:
    """The message as templates expect it, with the arguments of calls as objects."""
    made: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.name is not None:
        made["name"] = message.name
    if message.thinking:
        made["thinking" if format.channels is not None else "reasoning_content"] = message.thinking
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


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The messages for harmony's template: it takes one call of a message, names a result after the last call, and
    refuses a call's message that has both thinking and text."""
    made: list[Message] = []
    waiting: list[Message] = []  # the later calls of the last message with several
    for message in messages:
        if message.role == "tool":
            own = next((call for call in waiting if call.calls[0].id == message.call_id), None)
            if own is not None:
                waiting.remove(own)
                made.append(own)
        else:
            made += waiting
            waiting = []
        if message.calls:
            thinking = "\n\n".join(filter(None, (message.thinking, message.text)))
            first, *later = message.calls
            waiting = [Message("assistant", calls=(call,)) for call in later]
            message = Message("assistant", "", thinking, (first,), name=message.name)
        made.append(message)
    return made + waiting


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
    results the user's. Raises TemplateError where the model's format has no words for that."""
    form = format.tools
    used = tools or any(message.calls or message.role == "tool" for message in messages)
    if not used:
        return list(messages)
    if form is None or not form.instruction:
        raise TemplateError("it has no place for tools", "tools")
    made: list[Message] = []
    was_result = False
    for message in messages:
        if message.role == "tool":
            result = form.result.replace("{name}", message.name or "").replace("{text}", message.text)
            text = f"{made.pop().text}\n{result}" if was_result else result
            made.append(Message("user", text))
        elif message.calls:
            calls = [
                f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': _object(call.arguments)})}\n</tool_call>"
                for call in message.calls
            ]
            made.append(Message("assistant", "\n".join(filter(None, [message.text, *calls]))))
        else:
            made.append(message)
        was_result = message.role == "tool"
    if tools:
        lines = "\n".join(json.dumps(_tool(tool), ensure_ascii=False) for tool in tools)
        description = form.instruction.replace("{tools}", lines)
        if made and made[0].role == "system":
            made[0] = Message("system", f"{made[0].text}\n\n{description}", name=made[0].name)
        else:
            made.insert(0, Message("system", description))
    return made
