"""The HTTP server: OpenAI's API, and endpoints for operators.

The path of a request for text:

1. `Keys` checks the API key.
2. `Models` reads the body into one of the types of `requests`, and finds the `Service` of the model that it names. What
   names a model of another endpoint is passed on (`upstream`).
3. `chat_job` or `completion_job` (`prepared_request`) turns it into tokens and sampling parameters.
4. `Generation` runs its sequences through the `Service`, and writes the text with `ChatFormat` or `CompletionFormat`.
   (`choices_job` and `ChoicesFormat` are the same for scores; `embedding_routes` has those for embeddings.)
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from router import openapi
from router.access.auth import Keys
from router.access.rate_limits import HEADERS as RATE_LIMIT_HEADERS
from router.access.rate_limits import Kind, RateLimits
from router.chat.chat_template import TemplateError
from router.endpoints.adapter_routes import adapter_routes
from router.endpoints.completion_routes import answered, completion_routes
from router.endpoints.control_routes import control_routes
from router.endpoints.embeddings.routes import embedding_routes
from router.endpoints.messages.routes import anthropic_model, anthropic_models, messages_routes
from router.endpoints.responses.routes import responses_routes
from router.http.middleware import IGNORED, Guarded, HeadAsGet, Observed
from router.metrics.build import version
from router.models import ListedModel, Models
from router.page.routes import page_routes
from router.prepare.chat_reader import tokenized_conversation
from router.prepare.sampling import check_token_ids
from router.service import Service
from router.streaming.dialects import error_response, wants_anthropic
from router.streaming.sse import ClientGone
from router.text.chat_prompt import chat_prompt
from router.wire import request_id
from router.wire.errors import ApiError, invalid
from router.wire.messages_types import AnthropicModel
from router.wire.requests import (
    INT32,
    DetokenizeRequest,
    TokenizeRequest,
)
from router.wire.responses import (
    DetokenizeResponse,
    Health,
    ModelCard,
    ModelList,
    TokenizeResponse,
    TokenizerInfo,
    Version,
)

OPENAPI = "/openapi.json"
PREFLIGHT_S = 600  # how long a browser may cache the answer to a CORS preflight


def create_app(models: Models, answers_id: bool = True) -> FastAPI:
    """The FastAPI application. Its lifespan starts and closes `models`. `answers_id`: whether answers carry the
    request's id as X-Request-Id; false where a proxy in front adds it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await models.start()
        try:
            yield
        finally:
            await models.close()

    config = models.config
    closed = config.require_auth_for_metrics_endpoint
    app = FastAPI(
        title="Shoal",
        description="Large language models behind OpenAI's protocol",
        version=version(),
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None if closed else OPENAPI,  # without it, there is no page of the documentation either
    )
    keys = Keys(config, models.metrics)
    limits = RateLimits(models.metrics)
    models.share(limits)
    dependencies: list[Any] = [Depends(keys.check)]
    if keys:
        dependencies.append(Depends(HTTPBearer(auto_error=False)))  # for the OpenAPI page
    app.include_router(completion_routes(models, keys, limits), dependencies=dependencies)
    app.include_router(messages_routes(models, limits, answered), dependencies=dependencies)
    app.include_router(embedding_routes(models, limits), dependencies=dependencies)
    app.include_router(responses_routes(models, keys, limits), dependencies=dependencies)
    app.include_router(_model_routes(models, limits), dependencies=dependencies)
    app.include_router(adapter_routes(models), dependencies=dependencies)
    inside: list[Any] = dependencies if closed else []
    app.include_router(_operator_routes(models, app.version, inside))
    app.include_router(control_routes(models, keys))
    app.include_router(page_routes(models, app.version, bool(keys), inside))
    if closed:
        app.include_router(_documentation(app), dependencies=inside)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _nobody)
    app.add_middleware(Guarded)
    if config.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.origins,
            allow_methods=["GET", "POST", "HEAD", "DELETE"],
            allow_headers=["*"],
            expose_headers=[request_id.HEADER, "Retry-After", "request-id", IGNORED, *RATE_LIMIT_HEADERS],
            max_age=PREFLIGHT_S,
        )
    app.add_middleware(
        Observed, metrics=models.metrics, shutdown=models.shutdown, answers_id=answers_id, tracer=models.tracer
    )
    app.add_middleware(HeadAsGet)
    _document(app, models, keys)
    return app


