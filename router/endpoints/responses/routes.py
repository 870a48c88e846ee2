"""The routes of OpenAI's Responses: made, kept, asked for again, followed, cancelled, deleted."""

import contextlib
import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar, get_args

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from router import openapi
from router.access.auth import Keys, client_of
from router.access.rate_limits import Kind, RateLimits
from router.endpoints.answering import json_response
from router.endpoints.responses.reader import Asked, prepare_responses, references, sent_items
from router.endpoints.responses.runs import BackgroundRuns, KeptResponses, follow
from router.endpoints.responses.store import Item, ResponseStore, StoredResponse, TooLarge
from router.endpoints.responses.writer import ResponsesFormat, new_id
from router.generation import Generation
from router.models import Models, passed_over
from router.streaming.sse import Emit, EventStream, unless_gone
from router.wire.errors import ApiError, internal, invalid
from router.wire.responses_objects import ENDED, DeletedResponse, InputItems, ResponseObject
from router.wire.responses_types import Include, ResponsesRequest

T = TypeVar("T")
log = logging.getLogger(__name__)

PAGE_ITEMS, MAX_PAGE_ITEMS = 20, 100  # items
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
STREAM = {"schema": {"description": "server-sent events, each with its name and a sequence_number"}}


def responses_routes(models: Models, keys: Keys, limits: RateLimits) -> APIRouter:
    """The routes."""
    return _ResponsesRoutes(models, keys, limits).routes()


