"""The routes of OpenAI's Responses: made, kept, asked for again, followed, cancelled, deleted."""

import logging
from time import perf_counter
from typing import Any, get_args

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from router import openapi
from router.auth import Keys, client_of
from router.errors import ApiError, internal, invalid
from router.generation import Generation
from router.models import Models, passed_over
from router.protocols.response_store import Item, StoredResponse
from router.protocols.responses_objects import DeletedResponse, InputItems, ResponseObject
from router.protocols.responses_reader import Asked, references, responses_job, sent_items
from router.protocols.responses_runs import BackgroundRuns, KeptResponses, follow
from router.protocols.responses_types import Include, ResponsesRequest
from router.protocols.responses_writer import ResponsesFormat, new_id
from router.rate_limits import Kind, RateLimits
from router.sse import Emit, EventStream, unless_gone

log = logging.getLogger(__name__)

PAGE, MOST = 20, 100  # items
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
STREAM = {"schema": {"description": "server-sent events, each with its name and a sequence_number"}}


def responses_routes(models: Models, keys: Keys, limits: RateLimits) -> APIRouter:
    """The routes."""
    kept = KeptResponses(models.config)
    runs = BackgroundRuns(kept, models.config.max_background_responses)
    models.before_close(runs.close)
    models.before_close(kept.close)
    routes = APIRouter(tags=["generation"])
    reads, ends = ([Depends(limits.admit_as(kind))] for kind in (Kind.READS, Kind.ENDS))

    @routes.post(
        "/v1/responses",
        dependencies=[Depends(limits.admit)],
        openapi_extra=openapi.body(ResponsesRequest),
        responses=_streamed(openapi.answers(ResponseObject, 400, 401, 404, 408, 413, 415, 429, 500, 502, 503, 504)),
    )
    @models.passing_on
    async def create_response(request: Request) -> Response:
        """Answers items, as a whole, as a stream, or in the background."""
        arrived = perf_counter()
        service, body, size = await models.read(request, ResponsesRequest)
        service.check_priority(body.priority, client_of(request))
        tenant = keys.tenant(request)
        keeps = bool(kept) and body.store is not False
        if body.background and not keeps:
            why = "'store' must not be false" if kept else "this server keeps no responses"
            raise invalid(f"'background' needs a stored response: {why}.", "background")
        items = sent_items(body, passed_over(request))
        asked = await _asked(kept, tenant, body, items, keeps, passed_over(request))
        job, response = await service.in_thread(
            size + len(msgspec.json.encode(asked.before)),
            responses_job,
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
        request.state.also_named(job.id)
        form = ResponsesFormat(job, response, service.tokenizer)
        generation = Generation(service, job, form, request.state.name, request.state.ticket, request.state.timeout_s)
        stored = StoredResponse(response, [_listed(item, asked.referred) for item in items] if keeps else [])
        if body.background:
            await runs.start(tenant, stored, generation, form, bool(body.stream))
            if body.stream:
                return EventStream(lambda emit: follow(kept, tenant, response.id, -1, emit))
            return _json(response)
        if body.stream:
            return EventStream(lambda emit: _stream(generation, form, kept, tenant, stored, emit))
        answer = await unless_gone(request.scope, request.receive, generation.whole())
        if keeps:
            await kept.keep(tenant, stored)
        return Response(answer, media_type="application/json")

    async def found(request: Request, response_id: str) -> StoredResponse:
        tenant = keys.tenant(request)
        stored = await kept.run(lambda store: store.get(tenant, response_id)) if kept else None
        if stored is None:
            raise _unknown(response_id)
        return stored

    async def admit_reader(request: Request) -> None:
        kind = Kind.FOLLOWS if request.query_params.get("stream") == "true" else Kind.READS
        request.state.ticket = limits.enter(client_of(request), kind)

    @routes.get(
        "/v1/responses/{response_id}",
        dependencies=[Depends(admit_reader)],
        openapi_extra=openapi.queries(stream=bool, starting_after=int),
        responses=_streamed(openapi.answers(ResponseObject, 400, 401, 404, 429, 503)),
    )
    async def get_response(request: Request, response_id: str) -> Response:
        """A stored response. With `stream`, the events of one that was begun as a stream in the background."""
        after = _number(request, "starting_after", -1, 0, (1 << 31) - 1)
        streams = _flag(request, "stream")
        _check_include(request)
        if after >= 0 and not streams:
            raise invalid("'starting_after' is for streams only: set 'stream' to true.", "starting_after")
        stored = await found(request, response_id)
        if not streams:
            return _json(stored.response)
        if not stored.response.background:
            raise invalid("Only a response that was begun in the background, as a stream, can be followed.", "stream")
        tenant = keys.tenant(request)
        return EventStream(lambda emit: follow(kept, tenant, response_id, after, emit))

    @routes.delete(
        "/v1/responses/{response_id}",
        dependencies=ends,
        responses=openapi.answers(DeletedResponse, 401, 404, 503),
    )
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forgets a stored response, and ends it if it runs."""
        tenant = keys.tenant(request)
        if not kept or not await kept.run(lambda store: store.delete(tenant, response_id)):
            raise _unknown(response_id)
        await runs.stop(response_id)
        return _json(DeletedResponse(response_id))

    @routes.post(
        "/v1/responses/{response_id}/cancel",
        dependencies=ends,
        responses=openapi.answers(ResponseObject, 400, 401, 404, 503),
    )
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Ends a response that runs in the background. One that has ended stays as it is."""
        stored = await found(request, response_id)
        if not stored.response.background:
            raise invalid("Only a response that was begun in the background can be cancelled.", "response_id")
        if not stored.has_ended:
            tenant = keys.tenant(request)
            stored.response.status = "cancelled"
            await kept.run(lambda store: store.put(tenant, stored, new=False))
            await runs.stop(response_id)
            stored = await found(request, response_id)
        return _json(stored.response)

    @routes.get(
        "/v1/responses/{response_id}/input_items",
        dependencies=reads,
        openapi_extra=openapi.queries(limit=int, after=str, order=str),
        responses=openapi.answers(InputItems, 400, 401, 404, 429, 503),
    )
    async def input_items(request: Request, response_id: str) -> Response:
        """The items that a stored response was asked with, the last first unless `order` is asc."""
        limit = _number(request, "limit", PAGE, 1, MOST)
        order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
        _check_include(request)
        if order not in ("asc", "desc"):
            raise invalid("'order' is asc or desc.", "order", "invalid_value")
        stored = await found(request, response_id)
        items = stored.input if order == "asc" else stored.input[::-1]
        if after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise invalid(f"'after' is {after[:100]!r}, which is none of the items.", "after")
            items = items[places[0] + 1 :]
        page = items[:limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return _json(InputItems(data=page, first_id=first, last_id=last, has_more=len(items) > limit))

    return routes


async def _asked(
    kept: KeptResponses, tenant: str, body: ResponsesRequest, items: list[Item], keeps: bool, passed_over: set[str]
) -> Asked:
    """The request with what it refers to in the store. Raises ApiError."""
    before: list[Item] = []
    referred: dict[str, Item] = {}
    previous = body.previous_response_id
    if previous is not None:
        chain = await kept.run(lambda store: store.chain(tenant, previous)) if kept else None
        if chain is None:
            message = f"Previous response with id {previous[:100]!r} not found."
            if not kept:
                message += " This server keeps no responses: send all items in 'input'."
            raise invalid(message, "previous_response_id", "previous_response_not_found")
        if not chain[-1].has_ended:
            message = f"The previous response is {chain[-1].response.status}: wait until it is complete."
            raise invalid(message, "previous_response_id", "previous_response_not_complete")
        before = [item for stored in chain for item in stored.items]
    if kept and (ids := references(items)):
        referred = await kept.run(lambda store: store.items(tenant, ids))
    return Asked(body, before, referred, keeps, passed_over)


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


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


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
