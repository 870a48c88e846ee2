"""Reads a request for a response: its items into a `Conversation`, the rest into what prepares any generation."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from router.chat.conversation import (
    Conversation,
    Message,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    arguments_text,
    qualified,
)
from router.endpoints.responses.custom_input import PARAMETERS, as_arguments
from router.formats.format import OutputFormat
from router.http.body import read_as
from router.prepare.chat_reader import check_choice, text_of_file, unsupported_part
from router.prepare.defaults import SamplingDefaults
from router.prepare.prepared_request import PreparedRequest, prepare_conversation
from router.text.tokenizer import Tokenizer
from router.wire.errors import ApiError, invalid
from router.wire.requests import HOSTED_TOOLS, GenerationRequest, JsonSchema, JsonSchemaFormat
from router.wire.responses_objects import ReasoningSettings, ResponseObject, TextSettings
from router.wire.responses_types import (
    ITEMS,
    AllowedFunctions,
    Content,
    ContentPart,
    GrammarInput,
    InputFile,
    InputImage,
    InputText,
    Item,
    ItemReference,
    NamedFunction,
    ResponsesRequest,
    SchemaFormat,
    SentCall,
    SentCustomCall,
    SentCustomOutput,
    SentCustomTool,
    SentMessage,
    SentNamespace,
    SentOutput,
    SentReasoning,
    SentTool,
    WrittenRefusal,
    WrittenText,
)
from router.wire.unknown_fields import hosted

TOO_LONG = "context_length_exceeded"
LOGPROBS = "message.output_text.logprobs"
PARAMS = {"response_format": "text.format"}  # the names that chat completions have for parameters

# Calls of hosted tools, and what came of them: other servers' answers have them.
HOSTED_ITEMS = re.compile(
    r"(web_search|file_search|code_interpreter|image_generation|mcp|tool_search)_call|tool_search_output|"
    r"mcp_(list_tools|approval_request|approval_response)"
)

Sent = dict[str, Any]  # an item as it was sent
Made = TypeVar("Made")


@dataclass(frozen=True)
class Asked:
    """A request, and the items that it refers to. `before`: those of the responses before it. `referred`: by their ids.
    `keeps`: whether the response will be stored. `passed_over`: gets the names of what is passed over."""

    request: ResponsesRequest
    before: Sequence[Sent] = ()
    referred: dict[str, Sent] = field(default_factory=dict)
    keeps: bool = False
    passed_over: set[str] = field(default_factory=set)


def prepare_responses(
    asked: Asked,
    model: str,
    defaults: SamplingDefaults,
    format: OutputFormat,
    tokenizer: Tokenizer,
    context_length: int,
    max_sequences: int,
    arrived: float,
    cut_at_context: bool = False,
) -> tuple[PreparedRequest, ResponseObject]:
    """Prepares a response: renders the template and tokenises. Returns the response as it is before it begins, too.
    `cut_at_context`: as of `prepare_conversation`. Slow: run it in a thread. Raises ApiError."""
    request = asked.request
    conversation = responses_conversation(asked)
    generation = defaults.complete(_generation(request))

    def prepare(conversation: Conversation) -> PreparedRequest:
        return prepare_conversation(
            conversation,
            generation,
            format,
            tokenizer,
            context_length,
            max_sequences,
            arrived,
            id_prefix="resp_",
            max_tokens=request.max_output_tokens,
            max_tokens_param="max_output_tokens",
            messages_param="input",
            cut_at_context=cut_at_context,
            logprobs=_logprobs(request),
        )

    try:
        prepared = fitted(conversation, prepare) if request.truncation == "auto" else prepare(conversation)
    except ApiError as error:
        for name, here in PARAMS.items():
            error.message = error.message.replace(repr(name), repr(here))
            error.param = here if error.param == name else error.param
        raise
    prepared = replace(prepared, grammar_param=PARAMS.get(prepared.grammar_param or "", prepared.grammar_param))
    return prepared, response_object(asked, prepared, generation, model)


def responses_conversation(asked: Asked) -> Conversation:
    """The conversation of a request: its instructions, the items before it, its own. Raises ApiError, which names the
    parameter at fault."""
    request = asked.request
    tools = read_tools(request.tools or (), asked.passed_over)
    effort = request.reasoning.effort if request.reasoning else None
    messages = read_messages(
        [
            *_instructions(request),
            *_read(asked.before, "previous_response_id", asked.referred, set()),  # told when they were sent
            *_read(sent_items(request, asked.passed_over), "input", asked.referred, asked.passed_over),
        ]
    )
    if not any(message.role != "system" or message.text for message in messages):
        raise invalid("'input' is empty, and nothing comes before it.", "input", "missing_required_parameter")
    return Conversation(
        messages=messages,
        tools=tools,
        choice=_choice(request, tools),
        parallel=request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedFunction),
        thinking=Thinking(
            enabled=None if effort is None else effort != "none",
            effort=effort,
            budget=None if request.thinking_token_budget == -1 else request.thinking_token_budget,
        ),
        arguments=request.chat_template_kwargs or {},
    )


def sent_items(request: ResponsesRequest, passed_over: set[str]) -> list[Sent]:
    """The items of `input`, each with its type, but for what hosted tools have done elsewhere. Raises ApiError for one
    whose type is not known."""
    if request.input is None or isinstance(request.input, str):
        content = request.input
        return [] if content is None else [{"type": "message", "role": "user", "content": content}]
    items = [_typed(item, f"input[{number}]") for number, item in enumerate(request.input)]
    kept = [item for item in items if not HOSTED_ITEMS.fullmatch(item["type"])]
    passed_over.update(hosted("input", item["type"]) for item in items if HOSTED_ITEMS.fullmatch(item["type"]))
    return kept


def references(items: Iterable[Sent]) -> list[str]:
    """The ids that items refer to."""
    return [item["id"] for item in items if item["type"] == "item_reference" and isinstance(item.get("id"), str)]


def read_messages(items: Iterable[tuple[str, Item]]) -> tuple[Message, ...]:
    """The messages of items, each with the parameter's name. What the model said in one turn (thinking, text, calls)
    is one message, and so are the system's messages at the beginning. Raises ApiError."""
    made: list[Message] = []
    tool_names: dict[str, str] = {}
    for path, item in items:
        last = made[-1] if made else Message("system")
        thinks = last.role == "assistant" and not last.text and not last.calls
        match item:
            case SentMessage(role="assistant", content=content):
                text = _text(content or "", f"{path}.content")
                if thinks:
                    made[-1] = replace(last, text=text)
                else:
                    made.append(Message("assistant", text))
            case SentMessage(content=None):
                where = f"{path}.content"
                raise invalid(f"Missing required parameter: {where!r}.", where, "missing_required_parameter")
            case SentMessage(role="user", content=str() | list() as content):
                made.append(Message("user", _text(content, f"{path}.content")))
            case SentMessage(content=str() | list() as content):
                text = _text(content, f"{path}.content")
                if len(made) == 1 and last.role == "system":
                    made[-1] = replace(last, text=f"{last.text}\n\n{text}")
                else:
                    made.append(Message("system", text))
            case SentReasoning():
                thinking = "\n".join(part.text for part in item.content or item.summary or ())
                if thinks:
                    made[-1] = replace(last, thinking=f"{last.thinking}\n{thinking}")
                elif thinking:
                    made.append(Message("assistant", thinking=thinking))
            case SentCall(status="incomplete") | SentCustomCall(status="incomplete"):  # its arguments were cut off
                pass
            case SentCall(call_id=call_id) | SentCustomCall(call_id=call_id):
                name = qualified(item.name, item.namespace)
                written = arguments_text(item.arguments) if isinstance(item, SentCall) else as_arguments(item.input)
                call = ToolCall(call_id, name, written)
                tool_names[call_id] = name
                if last.role == "assistant":
                    made[-1] = replace(last, calls=(*last.calls, call))
                else:
                    made.append(Message("assistant", calls=(call,)))
            case SentOutput(call_id=call_id, output=output) | SentCustomOutput(call_id=call_id, output=output):
                text = _text(output or "", f"{path}.output")
                named = qualified(item.name, item.namespace) if item.name else None
                made.append(Message("tool", text, call_id=call_id, name=tool_names.get(call_id) or named))
            case ItemReference():
                raise invalid(f"{path!r} refers to an item that refers to another.", path)
    return tuple(made)


