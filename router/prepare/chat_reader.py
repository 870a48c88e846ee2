"""Reads the messages and tools of a chat completions request into a `Conversation`."""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from router.chat.conversation import Conversation, Message, Thinking, Tool, ToolCall, ToolChoice, arguments_text
from router.wire.errors import ApiError, invalid
from router.wire.requests import (
    AllowedTools,
    AudioPart,
    ChatMessage,
    ChatRequest,
    ChooseTools,
    FilePart,
    FunctionTool,
    ImagePart,
    NamedTool,
    Part,
    ReasonedPart,
    ReasoningSwitch,
    RedactedThinkingPart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    ThinkingSwitch,
    TokenizeRequest,
    VideoPart,
)

Said = TypeVar("Said")


def chat_conversation(request: ChatRequest) -> Conversation:
    """The conversation of a request. Raises ApiError, which names the parameter at fault."""
    tools = read_tools(request.tools)
    return _begun(request)(
        tools=tools,
        choice=_choice(request.tool_choice, tools),
        parallel=request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool),
        thinking=_thinking(request),
        arguments=request.chat_template_kwargs or {},
    )


def tokenized_conversation(request: TokenizeRequest) -> Conversation:
    """The conversation whose tokens a client asks for. Raises ApiError."""
    return _begun(request)(tools=read_tools(request.tools), arguments=request.chat_template_kwargs or {})


def _begun(request: ChatRequest | TokenizeRequest) -> Callable[..., Conversation]:
    """A conversation with the messages of a request, and how its prompt ends. Raises ApiError."""
    messages = read_messages(request.messages or [])
    goes_on = request.continue_final_message or (request.messages and request.messages[-1].prefix)
    if not goes_on:
        return partial(Conversation, messages, begins_answer=request.add_generation_prompt is not False)
    if request.add_generation_prompt:
        raise invalid(
            "'continue_final_message' and 'add_generation_prompt' exclude each other: the last message either goes on, "
            "or another one begins.",
            "continue_final_message",
        )
    last = messages[-1]
    if last.role != "assistant" or last.calls:
        raise invalid(
            "'continue_final_message' needs a last message of role 'assistant', without calls of tools.",
            "continue_final_message",
        )
    return partial(Conversation, messages[:-1], prefill=last.text, prefill_thinking=last.thinking)


def _thinking(request: ChatRequest) -> Thinking:
    """How to think, by whichever of the fields says it. Raises ApiError where two differ."""
    switch, reasoning, think = request.thinking, request.reasoning or ReasoningSwitch(), request.think
    efforts = {
        "reasoning_effort": request.reasoning_effort,
        "reasoning.effort": reasoning.effort,
        "think": think if isinstance(think, str) else None,
    }
    effort = _agreed(efforts)
    enabled: dict[str, bool | None] = {
        name: None if said is None else said != "none" for name, said in efforts.items()
    } | {"reasoning.enabled": reasoning.enabled, "enable_thinking": request.enable_thinking}
    if isinstance(think, bool):
        enabled["think"] = think
    budgets = {
        "thinking_token_budget": request.thinking_token_budget,
        "thinking_budget": request.thinking_budget,
        "reasoning.max_tokens": reasoning.max_tokens,
    }
    if isinstance(switch, ThinkingSwitch):
        enabled["thinking"] = None if switch.type == "auto" else switch.type != "disabled"
        budgets["thinking.budget_tokens"] = switch.budget_tokens
    else:
        enabled["thinking"] = switch
    budget = _agreed({name: None if said == -1 else said for name, said in budgets.items()})
    return Thinking(_agreed(enabled), effort, budget)


