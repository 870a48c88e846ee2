"""The models at one door: those that replicas serve, and those whose requests are passed on to other endpoints."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar

from fastapi import Request, Response

from router.access.auth import client_of
from router.access.rate_limits import RateLimits, Ticket, UsageExchange
from router.config import RouterConfig
from router.http.body import HeldBytes, parse, read_sent
from router.http.upstream import Upstream, head
from router.metrics.build import version
from router.metrics.metrics import Metrics
from router.metrics.otlp import Tracer
from router.metrics.process import watch_loop
from router.service import Service
from router.streaming.aborts import Aborts
from router.streaming.deadline import timeout_of
from router.streaming.shutdown import Shutdown
from router.wire.errors import ApiError, invalid
from router.wire.requests import Body

Known = TypeVar("Known", bound=Body)
Route = Callable[[Request], Awaitable[Response]]
ServedModel = Service | Upstream  # of replicas, or of another endpoint

DEFAULT = "default"  # a name for the only model, as clients send it that were not told any
MAX_NAMES = 20  # names in an error
MAX_NAME_CHARS = 200


def passed_over(request: Request) -> set[str]:
    """The names of what a request has and this server passes over. Its answer has them in a header."""
    names: set[str] = request.scope.setdefault("state", {}).setdefault("passed_over", set())
    return names


@dataclass(frozen=True)
class ListedModel:
    """A name in the list of models. `name` may be an alias or an adapter's, `model` is the model's own name."""

    name: str
    model: str
    served: ServedModel


class Models:
    """The models of a router, by name and by alias.

    | attribute | meaning |
    | --- | --- |
    | `services` | the models that replicas serve |
    | `upstreams` | the models whose requests are passed on |
    | `metrics` | those of the router |
    | `config` | settings of the HTTP side |
    | `leaving` | whether the router is being taken away, so that `/ready` says no |
    | `shutdown` | ends all answers when the whole server ends, or this machine |
    | `aborts` | ends single requests, whose clients want that |
    | `tracer` | traces requests; None if no receiver is configured |
    """

    def __init__(self, served: Sequence[ServedModel], metrics: Metrics, config: RouterConfig) -> None:
        """`served`: the models, in the order of the list that clients get. Raises ValueError if two have the same
        name, or if there is none."""
        self.services = [model for model in served if isinstance(model, Service)]
        self.upstreams = [model for model in served if isinstance(model, Upstream)]
        self.metrics = metrics
        self.config = config
        self.leaving = False
        self.shutdown = Shutdown()
        self.aborts = Aborts()
        self.tracer: Tracer | None = None
        if config.otlp_traces_endpoint is not None:
            kept = config.otlp_traces_endpoint, config.trace_sampling_ratio
            self.tracer = Tracer(*kept, metrics.trace_spans, metrics.router, version())
        self._named: dict[str, ListedModel] = {}
        self._held = HeldBytes(config.max_held_bytes, self._shortest_wait_s)
        self._before_close: list[Callable[[], Awaitable[None]]] = []
        self._alongside: list[tuple[Callable[[], Awaitable[None]], Callable[[], Awaitable[None]]]] = []
        self._exchange: UsageExchange | None = None
        self._watching: asyncio.Task[None] | None = None
        for model in served:
            for name in (model.model, *model.aliases):
                if name in self._named:
                    raise ValueError(f"two models are named {name!r}")
                self._named[name] = ListedModel(name, model.model, model)
        for service in self.services:
            if taken := service.adapters.keys() & self._named.keys():
                raise ValueError(f"an adapter is named as a model is: {min(taken)!r}")
        if not self._named:
            raise ValueError("there is no model")

    # ------------------------------------------------ by name

    def __iter__(self) -> Iterator[ListedModel]:
        """All names, each model's own before its aliases, then the adapters."""
        yield from list(self._named.values())
        for service in self.services:
            for name, adapted in list(service.adapters.items()):
                yield ListedModel(name, service.model, adapted)

    def find(self, name: str) -> ListedModel:
        """The model of this name or alias. Raises ApiError (404) that lists the names that there are."""
        listed = self._named.get(name) or self._adapter(name)
        if listed is None:
            raise self._unknown(name)
        return listed

    def check_free(self, name: str) -> None:
        """Raises ApiError (400) if there is a model or an adapter of this name."""
        if not name or self._knows(name):
            raise invalid(f"The name {name[:MAX_NAME_CHARS]!r} is taken, or empty.", "lora_name", "invalid_value")

    def _knows(self, name: str) -> bool:
        return name in self._named or self._adapter(name) is not None

    def _adapter(self, name: str) -> ListedModel | None:
        for service in self.services:
            if (adapted := service.adapters.get(name)) is not None:
                return ListedModel(name, service.model, adapted)
        return None

    def _meant(self, name: str | None) -> ListedModel:
        """The model that a request's `model` means. Without a name, and by the name `default` where nothing else has
        it, that is the only model of replicas, or the only model of another endpoint where no replicas are. Raises
        ApiError (404), and (400) where several models could be meant."""
        if name is not None and (name != DEFAULT or self._knows(name)):
            return self.find(name)
        candidates: Sequence[ServedModel] = self.services or self.upstreams
        if len(candidates) > 1:
            raise invalid(f"Send 'model': this server has {self._names()}.", "model", "missing_required_parameter")
        return self._named[candidates[0].model]

    def service(self, name: str | None) -> Service:
        """The model that this name means, which replicas serve. Raises ApiError."""
        listed = self._meant(name)
        served = listed.served
        if isinstance(served, Upstream):
            message = (
                f"The model {listed.name!r} is at another endpoint, and only requests with a body are passed on to it."
            )
            raise invalid(message, "model", "invalid_value")
        return served

    def _shortest_wait_s(self) -> float:
        queues = [service.shortest_queue() for service in self.services]
        return min((queue.wait_s for queue in queues if queue is not None), default=0.0)

    def _unknown(self, name: str) -> ApiError:
        message = f"The model {name[:MAX_NAME_CHARS]!r} does not exist; this server has {self._names()}."
        return ApiError(404, message, param="model", code="model_not_found")

    def _names(self) -> str:
        names = [repr(listed.name) for listed in self]
        rest = len(names) - MAX_NAMES
        return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more: see /v1/models" if rest > 0 else "")

    # ------------------------------------------------ requests

    def passing_on(self, route: Route) -> Route:
        """The route, with requests for a model of another endpoint passed on to that."""
        if not self.upstreams:
            return route

        @wraps(route)
        async def passing(request: Request) -> Response:
            sent = await self._sent(request)
            asked = head(sent)
            try:
                listed = None if asked is None else self._meant(asked.model)
            except ApiError:  # the route says so, once it has read the body
                listed = None
            if asked is None or listed is None or not isinstance(listed.served, Upstream):
                return await route(request)
            request.state.model = listed.model
            return await listed.served.answer(request, sent, asked.stream is True)

        return passing

    async def body(self, request: Request, kind: type[Known]) -> Known:
        """A request's body as `kind`. Raises what `read_sent` and `parse` do."""
        return parse(kind, await self._sent(request), passed_over(request))

    async def read(self, request: Request, kind: type[Known]) -> tuple[Service, Known, int]:
        """The service of the model that a request's body names, the body as `kind`, and its size in bytes. Raises what
        `read_sent`, `parse` and, for a request that generates, `Service.check_queue` do, and ApiError (404) for an
        unknown model."""
        sent = await self._sent(request)
        body = parse(kind, sent, passed_over(request))
        service = self.service(body.model)  # type: ignore[attr-defined]  # every kind has it
        request.state.model = service.base_model
        ticket: Ticket | None = getattr(request.state, "ticket", None)
        if ticket is not None and ticket.generates:  # it is about to wait for a replica
            self._name(request, body)
            request.state.timeout_s = timeout_of(request, body)
            service.check_queue(request.state.timeout_s)
        return service, body, len(sent)

    def _name(self, request: Request, body: Body) -> None:
        """Lets the client end a request by its id, and by the names that the body gives it. `also_named` of its state
        gives it more."""
        state = request.state
        aborted, state.also_named, forget = self.aborts.begin(client_of(request).tenant)
        request.scope["state"]["aborted"] = aborted
        request.scope["state"].setdefault("at_end", []).append(forget)
        for name in (state.request_id, getattr(body, "request_id", None), getattr(body, "rid", None)):
            if name is not None:
                state.also_named(name)

    async def _sent(self, request: Request) -> bytes:
        sent: bytes | None = getattr(request.state, "sent", None)
        if sent is None:
            sent = await read_sent(request, self.config, self._held)
            if self.upstreams:  # it is read twice
                request.state.sent = sent
        return sent

    # ------------------------------------------------ life

    def alongside(self, start: Callable[[], Awaitable[None]], close: Callable[[], Awaitable[None]]) -> None:
        """Has `start` done when the router starts, and `close` when it ends."""
        self._alongside.append((start, close))

    def before_close(self, work: Callable[[], Awaitable[None]]) -> None:
        """Has `work` done when the router closes, while its replicas are still connected."""
        self._before_close.append(work)

    def share(self, limits: RateLimits) -> None:
        """Lets `limits` hold over all routers of the same replicas, once the connections are there."""
        self._exchange = UsageExchange(limits, [service.replicas for service in self.services], self.aborts)

    async def start(self) -> None:
        """Starts the connections. Call it in the event loop that will serve."""
        for service in self.services:
            await service.start()
        if self._exchange is not None:
            self._exchange.start()
        if self.tracer is not None:
            self.tracer.start()
        for start, _ in self._alongside:
            await start()
        self._watching = asyncio.create_task(watch_loop(self.metrics.loop_lag.observe))

    async def close(self) -> None:
        for work in self._before_close:
            await work()
        if self._exchange is not None:
            await self._exchange.close()
        for service in self.services:
            await service.close()
        for upstream in self.upstreams:
            await upstream.close()
        if self.tracer is not None:
            await self.tracer.close()
        for _, close in self._alongside:
            await close()
        if self._watching is not None:
            self._watching.cancel()
