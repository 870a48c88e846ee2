"""The routes of embeddings, rankings and scores. The path of a request is that of a request for text (`router.api`)."""

from time import perf_counter

from fastapi import APIRouter, Depends, Request, Response

from router import openapi
from router.access.rate_limits import RateLimits
from router.endpoints.embeddings.embeddings import EmbeddingsFormat, embeddings_job
from router.endpoints.embeddings.rerank import RerankFormat, ScoreFormat, rerank_texts, score_texts
from router.endpoints.embeddings.scoring import ScoringJob, Texts, scoring_job
from router.generation import Format, Generation
from router.models import Models
from router.prepare.prepared_request import PreparedRequest
from router.service import Service
from router.streaming.sse import unless_gone
from router.wire.requests import EmbeddingsRequest, RerankRequest, ScoreRequest
from router.wire.responses import Embeddings, Reranking, Scores

ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 502, 503, 504)


def embedding_routes(models: Models, limits: RateLimits) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["embeddings"], dependencies=[Depends(limits.admit)])

    async def answer(request: Request, service: Service, job: PreparedRequest, form: Format) -> Response:
        request.state.also_named(job.id)
        generation = Generation(service, job, form, request.state.name, request.state.ticket, request.state.timeout_s)
        body = await unless_gone(request.scope, request.receive, generation.whole())
        return Response(body, media_type="application/json")

    async def scored(
        request: Request, service: Service, prefix: str, size: int, texts: Texts, arrived: float
    ) -> ScoringJob:
        size += (len(texts.documents) - 1) * max(map(len, texts.queries)) * service.pooling.is_reranker
        return await service.in_thread(
            request,
            size,
            scoring_job,
            prefix,
            texts,
            service.tokenizer,
            service.context_length,
            service.pooling,
            arrived,
        )

    @routes.post(
        "/v1/embeddings",
        openapi_extra=openapi.body(EmbeddingsRequest),
        responses=openapi.answers(Embeddings, *ERRORS),
    )
    @models.passing_on
    async def embeddings(request: Request) -> Response:
        """Embeds texts."""
        arrived = perf_counter()
        service, body, size = await models.read(request, EmbeddingsRequest)
        job = await service.in_thread(
            request,
            size,
            embeddings_job,
            body,
            service.tokenizer,
            service.context_length,
            service.config.max_prompts,
            service.pooling,
            arrived,
        )
        return await answer(request, service, job.prepared, EmbeddingsFormat(job, service.model))

    @routes.post("/v2/rerank", include_in_schema=False)  # Cohere's path
    @routes.post("/rerank", include_in_schema=False)  # vLLM's
    @routes.post(
        "/v1/rerank",
        openapi_extra=openapi.body(RerankRequest),
        responses=openapi.answers(Reranking, *ERRORS),
    )
    @models.passing_on
    async def rerank(request: Request) -> Response:
        """Sorts documents by their relevance to a query."""
        arrived = perf_counter()
        service, body, size = await models.read(request, RerankRequest)
        job = await scored(request, service, "rerank-", size, rerank_texts(body, service.config.max_prompts), arrived)
        return await answer(request, service, job.prepared, RerankFormat(job, body, service.model))

    @routes.post("/score", include_in_schema=False)  # vLLM's path
    @routes.post(
        "/v1/score",
        openapi_extra=openapi.body(ScoreRequest),
        responses=openapi.answers(Scores, *ERRORS),
    )
    @models.passing_on
    async def score(request: Request) -> Response:
        """Scores pairs of texts: how relevant the second is to the first, or how alike they are."""
        arrived = perf_counter()
        service, body, size = await models.read(request, ScoreRequest)
        job = await scored(request, service, "score-", size, score_texts(body, service.config.max_prompts), arrived)
        return await answer(request, service, job.prepared, ScoreFormat(job, service.model))

    return routes
