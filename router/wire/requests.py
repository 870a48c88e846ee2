"""Request bodies: OpenAI's fields, and fields that other servers have made common.

Types are strict (`"1"` is no number), and unknown fields are errors, except in messages, their parts and tools
(`Lenient`). `/openapi.json` is made from these types. Some fields of OpenAI's clients mean nothing here. They are
accepted at the one value that changes nothing (`Neutral`, `NeutralList`, `neutral_flags`), and refused by name at any
other.
"""

import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_LEASE_S = 3600
MAX_BAD_WORDS = 256
INT32 = (1 << 31) - 1
INT63 = (1 << 63) - 1
TOKEN_ID = "token id"

Neutral = Annotated[None, Meta(description="not supported: leave it out")]
NeutralList = Annotated[list[Any], Meta(max_length=0, description="not supported: leave it out or empty")]
TokenId = Annotated[int, Meta(ge=0, le=INT32, title=TOKEN_ID)]
Count = Annotated[int, Meta(ge=1, le=INT32)]
NonEmpty = Annotated[str, Meta(min_length=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Penalty = Annotated[float, Meta(ge=-2, le=2, description="0")]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
MaxTokens = Annotated[Annotated[int, Meta(ge=0, le=INT32)] | None, Meta(description="most tokens of the answer; 16")]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Flag = bool | None
RequestId = Annotated[
    Annotated[str, Meta(min_length=1, max_length=256)] | None, Meta(description="a name for /abort_request")
]
Truncation = Annotated[
    Annotated[int, Meta(ge=-1, le=INT32)] | None,
    Meta(description="most tokens of the prompt, which is cut to them; -1: as many as fit"),
]
TruncationSide = Annotated[
    Literal["left", "right"] | None,
    Meta(description="where tokens are cut off: left for prompts, right for what is embedded or ranked"),
]
ModelName = Annotated[str | None, Meta(description="may be left out, or default, where one model is served")]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Any object that a client sends."""

    neutral_flags: ClassVar[tuple[str, ...]] = ()  # refused when true


class Lenient(Body, frozen=True, kw_only=True):
    """A part of a conversation, or a tool. Unknown fields are passed over: clients send back what other servers and
    their own packages have added, and none of it asks for anything. Known fields are checked as everywhere."""


# Types of tools that a hosted service runs, with the date or the like that some have at their end. The client runs all
# others, and waits for calls of them.
HOSTED_TOOLS = re.compile(
    r"(web_search|web_fetch|file_search|code_interpreter|code_execution|image_generation|mcp|mcp_toolset|"
    r"tool_search|tool_search_tool_(regex|bm25))(_preview)?(_[0-9_]+)?"
)


class LenientTool(Lenient, frozen=True, kw_only=True):
    """A tool among others, of which those that match `hosted` are passed over: nothing runs them here. `needs_others`:
    where there are no others, the request is refused."""

    hosted: ClassVar[re.Pattern[str] | None] = HOSTED_TOOLS
    needs_others: ClassVar[bool] = False


class StreamOptions(Body, frozen=True):
    neutral_flags = ("include_obfuscation",)

    include_usage: Annotated[Flag, Meta(description="end the stream with a chunk that counts tokens")] = None
    continuous_usage_stats: Annotated[
        Flag, Meta(description="with include_usage: every chunk counts the tokens so far")
    ] = None
    whole_choices: Annotated[
        Flag,
        Meta(
            description="each choice is one event, sent when it has ended; with include_usage, it has its own usage; "
            "only for completions"
        ),
    ] = None
    include_obfuscation: Annotated[Flag, Meta(description="not supported: false")] = None


class TextFormat(Body, frozen=True, tag_field="type", tag="text"):
    """Any text: the default."""


class JsonObjectFormat(Body, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(Body, frozen=True):
    """The schema that the output validates against."""

    name: NonEmpty
    schema: dict[str, Any]
    description: str | None = None
    strict: Annotated[
        Flag,
        Meta(
            description="true: a keyword that cannot be enforced while the output is made is refused. false: it is "
            "judged when the output is whole; the choice's schema_check names it, and says whether the output is valid"
        ),
    ] = None


class JsonSchemaFormat(Body, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that validates against a schema."""

    json_schema: JsonSchema


Regex = Annotated[NonEmpty | None, Meta(description="the output matches this regular expression")]
Options = Annotated[
    Annotated[list[NonEmpty], Meta(min_length=1, max_length=1024)] | None,
    Meta(description="the output is one of these"),
]
Ebnf = Annotated[
    NonEmpty | None, Meta(description="the output follows this grammar (GBNF, or Lark as llguidance reads it)")
]
Schema = Annotated[dict[str, Any] | str | None, Meta(description="the output validates against this JSON schema")]
AnyJson = Annotated[Flag, Meta(description="the output is a JSON object")]


class TaggedStructure(Body, frozen=True, kw_only=True):
    """A part of the output between two texts, JSON that validates against a schema."""

    begin: NonEmpty
    schema: dict[str, Any] = {}
    end: NonEmpty


class StructuralTagFormat(Body, frozen=True, kw_only=True, tag_field="type", tag="structural_tag"):
    """Text whose parts have forms of their own: `format` as xgrammar has it, or `structures` that begin with one of
    `triggers`."""

    format: dict[str, Any] | None = None
    structures: Annotated[list[TaggedStructure], Meta(min_length=1, max_length=256)] | None = None
    triggers: Annotated[list[NonEmpty], Meta(min_length=1, max_length=256)] | None = None
    at_least_one: Annotated[Flag, Meta(description="with structures: the output has at least one; false")] = None
    stop_after_first: Annotated[Flag, Meta(description="with structures: the output ends with the first; false")] = None


StructuralTag = Annotated[
    dict[str, Any] | str | None, Meta(description="as response_format of the type structural_tag has it")
]


class StructuredOutputs(Body, frozen=True, kw_only=True):
    """A constraint on the output, by vLLM's names: one of the first six fields."""

    neutral_flags = ("disable_additional_properties",)

    json: Schema = None
    regex: Regex = None
    choice: Options = None
    grammar: Ebnf = None
    json_object: AnyJson = None
    structural_tag: StructuralTag = None
    disable_any_whitespace: Annotated[
        Flag, Meta(description="either value changes nothing: JSON has at most a space after a comma or a colon")
    ] = None
    disable_additional_properties: Annotated[Flag, Meta(description="not supported: false")] = None
    disable_fallback: Annotated[Flag, Meta(description="there is nothing to fall back to")] = None
    whitespace_pattern: Neutral = None


class GenerationParameters(Body, frozen=True, kw_only=True):
    """The fields that say how one text is generated: sampling, its end, its form."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, Meta(description="0 is greedy; the model's own, else 1")
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="0 takes the likeliest token; the model's own, else 1"),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=INT32)] | None,
        Meta(description="0 and -1 stand for all tokens; the model's own, else 0"),
    ] = None
    min_p: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, Meta(description="the model's own, else 0")] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100, description="the model's own, else 1")] | None = None
    logit_bias: Annotated[
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None,
        Meta(description="token ids, as strings, to what is added to their logits"),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-INT63 - 1, le=INT63)] | None,
        Meta(description="the same seed gives the same text, whatever the load"),
    ] = None
    stop: Annotated[
        StopText | Annotated[list[StopText], Meta(max_length=16)] | None,
        Meta(description="texts that end the answer; they are not part of it"),
    ] = None
    include_stop_str_in_output: Annotated[
        Flag, Meta(description="the stop text or token that ends the answer is part of it; false")
    ] = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 18)] | None,
        Meta(description="the answer has these tokens only; to end by itself it needs an end token among them"),
    ] = None
    bad_words: Annotated[
        Annotated[list[StopText], Meta(max_length=MAX_BAD_WORDS)] | None,
        Meta(description="texts that the answer does not have, as the tokenizer writes them after a space or without"),
    ] = None
    min_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=INT32)] | None,
        Meta(description="least tokens of the answer; stop strings are searched for in the text after them"),
    ] = None
    ignore_eos: Flag = None
    skip_special_tokens: Annotated[Flag, Meta(description="leave special tokens out of the text; true")] = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat | None = None
    regex: Regex = None
    choice: Options = None
    ebnf: Ebnf = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: Regex = None
    guided_choice: Options = None
    guided_grammar: Ebnf = None
    guided_json_object: AnyJson = None
    guided_decoding_backend: Annotated[str | None, Meta(description="not used: there is one")] = None
    guided_whitespace_pattern: Neutral = None


ProgramName = Annotated[str, Meta(min_length=1, max_length=64)]


class ProgramFork(Body, frozen=True, kw_only=True):
    """A branch that a request begins, together with others."""

    branch: Annotated[ProgramName, Meta(description="the new branch")]
    prompt: Annotated[str, Meta(description="the branch's own text, after the request's prompt")]
    then: Annotated[str | None, Meta(description="constant text that will follow the answer: computed as it ends")] = (
        None
    )
    remaining: Annotated[
        Annotated[int, Meta(ge=0, le=INT32)] | None,
        Meta(description="calls that the program still has after this one on its longest path"),
    ] = None


class TemplateCall(GenerationParameters, frozen=True, kw_only=True):
    """A call of a template: constant text that follows the answer before, and how what follows that is generated."""

    prompt: Annotated[str, Meta(description="the text between the answer before and this one")]
    max_tokens: MaxTokens = None
    logprobs: TopLogprobs | None = None


class ProgramCall(Body, frozen=True, kw_only=True):
    """The program of calls that a request belongs to, and what it says about the calls to come."""

    id: Annotated[ProgramName, Meta(description="the program's run")]
    branch: Annotated[
        ProgramName | None, Meta(description="the branch whose text this request continues; needed without forks")
    ] = None
    forks: Annotated[
        Annotated[list[ProgramFork], Meta(min_length=1, max_length=MAX_CHOICES)] | None,
        Meta(description="new branches, each with a choice of the answer; prompt is the text that all begin with"),
    ] = None
    template: Annotated[
        Annotated[list[TemplateCall], Meta(min_length=1, max_length=MAX_CHOICES)] | None,
        Meta(description="calls that follow on the branch one after the other, each with a choice of the answer"),
    ] = None
    parent: Annotated[
        ProgramName | None,
        Meta(description="with the first request of a branch: the branch whose text, as it is now, it begins with"),
    ] = None
    continues: Annotated[
        Flag,
        Meta(description="prompt is only the text that follows what the branch holds; false: prompt is the whole text"),
    ] = None
    held: Annotated[
        Annotated[int, Meta(ge=0, le=INT63)] | None,
        Meta(description="characters that the branch, or the parent, holds by the client's count: else 409"),
    ] = None
    lease_s: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_LEASE_S)] | None,
        Meta(description="seconds after this request in which the branch's KV is evicted last; 0"),
    ] = None
    then: Annotated[
        str | None,
        Meta(description="constant text that will follow the answer: of a completion: computed as it ends"),
    ] = None
    remaining: Annotated[
        Annotated[int, Meta(ge=0, le=INT32)] | None,
        Meta(description="calls that the program still has after this one on its longest path: fewer go earlier"),
    ] = None
    deadline_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="seconds from now in which the program should have ended: near ones go earlier"),
    ] = None


class GenerationRequest(GenerationParameters, frozen=True, kw_only=True):
    """The fields that chat and plain completions share."""

    model: ModelName = None
    stream: Annotated[Flag, Meta(description="send the text as it is made, as server-sent events")] = None
    stream_options: StreamOptions | None = None
    n: Annotated[Choices | None, Meta(description="answers to each prompt; 1")] = None
    return_token_ids: Annotated[
        Flag,
        Meta(
            description="every choice has token_ids, its tokens, the one that ended it included; and there are "
            "prompt_token_ids; false"
        ),
    ] = None
    return_prompt_token_ids: Annotated[Flag, Meta(description="prompt_token_ids alone; false")] = None
    prompt_logprobs: Annotated[
        TopLogprobs | None,
        Meta(
            description="log probabilities of the prompt's tokens, each with as many of the likeliest; not in streams"
        ),
    ] = None
    truncate_prompt_tokens: Truncation = None
    truncation_side: TruncationSide = None
    request_id: RequestId = None
    rid: RequestId = None
    priority: Annotated[
        Annotated[int, Meta(ge=-INT32 - 1, le=INT32)] | None,
        Meta(description="higher goes first, up to the server's max_priority; 0"),
    ] = None
    timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="seconds in which the answer must be complete, also by the header X-Request-Timeout; refused "
            "at once with 429 where the queue is longer, ended with 504 (or an error event) when they are over"
        ),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=1024)] | None,
        Meta(description="the prompt's prefixes are cached for requests with the same salt only"),
    ] = None
    user: Annotated[
        str | None, Meta(description="whom the request is for: a part of the key's share, where the key has by_user")
    ] = None
    length_penalty: Annotated[
        Annotated[float, Meta(ge=1, le=1)] | None, Meta(description="for beam search, which is not supported: 1")
    ] = None
    program: ProgramCall | None = None


class TextPart(Lenient, frozen=True, tag_field="type", tag="text"):
    """A part of a message that is text."""

    text: str


class Prediction(Body, frozen=True):
    """A client's guess at the answer."""

    type: Literal["content"]
    content: Annotated[str, Meta(min_length=1)] | Annotated[list[TextPart], Meta(min_length=1)]


class RefusalPart(Lenient, frozen=True, tag_field="type", tag="refusal"):
    """A part of an assistant's message with which it refused."""

    refusal: str


class FileContent(Lenient, frozen=True, kw_only=True):
    file_data: Annotated[str | None, Meta(description="data:text/...;base64,... or the text in base64")] = None
    filename: str | None = None
    file_id: Neutral = None


class FilePart(Lenient, frozen=True, tag_field="type", tag="file"):
    """A file of text, as a part of a message."""

    file: FileContent


class ImageUrl(Lenient, frozen=True, kw_only=True):
    url: str
    detail: str | None = None


class ImagePart(Lenient, frozen=True, tag_field="type", tag="image_url"):
    """A picture. No model here takes one."""

    image_url: ImageUrl | str


class AudioPart(Lenient, frozen=True, tag_field="type", tag="input_audio"):
    """A sound. No model here takes one."""

    input_audio: dict[str, Any]


class VideoPart(Lenient, frozen=True, tag_field="type", tag="video_url"):
    """A film. No model here takes one."""

    video_url: dict[str, Any] | str


class ThinkingPart(Lenient, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """A part of an assistant's message that is what the model thought."""

    thinking: str | list[TextPart] | None = None


class ReasonedPart(Lenient, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """As `ThinkingPart`, by other names."""

    text: str | None = None
    reasoning: str | None = None


class RedactedThinkingPart(Lenient, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Thinking that another server did not show. Left out."""


Part = (
    TextPart
    | RefusalPart
    | FilePart
    | ImagePart
    | AudioPart
    | VideoPart
    | ThinkingPart
    | ReasonedPart
    | RedactedThinkingPart
)
ProviderFields = Annotated[dict[str, Any] | None, Meta(description="LiteLLM adds it to answers; not used")]
PastArguments = Annotated[
    str | dict[str, Any] | None, Meta(description="a JSON object, as text or as it is; null: there were none")
]


class FunctionCall(Lenient, frozen=True):
    """A function that the model called."""

    name: NonEmpty
    arguments: PastArguments = None


class ToolCallOfMessage(Lenient, frozen=True, kw_only=True):
    """A call in an assistant's message."""

    id: Annotated[str | None, Meta(description="results without an id belong to calls in their order")] = None
    function: FunctionCall
    type: Literal["function"] | None = None
    index: int | None = None  # clients that joined a stream's chunks leave it in
    provider_specific_fields: ProviderFields = None


class ChatMessage(Lenient, frozen=True):
    """A message of a conversation. `developer` means `system`. Text parts are joined by newlines."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        Meta(description="function is what tool was before calls had ids: name says whose result it is"),
    ]
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any] | None, Meta(description="not used")] = None
    audio: Neutral = None
    function_call: Annotated[FunctionCall | None, Meta(description="of role assistant: as one of tool_calls")] = None
    tool_calls: list[ToolCallOfMessage] | None = None
    tool_call_id: Annotated[str | None, Meta(description="of role tool: the call that this is the result of")] = None
    reasoning_content: Annotated[str | None, Meta(description="of role assistant: what the model thought")] = None
    reasoning: Annotated[str | None, Meta(description="as reasoning_content")] = None
    prefix: Annotated[Flag, Meta(description="of the last message, an assistant's: as continue_final_message")] = None
    provider_specific_fields: ProviderFields = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1)]
TemplateArguments = Annotated[
    dict[str, Any] | None,
    Meta(description="further variables of the model's chat template, such as enable_thinking"),
]


ToolName = Annotated[str, Meta(pattern="^[A-Za-z0-9_.:-]{1,128}$")]


class FunctionDefinition(Lenient, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="a JSON schema of an object")] = None
    strict: Annotated[Flag, Meta(description="the arguments of every call validate against parameters; false")] = None


class FunctionTool(LenientTool, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A tool of OpenAI's kind `function`, the only one."""

    function: FunctionDefinition


class FunctionName(Body, frozen=True):
    name: ToolName


class NamedTool(Body, frozen=True, tag_field="type", tag="function"):
    """The answer is one call of this function."""

    function: FunctionName


class AllowedToolNames(Body, frozen=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class AllowedTools(Body, frozen=True, tag_field="type", tag="allowed_tools"):
    """Only these of the tools may be called."""

    allowed_tools: AllowedToolNames


Tools = Annotated[list[FunctionTool], Meta(max_length=512)]
ChooseTools = Literal["none", "auto", "required"] | NamedTool | AllowedTools
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThinkingBudget = Annotated[
    Annotated[int, Meta(ge=-1, le=INT32)] | None,
    Meta(description="most tokens of thinking; what is longer is cut off, and the answer begins; -1: no limit"),
]
Unused = Annotated[Any, Meta(description="not used: shared prefixes are found without it")]


class ReasoningSwitch(Body, frozen=True, kw_only=True):
    """How to think, as OpenRouter has it."""

    enabled: Flag = None
    effort: ReasoningEffort | None = None
    max_tokens: Annotated[Count | None, Meta(description="most tokens of thinking")] = None
    exclude: Annotated[Flag, Meta(description="the answer does not have what the model thought")] = None
    summary: Annotated[str | None, Meta(description="not used")] = None


class ThinkingSwitch(Body, frozen=True, kw_only=True):
    """Whether to think, as DeepSeek, GLM and Anthropic have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[Count | None, Meta(description="most tokens of thinking")] = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    neutral_flags = ("add_special_tokens",)

    messages: Messages
    add_generation_prompt: Annotated[Flag, Meta(description="end the prompt where an answer begins; true")] = None
    continue_final_message: Annotated[
        Flag, Meta(description="the last message, the assistant's, is the beginning of the answer; false")
    ] = None
    add_special_tokens: Annotated[Flag, Meta(description="not supported: the template has them")] = None
    max_tokens: Annotated[
        Count | None, Meta(description="most tokens of the answer; by default what fits into the context")
    ] = None
    max_completion_tokens: Annotated[Count | None, Meta(description="as max_tokens")] = None
    logprobs: Flag = None
    top_logprobs: Annotated[TopLogprobs | None, Meta(description="needs logprobs to be true")] = None
    chat_template_kwargs: TemplateArguments = None

    audio: Neutral = None
    function_call: Literal["none", "auto"] | None = None
    functions: NeutralList | None = None
    metadata: Annotated[
        Annotated[dict[str, Any], Meta(max_length=16)] | None, Meta(description="not used, and not kept")
    ] = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)] | None = None
    moderation: Neutral = None
    parallel_tool_calls: Annotated[Flag, Meta(description="an answer may have more than one call; true")] = None
    prediction: Annotated[
        Prediction | None,
        Meta(
            description="a text that the answer is likely to repeat, as when a file is edited; the answer comes faster"
        ),
    ] = None
    prompt_cache_key: Annotated[str | None, Meta(description="not used: shared prefixes are found without it")] = None
    prompt_cache_options: Unused = None
    prompt_cache_retention: Unused = None
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        Meta(description="none: no thinking, where the template allows; others go to the template"),
    ] = None
    reasoning: Annotated[ReasoningSwitch | None, Meta(description="as OpenRouter has it")] = None
    thinking: Annotated[ThinkingSwitch | Flag, Meta(description="as DeepSeek, GLM and Anthropic have it")] = None
    enable_thinking: Annotated[Flag, Meta(description="whether to think, as Qwen's API has it")] = None
    think: Annotated[bool | Literal["low", "medium", "high"] | None, Meta(description="as Ollama has it")] = None
    include_reasoning: Annotated[Flag, Meta(description="the answer has what the model thought; true")] = None
    separate_reasoning: Annotated[
        Flag, Meta(description="false: what the model thought is part of the content, between its markers; true")
    ] = None
    safety_identifier: Annotated[str | None, Meta(description="as user, and before it")] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority"] | None,
        Meta(description="there is one tier: the answer says default"),
    ] = None
    store: Annotated[Flag, Meta(description="not used: no chat is kept")] = None
    thinking_token_budget: ThinkingBudget = None
    thinking_budget: Annotated[ThinkingBudget, Meta(description="as thinking_token_budget")] = None
    tool_choice: Annotated[
        ChooseTools | None, Meta(description="auto if there are tools; required: the answer is a call")
    ] = None
    tools: Tools | None = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Meta(description="not used")] = None
    web_search_options: Neutral = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[
        str | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)],
        Meta(description="a text, token ids, a list of texts, or a list of lists of token ids"),
    ]
    max_tokens: MaxTokens = None
    echo: Annotated[Flag, Meta(description="begin the text with the prompt")] = None
    logprobs: TopLogprobs | None = None
    best_of: Annotated[Choices | None, Meta(description="accepted if equal to n")] = None
    suffix: Neutral = None


class ChoicesRequest(Body, frozen=True, kw_only=True):
    """POST /v1/choices."""

    model: ModelName = None
    prompt: Annotated[str, Meta(description="the text before each choice; with a program, what follows its branch")]
    choices: Annotated[list[NonEmpty], Meta(min_length=1, max_length=MAX_CHOICES)]
    unconditional: Annotated[Flag, Meta(description="score the choices without the prompt, too; false")] = None
    program: ProgramCall | None = None


Truncate = Annotated[
    bool | Literal["NONE", "START", "END"] | None,
    Meta(description="cut what does not fit, as truncate_prompt_tokens -1: true or END at its end, START at its start"),
]


class EmbeddingsRequest(Body, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    model: ModelName = None
    input: Annotated[
        str | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)],
        Meta(description="a text, token ids, a list of texts, or a list of lists of token ids"),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="base64 is of little-endian float32; float")
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1, le=INT32)] | None,
        Meta(description="how many numbers of each embedding are kept, the first ones; all"),
    ] = None
    truncate_prompt_tokens: Truncation = None
    truncation_side: TruncationSide = None
    truncate: Truncate = None
    user: Annotated[str | None, Meta(description="whom the request is for; not used")] = None


class SourceText(Lenient, frozen=True):
    """A document to rank: its text alone, of all that clients keep with it."""

    text: str


Instruction = Annotated[
    str | None, Meta(description="the task, for models that take one: what makes a document relevant to a query")
]


class RerankRequest(Body, frozen=True, kw_only=True):
    """POST /v1/rerank."""

    model: ModelName = None
    query: str
    documents: Annotated[list[str | SourceText], Meta(min_length=1)]
    top_n: Annotated[
        Annotated[int, Meta(ge=0, le=INT32)] | None, Meta(description="most documents of the answer; 0: all")
    ] = None
    return_documents: Annotated[Flag, Meta(description="the answer repeats the documents; true")] = None
    instruction: Instruction = None
    truncate_prompt_tokens: Truncation = None
    truncation_side: TruncationSide = None
    truncate: Truncate = None
    user: Annotated[str | None, Meta(description="whom the request is for; not used")] = None


ScoredTexts = str | Annotated[list[str], Meta(min_length=1)] | None


class ScoreRequest(Body, frozen=True, kw_only=True):
    """POST /v1/score: `text_1` and `text_2`, or `queries` and `documents`; one text to one, to many, or many to as
    many."""

    model: ModelName = None
    text_1: Annotated[ScoredTexts, Meta(description="queries")] = None
    text_2: Annotated[ScoredTexts, Meta(description="documents")] = None
    queries: ScoredTexts = None
    documents: ScoredTexts = None
    instruction: Instruction = None
    truncate_prompt_tokens: Truncation = None
    truncation_side: TruncationSide = None
    truncate: Truncate = None
    user: Annotated[str | None, Meta(description="whom the request is for; not used")] = None


class TokenizeRequest(Body, frozen=True):
    """POST /tokenize: a text (`prompt`) or a conversation (`messages`)."""

    model: ModelName = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Annotated[
        Flag, Meta(description="add the special tokens that the model expects; true for a prompt, false for messages")
    ] = None
    add_generation_prompt: Annotated[
        Flag, Meta(description="end a conversation where the answer begins; true for messages")
    ] = None
    continue_final_message: Annotated[
        Flag, Meta(description="the last message, the assistant's, is the beginning of the answer; false")
    ] = None
    return_token_strs: Annotated[Flag, Meta(description="name the tokens as the vocabulary spells them; false")] = None
    chat_template_kwargs: TemplateArguments = None
    tools: Tools | None = None


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: ModelName = None
    tokens: list[TokenId]
    skip_special_tokens: Annotated[Flag, Meta(description="leave special tokens out of the text; false")] = None


class LoadLoraRequest(Body, frozen=True, kw_only=True):
    """POST /v1/load_lora_adapter."""

    lora_name: Annotated[str, Meta(min_length=1, description="the adapter's name in the API")]
    lora_path: Annotated[str, Meta(min_length=1, description="folder of the adapter, in PEFT's format, on replicas")]
    load_inplace: Annotated[
        bool, Meta(description="whether an adapter of this name may be there, which this one replaces")
    ] = False
    base_model: Annotated[str | None, Meta(description="the model that it is for; needed where there are several")] = (
        None
    )


class AbortRequest(Body, frozen=True, kw_only=True):
    """POST /abort_request: requests of the client's own that are to end."""

    rid: Annotated[str | None, Meta(description="the name of a request")] = None
    request_ids: Annotated[
        Annotated[list[NonEmpty], Meta(max_length=1024)] | None, Meta(description="names of requests")
    ] = None
    abort_all: Annotated[
        Flag, Meta(description="all requests of the client's key; without keys, all, for clients on this machine")
    ] = None


class UnloadLoraRequest(Body, frozen=True, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Meta(min_length=1, description="the adapter's name in the API")]
