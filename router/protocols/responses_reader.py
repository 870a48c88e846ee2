"""Reads a request for a response: its items into a `Conversation`, the rest into what prepares any generation."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from router.body import read_as
from router.conversation import Conversation, Message, Thinking, Tool, ToolCall, ToolChoice, arguments_text
from router.defaults import SamplingDefaults
from router.errors import ApiError, invalid
from router.formats.format import OutputFormat
from router.prepared_request import PreparedRequest, conversation_job
from router.protocols.chat_reader import check_choice, text_of_file, unsupported_part
from router.protocols.responses_objects import ReasoningSettings, ResponseObject, TextSettings
from router.protocols.responses_types import (
    ITEMS,
    AllowedFunctions,
    Content,
    ContentPart,
    InputFile,
    InputImage,
    InputText,
    Item,
    ItemReference,
    NamedFunction,
    ResponsesRequest,
    SchemaFormat,
    SentCall,
    SentMessage,
    SentOutput,
    SentReasoning,
    SentTool,
    WrittenRefusal,
    WrittenText,
)
from router.requests import GenerationRequest, JsonSchema, JsonSchemaFormat
from router.tokenizer import Tokenizer

TOO_LONG = "context_length_exceeded"
LOGPROBS = "message.output_text.logprobs"
PARAMS = {"response_format": "text.format"}  # the names that chat completions have for parameters

Sent = dict[str, Any]  # an item as it was sent
Made = TypeVar("Made")


@dataclass(frozen=True)
class Asked:
    """A request, and the items that it refers to. `before`: those of the responses before it. `referred`: by their ids.
    `keeps`: whether the response will be stored."""

    request: ResponsesRequest
    before: Sequence[Sent] = ()
    referred: dict[str, Sent] = field(default_factory=dict)
    keeps: bool = False


def responses_job(
    asked: Asked,
    model: str,
    defaults: SamplingDefaults,
    format: OutputFormat,
    tokenizer: Tokenizer,
    context_length: int,
    max_sequences: int,
    arrived: float,
) -> tuple[PreparedRequest, ResponseObject]:
    """Prepares a response: renders the template and tokenises. Returns the response as it is before it begins, too.
    Slow: run it in a thread. Raises ApiError."""
    request = asked.request
    conversation = responses_conversation(asked)
    generation = defaults.complete(_generation(request))

    def prepare(conversation: Conversation) -> PreparedRequest:
        return conversation_job(
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
            logprobs=_logprobs(request),
        )

    try:
        job = fitted(conversation, prepare) if request.truncation == "auto" else prepare(conversation)
    except ApiError as error:
        for name, here in PARAMS.items():
            error.message = error.message.replace(repr(name), repr(here))
            error.param = here if error.param == name else error.param
        raise
    job = replace(job, grammar_param=PARAMS.get(job.grammar_param or "", job.grammar_param))
    return job, response_object(asked, job, generation, model)


def responses_conversation(asked: Asked) -> Conversation:
    """The conversation of a request: its instructions, the items before it, its own. Raises ApiError, which names the
    parameter at fault."""
    request = asked.request
    tools = read_tools(request.tools or ())
    effort = request.reasoning.effort if request.reasoning else None
    messages = read_messages(
        [
            *_instructions(request),
            *_read(asked.before, "previous_response_id", asked.referred),
            *_read(sent_items(request), "input", asked.referred),
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


def sent_items(request: ResponsesRequest) -> list[Sent]:
    """The items of `input`, each with its type. Raises ApiError for one whose type is not known."""
    if request.input is None or isinstance(request.input, str):
        content = request.input
        return [] if content is None else [{"type": "message", "role": "user", "content": content}]
    return [_typed(item, f"input[{number}]") for number, item in enumerate(request.input)]


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
                text = _text(content, f"{path}.content")
                if thinks:
                    made[-1] = replace(last, text=text)
                else:
                    made.append(Message("assistant", text))
            case SentMessage(role="user", content=content):
                made.append(Message("user", _text(content, f"{path}.content")))
            case SentMessage(content=content):
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
            case SentCall(status="incomplete"):  # its arguments were cut off
                pass
            case SentCall(call_id=call_id, name=name, arguments=arguments):
                call = ToolCall(call_id, name, arguments_text(arguments))
                tool_names[call_id] = name
                if last.role == "assistant":
                    made[-1] = replace(last, calls=(*last.calls, call))
                else:
                    made.append(Message("assistant", calls=(call,)))
            case SentOutput(call_id=call_id, output=output):
                text = _text(output, f"{path}.output")
                made.append(Message("tool", text, call_id=call_id, name=item.name or tool_names.get(call_id)))
            case ItemReference():
                raise invalid(f"{path!r} refers to an item that refers to another.", path)
    return tuple(made)


def read_tools(tools: Sequence[Sent]) -> tuple[Tool, ...]:
    """The tools. Raises ApiError for those that a client does not run, and for two of one name."""
    read: list[Tool] = []
    for number, sent in enumerate(tools):
        path = f"tools[{number}]"
        kind = sent.get("type")
        if isinstance(kind, str) and kind != "function":
            raise invalid(
                f"{path!r} is of type {kind[:100]!r}: this server runs no tools. Send those of type 'function', which "
                "the client runs, and leave the others out.",
                f"{path}.type",
                "unsupported_tool",
            )
        tool: SentTool = read_as(SentTool, sent, path)
        if any(tool.name == other.name for other in read):
            raise invalid(f"Two tools are called {tool.name!r}.", f"{path}.name")
        parameters = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
        read.append(Tool(tool.name, tool.description or "", parameters, tool.strict is not False))
    return tuple(read)


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


def response_object(asked: Asked, job: PreparedRequest, generation: GenerationRequest, model: str) -> ResponseObject:
    """The response before it has begun: what was asked for. `generation`: with the model's own sampling parameters."""
    request = asked.request
    text, reasoning, choice = request.text, request.reasoning, request.tool_choice
    form = text.format if text else None
    return ResponseObject(
        id=job.id,
        created_at=job.created,
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
        tools=[
            {"description": None, "parameters": None, **tool, "strict": tool.get("strict") is not False}
            for tool in request.tools or ()
        ],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if generation.top_p is None else generation.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )


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
        case NamedFunction(name=name):
            return check_choice(ToolChoice("required", (name,)), tools)
        case AllowedFunctions(mode=mode, tools=allowed):
            return check_choice(ToolChoice(mode, tuple(tool.name for tool in allowed)), tools)
        case mode:
            return check_choice(ToolChoice(mode), tools)


def _typed(item: Sent, path: str) -> Sent:
    """The item with its type, which a message and a reference may leave out."""
    kind = item.get("type")
    if kind is None:
        guess = "message" if "role" in item else "item_reference" if item.keys() - {"type"} == {"id"} else None
        if guess is None:
            raise invalid(f"Missing required parameter: '{path}.type'.", f"{path}.type", "missing_required_parameter")
        return item | {"type": guess}
    known = [each.__struct_config__.tag for each in ITEMS]
    if kind not in known:
        raise invalid(
            f"'{path}' is of type {str(kind)[:100]!r}; this server takes {', '.join(map(str, known))}.",
            f"{path}.type",
            "unsupported_item",
        )
    return item


def _read(items: Sequence[Sent], path: str, referred: dict[str, Sent]) -> Iterable[tuple[str, Item]]:
    for number, sent in enumerate(items):
        here = f"{path}[{number}]"
        item: Item = read_as(Item, sent, here)
        if isinstance(item, ItemReference):
            if item.id not in referred:
                raise invalid(f"Item with id {item.id[:100]!r} not found.", f"{here}.id", "item_not_found")
            item = read_as(Item, referred[item.id], here)
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
