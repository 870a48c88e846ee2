"""The body of a request to `/v1/responses`, and the items of its input: OpenAI's fields, as `requests.py` has
them.

Items and tools stay objects in the body (`dict`), because an item may leave out its `type`, and because they are kept
and repeated as they were sent. `responses_reader` reads them as the types below.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.wire.requests import (
    Body,
    Count,
    Flag,
    GenerationRequest,
    JsonObjectFormat,
    Lenient,
    LenientTool,
    Neutral,
    NeutralList,
    NonEmpty,
    PastArguments,
    ReasoningEffort,
    TemplateArguments,
    TextFormat,
    ThinkingBudget,
    ToolName,
    TopLogprobs,
    Unused,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
Anything = Annotated[list[Any], Meta(description="not used")]
Ignored = Annotated[Any, Meta(description="not used")]
Namespace = Annotated[str | None, Meta(description="the namespace of the function, where it has one")]


# ---------------------------------------------------------------- items


class InputText(Lenient, frozen=True, tag_field="type", tag="input_text"):
    """A part that is text."""

    text: str


class WrittenText(Lenient, frozen=True, tag_field="type", tag="output_text"):
    """A part that is a model's text."""

    text: str
    annotations: Anything | None = None
    logprobs: Anything | None = None


class WrittenRefusal(Lenient, frozen=True, tag_field="type", tag="refusal"):
    """A part with which a model refused."""

    refusal: str


class InputFile(Lenient, frozen=True, kw_only=True, tag_field="type", tag="input_file"):
    """A part that is a file of text."""

    file_data: Annotated[str | None, Meta(description="data:text/...;base64,... or the text in base64")] = None
    filename: str | None = None
    detail: str | None = None
    file_id: Neutral = None
    file_url: Neutral = None


class InputImage(Lenient, frozen=True, kw_only=True, tag_field="type", tag="input_image"):
    """A picture. No model here takes one."""

    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None


ContentPart = InputText | WrittenText | WrittenRefusal | InputFile | InputImage
Content = str | list[ContentPart]


