"""The HTTP server: OpenAI's API, and endpoints for operators.

The path of a request for text:

1. `Keys` checks the API key.
2. `Models` reads the body into one of the types of `requests`, and finds the `Service` of the model that it names. What
   names a model of another endpoint is passed on (`upstream`).
3. `prepare_chat` or `prepare_completion` (`prepared_request`) turns it into tokens and sampling parameters.
4. `Generation` runs its sequences through the `Service`, and writes the text with `ChatFormat` or `CompletionFormat`.
   (`prepare_choices` and `ChoicesFormat` are the same for scores; `endpoints.embeddings` has those for embeddings.)
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from router import openapi
from router.access.auth import Keys
from router.access.rate_limits import HEADERS as RATE_LIMIT_HEADERS
from router.access.rate_limits import RateLimits
from router.endpoints.adapter_routes import adapter_routes
from router.endpoints.completion_routes import completion_routes
from router.endpoints.control_routes import control_routes
from router.endpoints.embeddings.routes import embedding_routes
from router.endpoints.messages.routes import messages_routes
from router.endpoints.model_routes import model_routes
from router.endpoints.operator_routes import operator_routes
from router.endpoints.responses.routes import responses_routes
from router.http.middleware import IGNORED, Guarded, HeadAsGet, Observed
from router.metrics.build import version
from router.models import Models
from router.page.routes import page_routes
from router.streaming.dialects import error_response
from router.streaming.sse import ClientGone
from router.wire import request_id
from router.wire.errors import ApiError
from router.wire.requests import INT32

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
    app.include_router(messages_routes(models, limits), dependencies=dependencies)
    app.include_router(embedding_routes(models, limits), dependencies=dependencies)
    app.include_router(responses_routes(models, keys, limits), dependencies=dependencies)
    app.include_router(model_routes(models, limits), dependencies=dependencies)
    app.include_router(adapter_routes(models), dependencies=dependencies)
    inside: list[Any] = dependencies if closed else []
    app.include_router(operator_routes(models, app.version, inside))
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


def create_metrics_app(models: Models) -> FastAPI:
    """The routes for operators alone, for a router's own port (`router.http.own_port`)."""
    app = FastAPI(title="Shoal", version=version(), redirect_slashes=False, openapi_url=None)
    inside: list[Any] = []
    if models.config.require_auth_for_metrics_endpoint:
        inside = [Depends(Keys(models.config, models.metrics).check)]
    app.include_router(operator_routes(models, app.version, inside))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Guarded)
    app.add_middleware(HeadAsGet)
    return app


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
