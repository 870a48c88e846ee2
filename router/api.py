"""The HTTP server: OpenAI's protocol, and what an operator asks.

A request's way: `Keys` lets it in, `body` parses it (`requests`), `job` turns it into tokens, `Generation` runs its
sequences through the `Service` and writes the text as `chat` or `completion` say.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router import openapi
from router.auth import Keys
from router.body import read_body
from router.chat import ChatFormat
from router.chat_template import TemplateError
from router.completion import CompletionFormat
from router.config import RouterConfig
from router.errors import ApiError, internal, invalid
from router.generation import Format, Generation
from router.job import Job, chat_job, completion_job
from router.metrics import Metrics
from router.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.responses import ChatChunk, ChatCompletion, Completion, Health, Model, ModelList, Text, Tokens
from router.sampling import check_token_ids
from router.service import Service
from router.sse import ClientGone, EventStream, unless_gone

log = logging.getLogger(__name__)


def create_app(service: Service, config: RouterConfig) -> FastAPI:
    """The application. Its lifespan starts and closes `service`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="Shoal",
        description="Large language models behind OpenAI's protocol",
        lifespan=lifespan,
        redirect_slashes=False,
    )
    keys = Keys(config)
    dependencies: list[Any] = [Depends(keys.check)]
    if keys:
        dependencies.append(Depends(HTTPBearer(auto_error=False)))  # for the OpenAPI page
    app.include_router(_generation_routes(service, config), dependencies=dependencies)
    app.include_router(_model_routes(service, config), dependencies=dependencies)
    app.include_router(_operator_routes(service))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _nobody)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(_Counted, metrics=service.metrics)
    _document(app, service)
    return app


def _generation_routes(service: Service, config: RouterConfig) -> APIRouter:
    routes = APIRouter(tags=["generation"])
    errors = (400, 401, 404, 413, 429, 500, 503)

    async def answer(request: Request, stream: bool, job: Job, form: Format) -> Response:
        generation = Generation(service, job, form)
        headers = {"X-Request-Id": job.id}
        if stream:
            return EventStream(generation.stream, headers)
        body = await unless_gone(request.receive, generation.whole())
        return Response(body, headers=headers, media_type="application/json")

    @routes.post(
        "/v1/chat/completions",
        openapi_extra=openapi.body(ChatRequest),
        responses=openapi.answers(ChatCompletion, *errors, stream=ChatChunk),
    )
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        arrived = perf_counter()
        body, size = await read_body(request, ChatRequest, config.max_body_bytes)
        _check_model(service, body.model)
        body = service.defaults.complete(body)
        job = await service.in_thread(
            size, chat_job, body, service.tokenizer, service.context_length, config.max_prompts, arrived
        )
        return await answer(request, bool(body.stream), job, ChatFormat(job, service.model, service.tokenizer))

    @routes.post(
        "/v1/completions",
        openapi_extra=openapi.body(CompletionRequest),
        responses=openapi.answers(Completion, *errors, stream=Completion),
    )
    async def completions(request: Request) -> Response:
        """Continues texts."""
        arrived = perf_counter()
        body, size = await read_body(request, CompletionRequest, config.max_body_bytes)
        _check_model(service, body.model)
        body = service.defaults.complete(body)
        job = await service.in_thread(
            size, completion_job, body, service.tokenizer, service.context_length, config.max_prompts, arrived
        )
        return await answer(request, bool(body.stream), job, CompletionFormat(job, service.model, service.tokenizer))

    return routes


