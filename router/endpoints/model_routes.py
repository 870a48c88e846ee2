"""The routes of models: their list, and their tokenizers."""

import time
from datetime import UTC, datetime

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from router import openapi
from router.access.rate_limits import Kind, RateLimits
from router.chat.chat_template import TemplateError
from router.endpoints.answering import json_response
from router.models import ListedModel, Models
from router.prepare.chat_reader import tokenized_conversation
from router.prepare.sampling import check_token_ids
from router.service import Service
from router.streaming.dialects import wants_anthropic
from router.text.chat_prompt import chat_prompt
from router.wire.errors import invalid
from router.wire.messages_types import AnthropicModel, AnthropicModelPage
from router.wire.requests import DetokenizeRequest, TokenizeRequest
from router.wire.responses import DetokenizeResponse, ModelCard, ModelList, TokenizeResponse, TokenizerInfo

ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 502)


def model_routes(models: Models, limits: RateLimits) -> APIRouter:
    """The routes."""
    return _ModelRoutes(models, limits).routes()


class _ModelRoutes:
    """The handlers of requests. `_created`: seconds since 1970."""

    def __init__(self, models: Models, limits: RateLimits) -> None:
        self._models, self._limits = models, limits
        self._created = int(time.time())

    def routes(self) -> APIRouter:
        routes = APIRouter(tags=["model"])
        admitted, passing_on = [Depends(self._limits.admit_as(Kind.TOKENISES))], self._models.passing_on
        routes.get("/v1/models", responses=openapi.answers(ModelList, 401))(self.all_models)
        routes.get("/v1/models/{model_id:path}", responses=openapi.answers(ModelCard, 401, 404))(self.one_model)
        routes.post(
            "/tokenize",
            dependencies=admitted,
            openapi_extra=openapi.body(TokenizeRequest),
            responses=openapi.answers(TokenizeResponse, *ERRORS),
        )(passing_on(self.tokenize))
        routes.post(
            "/detokenize",
            dependencies=admitted,
            openapi_extra=openapi.body(DetokenizeRequest),
            responses=openapi.answers(DetokenizeResponse, *ERRORS),
        )(passing_on(self.detokenize))
        routes.get(
            "/tokenizer_info",
            dependencies=admitted,
            openapi_extra=openapi.queries(model=str),
            responses=openapi.answers(TokenizerInfo, 400, 401, 404, 429),
        )(self.tokenizer_info)
        return routes

    async def all_models(self, request: Request) -> Response:
        """All models and their aliases, as a list; with the header `anthropic-version`, in Anthropic's form."""
        if wants_anthropic(request.scope):
            cards = [self._anthropic_card(listed) for listed in self._models]
            return json_response(AnthropicModelPage(data=cards, first_id=cards[0].id, last_id=cards[-1].id))
        return json_response(ModelList(data=[self._card(listed) for listed in self._models]))

    async def one_model(self, request: Request, model_id: str) -> Response:
        """A model, by its name or an alias; with the header `anthropic-version`, in Anthropic's form."""
        listed = self._models.find(model_id)
        return json_response((self._anthropic_card if wants_anthropic(request.scope) else self._card)(listed))

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        service, body, size = await self._models.read(request, TokenizeRequest)
        tokens = await service.in_thread(request, size, _tokens, service, body)
        request.state.ticket.add_read(len(tokens))
        spelled = service.tokenizer.spelled(tokens) if body.return_token_strs else None
        return json_response(TokenizeResponse(tokens, len(tokens), service.context_length, spelled))

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        service, body, size = await self._models.read(request, DetokenizeRequest)
        check_token_ids(body.tokens, service.tokenizer.vocab_size, "tokens")
        skip = body.skip_special_tokens is True
        request.state.ticket.add_read(len(body.tokens))
        text = await service.in_thread(request, size, service.tokenizer.decode, body.tokens, skip)
        return json_response(DetokenizeResponse(text))

    async def tokenizer_info(self, request: Request) -> Response:
        """The tokenizer's own configuration, for clients that render chats themselves."""
        service = self._models.service(request.query_params.get("model"))
        return JSONResponse(service.tokenizer.info)  # not msgspec: the file may have integers beyond 64 bits

    def _card(self, listed: ListedModel) -> ModelCard:
        """A name in OpenAI's list."""
        card = ModelCard(
            id=listed.name,
            created=self._created,
            root=listed.model,
            parent=listed.model if listed.name != listed.model else None,
        )
        if isinstance(listed.served, Service):
            if listed.served.adapter is not None:
                card.root = listed.served.adapter.path
            card.max_model_len = listed.served.context_length
            card.default_sampling = dict(listed.served.defaults.values)
        else:
            card.owned_by = "upstream"
        return card

    def _anthropic_card(self, listed: ListedModel) -> AnthropicModel:
        """A name in Anthropic's list."""
        context_length = listed.served.context_length if isinstance(listed.served, Service) else None
        return AnthropicModel(
            id=listed.name,
            display_name=listed.name,
            created_at=datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            max_input_tokens=context_length,
            max_tokens=context_length,
        )


def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Send either 'prompt' or 'messages'.", "prompt")
    tokenizer = service.tokenizer
    if body.prompt is not None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name):
                raise invalid(f"{name!r} is for 'messages'.", name)
        return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    conversation = tokenized_conversation(body)
    try:
        text = chat_prompt(conversation, service.output_format, tokenizer)
    except TemplateError as error:
        raise invalid(str(error), error.param) from None
    return tokenizer.encode(text, bool(body.add_special_tokens))