def read_tools(tools: Sequence[Sent], passed_over: set[str]) -> tuple[Tool, ...]:
    """The tools, those of namespaces too. Hosted ones are passed over. Raises ApiError for others that are neither
    functions nor custom, and for two of one name."""
    read: list[Tool] = []
    for sent, path, namespace in _functions(tools, "tools", passed_over):
        is_custom = sent.get("type") == "custom"
        tool: SentTool | SentCustomTool = read_as(SentCustomTool if is_custom else SentTool, sent, path, passed_over)
        group = None if namespace is None else namespace.name
        name = qualified(tool.name, group)
        if any(name == other.name for other in read):
            raise invalid(f"Two tools are called {name!r}.", f"{path}.name")
        description = tool.description or ""
        if namespace is not None and namespace.description and path.endswith("[0]"):
            description = f"{namespace.description}\n\n{description}"  # what is said of all is said once
        if isinstance(tool, SentCustomTool):
            if isinstance(form := tool.format, GrammarInput):
                description = (
                    f"{description}\n\nThe input follows this grammar ({form.syntax}):\n{form.definition}".strip()
                )
                passed_over.add("tools[].format")
            read.append(Tool(name, description, PARAMETERS, True, group, is_custom=True))
        else:
            parameters = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
            read.append(Tool(name, description, parameters, tool.strict is not False, group))
    return tuple(read)