class _ResponsesRoutes:
    """The handlers of requests, over one store and its runs in the background."""

    def __init__(self, models: Models, keys: Keys, limits: RateLimits) -> None:
        self._models, self._keys, self._limits = models, keys, limits
        self._kept = KeptResponses(models.config)
        self._runs = BackgroundRuns(self._kept, models.config.max_background_responses)
        models.before_close(self._runs.close)
        models.before_close(self._kept.close)

    def routes(self) -> APIRouter:
        routes = APIRouter(tags=["generation"])
        reads, ends = ([Depends(self._limits.admit_as(kind))] for kind in (Kind.READS, Kind.ENDS))
        one = "/v1/responses/{response_id}"
        routes.post(
            "/v1/responses",
            dependencies=[Depends(self._limits.admit)],
            openapi_extra=openapi.body(ResponsesRequest),
            responses=_streamed(openapi.answers(ResponseObject, 400, 401, 404, 408, 413, 415, 429, 500, 502, 503, 504)),
        )(self._models.passing_on(self.create_response))
        routes.get(
            one,
            dependencies=[Depends(self._admit_reader)],
            openapi_extra=openapi.queries(stream=bool, starting_after=int),
            responses=_streamed(openapi.answers(ResponseObject, 400, 401, 404, 429, 503)),
        )(self.get_response)
        routes.delete(one, dependencies=ends, responses=openapi.answers(DeletedResponse, 401, 404, 503))(
            self.delete_response
        )
        routes.post(f"{one}/cancel", dependencies=ends, responses=openapi.answers(ResponseObject, 400, 401, 404, 503))(
            self.cancel_response
        )
        routes.get(
            f"{one}/input_items",
            dependencies=reads,
            openapi_extra=openapi.queries(limit=int, after=str, order=str),
            responses=openapi.answers(InputItems, 400, 401, 404, 429, 503),
        )(self.input_items)
        return routes

    async def create_response(self, request: Request) -> Response:
        """Answers items, as a whole, as a stream, or in the background."""
        arrived = perf_counter()
        service, body, size = await self._models.read(request, ResponsesRequest)
        service.check_priority(body.priority, client_of(request))
        tenant = self._keys.tenant(request)
        keeps = bool(self._kept) and body.store is not False
        if body.background and not keeps:
            why = "'store' must not be false" if self._kept else "this server keeps no responses"
            raise invalid(f"'background' needs a stored response: {why}.", "background")
        items = sent_items(body, passed_over(request))
        max_bytes = self._models.config.max_body_bytes
        asked, more = await _asked(self._kept, tenant, body, items, keeps, passed_over(request), max_bytes)
        prepared, response = await service.in_thread(
            request,
            size + more,
            prepare_responses,
            asked,
            service.model,
            service.defaults,
            service.output_format,
            service.tokenizer,
            service.context_length,
            service.config.max_prompts,
            arrived,
            service.config.clamp_max_tokens,
        )
        request.state.also_named(prepared.id)
        form = ResponsesFormat(prepared, response, service.tokenizer)
        generation = Generation(
            service, prepared, form, request.state.name, request.state.ticket, request.state.timeout_s
        )
        stored = StoredResponse(response, [_listed(item, asked.referred) for item in items] if keeps else [])
        if body.background:
            await self._runs.start(tenant, stored, generation, form, bool(body.stream))
            if body.stream:
                return EventStream(lambda emit: follow(self._kept, tenant, response.id, -1, emit))
            return json_response(response)
        if body.stream:
            return EventStream(lambda emit: _stream(generation, form, self._kept, tenant, stored, emit))
        answer = await unless_gone(request.scope, request.receive, generation.whole())
        if keeps:
            await self._kept.keep(tenant, stored)
        return Response(answer, media_type="application/json")

    async def get_response(self, request: Request, response_id: str) -> Response:
        """A stored response. With `stream`, the events of one that was begun as a stream in the background."""
        after = _number(request, "starting_after", -1, 0, (1 << 31) - 1)
        streams = _flag(request, "stream")
        _check_include(request)
        if after >= 0 and not streams:
            raise invalid("'starting_after' is for streams only: set 'stream' to true.", "starting_after")
        tenant = self._keys.tenant(request)
        if not streams:
            answer = await self._read(tenant, lambda store: _encoded(store.response(tenant, response_id)))
            if answer is None:
                raise _unknown(response_id)
            return Response(answer, media_type="application/json")
        if not (await self._stored(request, response_id)).background:
            raise invalid("Only a response that was begun in the background, as a stream, can be followed.", "stream")
        return EventStream(lambda emit: follow(self._kept, tenant, response_id, after, emit))

    async def delete_response(self, request: Request, response_id: str) -> Response:
        """Forgets a stored response, and ends it if it runs."""
        tenant = self._keys.tenant(request)
        if not self._kept or not await self._kept.write(tenant, lambda store: store.delete(tenant, response_id)):
            raise _unknown(response_id)
        await self._runs.stop(response_id)
        return json_response(DeletedResponse(response_id))

    async def cancel_response(self, request: Request, response_id: str) -> Response:
        """Ends a response that runs in the background. One that has ended stays as it is."""
        response = await self._stored(request, response_id)
        if not response.background:
            raise invalid("Only a response that was begun in the background can be cancelled.", "response_id")
        if response.status not in ENDED:
            tenant = self._keys.tenant(request)
            await self._kept.beat(tenant, lambda store: store.cancel(tenant, response_id))
            await self._runs.stop(response_id)
            response = await self._stored(request, response_id)
        return json_response(response)

    async def input_items(self, request: Request, response_id: str) -> Response:
        """The items that a stored response was asked with, the last first unless `order` is asc."""
        limit = _number(request, "limit", PAGE_ITEMS, 1, MAX_PAGE_ITEMS)
        order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
        _check_include(request)
        if order not in ("asc", "desc"):
            raise invalid("'order' is asc or desc.", "order", "invalid_value")
        tenant = self._keys.tenant(request)

        def page(store: ResponseStore) -> bytes | None:
            items = store.input(tenant, response_id)
            return None if items is None else msgspec.json.encode(_page(items, order, after, limit))

        answer = await self._read(tenant, page)
        if answer is None:
            raise _unknown(response_id)
        return Response(answer, media_type="application/json")

    async def _stored(self, request: Request, response_id: str) -> ResponseObject:
        tenant = self._keys.tenant(request)
        response = await self._read(tenant, lambda store: store.response(tenant, response_id))
        if response is None:
            raise _unknown(response_id)
        return response

    async def _read(self, tenant: str, read: Callable[[ResponseStore], T]) -> T | None:
        """The result of `read` from the store; None on a server that keeps nothing."""
        return await self._kept.read(tenant, read) if self._kept else None

    async def _admit_reader(self, request: Request) -> None:
        kind = Kind.FOLLOWS if request.query_params.get("stream") == "true" else Kind.READS
        request.state.ticket = self._limits.enter(client_of(request), kind)


