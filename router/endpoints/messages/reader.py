"""Reads a request of Anthropic's Messages into a `Conversation`, and its sampling into a `GenerationRequest`."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from router.chat.billing import without_billing
from router.chat.conversation import Conversation, Message, Thinking, Tool, ToolCall, ToolChoice, arguments_text
from router.prepare.chat_reader import check_choice, text_of_file, unsupported_part
from router.streaming.dialects import THREAD_UNSUPPORTED
from router.wire.errors import invalid
from router.wire.messages_types import (
    AssistantBlock,
    AssistantTurn,
    Base64Source,
    ChooseAny,
    ChooseNone,
    ChooseTool,
    ContentSource,
    CountTokensRequest,
    CustomTool,
    DocumentBlock,
    FileSource,
    MessagesRequest,
    OutputSchema,
    PlainTextSource,
    RedactedThinkingBlock,
    ResultPart,
    SearchResultBlock,
    TextBlock,
    ThinkingAdaptive,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UrlSource,
    UserBlock,
    UserTurn,
)
from router.wire.requests import GenerationRequest, JsonSchema, JsonSchemaFormat

Placed = tuple[str, UserBlock | AssistantBlock | ToolReferenceBlock]  # a block, and where it stands in the request


def messages_conversation(request: CountTokensRequest) -> Conversation:
    """The conversation of a request. Consecutive turns of one role are one. A last turn of the assistant begins the
    answer. Raises ApiError, which names the parameter at fault."""
    tools = _tools(request.tools or ())
    messages = _system(request.system)
    tool_names: dict[str, str] = {}  # by the id of a call
    groups = [
        (role, [block for number, turn in turns for block in _blocks(turn, f"messages[{number}].content")])
        for role, turns in groupby(enumerate(request.messages), key=lambda numbered: type(numbered[1]))
    ]
    prefill = _prefill(groups.pop()[1]) if groups[-1][0] is AssistantTurn else ""
    for role, blocks in groups:
        if role is AssistantTurn:
            messages.append(_assistant(blocks))
            tool_names |= {call.id: call.name for call in messages[-1].calls}
        elif role is UserTurn:
            messages += _user(blocks, tool_names)
        else:
            messages.append(Message("system", _joined(blocks)))
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        choice=_choice(request, tools),
        parallel=_may_call_several(request),
        thinking=_thinking(request, bool(prefill)),
        prefill=prefill,
    )


def generation_request(request: MessagesRequest) -> GenerationRequest:
    """The sampling of a request, and the form of its text. Raises ApiError."""
    if request.thread is not None:
        message = "'thread' is not supported: this server keeps no conversations. Send all messages, without it."
        raise invalid(message, "thread", THREAD_UNSUPPORTED)
    schema = _output_schema(request)
    if schema is not None and isinstance(request.messages[-1], AssistantTurn):
        raise invalid("An answer of a given form cannot be begun: end 'messages' with the user's.", "messages")
    return GenerationRequest(
        model=request.model,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences,
        user=None if request.metadata is None else request.metadata.user_id,
        response_format=None
        if schema is None
        else JsonSchemaFormat(json_schema=JsonSchema(name=schema.name or "answer", schema=schema.schema)),
    )


def _output_schema(request: CountTokensRequest) -> OutputSchema | None:
    config = None if request.output_config is None else request.output_config.format
    if config is not None and request.output_format is not None and config != request.output_format:
        raise invalid("'output_config.format' and 'output_format' differ: send one of them.", "output_format")
    return config or request.output_format


def _thinking(request: CountTokensRequest, begun: bool) -> Thinking:
    """How to think. `begun`: the answer has begun, so that it is too late."""
    effort = None if request.output_config is None else request.output_config.effort
    asked = request.thinking
    if begun:
        if isinstance(asked, ThinkingEnabled | ThinkingAdaptive):
            raise invalid(
                "'messages' end with the beginning of the answer, after which there is no thinking: end them with the "
                "user's, or leave 'thinking' out.",
                "thinking",
            )
        return Thinking(enabled=False)
    match asked:
        case ThinkingEnabled(budget_tokens=budget):
            return Thinking(enabled=True, effort=effort, budget=budget)
        case ThinkingAdaptive():
            return Thinking(enabled=True, effort=effort)
        case ThinkingDisabled():
            return Thinking(enabled=False)
        case None:
            return Thinking(effort=effort)


def _tools(tools: Iterable[CustomTool]) -> tuple[Tool, ...]:
    read: list[Tool] = []
    for number, tool in enumerate(tools):
        if any(tool.name == other.name for other in read):
            raise invalid(f"Two tools are called {tool.name!r}.", f"tools[{number}].name")
        lines = [tool.description] if tool.description else []
        lines += [f"Example of the input: {_json(given)}" for given in tool.input_examples or ()]
        read.append(Tool(tool.name, "\n".join(lines), tool.input_schema, bool(tool.strict)))
    return tuple(read)


def _choice(request: CountTokensRequest, tools: Sequence[Tool]) -> ToolChoice:
    match request.tool_choice:
        case ChooseNone():
            return ToolChoice("none")
        case ChooseAny():
            return check_choice(ToolChoice("required"), tools)
        case ChooseTool(name=name):
            return check_choice(ToolChoice("required", (name,)), tools)
        case _:
            return ToolChoice()


def _may_call_several(request: CountTokensRequest) -> bool:
    """Whether an answer may have several calls. A named tool is called once, if the request does not say otherwise:
    a small model does not stop by itself."""
    choice = request.tool_choice
    said = None if choice is None else choice.disable_parallel_tool_use
    return not isinstance(choice, ChooseTool) if said is None else not said


def _system(system: str | list[TextBlock] | None) -> list[Message]:
    text = without_billing(system if isinstance(system, str) else "\n".join(block.text for block in system or ()))
    return [Message("system", text)] if text else []


def _blocks(turn: Turn, path: str) -> Iterator[Placed]:
    if isinstance(turn.content, str):
        yield path, TextBlock(text=turn.content)
    else:
        for number, block in enumerate(turn.content):
            yield f"{path}[{number}]", block


def _prefill(blocks: list[Placed]) -> str:
    for path, block in blocks:
        if not isinstance(block, TextBlock):
            raise invalid(
                f"'messages' end with the assistant's, which begins the answer and may only be text: {path!r} is not.",
                path,
            )
    return _joined(blocks)


def _assistant(blocks: list[Placed]) -> Message:
    thinking, calls, text = [], [], []
    for path, block in blocks:
        match block:
            case ThinkingBlock():
                thinking.append(block.thinking)
            case ToolUseBlock():
                calls.append(ToolCall(block.id, block.name, arguments_text(block.input)))
            case RedactedThinkingBlock():
                pass
            case _:
                text.append((path, block))
    return Message("assistant", _joined(text), "\n".join(thinking), tuple(calls))


def _user(blocks: list[Placed], tool_names: dict[str, str]) -> Iterator[Message]:
    """The results of tools, and what the user says before, between and after them."""
    for is_result, group in groupby(blocks, key=lambda placed: isinstance(placed[1], ToolResultBlock)):
        if not is_result:
            yield Message("user", _joined(group))
            continue
        for path, block in group:
            assert isinstance(block, ToolResultBlock)
            name = tool_names.get(block.tool_use_id)
            yield Message("tool", _result(block, path), call_id=block.tool_use_id, name=name)
    if not blocks:
        yield Message("user")


def _result(block: ToolResultBlock, path: str) -> str:
    """The text of a result. Templates have no mark for errors, so the text says it."""
    content = block.content or ""
    text = content if isinstance(content, str) else _parts(content, f"{path}.content")
    return f"Error: {text}" if block.is_error else text


def _joined(blocks: Iterable[Placed]) -> str:
    return "\n".join(_text(block, path) for path, block in blocks)


def _parts(parts: Sequence[ResultPart], path: str) -> str:
    return _joined((f"{path}[{number}]", part) for number, part in enumerate(parts))


def _text(block: UserBlock | AssistantBlock | ToolReferenceBlock, path: str) -> str:
    match block:
        case TextBlock(text=text):
            return text
        case DocumentBlock():
            _refuse_citations(block, path)
            parts = (block.title, block.context, _document(block, f"{path}.source"))
            return "\n".join(part for part in parts if part)
        case SearchResultBlock():
            _refuse_citations(block, path)
            return "\n".join([block.title, block.source, _parts(block.content, f"{path}.content")])
        case ToolReferenceBlock(tool_name=name):
            return name
        case _:
            raise unsupported_part("images", path)


def _document(block: DocumentBlock, path: str) -> str:
    match block.source:
        case PlainTextSource(data=text):
            return text
        case ContentSource(content=content):
            return content if isinstance(content, str) else _parts(content, f"{path}.content")
        case Base64Source(data=data, media_type=media_type):
            if not media_type.startswith("text/"):
                raise unsupported_part(f"documents of type {media_type[:100]!r}", path)
            return text_of_file(data, f"{path}.data")
        case UrlSource():
            raise unsupported_part("documents by their address", path)
        case FileSource():
            raise unsupported_part("stored documents", path)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse_citations(block: DocumentBlock | SearchResultBlock, path: str) -> None:
    if block.citations is not None and block.citations.enabled:
        param = f"{path}.citations.enabled"
        raise invalid(f"{param!r} is not supported by this server: leave it out.", param, "unsupported_parameter")