def _agreed(said: Mapping[str, Said | None]) -> Said | None:
    """The value that all parameters have which say one. Raises ApiError where two differ."""
    given = [(name, value) for name, value in said.items() if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise invalid(f"{given[0][0]!r} and {name!r} contradict each other: send one of them.", name)
    return given[0][1] if given else None


def read_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """The messages. Raises ApiError."""
    read: list[Message] = []
    tool_names: dict[str, str] = {}  # by the id of a call
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        read.append(_message(message, path, tool_names))
        tool_names |= {call.id: call.name for call in read[-1].calls}
    return tuple(read)


def read_tools(tools: Sequence[FunctionTool] | None) -> tuple[Tool, ...]:
    """The tools. Raises ApiError for two of one name."""
    read: list[Tool] = []
    for number, tool in enumerate(tools or ()):
        function = tool.function
        if any(function.name == other.name for other in read):
            raise invalid(f"Two tools are called {function.name!r}.", f"tools[{number}].function.name")
        parameters = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
        read.append(Tool(function.name, function.description or "", parameters, bool(function.strict)))
    return tuple(read)


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """The choice. Raises ApiError if it needs tools that are not there."""
    names = {tool.name for tool in tools}
    if missing := sorted(set(choice.names) - names):
        raise invalid(f"'tool_choice' names {missing[0]!r}, which is none of the 'tools'.", "tool_choice")
    if choice.mode == "required" and not tools:
        raise invalid("'tool_choice' asks for a call, but there are no 'tools'.", "tool_choice")
    return choice


def _choice(choice: ChooseTools | None, tools: Sequence[Tool]) -> ToolChoice:
    match choice:
        case None:
            return ToolChoice()
        case NamedTool(function=function):
            return check_choice(ToolChoice("required", (function.name,)), tools)
        case AllowedTools(allowed_tools=allowed):
            return check_choice(ToolChoice(allowed.mode, tuple(tool.function.name for tool in allowed.tools)), tools)
        case mode:
            return check_choice(ToolChoice(mode), tools)


def _message(message: ChatMessage, path: str, tool_names: dict[str, str]) -> Message:
    role = "system" if message.role == "developer" else message.role
    text, thoughts = _read(message.content, f"{path}.content")
    if role != "assistant":
        if thoughts:
            raise invalid("Only a message of role 'assistant' has thinking.", f"{path}.content", "invalid_value")
        for name in ("tool_calls", "function_call", "reasoning_content", "reasoning"):
            if getattr(message, name):
                raise invalid(f"Only a message of role 'assistant' has {name!r}.", f"{path}.{name}")
    if role == "function":
        names = {name: call_id for call_id, name in tool_names.items()}  # the last call of each
        return Message("tool", text or "", call_id=names.get(message.name or "", ""), name=message.name)
    if role == "tool":
        if message.tool_call_id is None:
            where = f"{path}.tool_call_id"
            raise invalid(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
        tool = message.name or tool_names.get(message.tool_call_id)
        return Message(role, text or "", call_id=message.tool_call_id, name=tool)
    if message.tool_call_id is not None:
        raise invalid("Only a message of role 'tool' has 'tool_call_id'.", f"{path}.tool_call_id")
    calls = tuple(
        ToolCall(call.id, call.function.name, arguments_text(call.function.arguments))
        for call in message.tool_calls or ()
    )
    if message.function_call is not None:
        function = message.function_call
        calls = (*calls, ToolCall(f"call_{len(tool_names)}", function.name, arguments_text(function.arguments)))
    if not text and not calls:
        text = message.refusal or text
    if text is None and role != "assistant":  # an answer may have been cut off before its first word
        raise invalid(f"Missing required parameter: '{path}.content'.", f"{path}.content", "missing_required_parameter")
    thinking = message.reasoning_content or message.reasoning or "\n".join(thoughts)
    return Message(role, text or "", thinking, calls, name=message.name)


def _read(content: str | Sequence[Part] | None, path: str) -> tuple[str | None, list[str]]:
    """The text of a message, and what its parts say that the model thought."""
    if content is None or isinstance(content, str):
        return content, []
    texts: list[str] = []
    thoughts: list[str] = []
    for number, part in enumerate(content):
        match part:
            case ThinkingPart(thinking=thinking):
                thoughts.append(thinking if isinstance(thinking, str) else _joined(thinking or ()))
            case ReasonedPart(text=text, reasoning=reasoning):
                thoughts.append(text or reasoning or "")
            case RedactedThinkingPart():
                pass
            case _:
                texts.append(_part(part, f"{path}[{number}]"))
    return "\n".join(texts), [thought for thought in thoughts if thought]


def _joined(parts: Sequence[TextPart]) -> str:
    return "".join(part.text for part in parts)


def _part(part: TextPart | RefusalPart | FilePart | ImagePart | AudioPart | VideoPart, path: str) -> str:
    match part:
        case TextPart(text=text):
            return text
        case RefusalPart(refusal=text):
            return text
        case FilePart(file=file):
            return text_of_file(file.file_data, f"{path}.file.file_data")
        case ImagePart():
            raise unsupported_part("images", path)
        case AudioPart():
            raise unsupported_part("audio", path)
        case VideoPart():
            raise unsupported_part("video", path)


def unsupported_part(kind: str, path: str) -> ApiError:
    """The error for a part of a message that no model here takes."""
    return invalid(f"This model takes no {kind}: leave {path!r} out.", path, "unsupported_content")


def text_of_file(data: str | None, path: str) -> str:
    """The text of a file that is sent in base64, with or without the beginning of a data URL. Raises ApiError."""
    if data is None:
        raise invalid(f"Missing required parameter: {path!r}.", path, "missing_required_parameter")
    head, comma, body = data.partition(",")
    try:
        content = base64.b64decode(body if comma and head.startswith("data:") else data, validate=True)
        return content.decode()
    except (binascii.Error, ValueError):
        raise invalid(f"{path!r} is not a text (UTF-8) in base64: only files of text are taken.", path) from None
