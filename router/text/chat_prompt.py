"""A conversation as the prompt of a model: its messages as chat templates take them, and the template's text."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.chat.billing import without_billing
from router.chat.chat_template import TemplateError
from router.chat.conversation import Conversation, Message, Tool
from router.chat.fitted_messages import fitted, tell
from router.formats.format import OutputFormat
from router.formats.past_arguments import past_arguments
from router.text.tokenizer import Tokenizer


def chat_prompt(conversation: Conversation, format: OutputFormat, tokenizer: Tokenizer) -> str:
    """The text of a conversation, up to where the model's answer begins or goes on. It has its special tokens. Raises
    TemplateError."""
    try:
        return _prompt(conversation, format, tokenizer)
    except RecursionError:
        raise TemplateError("the arguments of a call are nested too deeply") from None


def _prompt(conversation: Conversation, format: OutputFormat, tokenizer: Tokenizer) -> str:
    tools = conversation.callable_tools
    messages: Sequence[Message] = _without_billing(conversation.messages)
    if not tokenizer.takes_tools:
        messages = _described(messages, tools, format)
        tools = ()
    if format.channels is not None:
        messages = _one_call_each(messages)
    variables = {**_thinking(conversation), **conversation.arguments}
    described = [_tool(tool) for tool in tools] or None

    def render(messages: Sequence[Message], as_text: bool = False) -> str:
        made = [_for_template(message, format, as_text) for message in messages]
        if described is not None and tokenizer.reads_tools_of_messages:
            made = _with_tools(made, described)
        return tokenizer.render_chat(made, conversation.begins_answer, variables, described)

    def render_either(messages: Sequence[Message]) -> str:
        """Templates take the arguments of past calls as objects, and a few as text only."""
        try:
            return render(messages)
        except TemplateError:
            if not any(message.calls for message in messages):
                raise
            with contextlib.suppress(TemplateError):
                return render(messages, as_text=True)
            raise

    text = fitted(messages, render_either)
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


def _without_billing(messages: Sequence[Message]) -> list[Message]:
    """The messages, those of the system without lines about billing, and left out if they are nothing else."""
    made: list[Message] = []
    for message in messages:
        text = without_billing(message.text) if message.role == "system" else message.text
        if text == message.text or text.strip():
            made.append(message if text == message.text else replace(message, text=text))
    return made


def _for_template(message: Message, format: OutputFormat, as_text: bool) -> dict[str, Any]:
    """The message as templates expect it, with the arguments of calls as objects or as text."""
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
                "function": {"name": call.name, "arguments": _json(read) if as_text else read},
            }
            for call in message.calls
            for read in [_object(call.arguments)]
        ]
    if message.call_id is not None:
        made["tool_call_id"] = message.call_id
    return made


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that looks for tools, as JSON, in the system's message."""
    has_system = bool(messages) and messages[0]["role"] == "system"
    first, rest = (messages[0], messages[1:]) if has_system else ({"role": "system", "content": ""}, messages)
    return [first | {"tools": _json([tool["function"] for tool in tools])}, *rest]


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
    """The arguments of a past call."""
    read, is_whole = past_arguments(arguments)
    if not is_whole:
        tell("arguments of a past call are no JSON object: the model gets what can be read of them")
    return read


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


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
                f"<tool_call>\n{_json({'name': call.name, 'arguments': _object(call.arguments)})}\n</tool_call>"
                for call in message.calls
            ]
            made.append(Message("assistant", "\n".join(filter(None, [message.text, *calls]))))
        else:
            made.append(message)
        was_result = message.role == "tool"
    if tools:
        lines = "\n".join(_json(_tool(tool)) for tool in tools)
        description = form.instruction.replace("{tools}", lines)
        if made and made[0].role == "system":
            made[0] = Message("system", f"{made[0].text}\n\n{description}", name=made[0].name)
        else:
            made.insert(0, Message("system", description))
    return made
