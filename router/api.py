"""The HTTP server: OpenAI's API, and endpoints for operators.

The path of a request for text:

1. `Keys` checks the API key.
2. `read_body` parses the body into one of the types of `requests`.
3. `chat_job` or `completion_job` (`prepared_request`) turns it into tokens and sampling parameters.
4. `Generation` runs its sequences through the `Service`, and writes the text with `ChatFormat` or `CompletionFormat`.
   (`choices_job` and `ChoicesFormat` are the same for scores; `embedding_routes` has those for embeddings.)
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib import metadata
from time import perf_counter
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from router import openapi, request_id
from router.auth import Keys
from router.body import read_body
from router.chat_prompt import chat_prompt
from router.chat_template import TemplateError
from router.choices import ChoicesFormat, choices_job
from router.config import RouterConfig
from router.embedding_routes import embedding_routes
from router.errors import ApiError, invalid, program_unknown
from router.generation import Format, Generation
from router.middleware import Guarded, Observed
from router.prepared_request import PreparedRequest, chat_job, completion_job
from router.programs import BranchCall, BranchText, BranchUnknown, Held
from router.protocols.chat_reader import tokenized_conversation
from router.protocols.chat_writer import ChatFormat
from router.protocols.completion_writer import CompletionFormat
from router.protocols.dialects import error_response, wants_anthropic
from router.protocols.messages_routes import anthropic_model, anthropic_models, messages_routes
from router.protocols.responses_routes import responses_routes
from router.requests import (
    INT32,
    ChatRequest,
    ChoicesRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    ProgramCall,
    TokenizeRequest,
)
from router.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    DetokenizeResponse,
    Health,
    ModelCard,
    ModelList,
    ScoredChoices,
    TokenizeResponse,
    TokenizerInfo,
    Version,
)
from router.sampling import check_token_ids
from router.service import Service
from router.sse import ClientGone, EventStream, unless_gone
from worker.messages import Lease

PREFLIGHT_S = 600  # how long a browser may cache the answer to a CORS preflight


def create_app(service: Service, config: RouterConfig, answers_id: bool = True) -> FastAPI:
    """The FastAPI application. Its lifespan starts and closes `service`. `answers_id`: whether answers carry the
    request's id as X-Request-Id; false where a proxy in front adds it."""

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
        version=_version(),
        lifespan=lifespan,
        redirect_slashes=False,
    )
    keys = Keys(config)
    dependencies: list[Any] = [Depends(keys.check)]
    if keys:
        dependencies.append(Depends(HTTPBearer(auto_error=False)))  # for the OpenAPI page
    app.include_router(_generation_routes(service, config, keys), dependencies=dependencies)
    app.include_router(embedding_routes(service, config, _check_model), dependencies=dependencies)
    check = partial(_check_shared, service, config)
    app.include_router(responses_routes(service, config, keys, check), dependencies=dependencies)
    app.include_router(_model_routes(service, config), dependencies=dependencies)
    app.include_router(_operator_routes(service, app.version))
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
            expose_headers=[request_id.HEADER, "Retry-After", "request-id"],
            max_age=PREFLIGHT_S,
        )
    app.add_middleware(Observed, metrics=service.metrics, answers_id=answers_id)
    _document(app, service, config)
    return app


