"""An HTTP request for text, ready to run: its prompts as tokens, its sequences, and their sampling parameters."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Literal

import msgspec

from router.chat.chat_template import TemplateError
from router.chat.conversation import Conversation
from router.formats.format import OutputFormat
from router.prepare.answer_syntax import AnswerSyntax
from router.prepare.chat_reader import chat_conversation
from router.prepare.program_calls import ContinuedBranch
from router.prepare.prompts import Prompt, branch_prompts, context_room, separate_prompts, tokenized_prompt, too_long
from router.prepare.sampling import bad_word_ids, sampling_params, sequence_seed
from router.prepare.structure import constrained, structure
from router.programs import BranchCall, Held
from router.text.chat_prompt import chat_prompt, check_arguments
from router.text.tokenizer import PromptTooLong, Tokenizer
from router.text.truncation import Truncation
from router.wire.errors import invalid
from router.wire.requests import ChatRequest, CompletionRequest, GenerationRequest, Prediction
from worker.messages import Grammar, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
Promised = Literal["calls", "json"] | None
MAX_LOGPROBS_HELD = 8 << 20  # in one answer that is not streamed: about 1 GB of memory


@dataclass(frozen=True)
class Choice:
    """A choice of the answer: one sequence. `first`: whether it is the first choice of its prompt. `call`: the program
    that it belongs to. `held`: the branch that it continues, whose text begins the prompt."""

    index: int
    prompt: Prompt
    sampling: SamplingParams
    first: bool
    call: BranchCall | None = None
    held: Held | None = None


@dataclass(frozen=True)
class PreparedRequest:
    """A request with everything that running it needs.

    | field | meaning |
    | --- | --- |
    | `prompt_tokens` | tokens of all prompts, each prompt counted once |
    | `include_stop` | whether the stop string or token that ends the text is part of it |
    | `include_usage`, `usage_so_far` | whether a stream ends with the usage; whether every chunk has a usage |
    | `names_tier` | the client named a service tier, so the answer names one too |
    | `prompt_param`, `grammar_param` | the client's parameter names, for a replica's errors about prompt and grammar |
    | `wants_token_ids` | whether every choice has its `token_ids` |
    | `wants_prompt_ids` | whether the answer has `prompt_token_ids` |
    | `prompt_logprobs` | how many of the likeliest tokens `prompt_logprobs` has; None if the answer has none |
    | `continues` | the answers go on in a text that the prompt has begun |
    | `thinking_place` | what becomes of thinking: it stands apart, is part of the content, or is left out |
    | `discard` | `max_tokens` is 0: the one token that the replica makes nevertheless is dropped |
    | `whole_choices` | each choice of a stream is one event, with its own usage if the usage is wanted |
    | `together` | the sequences share their context, and start on one replica |
    | `syntax` | how answers are read: thinking, calls; None if they are text and nothing else |
    | `promised` | `calls`: the answer has one; `json`: its text, if there is any, is JSON; None: neither |
    | `thinking_budget` | most tokens of thinking; None if it has no limit of its own |
    | `prediction_ids` | tokens of the client's guess at the answer |
    | `cache_salt` | the client's salt of the prefix cache |
    | `user` | the client's name for whom the request is for |
    | `arrived` | `perf_counter` when the request came |
    """

    id: str
    sequences: list[Choice]
    prompt_tokens: int
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    priority: int
    include_usage: bool
    usage_so_far: bool
    names_tier: bool
    prompt_param: str
    grammar_param: str | None
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    wants_prompt_ids: bool = False
    prompt_logprobs: int | None = None
    continues: bool = False
    thinking_place: Literal["apart", "content", "nowhere"] = "apart"
    echo: bool = False
    discard: bool = False
    whole_choices: bool = False
    together: bool = False
    syntax: AnswerSyntax | None = None
    promised: Promised = None
    thinking_budget: int | None = None
    prediction_ids: list[int] = field(default_factory=list)
    cache_salt: str | None = None
    user: str | None = None
    arrived: float = field(default_factory=perf_counter)
    created: int = field(default_factory=lambda: int(time.time()))

    def prompt_ids(self, index: int) -> list[int]:
        """The tokens of the prompt of choice number `index`."""
        return next(sequence.prompt.token_ids for sequence in self.sequences if sequence.index == index)


def prepare_chat(
    request: ChatRequest,
    format: OutputFormat,
    tokenizer: Tokenizer,
    context_length: int,
    max_sequences: int,
    arrived: float,
    call: BranchCall | None = None,
    cut_at_context: bool = False,
) -> PreparedRequest:
    """Prepares a chat request: renders the template and tokenises. `call`: the program that it belongs to;
    `cut_at_context`: as of `prepare_conversation`. Slow: run it in a thread. Raises ApiError."""
    if request.top_logprobs and not request.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    if request.program is not None and request.program.continues:
        raise invalid("A chat cannot continue a branch: 'messages' are the whole conversation.", "program.continues")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise invalid("'max_tokens' and 'max_completion_tokens' differ: send one of them.", "max_tokens")
    prepared = prepare_conversation(
        chat_conversation(request),
        request,
        format,
        tokenizer,
        context_length,
        max_sequences,
        arrived,
        id_prefix="chatcmpl-",
        max_tokens=limits.pop() if limits else None,
        max_tokens_param="max_tokens" if request.max_tokens is not None else "max_completion_tokens",
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        names_tier=request.service_tier is not None,
        call=call,
        cut_at_context=cut_at_context,
    )
    excluded = request.include_reasoning is False or bool(request.reasoning and request.reasoning.exclude)
    if excluded or request.separate_reasoning is False:
        prepared = replace(prepared, thinking_place="nowhere" if excluded else "content")
    if request.prediction is None:
        return prepared
    return replace(prepared, prediction_ids=_prediction_ids(request.prediction, tokenizer, context_length))


def _prediction_ids(prediction: Prediction, tokenizer: Tokenizer, context_length: int) -> list[int]:
    """The tokens of a client's guess, as many as the context has room for. Raises ApiError for a text that is far
    longer."""
    content = prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    try:
        return tokenizer.encode_continuation(text, context_length)[:context_length]
    except PromptTooLong:
        message = f"'prediction' is far longer than the context of {context_length} tokens."
        raise invalid(message, "prediction", "context_length_exceeded") from None


def prepare_conversation(
    conversation: Conversation,
    request: GenerationRequest,
    format: OutputFormat,
    tokenizer: Tokenizer,
    context_length: int,
    max_sequences: int,
    arrived: float,
    *,
    id_prefix: str,
    max_tokens: int | None,
    max_tokens_param: str,
    messages_param: str = "messages",
    cut_at_context: bool = False,
    logprobs: int | None = None,
    names_tier: bool = False,
    call: BranchCall | None = None,
) -> PreparedRequest:
    """Prepares the answer to a conversation, whichever protocol it came by: renders the template and tokenises. Slow:
    run it in a thread. Raises ApiError.

    | argument | meaning |
    | --- | --- |
    | `request` | sampling, `n`, stop strings, streaming, and the form of the text |
    | `format` | how the model writes thinking and calls |
    | `max_tokens` | most tokens of the answer; None for what fits into the context |
    | `max_tokens_param`, `messages_param` | the protocol's names for these parameters, for errors |
    | `cut_at_context` | `max_tokens` may be more than what fits into the context: the answer ends there |
    """
    grammar_param, grammar = structure(request)
    promised = "calls" if conversation.choice.mode == "required" else _promised(grammar)
    _check_request(request, 1, max_sequences)
    truncation = Truncation.asked(request, "left")
    text, token_ids = conversation_prompt(
        conversation, format, tokenizer, context_length, messages_param, truncation, max_tokens
    )
    syntax = _syntax(conversation, format, tokenizer, text)
    if syntax is not None:
        grammar_param, grammar = constrained(conversation, syntax, grammar_param, grammar)
    sampling = sampling_params(
        request,
        tokenizer.vocab_size,
        grammar=grammar,
        logprobs=logprobs,
        prompt_logprobs=None if request.stream else request.prompt_logprobs,
        bad_words=bad_word_ids(request.bad_words or (), tokenizer),
    )
    room = context_room(token_ids, context_length, messages_param)
    limit = _max_tokens(max_tokens, room, room, max_tokens_param, cut_at_context)
    prepared = _prepared(request, id_prefix, [Prompt(token_ids)], sampling, [limit], arrived, grammar_param, call)
    budget = conversation.thinking.budget
    return replace(
        prepared,
        names_tier=names_tier,
        prompt_param=messages_param,
        syntax=syntax,
        continues=bool(conversation.prefill or conversation.prefill_thinking),
        promised=promised,
        thinking_budget=budget if syntax is not None and syntax.end_of_thinking else None,
    )


def conversation_prompt(
    conversation: Conversation,
    format: OutputFormat,
    tokenizer: Tokenizer,
    context_length: int | None = None,
    messages_param: str = "messages",
    truncation: Truncation | None = None,
    max_tokens: int | None = None,
) -> tuple[str, list[int]]:
    """The prompt of a conversation as text, and as tokens. `truncation`: what of these may be cut, so that the prompt
    and an answer of `max_tokens` fit. Slow: run it in a thread. Raises ApiError, also for a prompt that is far longer
    than `context_length`."""
    try:
        check_arguments(conversation)
        text = chat_prompt(conversation, format, tokenizer)
        if truncation is not None and context_length is not None:
            room = context_length - (max_tokens or 1)
            token_ids = tokenizer.encode(truncation.part(text, room), add_special_tokens=False)
            return text, truncation.cut(token_ids, room)
        return text, tokenizer.encode(text, add_special_tokens=False, context_length=context_length)
    except TemplateError as error:
        param = messages_param if error.param == "messages" else error.param
        raise invalid(f"The chat template refuses these messages: {error}.", param) from None
    except PromptTooLong as error:
        raise too_long(error.tokens, context_length or 0, messages_param, "at least ") from None


def _syntax(conversation: Conversation, format: OutputFormat, tokenizer: Tokenizer, prompt: str) -> AnswerSyntax | None:
    """How the answer is read; None if it is text and nothing else."""
    tools, thinking = conversation.callable_tools, format.thinking
    if not tools and not format.may_think:
        return None
    goes_on_thinking = thinking is not None and bool(conversation.prefill_thinking) and not conversation.prefill
    thinks = goes_on_thinking or format.opens_thinking(prompt)
    is_begun = thinks or bool(conversation.prefill) or format.closes_thinking(prompt)
    return AnswerSyntax(
        format=format,
        tools=tools,
        thinks=thinks,
        may_open_thinking=thinking is not None and not is_begun and conversation.thinking.enabled is not False,
        parallel=conversation.parallel,
        end_of_thinking=[] if thinking is None else tokenizer.encode_continuation(f"\n{thinking.end}\n\n"),
        calls_before=sum(len(message.calls) for message in conversation.messages),
    )


def _promised(grammar: Grammar | None) -> Promised:
    return "json" if grammar is not None and grammar.kind in ("json_schema", "json_object") else None


def prepare_completion(
    request: CompletionRequest,
    tokenizer: Tokenizer,
    context_length: int,
    max_sequences: int,
    arrived: float,
    branches: Sequence[ContinuedBranch] = (),
    cut_at_context: bool = False,
) -> PreparedRequest:
    """Prepares a request for completions: tokenises its prompts. `branches`: those of a program that it continues;
    `cut_at_context`: as of `prepare_conversation`. Slow: run it in a thread. Raises ApiError."""
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise invalid("'best_of' is not supported unless it equals 'n'.", "best_of", "unsupported_parameter")
    grammar_param, grammar = structure(request)
    of_echo = request.logprobs if request.echo else None
    of_prompt = None if request.stream else request.prompt_logprobs
    asked_of_prompt = [number for number in (of_echo, of_prompt) if number is not None]
    sampling = sampling_params(
        request,
        tokenizer.vocab_size,
        grammar=grammar,
        logprobs=request.logprobs,
        prompt_logprobs=max(asked_of_prompt) if asked_of_prompt else None,
        bad_words=bad_word_ids(request.bad_words or (), tokenizer),
    )
    truncation = Truncation.asked(request, "left")
    if truncation is not None and branches:
        raise invalid("The text of a program is not cut: leave it out.", "truncate_prompt_tokens")
    inputs = [branch.text for branch in branches] or separate_prompts(request.prompt)
    _check_request(request, len(inputs), max_sequences)
    if branches:
        assert isinstance(request.prompt, str)
        prompts = branch_prompts(request.prompt, branches, tokenizer, context_length)
    else:
        room = context_length - max(1, DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens)
        prompts = [tokenized_prompt(entry, tokenizer, context_length, truncation, room) for entry in inputs]
    max_tokens = []
    for prompt in prompts:
        room = context_room(prompt.token_ids, context_length, "prompt")
        asked = request.max_tokens
        max_tokens.append(_max_tokens(asked, DEFAULT_COMPLETION_TOKENS, room, "max_tokens", cut_at_context))
    prepared = replace(
        _prepared(request, "cmpl-", prompts, sampling, max_tokens, arrived, grammar_param, None),
        promised=_promised(grammar),
    )
    if not branches:
        return prepared
    sequences = [
        replace(sequence, call=branch.call, held=branch.held)
        for sequence, branch in zip(prepared.sequences, branches, strict=True)
    ]
    return replace(prepared, sequences=sequences, together=len(branches) > 1)


def _prepared(
    request: GenerationRequest,
    prefix: str,
    prompts: list[Prompt],
    sampling: SamplingParams,
    max_tokens: list[int],
    arrived: float,
    grammar_param: str | None,
    call: BranchCall | None,
) -> PreparedRequest:
    n = request.n or 1
    options = request.stream_options if request.stream else None
    echoes = isinstance(request, CompletionRequest) and bool(request.echo)
    include_usage = bool(options and options.include_usage)
    sequences: list[Choice] = []
    for prompt, limit in zip(prompts, max_tokens, strict=True):
        if sampling.min_tokens > limit:
            raise invalid(
                f"'min_tokens' is {sampling.min_tokens}, but the answer has at most {limit} tokens.", "min_tokens"
            )
        for choice in range(n):
            params = msgspec.structs.replace(
                sampling,
                max_tokens=max(limit, 1),
                seed=sequence_seed(request.seed, choice),
                prompt_logprobs=sampling.prompt_logprobs if echoes or not choice else None,
            )
            sequences.append(Choice(len(sequences), prompt, params, choice == 0, call))
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    _check_logprobs(request, sampling, sum(max_tokens) * n, prompt_tokens * (n if echoes else 1))
    return PreparedRequest(
        id=prefix + uuid.uuid4().hex,
        sequences=sequences,
        prompt_tokens=prompt_tokens,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        priority=request.priority or 0,
        include_usage=include_usage,
        usage_so_far=include_usage and bool(options and (options.continuous_usage_stats or options.whole_choices)),
        names_tier=False,
        prompt_param="prompt",
        grammar_param=grammar_param,
        wants_logprobs=sampling.logprobs is not None,
        wants_token_ids=bool(request.return_token_ids),
        wants_prompt_ids=bool(request.return_token_ids or request.return_prompt_token_ids),
        prompt_logprobs=None if request.stream else request.prompt_logprobs,
        echo=echoes,
        discard=isinstance(request, CompletionRequest) and request.max_tokens == 0,
        whole_choices=bool(options and options.whole_choices),
        cache_salt=request.cache_salt,
        user=getattr(request, "safety_identifier", None) or request.user,
        arrived=arrived,
    )


def _check_request(request: GenerationRequest, num_prompts: int, max_sequences: int) -> None:
    if request.stream and request.prompt_logprobs:
        raise invalid("A stream has no 'prompt_logprobs': leave them out, or 'stream'.", "prompt_logprobs")
    whole_choices = request.stream_options is not None and request.stream_options.whole_choices
    if whole_choices and not isinstance(request, CompletionRequest):
        raise invalid("'whole_choices' is for completions only.", "stream_options.whole_choices")
    asked = num_prompts * (request.n or 1)
    if asked > max_sequences:
        param = "n" if num_prompts <= max_sequences else "prompt"
        raise invalid(f"Prompts times 'n' is {asked}; the limit is {max_sequences} in one request.", param)


def _check_logprobs(request: GenerationRequest, sampling: SamplingParams, tokens: int, prompt_tokens: int) -> None:
    asked = 0 if sampling.logprobs is None or request.stream else tokens * (1 + sampling.logprobs)
    asked += 0 if sampling.prompt_logprobs is None else prompt_tokens * (1 + sampling.prompt_logprobs)
    if asked > MAX_LOGPROBS_HELD:
        raise invalid(
            f"The answer could have {asked} log probabilities; the limit is {MAX_LOGPROBS_HELD} unless it is streamed. "
            "Lower 'max_tokens', 'n' or the number of log probabilities.",
            "logprobs",
        )


def _max_tokens(asked: int | None, default: int, room: int, param: str, cut_at_context: bool) -> int:
    if asked is None:
        return min(default, room)
    if asked > room:
        if cut_at_context:
            return room
        raise invalid(
            f"{param!r} is {asked}, but only {room} tokens of the model's context are left after the prompt. Lower it, "
            "leave it out, or set clamp_max_tokens on the server.",
            param,
            "context_length_exceeded",
        )
    return asked
