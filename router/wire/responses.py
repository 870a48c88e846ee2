"""Response bodies: OpenAI's objects. Encoded by msgspec, because a stream makes thousands of them a second."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


_MIN_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """The log probability, or -9999 for minus infinity, as OpenAI does: JSON cannot express infinity."""
    return max(logprob, _MIN_LOGPROB)


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Some numbers of output tokens.

    | field | meaning |
    | --- | --- |
    | `reasoning_tokens` | those with which the model thought before its answer |
    | `accepted_prediction_tokens` | drafts that were right: tokens that needed no step of their own |
    | `rejected_prediction_tokens` | drafts that were wrong: they are in no answer, and not counted in it |
    """

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    """Numbers of tokens: of the prompts, each counted once, and of all choices. The details of completions are there
    for models that think, and where drafts were verified."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    def __add__(self, other: "Usage") -> "Usage":
        details = (self.completion_tokens_details, other.completion_tokens_details)
        known = [each for each in details if each is not UNSET]
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.total_tokens + other.total_tokens,
            PromptTokensDetails(self.prompt_tokens_details.cached_tokens + other.prompt_tokens_details.cached_tokens),
            CompletionTokensDetails(
                *(sum(getattr(each, name) for each in known) for name in CompletionTokensDetails.__struct_fields__)
            )
            if known
            else UNSET,
        )


ChunkUsage = Usage | UnsetType | None  # in a chunk: left out, null before the end, or the usage so far


# What ended a choice, by vLLM's name (`stop_reason`: null for the model's own end tokens) and by SGLang's
# (`matched_stop`): the stop string, the token's id, or null.
StoppedBy = str | int | None


class PromptLogprob(msgspec.Struct):
    """The natural log probability of a token at a position of the prompt. `rank`: 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by position, then by token id; null for the first token


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


class CalledFunction(msgspec.Struct):
    """`arguments`: a JSON object, as text."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct):
    """The answer. `content` is null where there are only calls. Thinking has both of the names that clients know; they
    are null where a model that can think has not, and missing for a model that cannot."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[MessageToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET


class SchemaReport(msgspec.Struct):
    """How a choice keeps to its schema, where that has keywords that cannot be enforced while the text is made
    (`strict` is false).

    | field | meaning |
    | --- | --- |
    | `not_enforced` | these keywords, with their places |
    | `valid` | whether the text validates against the schema; null if it was cut off, or could not be judged |
    | `violation` | what is wrong, or why it could not be judged |
    | `sampled_again` | how often a part of the text was thrown away, from a violation on, and sampled again |
    | `narrowed` | keywords, with their places, of which not all values could be written; present if there are any |
    """

    not_enforced: list[str]
    valid: bool | None
    violation: str | None
    sampled_again: int
    narrowed: list[str] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET  # present if the request asks for them
    schema_check: SchemaReport | UnsetType = UNSET
    stop_reason: StoppedBy = None
    matched_stop: StoppedBy = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: Literal["default"] | UnsetType = UNSET  # present if the request names one
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET  # these two are present if the request asks for them
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """A part of the call number `index`. The first has its id and name, the others a fragment of its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET


class ChoicePart(msgspec.Struct, kw_only=True):
    """A choice that may not be complete: what chunks of chats, and completions, say besides their text."""

    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET  # present if the request asks for them
    schema_check: SchemaReport | UnsetType = UNSET
    stop_reason: StoppedBy | UnsetType = UNSET  # these two are present where there is a finish_reason
    matched_stop: StoppedBy | UnsetType = UNSET


class ChatChunkChoice(ChoicePart):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    service_tier: Literal["default"] | UnsetType = UNSET
    usage: ChunkUsage = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # present in the first chunk, if the request asks for them


# ---------------------------------------------------------------- completions


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities, one entry per token. `text_offset`: characters of the choice's text before the token. The
    first token of an echoed prompt has no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ChoicePart):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET  # these two are present if the request asks for them
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole completion, and also a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChunkUsage = UNSET


# ---------------------------------------------------------------- other routes


class ScoredChoice(msgspec.Struct, kw_only=True):
    """The tokens of a choice from the first that differs from the prompt's, with natural log probabilities. `greedy`:
    whether no other token is likelier; `top_logprob`: of the likeliest token. `unconditional_logprobs`, without the
    prompt, are null where nothing comes before the token."""

    tokens: list[int]
    logprobs: list[float]
    unconditional_logprobs: list[float | None] | None
    greedy: list[bool]
    top_logprob: list[float]


class ScoredChoices(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["choices"] = "choices"
    created: int
    model: str
    choices: list[ScoredChoice]
    usage: Usage


class PromptUsage(msgspec.Struct):
    """Number of tokens of all prompts, twice: nothing else is counted."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    """An embedding: its numbers, or in base64 its bytes, little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PromptUsage


class SourceDocument(msgspec.Struct):
    text: str


class RankedDocument(msgspec.Struct, kw_only=True):
    """A document by its index in the request. `relevance_score`: from 0 to 1 by a reranker, from -1 to 1 by
    embeddings."""

    index: int
    relevance_score: float
    document: SourceDocument | UnsetType = UNSET


class Reranking(msgspec.Struct, kw_only=True):
    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class ModelCard(msgspec.Struct, kw_only=True):
    """A name of a model.

    | field | meaning |
    | --- | --- |
    | `owned_by` | shoal; upstream if requests for the model are passed on to another endpoint |
    | `root` | the model's own name, of which `id` may be an alias; of an adapter: its folder |
    | `parent` | of an alias or an adapter: the model's own name |
    | `max_model_len` | most tokens of prompt and output together |
    | `default_sampling` | the model's own sampling parameters, for requests that leave them out |

    The last two are only known of models that are served here.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["shoal", "upstream"] = "shoal"
    root: str
    parent: str | None = None
    max_model_len: int | UnsetType = UNSET
    default_sampling: dict[str, float] | UnsetType = UNSET


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct):
    """The tokens of a text. `token_strs`: as the vocabulary spells them, if the request asks for it."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct):
    """The content of `tokenizer_config.json`. These fields are always there. Special tokens are texts."""

    tokenizer_class: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class FlushedCache(msgspec.Struct):
    """Caches that were emptied. `tokens_in_use`: KV tokens that running requests hold, which stay while they run."""

    replicas: int = 0
    tokens_in_use: int = 0


class AbortedRequests(msgspec.Struct):
    """`aborted`: requests that were ended at this router. Other routers end theirs, and are not counted."""

    aborted: int


class Version(msgspec.Struct):
    version: str


class Health(msgspec.Struct):
    """State of the server. `replicas`: how many it can reach now; `models`: how many of each model."""

    status: Literal["ok", "not ready"]
    replicas: int
    models: dict[str, int]


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    error: ErrorDetail
