"""Routes by which operators and clients steer a server: caches, requests that are to end, a probe that generates."""

import asyncio
import ipaddress
import logging
import secrets
import time
from contextlib import aclosing
from time import perf_counter

from fastapi import APIRouter, Depends, Request, Response

from router import openapi
from router.access.auth import Keys, client_of
from router.endpoints.answering import json_response
from router.models import Models
from router.service import GREEDY_TOKEN, Service
from router.streaming.aborts import ALL
from router.wire.errors import ApiError, invalid
from router.wire.requests import AbortRequest
from router.wire.responses import AbortedRequests, FlushedCache, Health

log = logging.getLogger(__name__)

FLUSH_S = 10.0  # how long a replica may take to empty its cache: it does so between two steps
PROBE_S = 20.0  # how long a model may take for one token
PROBED_FOR_S = 1.0  # how long the result of a probe holds, however many ask
PROBE_PRIORITY = (1 << 31) - 1  # priority: a probe is not to wait for the queue


def control_routes(models: Models, keys: Keys) -> APIRouter:
    """The routes. A probe needs no API key, as `/health` and `/ready`."""
    return _ControlRoutes(models, keys).routes()


class _ControlRoutes:
    """The handlers of requests."""

    def __init__(self, models: Models, keys: Keys) -> None:
        self._models, self._keys = models, keys
        self._probe = _Probe(models)

    def routes(self) -> APIRouter:
        routes = APIRouter(tags=["operation"])
        checked = [Depends(self._keys.check)]
        routes.post("/flush_cache", dependencies=checked, responses=openapi.answers(FlushedCache, 401, 403, 503))(
            self.flush_cache
        )
        # vLLM's name, and SGLang's other way.
        routes.post("/reset_prefix_cache", include_in_schema=False, dependencies=checked)(self.flush_cache)
        routes.get("/flush_cache", include_in_schema=False, dependencies=checked)(self.flush_cache)
        routes.post(
            "/abort_request",
            dependencies=checked,
            openapi_extra=openapi.body(AbortRequest),
            responses=openapi.answers(AbortedRequests, 400, 401, 403, 408, 413, 415, 503),
        )(self.abort_request)
        # vLLM's name.
        routes.post("/abort_requests", include_in_schema=False, dependencies=checked)(self.abort_request)
        health = openapi.answers(Health)
        routes.get("/health_generate", responses=health | {503: health[200]})(self.health_generate)
        return routes

    async def flush_cache(self, request: Request) -> Response:
        """Empties the caches of prefixes of all replicas. What running requests hold stays while they run."""
        check_admin(request, self._keys)
        flushed = FlushedCache()
        for service in self._models.services:
            told, missing = await service.replicas.flush(FLUSH_S)
            if missing:
                names = ", ".join(sorted(missing))
                message = f"These replicas of {service.model!r} have not emptied their caches: {names}."
                raise ApiError(503, message, code="not_flushed")
            flushed.replicas += len(told)
            flushed.tokens_in_use += sum(load.kv_tokens_used for load in told.values())
        log.info("the caches of %d replicas were emptied", flushed.replicas)
        return json_response(flushed)

    async def abort_request(self, request: Request) -> Response:
        """Ends requests of the same client, by their names: `rid`, `request_id`, X-Request-Id, or the id of an
        answer. Names that are not known, or not the client's, are passed over."""
        body = await self._models.body(request, AbortRequest)
        names = [*([body.rid] if body.rid else []), *(body.request_ids or ())]  # an empty one stands for none
        if body.abort_all:
            if not client_of(request).tenant:  # all clients of an open server are one
                check_admin(request, self._keys)
            names = [ALL]
        if not names:
            raise invalid("Send 'rid', 'request_ids', or 'abort_all'.", "rid", "missing_required_parameter")
        return json_response(AbortedRequests(self._models.aborts.abort(client_of(request).tenant, names)))

    async def health_generate(self) -> Response:
        """Whether a replica generates: 200 if one of any model gives a token within 20 s, as `/ready` also where
        autoscaling would start one or another endpoint answers, else 503. `models` has the replicas of those that
        do."""
        models = self._models
        found = await self._probe.result()
        is_well = (any(found.values()) or bool(models.upstreams)) and not models.shutdown.has_come
        numbers = {
            service.model: len(service.replicas.ready) if found[service.model] else 0 for service in models.services
        }
        return json_response(
            Health("ok" if is_well else "not ready", sum(numbers.values()), numbers), 200 if is_well else 503
        )


def check_admin(request: Request, keys: Keys) -> None:
    """Raises ApiError (403) for a client that may not administer: its key is not one with `admin`, or, on a server
    without keys, it is not on this machine."""
    if keys:
        if client_of(request).admin:
            return
        raise ApiError(
            403,
            "This needs a key that may administer: one whose entry in the key file has `admin: true`.",
            code="forbidden",
        )
    proxied = any(name in request.headers for name in ("forwarded", "x-forwarded-for", "x-real-ip"))
    if proxied or not _is_local(None if request.client is None else request.client.host):
        message = "On a server without API keys, only a client on its own machine may do this."
        raise ApiError(403, message, code="forbidden")


def _is_local(host: str | None) -> bool:
    if host is None:  # a socket of this machine, or no socket at all
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


class _Probe:
    """Whether each model generates. Any number of clients may ask; one token in a second is made."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._asking: asyncio.Task[dict[str, bool]] | None = None
        self._known: dict[str, bool] = {}
        self._until_s = 0.0

    async def result(self) -> dict[str, bool]:
        if time.monotonic() < self._until_s:
            return self._known
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> dict[str, bool]:
        services = self._models.services
        found = await asyncio.gather(*map(_generates, services))
        self._known = {service.model: is_well for service, is_well in zip(services, found, strict=True)}
        self._until_s = time.monotonic() + PROBED_FOR_S
        return self._known


async def _generates(service: Service) -> bool:
    """Whether a model gives a token; one without replicas, whether autoscaling would start some."""
    if not service.replicas.ready:
        return service.can_answer
    try:
        async with asyncio.timeout(PROBE_S):
            one = service.generate(f"health-{secrets.token_hex(8)}", [0], GREEDY_TOKEN, PROBE_PRIORITY, perf_counter())
            async with aclosing(one) as outputs:
                async for _ in outputs:
                    return True
    except TimeoutError:
        log.error("%s has not generated a token within %g s", service.model, PROBE_S)
    except ApiError as error:
        return error.status == 429  # a replica has said that it is full
    return False