async def _asked(
    kept: KeptResponses,
    tenant: str,
    body: ResponsesRequest,
    items: list[Item],
    keeps: bool,
    passed_over: set[str],
    max_bytes: int,
) -> tuple[Asked, int]:
    """The request with what it refers to in the store, and the bytes of that: at most as many as a request may have.
    Raises ApiError."""
    before: list[Item] = []
    referred: dict[str, Item] = {}
    num_bytes = 0
    previous = body.previous_response_id
    if previous is not None:
        try:
            chain = await kept.read(tenant, lambda store: store.chain(tenant, previous, max_bytes)) if kept else None
        except TooLarge as error:
            raise _too_large("previous_response_id", error.num_bytes, max_bytes) from None
        if chain is None:
            message = f"Previous response with id {previous[:100]!r} not found."
            if not kept:
                message += " This server keeps no responses: send all items in 'input'."
            raise invalid(message, "previous_response_id", "previous_response_not_found")
        if chain.status not in ENDED:
            message = f"The previous response is {chain.status}: wait until it is complete."
            raise invalid(message, "previous_response_id", "previous_response_not_complete")
        before, num_bytes = chain.items, chain.num_bytes
        with contextlib.suppress(ApiError):  # where the disk fails, the answer does not
            await kept.write(tenant, lambda store: store.touch(chain.ids))
    if kept and (ids := references(items)):
        left = max_bytes - num_bytes

        def look(store: ResponseStore) -> tuple[dict[str, Item], int]:
            found = store.items(tenant, ids, max_bytes)
            sizes = {name: len(msgspec.json.encode(item)) for name, item in found.items()}
            size = sum(sizes.get(name, 0) for name in ids)  # each time that one is referred to, it is read
            if size > left:
                raise TooLarge(num_bytes + size)
            return found, size

        try:
            referred, size = await kept.read(tenant, look)
        except TooLarge as error:
            raise _too_large("input", error.num_bytes, max_bytes) from None
        num_bytes += size
    return Asked(body, before, referred, keeps, passed_over), num_bytes


def _too_large(param: str, num_bytes: int, max_bytes: int) -> ApiError:
    message = (
        f"The stored items that {param!r} refers to have {num_bytes} bytes, and a request may have {max_bytes}: send "
        "the items that matter in 'input'."
    )
    return invalid(message, param, "stored_items_too_large")


async def _stream(
    generation: Generation, form: ResponsesFormat, kept: KeptResponses, tenant: str, stored: StoredResponse, emit: Emit
) -> None:
    """Emits the events of a response. It is kept before the client has the last of them. An error before the first
    event is raised, a later one is events."""

    async def keep_and_emit(data: bytes) -> None:
        if form.has_ended and stored.response.store:
            await kept.keep(tenant, stored)
        await emit(data)

    try:
        await generation.stream(keep_and_emit)
        return
    except ApiError as error:
        if not form.begun:
            raise
        failure = error
    except OSError:  # the client's connection broke
        raise
    except Exception:
        if not form.begun:
            raise
        log.exception("%s failed in its stream", stored.response.id)
        failure = internal()
    await keep_and_emit(form.failed(failure))


def _listed(item: Item, referred: dict[str, Item]) -> Item:
    """The item as it is kept: with its id, a message's content as parts, a reference as the item it refers to."""
    kind = item["type"]
    if kind == "item_reference":
        return referred.get(item["id"], item)
    made = item | {"id": item.get("id") or new_id(PREFIXES[kind])}
    if kind == "message" and isinstance(item.get("content"), str):
        written: Item = {"type": "input_text", "text": item["content"]}
        if item["role"] == "assistant":
            written = {"type": "output_text", "text": item["content"], "annotations": [], "logprobs": []}
        made["content"] = [written]
    if kind != "reasoning":
        made["status"] = item.get("status") or "completed"
    return made


def _page(items: list[Item], order: str, after: str | None, limit: int) -> InputItems:
    """The items after one of them. Raises ApiError."""
    if order == "desc":
        items = items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid(f"'after' is {after[:100]!r}, which is not one of the items.", "after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return InputItems(data=page, first_id=first, last_id=last, has_more=len(items) > limit)


def _encoded(response: ResponseObject | None) -> bytes | None:
    return None if response is None else msgspec.json.encode(response)


def _unknown(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id {response_id[:100]!r} not found.", param="response_id", code="not_found")


def _streamed(documented: dict[int | str, dict[str, Any]]) -> dict[int | str, dict[str, Any]]:
    documented[200]["content"]["text/event-stream"] = STREAM
    return documented


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """A number among the query's parameters. Raises ApiError."""
    said = request.query_params.get(name)
    if said is None:
        return default
    if not (said.isascii() and said.isdecimal() and len(said) < 11 and least <= int(said) <= most):
        raise invalid(f"{name!r} is a number from {least} to {most}.", name, "invalid_value")
    return int(said)


def _flag(request: Request, name: str) -> bool:
    said = request.query_params.get(name, "false")
    if said not in ("true", "false"):
        raise invalid(f"{name!r} is true or false.", name, "invalid_value")
    return said == "true"


def _check_include(request: Request) -> None:
    """Raises ApiError for something to include that is not known. What is known is there already."""
    asked = [value for name, value in request.query_params.multi_items() if name.partition("[")[0] == "include"]
    if unknown := [value for value in asked if value not in get_args(Include)]:
        raise invalid(f"'include' has {unknown[0][:100]!r}, which is not known.", "include", "invalid_value")
    if _flag(request, "include_obfuscation"):
        raise invalid("'include_obfuscation' is not supported: leave it out.", "include_obfuscation")
