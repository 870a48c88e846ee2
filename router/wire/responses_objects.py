"""The answers of `/v1/responses`: the response, its items, and the events of a stream."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from router.wire.responses import ContentLogprob, PromptTokensDetails, Usage

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ENDED = ("completed", "incomplete", "failed", "cancelled")


# ---------------------------------------------------------------- items


class ReasoningPart(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class AnsweredText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class AnswerItem(msgspec.Struct, kw_only=True, tag_field="type"):
    """An item of the output. `incomplete`: the answer was cut off in it."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"


class ReasoningItem(AnswerItem, kw_only=True, tag="reasoning"):
    """The model's thinking, as a whole. There are no summaries."""

    summary: list[Any] = []
    content: list[ReasoningPart] = []
    encrypted_content: None = None


class MessageItem(AnswerItem, kw_only=True, tag="message"):
    role: Literal["assistant"] = "assistant"
    content: list[AnsweredText] = []


class CallItem(AnswerItem, kw_only=True, tag="function_call"):
    """A call. `arguments`: a JSON object, as text. `namespace`: that of the function, where it has one."""

    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


OutputItem = ReasoningItem | MessageItem | CallItem


# ---------------------------------------------------------------- the response


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    code: str
    message: str


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Numbers of tokens. Those of thinking are part of the output's."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        """The same numbers by their names here."""
        cached: PromptTokensDetails = usage.prompt_tokens_details
        thinking = usage.completion_tokens_details
        return cls(
            usage.prompt_tokens,
            InputTokensDetails(cached.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(thinking.reasoning_tokens if thinking else 0),
            usage.total_tokens,
        )


class ReasoningSettings(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class TextSettings(msgspec.Struct, kw_only=True):
    format: dict[str, Any]
    verbosity: Literal["medium"] = "medium"


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response: what was asked for, and as much of the answer as there is."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItems(msgspec.Struct, kw_only=True):
    """A page of the items that a response was asked with."""

    object: Literal["list"] = "list"
    data: Annotated[list[dict[str, Any]], Meta(description="items as they were sent, with ids")]
    first_id: str | None
    last_id: str | None
    has_more: bool


# ---------------------------------------------------------------- events


class ResponseEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    """An event of a stream. Its name is its `type`."""

    sequence_number: int


class _OfResponse(ResponseEvent, kw_only=True):
    response: ResponseObject


class ResponseCreated(_OfResponse, tag="response.created"): ...


class ResponseQueued(_OfResponse, tag="response.queued"): ...


class ResponseInProgress(_OfResponse, tag="response.in_progress"): ...


class ResponseCompleted(_OfResponse, tag="response.completed"): ...


class ResponseIncomplete(_OfResponse, tag="response.incomplete"): ...


class ResponseFailed(_OfResponse, tag="response.failed"): ...


class _OfItem(ResponseEvent, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, tag="response.output_item.added"): ...


class ItemDone(_OfItem, tag="response.output_item.done"): ...


class _InItem(ResponseEvent, kw_only=True):
    item_id: str
    output_index: int


class _InPart(_InItem, kw_only=True):
    content_index: int = 0


class PartAdded(_InPart, kw_only=True, tag="response.content_part.added"):
    part: AnsweredText | ReasoningPart


class PartDone(_InPart, kw_only=True, tag="response.content_part.done"):
    part: AnsweredText | ReasoningPart


class TextAdded(_InPart, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ContentLogprob]


class TextDone(_InPart, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ContentLogprob]


class ThoughtAdded(_InPart, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ThoughtDone(_InPart, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsAdded(_InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_InItem, kw_only=True, tag="response.function_call_arguments.done"):
    arguments: str
    name: str


class StreamError(ResponseEvent, kw_only=True, tag="error"):
    code: str | None
    message: str
    param: str | None