def _generation_routes(service: Service, config: RouterConfig, keys: Keys) -> APIRouter:
    routes = APIRouter(tags=["generation"])
    errors = (400, 401, 404, 408, 413, 415, 429, 500, 503)

    async def answer(request: Request, stream: bool, job: PreparedRequest, form: Format) -> Response:
        generation = Generation(service, job, form, request.state.name)
        if stream:
            return EventStream(generation.stream)
        body = await unless_gone(request.receive, generation.whole())
        return Response(body, media_type="application/json")

    @routes.post(
        "/v1/chat/completions",
        openapi_extra=openapi.body(ChatRequest),
        responses=openapi.answers(ChatCompletion, *errors, stream=ChatChunk),
    )
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation, as a whole or as a stream."""
        arrived = perf_counter()
        body, size = await read_body(request, ChatRequest, config.max_body_bytes, config.body_timeout_s)
        _check_model(service, body.model)
        _check_priority(config, body.priority)
        body = service.defaults.complete(body)
        job = await service.in_thread(
            size,
            chat_job,
            body,
            service.output_format,
            service.tokenizer,
            service.context_length,
            config.max_prompts,
            arrived,
            _call(body.program, keys.tenant(request)),
        )
        return await answer(request, bool(body.stream), job, ChatFormat(job, service.model, service.tokenizer))

    @routes.post(
        "/v1/completions",
        openapi_extra=openapi.body(CompletionRequest),
        responses=openapi.answers(Completion, *errors, 409, stream=Completion),
    )
    async def completions(request: Request) -> Response:
        """Continues prompts, as a whole or as a stream."""
        arrived = perf_counter()
        body, size = await read_body(request, CompletionRequest, config.max_body_bytes, config.body_timeout_s)
        _check_model(service, body.model)
        _check_priority(config, body.priority)
        body = service.defaults.complete(body)
        call = _call(body.program, keys.tenant(request))
        held = None if body.program is None else _held(service, body.program, keys.tenant(request))
        job = await service.in_thread(
            size,
            completion_job,
            body,
            service.tokenizer,
            service.context_length,
            config.max_prompts,
            arrived,
            call,
            held,
        )
        return await answer(request, bool(body.stream), job, CompletionFormat(job, service.model, service.tokenizer))

    @routes.post(
        "/v1/choices",
        openapi_extra=openapi.body(ChoicesRequest),
        responses=openapi.answers(ScoredChoices, *errors, 409),
    )
    async def choices(request: Request) -> Response:
        """Scores choices: the log probabilities of their tokens after the prompt."""
        arrived = perf_counter()
        body, size = await read_body(request, ChoicesRequest, config.max_body_bytes, config.body_timeout_s)
        _check_model(service, body.model)
        held = None if body.program is None else _held(service, body.program, keys.tenant(request))
        branch = BranchText() if held is None else held.branch
        job = await service.in_thread(
            size * len(body.choices),
            choices_job,
            body,
            service.tokenizer,
            service.context_length,
            config.max_prompts,
            arrived,
            _call(body.program, keys.tenant(request)),
            branch,
        )
        return await answer(request, False, job.prepared, ChoicesFormat(job, service.model))

    routes.include_router(messages_routes(service, config, answer, partial(_check_model, service)))

    @routes.delete("/v1/programs/{program_id:path}", status_code=204, responses=openapi.errors(401))
    async def end_program(request: Request, program_id: str) -> Response:
        """Ends a program: what its branches hold is forgotten, and its leases end."""
        service.end_program(_program_key(keys.tenant(request), program_id))
        return Response(status_code=204)

    return routes


def _model_routes(service: Service, config: RouterConfig) -> APIRouter:
    routes = APIRouter(tags=["model"])
    created = int(time.time())

    def model() -> ModelCard:
        return ModelCard(
            id=service.model,
            created=created,
            max_model_len=service.context_length,
            default_sampling=dict(service.defaults.values),
        )

    @routes.get("/v1/models", responses=openapi.answers(ModelList, 401))
    async def models(request: Request) -> Response:
        """The model that is served, as a list; with the header `anthropic-version`, in Anthropic's form."""
        if wants_anthropic(request.scope):
            return _json(anthropic_models(anthropic_model(service.model, created, service.context_length)))
        return _json(ModelList(data=[model()]))

    @routes.get("/v1/models/{model_id:path}", responses=openapi.answers(ModelCard, 401, 404))
    async def one_model(request: Request, model_id: str) -> Response:
        """The model, by its name; with the header `anthropic-version`, in Anthropic's form."""
        _check_model(service, model_id)
        if wants_anthropic(request.scope):
            return _json(anthropic_model(service.model, created, service.context_length))
        return _json(model())

    @routes.post(
        "/tokenize",
        openapi_extra=openapi.body(TokenizeRequest),
        responses=openapi.answers(TokenizeResponse, 400, 401, 404, 408, 413, 415, 500),
    )
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        body, size = await read_body(request, TokenizeRequest, config.max_body_bytes, config.body_timeout_s)
        _check_model(service, body.model)
        tokens = await service.in_thread(size, _tokens, service, body)
        return _json(TokenizeResponse(tokens, len(tokens), service.context_length))

    @routes.post(
        "/detokenize",
        openapi_extra=openapi.body(DetokenizeRequest),
        responses=openapi.answers(DetokenizeResponse, 400, 401, 404, 408, 413, 415, 500),
    )
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        body, size = await read_body(request, DetokenizeRequest, config.max_body_bytes, config.body_timeout_s)
        _check_model(service, body.model)
        check_token_ids(body.tokens, service.tokenizer.vocab_size, "tokens")
        skip = body.skip_special_tokens is True
        return _json(DetokenizeResponse(await service.in_thread(size, service.tokenizer.decode, body.tokens, skip)))

    @routes.get("/tokenizer_info", responses=openapi.answers(TokenizerInfo, 401))
    async def tokenizer_info() -> Response:
        """The tokenizer's own configuration, for clients that render chats themselves."""
        return JSONResponse(service.tokenizer.info)  # not msgspec: the file may have integers beyond 64 bits

    return routes


