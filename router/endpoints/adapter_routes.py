"""Routes that load and unload adapters (LoRA) while the server runs, as vLLM has them."""

import logging
import os
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from router import openapi
from router.models import Models
from router.service import Service
from router.wire.errors import ApiError, invalid
from router.wire.requests import Body, LoadLoraRequest, UnloadLoraRequest
from worker.messages import Adapter

Sent = TypeVar("Sent", bound=Body)

log = logging.getLogger(__name__)


def adapter_routes(models: Models) -> APIRouter:
    """The routes. Without `allow_runtime_lora_updating` they refuse: who may call them has servers read any folder."""
    return _AdapterRoutes(models).routes()


class _AdapterRoutes:
    """The handlers of requests."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def routes(self) -> APIRouter:
        routes = APIRouter(tags=["model"])
        errors = openapi.errors(400, 401, 403, 404)
        routes.post(
            "/v1/load_lora_adapter",
            openapi_extra=openapi.body(LoadLoraRequest),
            responses=errors | {200: {"description": "the adapter can be named as a model"}},
        )(self.load_lora_adapter)
        routes.post(
            "/v1/unload_lora_adapter",
            openapi_extra=openapi.body(UnloadLoraRequest),
            responses=errors | {200: {"description": "the name is gone"}},
        )(self.unload_lora_adapter)
        return routes

    async def load_lora_adapter(self, request: Request) -> Response:
        """Loads an adapter from a folder that replicas can read, and serves it under a name. Answers when a replica has
        computed a token with it."""
        body = await self._read(request, LoadLoraRequest)
        service = self._base(body.base_model)
        known = service.adapters.get(body.lora_name)
        if known is None or not body.load_inplace:
            self._models.check_free(body.lora_name)
        adapter = Adapter(body.lora_name, body.lora_path, os.urandom(8).hex())
        await service.try_adapter(adapter)
        service.load_adapter(adapter)
        log.info("adapter %s was loaded from %s", adapter.name, adapter.path)
        return Response(f"Success: LoRA adapter '{adapter.name}' added successfully.", media_type="text/plain")

    async def unload_lora_adapter(self, request: Request) -> Response:
        """Takes an adapter's name away. Requests that have begun go on."""
        body = await self._read(request, UnloadLoraRequest)
        for service in self._models.services:
            if body.lora_name in service.adapters:
                service.unload_adapter(body.lora_name)
                log.info("adapter %s was unloaded", body.lora_name)
                message = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
                return Response(message, media_type="text/plain")
        raise ApiError(404, f"There is no adapter {body.lora_name!r}.", param="lora_name", code="model_not_found")

    async def _read(self, request: Request, kind: type[Sent]) -> Sent:
        if not self._models.config.allow_runtime_lora_updating:
            message = "This server loads no adapters at run time: start it with allow_runtime_lora_updating."
            raise ApiError(403, message, code="forbidden")
        return await self._models.body(request, kind)

    def _base(self, name: str | None) -> Service:
        """The model that an adapter is for."""
        service = self._models.service(name)
        if service.adapter is not None:
            raise invalid(f"{name!r} is an adapter itself.", "base_model", "invalid_value")
        return service