def _functions(
    tools: Sequence[Sent], path: str, passed_over: set[str], namespace: SentNamespace | None = None
) -> Iterator[tuple[Sent, str, SentNamespace | None]]:
    """The functions and custom tools among tools, each with the parameter's name and its namespace."""
    for number, sent in enumerate(tools):
        here = f"{path}[{number}]"
        match sent.get("type"):
            case "namespace" if namespace is None:
                group: SentNamespace = read_as(SentNamespace, sent, here, passed_over)
                yield from _functions(group.tools, f"{here}.tools", passed_over, group)
            case str(kind) if HOSTED_TOOLS.fullmatch(kind):
                passed_over.add(hosted("tools", kind))
            case str(kind) if kind not in ("function", "custom"):
                raise invalid(
                    f"{here!r} is of type {kind[:100]!r}, which this server does not know. Send those of type "
                    "'function', 'custom' or 'namespace', which the client runs, and leave the others out.",
                    f"{here}.type",
                    "unsupported_tool",
                )
            case _:
                yield sent, here, namespace


def fitted(conversation: Conversation, prepare: Callable[[Conversation], Made]) -> Made:
    """Returns what `prepare` makes of the conversation, without as many of its oldest messages as needed. The system's
    messages and the user's last one stay, and no result stays without its call. Raises the ApiError of `prepare` if
    that is still too long."""
    try:
        return prepare(conversation)
    except ApiError as error:
        if error.code != TOO_LONG:
            raise
        too_long = error
    messages = conversation.messages
    roles = [message.role for message in messages]
    last_user = max((number for number, role in enumerate(roles) if role == "user"), default=-1)
    starts = [number for number, role in enumerate(roles) if number <= last_user and role == "user"][1:]
    starts += [number for number, role in enumerate(roles) if number > last_user + 1 and role == "assistant"]
    made: list[Made] = []
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        kept = tuple(
            message
            for number, message in enumerate(messages)
            if number >= starts[middle] or number == last_user or message.role == "system"
        )
        try:
            made = [prepare(replace(conversation, messages=kept))]
            high = middle
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            too_long = error
            low = middle + 1
    if not made:
        raise too_long
    return made[0]


def response_object(
    asked: Asked, prepared: PreparedRequest, generation: GenerationRequest, model: str
) -> ResponseObject:
    """The response before it has begun: what was asked for. `generation`: with the model's own sampling parameters."""
    request = asked.request
    text, reasoning, choice = request.text, request.reasoning, request.tool_choice
    form = text.format if text else None
    return ResponseObject(
        id=prepared.id,
        created_at=prepared.created,
        status="queued",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=ReasoningSettings(
            effort=reasoning.effort if reasoning else None,
            summary=(reasoning.summary or reasoning.generate_summary) if reasoning else None,
        ),
        safety_identifier=request.safety_identifier,
        store=asked.keeps,
        temperature=1.0 if generation.temperature is None else generation.temperature,
        text=TextSettings(format={"type": "text"} if form is None else msgspec.to_builtins(form)),
        tool_choice=choice if isinstance(choice, str) else "auto" if choice is None else msgspec.to_builtins(choice),
        tools=[_shown(tool) for tool in request.tools or () if not HOSTED_TOOLS.fullmatch(str(tool.get("type")))],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if generation.top_p is None else generation.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )


