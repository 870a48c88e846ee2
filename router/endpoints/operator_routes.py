"""The routes for operators: whether the server is alive and ready, its version, its metrics."""

import asyncio
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from router import openapi
from router.endpoints.answering import json_response
from router.models import Models
from router.wire.responses import Health, Version


def operator_routes(models: Models, version: str, inside: list[Any]) -> APIRouter:
    """The routes. `inside`: what a request for the metrics depends on."""
    return _OperatorRoutes(models, version, inside).routes()


class _OperatorRoutes:
    """The handlers of requests."""

    def __init__(self, models: Models, version: str, inside: list[Any]) -> None:
        self._models, self._version, self._inside = models, version, inside

    def routes(self) -> APIRouter:
        routes = APIRouter(tags=["operation"])
        health = openapi.answers(Health)
        routes.get("/health", responses=health)(self.health)
        routes.get("/ping", responses=health)(self.health)
        routes.post("/ping", include_in_schema=False)(self.health)  # SageMaker's name for it
        routes.get("/ready", responses=health | {503: health[200]})(self.ready)
        routes.get("/version", responses=openapi.answers(Version))(self.version_of_this)
        page: dict[int | str, dict[str, Any]] = {200: {"description": "the metrics", "content": {"text/plain": {}}}}
        errors = openapi.errors(*([401] if self._inside else []))
        routes.get("/metrics", dependencies=self._inside, responses=errors | page)(self.metrics)
        return routes

    async def health(self) -> Response:
        """Whether this process is alive: answers 200 while it is."""
        reached = self._reached()
        return json_response(Health("ok", sum(reached.values()), reached))

    async def ready(self) -> Response:
        """Whether a request would be answered now: 200 if any model has a replica that is connected and not silent,
        would get one for the request (autoscaling to zero), or is at another endpoint, else 503. By the first model
        that is down, a load balancer would take out all others. 503 also once the router is being taken away."""
        models, reached = self._models, self._reached()
        answers = any(service.can_answer for service in models.services) or bool(models.upstreams)
        is_ready = answers and not models.leaving and not models.shutdown.has_come
        health = Health("ok" if is_ready else "not ready", sum(reached.values()), reached)
        return json_response(health, 200 if is_ready else 503)

    async def version_of_this(self) -> Response:
        """The version of Shoal."""
        return json_response(Version(self._version))

    async def metrics(self) -> Response:
        """Metrics in Prometheus' text format."""
        page = []
        for piece in self._models.metrics.pieces():
            page.append(piece)
            await asyncio.sleep(0)  # streams go on meanwhile
        return Response(b"".join(page), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _reached(self) -> dict[str, int]:
        return {service.model: len(service.replicas.ready) for service in self._models.services}
