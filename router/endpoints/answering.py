"""How a route answers: with the text of sequences that are ready to run, or with one object."""

import msgspec
from fastapi import Request, Response

from router.generation import Format, Generation
from router.prepare.prepared_request import PreparedRequest
from router.service import Service
from router.streaming.sse import EventStream, unless_gone


async def answered(
    request: Request, service: Service, stream: bool, prepared: PreparedRequest, form: Format
) -> Response:
    """The bytes of `form`, as a whole or as a stream."""
    request.state.also_named(prepared.id)
    generation = Generation(service, prepared, form, request.state.name, request.state.ticket, request.state.timeout_s)
    if stream:
        return EventStream(generation.stream)
    body = await unless_gone(request.scope, request.receive, generation.whole())
    return Response(body, media_type="application/json")


def json_response(answer: msgspec.Struct, status: int = 200) -> Response:
    """The object as JSON."""
    return Response(msgspec.json.encode(answer), status, media_type="application/json")