def _model_routes(service: Service, config: RouterConfig) -> APIRouter:
    routes = APIRouter(tags=["model"])
    created = int(time.time())

    def model() -> Model:
        return Model(
            id=service.model,
            created=created,
            max_model_len=service.context_length,
            default_sampling=dict(service.defaults.values),
        )

    @routes.get("/v1/models", responses=openapi.answers(ModelList, 401))
    async def models() -> Response:
        """The model that is served, as a list."""
        return _json(ModelList(data=[model()]))

    @routes.get("/v1/models/{model_id:path}", responses=openapi.answers(Model, 401, 404))
    async def one_model(model_id: str) -> Response:
        """The model, by its name."""
        _check_model(service, model_id)
        return _json(model())

    @routes.post(
        "/tokenize",
        openapi_extra=openapi.body(TokenizeRequest),
        responses=openapi.answers(Tokens, 400, 401, 404, 413, 500),
    )
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        body, size = await read_body(request, TokenizeRequest, config.max_body_bytes)
        _check_model(service, body.model)
        tokens = await service.in_thread(size, _tokens, service, body)
        return _json(Tokens(tokens, len(tokens), service.context_length))

    @routes.post(
        "/detokenize",
        openapi_extra=openapi.body(DetokenizeRequest),
        responses=openapi.answers(Text, 400, 401, 404, 413, 500),
    )
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        body, size = await read_body(request, DetokenizeRequest, config.max_body_bytes)
        _check_model(service, body.model)
        check_token_ids(body.tokens, service.tokenizer.vocab_size, "tokens")
        skip = body.skip_special_tokens is True
        return _json(Text(await service.in_thread(size, service.tokenizer.decode, body.tokens, skip)))

    return routes


def _operator_routes(service: Service) -> APIRouter:
    routes = APIRouter(tags=["operation"])

    # Load balancers ask with HEAD.
    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", responses=openapi.answers(Health))
    async def health() -> Response:
        """Whether this process is alive: answers as long as it is."""
        return _json(Health("ok", len(service.replicas.ready)))

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", responses=openapi.answers(Health) | {503: openapi.answers(Health)[200]})
    async def ready() -> Response:
        """Whether a request would be answered now: 200 if a replica is connected, 503 if none is."""
        replicas = len(service.replicas.ready)
        return _json(Health("ok" if replicas else "not ready", replicas), 200 if replicas else 503)

    @routes.get("/metrics", responses={200: {"description": "the metrics", "content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return routes


def _json(answer: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.model:
        raise ApiError(
            404,
            f"The model {name[:200]!r} does not exist; this server has {service.model!r}.",
            param="model",
            code="model_not_found",
        )


def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Send either 'prompt' or 'messages'.", "prompt")
    tokenizer = service.tokenizer
    if body.prompt is not None:
        if body.add_generation_prompt:
            raise invalid("'add_generation_prompt' is for 'messages'.", "add_generation_prompt")
        if body.chat_template_kwargs:
            raise invalid("'chat_template_kwargs' is for 'messages'.", "chat_template_kwargs")
        return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    assert body.messages is not None
    messages = [message.for_template() for message in body.messages]
    try:
        text = tokenizer.render_chat(messages, body.add_generation_prompt is not False, body.chat_template_kwargs)
    except TemplateError as error:
        raise invalid(str(error), error.param) from None
    return tokenizer.encode(text, bool(body.add_special_tokens))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: routes and methods that do not exist."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    known = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return known.response()


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # which nobody reads: the log's habit for a client that went away


async def _unexpected(request: Request, error: Exception) -> Response:
    return internal().response()


def _document(app: FastAPI, service: Service) -> None:
    """Completes the page that FastAPI makes of the routes."""
    make: Callable[[], dict[str, Any]] = app.openapi
    app.openapi = lambda: openapi.completed(make(), service.model, service.tokenizer.vocab_size)  # type: ignore[method-assign]


class _Counted:
    """Counts answers by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        def count(status: int) -> None:
            nonlocal started
            started = True
            route = scope.get("route")
            path = "unknown" if route is None else route.path
            self._metrics.responses.labels(path, status).inc()

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counting if scope["type"] == "http" else send)
        except Exception:
            if not started:
                count(500)  # `_unexpected` answers outside of here
            raise