def _shown(tool: Sent) -> Sent:
    """The tool in a response: as it was sent, a function with the fields that may be left out."""
    if tool.get("type") in ("namespace", "custom"):
        return tool
    return {"description": None, "parameters": None, **tool, "strict": tool.get("strict") is not False}


def _instructions(request: ResponsesRequest) -> list[tuple[str, Item]]:
    text = request.instructions
    return [("instructions", SentMessage(role="system", content=text))] if text else []


def _generation(request: ResponsesRequest) -> GenerationRequest:
    """The fields that all protocols share, with the form of the text by its name there."""
    fields = {name: getattr(request, name) for name in GenerationRequest.__struct_fields__}
    fields["user"] = request.safety_identifier or request.user
    form = request.text.format if request.text else None
    if isinstance(form, SchemaFormat):
        schema = JsonSchema(name=form.name, schema=form.schema, description=form.description, strict=True)
        return GenerationRequest(**fields | {"response_format": JsonSchemaFormat(json_schema=schema)})
    return GenerationRequest(**fields | {"response_format": form})


def _logprobs(request: ResponsesRequest) -> int | None:
    if LOGPROBS in (request.include or ()):
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise invalid(f"'top_logprobs' needs {LOGPROBS!r} in 'include'.", "top_logprobs")
    return None


def _choice(request: ResponsesRequest, tools: Sequence[Tool]) -> ToolChoice:
    match request.tool_choice:
        case None:
            return ToolChoice()
        case NamedFunction() as named:
            return check_choice(ToolChoice("required", (_named(named, tools),)), tools)
        case AllowedFunctions(mode=mode, tools=allowed):
            return check_choice(ToolChoice(mode, tuple(_named(named, tools) for named in allowed)), tools)
        case mode:
            return check_choice(ToolChoice(mode), tools)


def _named(function: NamedFunction, tools: Sequence[Tool]) -> str:
    """The name by which the model knows a function. Without a namespace, the own name is enough where only one function
    has it."""
    name = qualified(function.name, function.namespace)
    if function.namespace is None and all(tool.name != name for tool in tools):
        own = [tool.name for tool in tools if tool.own_name == name]
        return own[0] if len(own) == 1 else name
    return name


def _typed(item: Sent, path: str) -> Sent:
    """The item with its type, which a message and a reference may leave out."""
    kind = item.get("type")
    if kind is None:
        guess = "message" if "role" in item else "item_reference" if item.keys() - {"type"} == {"id"} else None
        if guess is None:
            raise invalid(f"Missing required parameter: '{path}.type'.", f"{path}.type", "missing_required_parameter")
        return item | {"type": guess}
    known = [each.__struct_config__.tag for each in ITEMS]
    if kind not in known and not (isinstance(kind, str) and HOSTED_ITEMS.fullmatch(kind)):
        raise invalid(
            f"'{path}' is of type {str(kind)[:100]!r}; this server takes {', '.join(map(str, known))}.",
            f"{path}.type",
            "unsupported_item",
        )
    return item


def _read(
    items: Sequence[Sent], path: str, referred: dict[str, Sent], passed_over: set[str]
) -> Iterable[tuple[str, Item]]:
    for number, sent in enumerate(items):
        here = f"{path}[{number}]"
        item: Item = read_as(Item, sent, here, passed_over)
        if isinstance(item, ItemReference):
            if item.id not in referred:
                raise invalid(f"Item with id {item.id[:100]!r} not found.", f"{here}.id", "item_not_found")
            item = read_as(Item, referred[item.id], here, set())
        yield here, item


def _text(content: Content, path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{path}[{number}]") for number, part in enumerate(content))


def _part(part: ContentPart, path: str) -> str:
    match part:
        case InputText(text=text) | WrittenText(text=text) | WrittenRefusal(refusal=text):
            return text
        case InputFile(file_data=data):
            return text_of_file(data, f"{path}.file_data")
        case InputImage():
            raise unsupported_part("images", path)
