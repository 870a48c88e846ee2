"""Bodies of Anthropic's Messages: what is asked, and what is answered.

Strict, as `router/wire/requests.py`: unknown fields are errors, except in blocks, turns and tools. Fields that steer
Anthropic's own service and change nothing here are accepted and not used. Blocks of that service are refused by name
in the user's turns, and passed over in the assistant's; its tools are passed over where there are others.
"""

import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from router.wire.requests import (
    INT32,
    Body,
    Count,
    Flag,
    Lenient,
    LenientTool,
    ModelName,
    Neutral,
    NeutralList,
    NonEmpty,
    PastArguments,
    StopText,
    ToolName,
)

# ---------------------------------------------------------------- blocks


# What hosted tools have done elsewhere, in the assistant's turns.
HOSTED_BLOCKS = re.compile("server_tool_use|mcp_tool_use|[a-z_]+_tool_result")


class CacheControl(Lenient, frozen=True, kw_only=True):
    """A mark up to where a prompt is to be cached. Not used: shared prefixes are found without it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class Citations(Lenient, frozen=True):
    enabled: Annotated[Flag, Meta(description="not supported: false")] = None


class Block(Lenient, frozen=True, kw_only=True, tag_field="type"):
    """A part of a message, of the system's text or of a tool's result. `hosted`: types of blocks that are passed over
    where this one may be."""

    hosted: ClassVar[re.Pattern[str] | None] = None

    cache_control: CacheControl | None = None


class TextBlock(Block, frozen=True, kw_only=True, tag="text"):
    text: str
    citations: Annotated[list[Any] | None, Meta(description="not used")] = None


class ImageBlock(Block, frozen=True, kw_only=True, tag="image"):
    """A picture. No model here takes one."""

    source: dict[str, Any]
    transformations: dict[str, Any] | None = None


class PlainTextSource(Lenient, frozen=True, kw_only=True, tag_field="type", tag="text"):
    data: str
    media_type: str = "text/plain"


class Base64Source(Lenient, frozen=True, kw_only=True, tag_field="type", tag="base64"):
    """A file in base64: of text, since no model here takes others."""

    data: str
    media_type: str


class UrlSource(Lenient, frozen=True, kw_only=True, tag_field="type", tag="url"):
    """The address of a file. Nothing is fetched here."""

    url: str


class FileSource(Lenient, frozen=True, kw_only=True, tag_field="type", tag="file"):
    """The name of a file that was stored before. Nothing is stored here."""

    file_id: str


class ContentSource(Lenient, frozen=True, kw_only=True, tag_field="type", tag="content"):
    content: str | list[TextBlock | ImageBlock]


class DocumentBlock(Block, frozen=True, kw_only=True, tag="document"):
    """A document of text."""

    source: PlainTextSource | Base64Source | ContentSource | UrlSource | FileSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class SearchResultBlock(Block, frozen=True, kw_only=True, tag="search_result"):
    """A text that the client's search has found."""

    content: list[TextBlock]
    source: str
    title: str
    citations: Citations | None = None


class ToolReferenceBlock(Block, frozen=True, kw_only=True, tag="tool_reference"):
    """A tool that the client's search of tools has found: the model knows all tools, so only the name is news."""

    tool_name: NonEmpty


class ToolUseBlock(Block, frozen=True, kw_only=True, tag="tool_use"):
    """A call of a tool."""

    hosted = HOSTED_BLOCKS

    id: NonEmpty
    name: NonEmpty
    input: PastArguments = None
    caller: Annotated[dict[str, Any] | None, Meta(description="not used")] = None


ResultPart = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock


class ToolResultBlock(Block, frozen=True, kw_only=True, tag="tool_result"):
    """The result of a call."""

    tool_use_id: NonEmpty
    content: str | list[ResultPart] | None = None
    is_error: Flag = None


class ThinkingBlock(Block, frozen=True, kw_only=True, tag="thinking"):
    """The model's thinking. `signature`: not used."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Thinking that another model did not show. Left out."""

    data: str


UserBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolResultBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock

# ---------------------------------------------------------------- messages and tools


class UserTurn(Lenient, frozen=True, tag_field="role", tag="user"):
    content: str | list[UserBlock]


class AssistantTurn(Lenient, frozen=True, tag_field="role", tag="assistant"):
    """An answer of the model. As the last message: the beginning of the answer, which goes on from there."""

    content: str | list[AssistantBlock]


class SystemTurn(Lenient, frozen=True, tag_field="role", tag="system"):
    """An instruction in the middle of a conversation, where the model's template allows it."""

    content: str | list[TextBlock]


Turn = UserTurn | AssistantTurn | SystemTurn


class CustomTool(LenientTool, frozen=True, kw_only=True):
    """A tool that the client runs, the only kind: this server runs none. A request whose tools are all hosted ones asks
    for what they would do, and is refused: the client then knows that nothing was searched."""

    needs_others = True

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: Annotated[dict[str, Any], Meta(description="a JSON schema of an object")]
    strict: Annotated[Flag, Meta(description="the input of every call validates against input_schema; false")] = None
    input_examples: Annotated[
        list[dict[str, Any]] | None, Meta(description="examples of the input: added to the description")
    ] = None
    cache_control: CacheControl | None = None
    allowed_callers: Annotated[list[str] | None, Meta(description="not used: the model calls")] = None
    defer_loading: Annotated[Flag, Meta(description="not used: nothing searches tools, so all are there")] = None
    eager_input_streaming: Annotated[Flag, Meta(description="not used: inputs are always streamed")] = None


