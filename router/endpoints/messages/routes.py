"""The routes of Anthropic's Messages."""

from dataclasses import replace
from time import perf_counter

from fastapi import APIRouter, Depends, Request, Response

from router import openapi
from router.access.rate_limits import Kind, RateLimits
from router.endpoints.answering import answered, json_response
from router.endpoints.messages.reader import generation_request, messages_conversation
from router.endpoints.messages.writer import MessagesFormat
from router.formats.format import OutputFormat
from router.models import Models
from router.prepare.defaults import SamplingDefaults
from router.prepare.prepared_request import PreparedRequest, conversation_prompt, prepare_conversation
from router.text.tokenizer import Tokenizer
from router.wire.messages_types import (
    AnthropicError,
    AssistantTurn,
    CountTokensRequest,
    InputTokens,
    MessageAnswer,
    MessagesRequest,
    ThinkingAdaptive,
    ThinkingEnabled,
)

FORM_PARAM = "output_config.format"
_EVENTS = "server-sent events: message_start, ping, content_block_start, content_block_delta, ..., message_stop"
_ERRORS = (400, 401, 404, 408, 413, 415, 500, 502)


def messages_routes(models: Models, limits: RateLimits) -> APIRouter:
    """`/v1/messages` and what is below."""
    return _MessagesRoutes(models, limits).routes()


class _MessagesRoutes:
    """The handlers of requests."""

    def __init__(self, models: Models, limits: RateLimits) -> None:
        self._models, self._limits = models, limits

    def routes(self) -> APIRouter:
        routes = APIRouter(tags=["generation"])
        routes.post(
            "/v1/messages",
            dependencies=[Depends(self._limits.admit)],
            openapi_extra=openapi.body(MessagesRequest),
            responses=openapi.answers(MessageAnswer, *_ERRORS, 429, 503, 504, events=_EVENTS, error=AnthropicError),
        )(self._models.passing_on(self.messages))
        routes.post(
            "/v1/messages/count_tokens",
            dependencies=[Depends(self._limits.admit_as(Kind.TOKENISES))],
            openapi_extra=openapi.body(CountTokensRequest),
            responses=openapi.answers(InputTokens, *_ERRORS, 429, error=AnthropicError),
        )(self._models.passing_on(self.count_tokens))
        return routes

    async def messages(self, request: Request) -> Response:
        """Answers a conversation by Anthropic's protocol, as a whole or as a stream."""
        arrived = perf_counter()
        service, body, size = await self._models.read(request, MessagesRequest)
        prepared = await service.in_thread(
            request,
            size,
            prepare_messages,
            body,
            service.defaults,
            service.output_format,
            service.tokenizer,
            service.context_length,
            arrived,
        )
        return await answered(
            request, service, bool(body.stream), prepared, messages_format(body, prepared, service.model)
        )

    async def count_tokens(self, request: Request) -> Response:
        """The number of tokens that a conversation has as a prompt."""
        service, body, size = await self._models.read(request, CountTokensRequest)
        count = await service.in_thread(request, size, input_tokens, body, service.output_format, service.tokenizer)
        request.state.ticket.add_read(count)
        return json_response(InputTokens(count))


def prepare_messages(
    request: MessagesRequest,
    defaults: SamplingDefaults,
    format: OutputFormat,
    tokenizer: Tokenizer,
    context_length: int,
    arrived: float,
) -> PreparedRequest:
    """Prepares a request: renders the template and tokenises. Slow: run it in a thread. Raises ApiError."""
    prepared = prepare_conversation(
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
    if prepared.grammar_param == "response_format":
        prepared = replace(prepared, grammar_param=FORM_PARAM)
    return replace(prepared, discard=request.max_tokens == 0)


def messages_format(request: MessagesRequest, prepared: PreparedRequest, model: str) -> MessagesFormat:
    """The writer of the answer to a request."""
    thinking = request.thinking
    return MessagesFormat(
        prepared,
        model,
        max_tokens=request.max_tokens,
        continues=isinstance(request.messages[-1], AssistantTurn),
        shows_thinking=not (isinstance(thinking, ThinkingEnabled | ThinkingAdaptive) and thinking.display == "omitted"),
    )


def input_tokens(request: CountTokensRequest, format: OutputFormat, tokenizer: Tokenizer) -> int:
    """The number of tokens of a conversation, as its answer's prompt. Slow: run it in a thread. Raises ApiError."""
    _, token_ids = conversation_prompt(messages_conversation(request), format, tokenizer)
    return len(token_ids)
