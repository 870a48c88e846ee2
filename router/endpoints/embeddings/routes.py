"""The routes of embeddings, rankings and scores. The path of a request is that of a request for text (`router.api`)."""

from collections.abc import Callable
from time import perf_counter

from fastapi import APIRouter, Depends, Request, Response

from router import openapi
from router.access.rate_limits import RateLimits
from router.endpoints.answering import answered
from router.endpoints.embeddings.embeddings import EmbeddingsFormat, prepare_embeddings
from router.endpoints.embeddings.rerank import Pairs, RerankFormat, ScoreFormat, rerank_texts, score_texts
from router.endpoints.embeddings.scoring import PreparedScoring, Texts, prepare_scoring
from router.generation import Format
from router.models import Models
from router.wire.requests import EmbeddingsRequest, RerankRequest, ScoreRequest
from router.wire.responses import Embeddings, Reranking, Scores

ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 502, 503, 504)


def embedding_routes(models: Models, limits: RateLimits) -> APIRouter:
    """The routes."""
    return _EmbeddingRoutes(models, limits).routes()


class _EmbeddingRoutes:
    """The handlers of requests."""

    def __init__(self, models: Models, limits: RateLimits) -> None:
        self._models, self._limits = models, limits

    def routes(self) -> APIRouter:
        routes = APIRouter(tags=["embeddings"], dependencies=[Depends(self._limits.admit)])
        passing_on = self._models.passing_on
        routes.post(
            "/v1/embeddings",
            openapi_extra=openapi.body(EmbeddingsRequest),
            responses=openapi.answers(Embeddings, *ERRORS),
        )(passing_on(self.embeddings))
        rerank, score = passing_on(self.rerank), passing_on(self.score)
        routes.post(
            "/v1/rerank",
            openapi_extra=openapi.body(RerankRequest),
            responses=openapi.answers(Reranking, *ERRORS),
        )(rerank)
        routes.post("/rerank", include_in_schema=False)(rerank)  # vLLM's path
        routes.post("/v2/rerank", include_in_schema=False)(rerank)  # Cohere's
        routes.post(
            "/v1/score",
            openapi_extra=openapi.body(ScoreRequest),
            responses=openapi.answers(Scores, *ERRORS),
        )(score)
        routes.post("/score", include_in_schema=False)(score)  # vLLM's path
        return routes

    async def embeddings(self, request: Request) -> Response:
        """Embeds texts."""
        arrived = perf_counter()
        service, body, size = await self._models.read(request, EmbeddingsRequest)
        prepared = await service.in_thread(
            request,
            size,
            prepare_embeddings,
            body,
            service.tokenizer,
            service.context_length,
            service.config.max_prompts,
            service.pooling,
            arrived,
        )
        return await answered(request, service, False, prepared.request, EmbeddingsFormat(prepared, service.model))

    async def rerank(self, request: Request) -> Response:
        """Sorts documents by their relevance to a query."""
        return await self._scored(request, RerankRequest, "rerank-", rerank_texts, RerankFormat)

    async def score(self, request: Request) -> Response:
        """Scores pairs of texts: how relevant the second is to the first, or how alike they are."""
        return await self._scored(request, ScoreRequest, "score-", score_texts, ScoreFormat)

    async def _scored(
        self,
        request: Request,
        kind: type[Pairs],
        id_prefix: str,
        texts_of: Callable[[Pairs, int], Texts],
        form: Callable[[PreparedScoring, Pairs, str], Format],
    ) -> Response:
        """The answer made of the scores of pairs. `texts_of` takes the body and the number of documents
        that it may have."""
        arrived = perf_counter()
        service, body, size = await self._models.read(request, kind)
        texts = texts_of(body, service.config.max_prompts)
        size += (len(texts.documents) - 1) * max(map(len, texts.queries)) * service.pooling.is_reranker
        prepared = await service.in_thread(
            request,
            size,
            prepare_scoring,
            id_prefix,
            texts,
            service.tokenizer,
            service.context_length,
            service.pooling,
            arrived,
        )
        return await answered(request, service, False, prepared.request, form(prepared, body, service.model))
