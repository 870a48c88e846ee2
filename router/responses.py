"""What clients get back: OpenAI's objects, encoded by msgspec because a stream makes thousands of them a second."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length"]


_LEAST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI sends -9999 for it."""
    return max(logprob, _LEAST_LOGPROB)


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens: of the prompts, each counted once, and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


# ---------------------------------------------------------------- chat


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ContentLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


# ---------------------------------------------------------------- completions


class CompletionLogprobs(msgspec.Struct):
    """One entry a token. `text_offset`: characters of the choice's text before it. The first token of an echoed prompt
    has no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(msgspec.Struct, kw_only=True):
    """A whole completion, and also a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


# ---------------------------------------------------------------- the rest


class Model(msgspec.Struct, kw_only=True):
    """`max_model_len`: most tokens of prompt and output together. `default_sampling`: the model's own temperature and
    the like, for requests that do not say any."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "shoal"
    max_model_len: int
    default_sampling: dict[str, float]


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokens(msgspec.Struct):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(msgspec.Struct):
    prompt: str


class Health(msgspec.Struct):
    """`replicas`: those that this server can reach now."""

    status: Literal["ok", "not ready"]
    replicas: int


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    error: ErrorDetail