def _model_routes(models: Models, limits: RateLimits) -> APIRouter:
    routes = APIRouter(tags=["model"])
    admitted = [Depends(limits.admit_as(Kind.TOKENISES))]
    created = int(time.time())

    @routes.get("/v1/models", responses=openapi.answers(ModelList, 401))
    async def all_models(request: Request) -> Response:
        """All models and their aliases, as a list; with the header `anthropic-version`, in Anthropic's form."""
        if wants_anthropic(request.scope):
            return _json(anthropic_models(*(_anthropic_card(listed, created) for listed in models)))
        return _json(ModelList(data=[_card(listed, created) for listed in models]))

    @routes.get("/v1/models/{model_id:path}", responses=openapi.answers(ModelCard, 401, 404))
    async def one_model(request: Request, model_id: str) -> Response:
        """A model, by its name or an alias; with the header `anthropic-version`, in Anthropic's form."""
        listed = models.find(model_id)
        return _json((_anthropic_card if wants_anthropic(request.scope) else _card)(listed, created))

    @routes.post(
        "/tokenize",
        dependencies=admitted,
        openapi_extra=openapi.body(TokenizeRequest),
        responses=openapi.answers(TokenizeResponse, 400, 401, 404, 408, 413, 415, 429, 500, 502),
    )
    @models.passing_on
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        service, body, size = await models.read(request, TokenizeRequest)
        tokens = await service.in_thread(request, size, _tokens, service, body)
        request.state.ticket.add_read(len(tokens))
        spelled = service.tokenizer.spelled(tokens) if body.return_token_strs else None
        return _json(TokenizeResponse(tokens, len(tokens), service.context_length, spelled))

    @routes.post(
        "/detokenize",
        dependencies=admitted,
        openapi_extra=openapi.body(DetokenizeRequest),
        responses=openapi.answers(DetokenizeResponse, 400, 401, 404, 408, 413, 415, 429, 500, 502),
    )
    @models.passing_on
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        service, body, size = await models.read(request, DetokenizeRequest)
        check_token_ids(body.tokens, service.tokenizer.vocab_size, "tokens")
        skip = body.skip_special_tokens is True
        request.state.ticket.add_read(len(body.tokens))
        return _json(
            DetokenizeResponse(await service.in_thread(request, size, service.tokenizer.decode, body.tokens, skip))
        )

    @routes.get(
        "/tokenizer_info",
        dependencies=admitted,
        openapi_extra=openapi.queries(model=str),
        responses=openapi.answers(TokenizerInfo, 400, 401, 404, 429),
    )
    async def tokenizer_info(request: Request) -> Response:
        """The tokenizer's own configuration, for clients that render chats themselves."""
        service = models.service(request.query_params.get("model"))
        return JSONResponse(service.tokenizer.info)  # not msgspec: the file may have integers beyond 64 bits

    return routes


def _documentation(app: FastAPI) -> APIRouter:
    """The OpenAPI page, and the pages that show it, as FastAPI has them. It does not let them have dependencies."""
    routes = APIRouter(include_in_schema=False)

    @routes.get(OPENAPI)
    async def openapi_page() -> Response:
        return JSONResponse(app.openapi())

    for path, page in (("/docs", get_swagger_ui_html), ("/redoc", get_redoc_html)):
        routes.add_api_route(path, partial(_shown, page, app.title))
    return routes


async def _shown(page: Callable[..., Response], title: str) -> Response:
    return page(openapi_url=OPENAPI.removeprefix("/"), title=title)


def _operator_routes(models: Models, version: str, inside: list[Any]) -> APIRouter:
    """`inside`: what a request for the metrics depends on."""
    routes = APIRouter(tags=["operation"])

    def reached() -> dict[str, int]:
        return {service.model: len(service.replicas.ready) for service in models.services}

    @routes.post("/ping", include_in_schema=False)  # SageMaker's name for it
    @routes.get("/ping", responses=openapi.answers(Health))
    @routes.get("/health", responses=openapi.answers(Health))
    async def health() -> Response:
        """Whether this process is alive: answers 200 while it is."""
        return _json(Health("ok", sum(reached().values()), reached()))

    @routes.get("/ready", responses=openapi.answers(Health) | {503: openapi.answers(Health)[200]})
    async def ready() -> Response:
        """Whether a request would be answered now: 200 if any model has a replica that is connected and not silent,
        would get one for the request (autoscaling to zero), or is at another endpoint, else 503. By the first model
        that is down, a load balancer would take out all others. 503 also once the router is being taken away."""
        found = reached()
        answers = any(service.answers for service in models.services) or bool(models.upstreams)
        is_ready = answers and not models.leaving and not models.shutdown.has_come
        return _json(Health("ok" if is_ready else "not ready", sum(found.values()), found), 200 if is_ready else 503)

    @routes.get("/version", responses=openapi.answers(Version))
    async def version_of_this() -> Response:
        """The version of Shoal."""
        return _json(Version(version))

    answers = openapi.errors(*([401] if inside else []))
    answers[200] = {"description": "the metrics", "content": {"text/plain": {}}}

    @routes.get("/metrics", dependencies=inside, responses=answers)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        page = []
        for piece in models.metrics.pieces():
            page.append(piece)
            await asyncio.sleep(0)  # streams go on meanwhile
        return Response(b"".join(page), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return routes


def _card(listed: ListedModel, created: int) -> ModelCard:
    """A name in OpenAI's list. `created`: seconds since 1970."""
    card = ModelCard(
        id=listed.name,
        created=created,
        root=listed.model,
        parent=listed.model if listed.name != listed.model else None,
    )
    if isinstance(listed.answers, Service):
        if listed.answers.adapter is not None:
            card.root = listed.answers.adapter.path
        card.max_model_len = listed.answers.context_length
        card.default_sampling = dict(listed.answers.defaults.values)
    else:
        card.owned_by = "upstream"
    return card


def _anthropic_card(listed: ListedModel, created: int) -> AnthropicModel:
    context_length = listed.answers.context_length if isinstance(listed.answers, Service) else None
    return anthropic_model(listed.name, created, context_length)


def _json(answer: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


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


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers the framework's own refusals: routes and methods that do not exist."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404 and request.url.path.startswith("/v1/conversations"):
        message += ". This server keeps responses, not conversations: send 'previous_response_id' to /v1/responses."
    known = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return error_response(known, request.scope)


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # never received: the client has gone, for which logs use 499 by convention


def _document(app: FastAPI, models: Models, keys: Keys) -> None:
    """Completes the OpenAPI page that FastAPI makes of the routes."""
    make: Callable[[], dict[str, Any]] = app.openapi
    names = [listed.name for listed in models]
    vocab_size = max((service.tokenizer.vocab_size for service in models.services), default=INT32)

    def page() -> dict[str, Any]:
        highest = [service.config.max_priority for service in models.services] or [INT32]
        by_key = keys.highest_priority
        most = max(highest) if by_key is None else max(*highest, by_key)
        is_needed = len(models.services or models.upstreams) > 1
        return openapi.completed(make(), names, vocab_size, most, is_needed)

    app.openapi = page  # type: ignore[method-assign]