class SentMessage(Lenient, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message. `developer` means `system`. Text parts are joined by newlines."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content | None = None
    id: str | None = None
    status: ItemStatus | None = None
    phase: str | None = None
    end_turn: Flag = None


class SentCall(Lenient, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model made."""

    call_id: NonEmpty
    name: NonEmpty
    arguments: PastArguments = None
    id: str | None = None
    status: ItemStatus | None = None
    namespace: Namespace = None
    caller: Ignored = None
    is_async: Ignored = msgspec.field(default=None, name="async")
    async_: Ignored = None  # as the openai package writes it down


class SentOutput(Lenient, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    """The result of a call."""

    call_id: NonEmpty
    output: Content
    id: str | None = None
    name: str | None = None
    status: ItemStatus | None = None
    namespace: Namespace = None
    caller: Ignored = None


class SummaryText(Lenient, frozen=True, tag_field="type", tag="summary_text"):
    """A part of a summary of what the model thought."""

    text: str


class ThoughtText(Lenient, frozen=True, tag_field="type", tag="reasoning_text"):
    """A part of what the model thought."""

    text: str


class PlainThought(Lenient, frozen=True, tag_field="type", tag="text"):
    """A part of what the model thought, as some clients name it."""

    text: str


class SentReasoning(Lenient, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's thinking. `content` goes to the template; without it, `summary` does."""

    summary: list[SummaryText] | None = None
    content: list[ThoughtText | PlainThought] | None = None
    encrypted_content: Annotated[str | None, Meta(description="not used: nothing here is encrypted")] = None
    id: str | None = None
    status: ItemStatus | None = None


class ItemReference(Lenient, frozen=True, kw_only=True, tag_field="type", tag="item_reference"):
    """An item of a stored response, by its id."""

    id: NonEmpty


Item = SentMessage | SentCall | SentOutput | SentReasoning | ItemReference
ITEMS = (SentMessage, SentCall, SentOutput, SentReasoning, ItemReference)


# ---------------------------------------------------------------- tools


class SentTool(LenientTool, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function that the model may call. The client runs it: this server runs none."""

    name: ToolName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="a JSON schema of an object")] = None
    strict: Annotated[Flag, Meta(description="the arguments of every call validate against parameters; true")] = None
    output_schema: Annotated[dict[str, Any] | None, Meta(description="not used")] = None
    allowed_callers: Annotated[list[Literal["direct"]], Meta(max_length=1)] | None = None
    defer_loading: Annotated[Flag, Meta(description="not used: nothing searches tools, so all are there")] = None
    is_async: Neutral = msgspec.field(default=None, name="async")


class SentNamespace(Lenient, frozen=True, kw_only=True, tag_field="type", tag="namespace"):
    """Functions under a common name, as an MCP server's. The model knows each as NAMESPACE__NAME; calls have `name` and
    `namespace`."""

    name: ToolName
    description: str | None = None
    tools: list[dict[str, Any]]


class NamedFunction(Body, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="function"):
    """The answer is a call of this function."""

    name: ToolName
    namespace: Namespace = None


class AllowedFunctions(Body, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Only these of the tools may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1)]


# ---------------------------------------------------------------- the body


class SchemaFormat(Body, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that validates against a schema, whatever `strict` says."""

    name: NonEmpty
    schema: dict[str, Any]
    description: str | None = None
    strict: Flag = None


class TextOptions(Body, frozen=True, kw_only=True):
    """The form of the answer's text."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Meta(description="not used")] = None


class ReasoningOptions(Body, frozen=True, kw_only=True):
    """How the model thinks before it answers. What it thinks is in the answer as a whole, never as a summary."""

    effort: Annotated[
        ReasoningEffort | None,
        Meta(description="none: no thinking, where the template allows; others go to the template"),
    ] = None
    summary: Annotated[
        Literal["auto", "concise", "detailed"] | None, Meta(description="not used: reasoning items have their content")
    ] = None
    generate_summary: Annotated[
        Literal["auto", "concise", "detailed"] | None, Meta(description="as summary, by its old name")
    ] = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/responses."""

    input: Annotated[
        str | list[dict[str, Any]] | None,
        Meta(description="a text, or items: messages, calls, their results, reasoning, references"),
    ] = None
    instructions: Annotated[
        str | None, Meta(description="a system message before all items; the next response does not inherit it")
    ] = None
    previous_response_id: Annotated[
        str | None, Meta(description="a stored response, whose items and those before it come first")
    ] = None
    store: Annotated[Flag, Meta(description="keep the response for a time; true where the server keeps any")] = None
    background: Annotated[Flag, Meta(description="answer at once, and go on; needs store")] = None
    include: list[Include] | None = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        Meta(description="auto: leave out the oldest items where all do not fit into the context; disabled"),
    ] = None
    max_output_tokens: Annotated[
        Count | None, Meta(description="most tokens of the answer, thinking included; by default what fits")
    ] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=512)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None,
        Meta(description="auto if there are tools; required: the answer is a call"),
    ] = None
    parallel_tool_calls: Annotated[Flag, Meta(description="an answer may have more than one call; true")] = None
    top_logprobs: Annotated[TopLogprobs | None, Meta(description="with message.output_text.logprobs in include; 0")] = (
        None
    )
    metadata: Annotated[
        Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None,
        Meta(description="kept, and repeated in the answer"),
    ] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority"] | None,
        Meta(description="there is one tier: the answer says default"),
    ] = None
    safety_identifier: Annotated[str | None, Meta(description="as user, and before it")] = None
    prompt_cache_key: Annotated[str | None, Meta(description="not used: shared prefixes are found without it")] = None
    client_metadata: Annotated[dict[str, str] | None, Meta(description="not used, and not kept")] = None
    chat_template_kwargs: TemplateArguments = None
    thinking_token_budget: ThinkingBudget = None

    access_programs: Neutral = None
    context_management: NeutralList | None = None
    conversation: Neutral = None
    image: Neutral = None
    max_tool_calls: Neutral = None
    moderation: Neutral = None
    n: Neutral = None
    program: Neutral = None
    prompt: Neutral = None
    prompt_cache_options: Unused = None
    prompt_cache_retention: Unused = None
    prompt_logprobs: Neutral = None
    response_format: Neutral = None
    return_prompt_token_ids: Neutral = None
    return_token_ids: Neutral = None
    truncate_prompt_tokens: Neutral = None
    truncation_side: Neutral = None