class ChooseAuto(Body, frozen=True, tag_field="type", tag="auto"):
    disable_parallel_tool_use: Flag = None


class ChooseAny(Body, frozen=True, tag_field="type", tag="any"):
    """The answer is a call of some tool."""

    disable_parallel_tool_use: Flag = None


class ChooseTool(Body, frozen=True, tag_field="type", tag="tool"):
    """The answer is a call of this tool."""

    name: ToolName
    disable_parallel_tool_use: Flag = None


class ChooseNone(Body, frozen=True, tag_field="type", tag="none"):
    """The answer has no call."""

    disable_parallel_tool_use: Flag = None


Display = Annotated[
    Literal["summarized", "omitted"] | None, Meta(description="omitted: thinking is left out of the answer")
]


class ThinkingEnabled(Body, frozen=True, kw_only=True, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[Count, Meta(description="most tokens of thinking; what is longer is cut off")]
    display: Display = None


class ThinkingAdaptive(Body, frozen=True, kw_only=True, tag_field="type", tag="adaptive"):
    """Thinking as the model sees fit."""

    display: Display = None


class ThinkingDisabled(Body, frozen=True, tag_field="type", tag="disabled"):
    """No thinking, where the model's template allows that."""


class OutputSchema(Body, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that validates against a schema."""

    schema: dict[str, Any]
    name: str | None = None


class OutputConfig(Body, frozen=True, kw_only=True):
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None, Meta(description="goes to the model's template")
    ] = None
    format: OutputSchema | None = None
    task_budget: Neutral = None


class Metadata(Body, frozen=True):
    """Facts about the request, which are not kept. `user_id`: whom it is for, where the API key has `by_user`."""

    user_id: str | None = None


# ---------------------------------------------------------------- requests


class CountTokensRequest(Body, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: a conversation."""

    model: ModelName = None
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: Annotated[str | list[TextBlock] | None, Meta(description="the system's text, before all messages")] = None
    tools: Annotated[list[CustomTool], Meta(max_length=512)] | None = None
    tool_choice: ChooseAuto | ChooseAny | ChooseTool | ChooseNone | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputSchema | None, Meta(description="as output_config.format")] = None
    cache_control: CacheControl | None = None
    context_management: Annotated[
        dict[str, Any] | None, Meta(description="not used: the whole conversation is read")
    ] = None
    mcp_servers: NeutralList | None = None
    speed: Literal["standard"] | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[
        int, Meta(ge=0, le=INT32, description="most tokens of the answer; 0: the prompt is computed, and kept")
    ]
    stream: Annotated[Flag, Meta(description="send the answer as it is made, as server-sent events")] = None
    stop_sequences: Annotated[
        Annotated[list[StopText], Meta(max_length=16)] | None,
        Meta(description="texts that end the answer; they are not part of it"),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, Meta(description="0 is greedy; the model's own, else 1")
    ] = None
    top_p: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, Meta(description="the model's own, else 1")] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=0, le=INT32)] | None, Meta(description="0 stands for all tokens; the model's own")
    ] = None
    metadata: Metadata | None = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, Meta(description="there is one tier: the answer says standard")
    ] = None
    thread: Annotated[
        dict[str, Any] | None, Meta(description="not supported: clients that are told so send the whole conversation")
    ] = None
    container: Neutral = None
    diagnostics: Annotated[dict[str, Any] | None, Meta(description="not used")] = None
    inference_geo: Annotated[str | None, Meta(description="not used")] = None


# ---------------------------------------------------------------- answers

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokens(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Numbers of tokens. `input_tokens`: those of the prompt that were computed; `cache_read_input_tokens`: the others,
    which were cached. Nothing is paid for caching, so none are counted as created for it."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET
    service_tier: Literal["standard"] = "standard"


class AnswerText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class AnswerThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    """Thinking. `signature`: always empty; nothing is checked when it comes back."""

    thinking: str
    signature: str = ""


class AnswerToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call. `input`: a JSON object."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class MessageAnswer(msgspec.Struct, kw_only=True):
    """An answer, whole or (with the event `message_start`) as it begins."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(msgspec.Struct):
    """The number of tokens of a conversation."""

    input_tokens: int


# ---------------------------------------------------------------- events


class TextPiece(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingPiece(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignaturePiece(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputPiece(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: MessageAnswer


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnding(msgspec.Struct):
    """The reason why an answer ends. `stop_sequence`: the one that ended it."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: MessageEnding
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


StreamEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop

# ---------------------------------------------------------------- errors and models


class ErrorDetails(msgspec.Struct):
    """The reason in a word, for clients that try again in another way."""

    error_code: str


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class AnthropicError(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str | None


class AnthropicModel(msgspec.Struct, kw_only=True):
    """A model, as Anthropic describes it. The numbers of tokens are null for a model at another endpoint."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModelPage(msgspec.Struct, kw_only=True):
    """A page of Anthropic's list of models: the only one."""

    data: list[AnthropicModel]
    has_more: bool = False
    first_id: str | None
    last_id: str | None
