"""The routes of Anthropic's Messages."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from time import perf_counter

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from router import openapi
from router.access.rate_limits import Kind, RateLimits
from router.endpoints.messages.reader import generation_request, messages_conversation
from router.endpoints.messages.writer import MessagesFormat
from router.formats.format import OutputFormat
from router.generation import Format
from router.models import Models
from router.prepare.defaults import SamplingDefaults
from router.prepare.prepared_request import PreparedRequest, conversation_job, conversation_prompt
from router.service import Service
from router.text.tokenizer import Tokenizer
from router.wire.messages_types import (
    AnthropicError,
    AnthropicModel,
    AnthropicModelPage,
    AssistantTurn,
    CountTokensRequest,
    InputTokens,
    MessageAnswer,
    MessagesRequest,
    ThinkingAdaptive,
    ThinkingEnabled,
)

Answer = Callable[[Request, Service, bool, PreparedRequest, Format], Awaitable[Response]]

FORM_PARAM = "output_config.format"
_EVENTS = "server-sent events: message_start, ping, content_block_start, content_block_delta, ..., message_stop"
_ERRORS = (400, 401, 404, 408, 413, 415, 500, 502)


def messages_routes(models: Models, limits: RateLimits, answer: Answer) -> APIRouter:
    """`/v1/messages` and what is below. `answer` runs a job and answers the request with a format's bytes."""
    routes = APIRouter(tags=["generation"])

    @routes.post(
        "/v1/messages",
        dependencies=[Depends(limits.admit)],
        openapi_extra=openapi.body(MessagesRequest),
        responses=openapi.answers(MessageAnswer, *_ERRORS, 429, 503, 504, events=_EVENTS, error=AnthropicError),
    )
    @models.passing_on
    async def messages(request: Request) -> Response:
        """Answers a conversation by Anthropic's protocol, as a whole or as a stream."""
        arrived = perf_counter()
        service, body, size = await models.read(request, MessagesRequest)
        job = await service.in_thread(
            request,
            size,
            messages_job,
            body,
            service.defaults,
            service.output_format,
            service.tokenizer,
            service.context_length,
            arrived,
        )
        return await answer(request, service, bool(body.stream), job, messages_format(body, job, service.model))

    @routes.post(
        "/v1/messages/count_tokens",
        dependencies=[Depends(limits.admit_as(Kind.TOKENISES))],
        openapi_extra=openapi.body(CountTokensRequest),
        responses=openapi.answers(InputTokens, *_ERRORS, 429, error=AnthropicError),
    )
    @models.passing_on
    async def count_tokens(request: Request) -> Response:
        """The number of tokens that a conversation has as a prompt."""
        service, body, size = await models.read(request, CountTokensRequest)
        count = await service.in_thread(request, size, input_tokens, body, service.output_format, service.tokenizer)
        request.state.ticket.add_read(count)
        return Response(msgspec.json.encode(InputTokens(count)), media_type="application/json")

    return routes


def messages_job(
    request: MessagesRequest,
    defaults: SamplingDefaults,
    format: OutputFormat,
    tokenizer: Tokenizer,
    context_length: int,
    arrived: float,
) -> PreparedRequest:
    """Prepares a request: renders the template and tokenises. Slow: run it in a thread. Raises ApiError."""
    job = conversation_job(
        messages_conversation(request),
        defaults.complete(generation_request(request)),
        format,
        tokenizer,
        context_length,
        1,
        arrived,
        id_prefix="msg_",
        max_tokens=request.max_tokens,
        max_tokens_param="max_tokens",
        cut_at_context=True,
    )
    if job.grammar_param == "response_format":
        job = replace(job, grammar_param=FORM_PARAM)
    return replace(job, discard=request.max_tokens == 0)


def messages_format(request: MessagesRequest, job: PreparedRequest, model: str) -> MessagesFormat:
    """The writer of the answer to a request."""
    thinking = request.thinking
    return MessagesFormat(
        job,
        model,
        max_tokens=request.max_tokens,
        continues=isinstance(request.messages[-1], AssistantTurn),
        shows_thinking=not (isinstance(thinking, ThinkingEnabled | ThinkingAdaptive) and thinking.display == "omitted"),
    )


def input_tokens(request: CountTokensRequest, format: OutputFormat, tokenizer: Tokenizer) -> int:
    """The number of tokens of a conversation, as its answer's prompt. Slow: run it in a thread. Raises ApiError."""
    _, token_ids = conversation_prompt(messages_conversation(request), format, tokenizer)
    return len(token_ids)


def anthropic_model(name: str, created: int, context_length: int | None) -> AnthropicModel:
    """The model, as Anthropic describes models. `created`: seconds since 1970. `context_length`: in tokens, None for a
    model at another endpoint."""
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(
        id=name, display_name=name, created_at=at, max_input_tokens=context_length, max_tokens=context_length
    )


def anthropic_models(*models: AnthropicModel) -> AnthropicModelPage:
    """Models, as a page of Anthropic's list."""
    return AnthropicModelPage(data=list(models), first_id=models[0].id, last_id=models[-1].id)