def _operator_routes(service: Service, version: str) -> APIRouter:
    routes = APIRouter(tags=["operation"])

    # Load balancers ask with HEAD.
    @routes.head("/health", include_in_schema=False)
    @routes.post("/ping", include_in_schema=False)  # SageMaker's name for it
    @routes.get("/ping", responses=openapi.answers(Health))
    @routes.get("/health", responses=openapi.answers(Health))
    async def health() -> Response:
        """Whether this process is alive: answers 200 while it is."""
        return _json(Health("ok", len(service.replicas.ready)))

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", responses=openapi.answers(Health) | {503: openapi.answers(Health)[200]})
    async def ready() -> Response:
        """Whether a request would be answered now: 200 if a replica is connected, 503 if none is."""
        replicas = len(service.replicas.ready)
        return _json(Health("ok" if replicas else "not ready", replicas), 200 if replicas else 503)

    @routes.get("/version", responses=openapi.answers(Version))
    async def version_of_this() -> Response:
        """The version of Shoal."""
        return _json(Version(version))

    @routes.get("/metrics", responses={200: {"description": "the metrics", "content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(service.metrics.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return routes


def _version() -> str:
    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:  # not installed: run from a checkout
        return "unknown"


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


def _check_shared(service: Service, config: RouterConfig, body: GenerationRequest) -> None:
    _check_model(service, body.model)
    _check_priority(config, body.priority)


def _check_priority(config: RouterConfig, priority: int | None) -> None:
    if priority is not None and priority > config.max_priority:
        raise invalid(
            f"'priority' is {priority}; here it may be from {-INT32 - 1} to {config.max_priority} (higher goes first).",
            "priority",
            "invalid_value",
        )


def _program_key(tenant: str, program_id: str) -> str:
    """The program's name in the router: clients with different keys never share a program."""
    return f"{tenant}/{program_id}"


def _call(call: ProgramCall | None, tenant: str) -> BranchCall | None:
    if call is None:
        return None
    lease = Lease(_program_key(tenant, call.id), call.branch, call.lease_s or 0.0)
    return BranchCall(lease, call.parent, call.then, call.remaining, call.deadline_s)


def _held(service: Service, call: ProgramCall, tenant: str) -> Held:
    try:
        return service.programs.look(
            _program_key(tenant, call.id), call.branch, call.parent, bool(call.continues), call.held
        )
    except BranchUnknown as error:
        raise program_unknown(str(error)) from None


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
    conversation = tokenized_conversation(body)
    try:
        text = chat_prompt(conversation, service.output_format, tokenizer, body.add_generation_prompt is not False)
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
    known = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return error_response(known, request.scope)


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # never received: the client has gone, for which logs use 499 by convention


def _document(app: FastAPI, service: Service, config: RouterConfig) -> None:
    """Completes the OpenAPI page that FastAPI makes of the routes."""
    make: Callable[[], dict[str, Any]] = app.openapi
    vocab_size = service.tokenizer.vocab_size
    app.openapi = lambda: openapi.completed(make(), service.model, vocab_size, config.max_priority)  # type: ignore[method-assign]
