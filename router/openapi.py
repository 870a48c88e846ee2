"""What `/openapi.json` says: made of the very types that requests are parsed with and answers written from."""

from typing import Any

import msgspec

from router import requests, responses

_REF = "#/components/schemas/{name}"
_TYPES = (
    requests.ChatRequest,
    requests.CompletionRequest,
    requests.TokenizeRequest,
    requests.DetokenizeRequest,
    responses.ChatCompletion,
    responses.ChatChunk,
    responses.Completion,
    responses.Model,
    responses.ModelList,
    responses.Tokens,
    responses.Text,
    responses.Health,
    responses.Error,
)
_ERRORS = {
    400: "a parameter is wrong or not supported; `param` names it",
    401: "no API key, or a wrong one",
    404: "no such model",
    413: "the body is too large",
    429: "too many requests are waiting",
    500: "the server's own fault",
    503: "no replica is ready",
}


def schemas() -> dict[str, Any]:
    """Components for all types."""
    return msgspec.json.schema_components(_TYPES, ref_template=_REF)[1]


def reference(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


def body(request: type[msgspec.Struct]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads this body."""
    content = {"application/json": {"schema": reference(request.__name__)}}
    return {"requestBody": {"required": True, "content": content}}


def answers(
    answer: type[msgspec.Struct], *errors: int, stream: type[msgspec.Struct] | None = None
) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route."""
    content: dict[str, Any] = {"application/json": {"schema": reference(answer.__name__)}}
    if stream is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": f"events of {stream.__name__} objects, then `[DONE]`"}
        }
    documented: dict[int | str, dict[str, Any]] = {200: {"description": "the answer", "content": content}}
    for status in errors:
        error = {"application/json": {"schema": reference("Error")}}
        documented[status] = {"description": _ERRORS[status], "content": error}
    return documented
