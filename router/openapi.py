"""The content of `/openapi.json`, made from the same types that requests are parsed with and answers are written
from."""

from collections.abc import Iterator
from typing import Any

import msgspec

from router.wire import messages_types, requests, responses, responses_objects, responses_types
from router.wire.server_state import ServerState

_REF = "#/components/schemas/{name}"
_TYPES = (
    requests.ChatRequest,
    requests.CompletionRequest,
    responses_types.ResponsesRequest,
    *responses_types.ITEMS,
    responses_types.SentTool,
    responses_types.SentNamespace,
    requests.ChoicesRequest,
    requests.EmbeddingsRequest,
    requests.RerankRequest,
    requests.SourceText,
    requests.ScoreRequest,
    requests.TokenizeRequest,
    requests.StreamOptions,
    requests.StructuredOutputs,
    requests.ProgramCall,
    requests.ProgramFork,
    requests.DetokenizeRequest,
    requests.LoadLoraRequest,
    requests.UnloadLoraRequest,
    requests.AbortRequest,
    messages_types.MessagesRequest,
    messages_types.CountTokensRequest,
    responses.ChatCompletion,
    responses.ChatChunk,
    responses.Completion,
    responses_objects.ResponseObject,
    responses_objects.DeletedResponse,
    responses_objects.InputItems,
    responses.ScoredChoices,
    responses.Embeddings,
    responses.Reranking,
    responses.Scores,
    responses.ModelCard,
    responses.ModelList,
    responses.TokenizeResponse,
    responses.DetokenizeResponse,
    responses.TokenizerInfo,
    responses.FlushedCache,
    responses.AbortedRequests,
    responses.Version,
    responses.Health,
    ServerState,
    responses.Error,
    messages_types.MessageAnswer,
    messages_types.InputTokens,
    messages_types.AnthropicModel,
    messages_types.AnthropicModelPage,
    messages_types.AnthropicError,
)
_ERRORS = {
    400: "a parameter is wrong or not supported; `param` names it",
    401: "no API key, or a wrong one",
    403: "the server does not allow this",
    404: "no such model",
    408: "the body took too long",
    409: "the program or branch to continue is not known here: send the whole text",
    413: "the body is too large",
    415: "the body is compressed",
    429: "too many requests are waiting, or the client's key has reached a limit",
    500: "the server's own fault",
    502: "the endpoint that the request is passed on to cannot be reached, is silent, or breaks off",
    504: "the request took longer than its timeout",
    503: "no replica is ready, or a replica has no memory or time for a grammar now",
}


def schemas(models: list[str], vocab_size: int, max_priority: int, is_needed: bool) -> dict[str, Any]:
    """Schemas of all types, completed with what the types cannot say: the models' names, and whether a body must have
    one (`is_needed`), the range of token ids, which fields go together."""
    made = msgspec.json.schema_components(_TYPES, ref_template=_REF)[1]
    single = ("ChoicesRequest", "EmbeddingsRequest", "RerankRequest", "ScoreRequest")
    for name in (*single, "MessagesRequest", "CountTokensRequest"):
        _name_models(made[name], models, is_needed)
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest"):
        _name_models(made[name], models, is_needed)
        made[name]["properties"]["priority"]["anyOf"][0]["maximum"] = max_priority
        biases, _ = made[name]["properties"]["logit_bias"]["anyOf"]
        biases["propertyNames"] = {"pattern": "^[0-9]{1,9}$"}
    for body in _TYPES:
        for flag in getattr(body, "neutral_flags", ()):
            made[body.__name__]["properties"][flag]["anyOf"] = [{"enum": [False, None]}]
    for lenient in _below(requests.Lenient):
        made.get(lenient.__name__, {}).pop("additionalProperties", None)
    asked = made["ResponsesRequest"]["properties"]
    (items,) = (way for way in asked["input"]["anyOf"] if way["type"] == "array")
    items["items"] = {"anyOf": [reference(item.__name__) for item in responses_types.ITEMS]}
    (tools,) = (way for way in asked["tools"]["anyOf"] if way["type"] == "array")
    tools["items"] = {"anyOf": [reference("SentTool"), reference("SentNamespace")]}
    text = {"type": "string"}
    token_ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "title": requests.TOKEN_ID}, "minItems": 1}
    lists = [{"type": "array", "items": one, "minItems": 1} for one in (text, token_ids)]
    made["CompletionRequest"]["properties"]["prompt"]["anyOf"] = [text, token_ids, *lists]
    made["EmbeddingsRequest"]["properties"]["input"]["anyOf"] = [text, token_ids, *lists]
    made["TokenizeRequest"]["oneOf"] = [_given("prompt"), _given("messages")]
    made["ScoreRequest"]["oneOf"] = [_given("text_1", "text_2"), _given("queries", "documents")]
    _limit_tokens(made, vocab_size)
    return made


def _below(kind: type[requests.Body]) -> Iterator[type[requests.Body]]:
    """The types that inherit from one."""
    each: type[requests.Body]
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def _name_models(schema: dict[str, Any], models: list[str], is_needed: bool) -> None:
    schema["properties"]["model"]["enum"] = models if is_needed else list(dict.fromkeys([*models, "default", None]))
    schema["required"] = [*(["model"] if is_needed else []), *schema.get("required", [])]


def _given(*names: str) -> dict[str, Any]:
    """The schema of a body that has these fields, not null."""
    return {"properties": {name: {"not": {"type": "null"}} for name in names}, "required": list(names)}


def _limit_tokens(schema: Any, vocab_size: int) -> None:
    """Sets the largest token id wherever the schema has a token id."""
    if isinstance(schema, dict):
        if schema.get("title") == requests.TOKEN_ID:
            schema["maximum"] = vocab_size - 1
        for part in schema.values():
            _limit_tokens(part, vocab_size)
    elif isinstance(schema, list):
        for part in schema:
            _limit_tokens(part, vocab_size)


def completed(
    page: dict[str, Any], models: list[str], vocab_size: int, max_priority: int, is_needed: bool
) -> dict[str, Any]:
    """FastAPI's page of the routes, with the schemas that they refer to. Without the 422 that FastAPI adds to routes
    with path parameters: here, no path parameter is invalid."""
    for ways in page["paths"].values():
        for route in ways.values():
            route["responses"].pop("422", None)
    components = page.setdefault("components", {})
    components["schemas"] = schemas(models, vocab_size, max_priority, is_needed)
    return page


def reference(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


def body(request: type[msgspec.Struct]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads a `request` body."""
    content = {"application/json": {"schema": reference(request.__name__)}}
    return {"requestBody": {"required": True, "content": content}}


def queries(**types: type[bool] | type[int] | type[str]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads parameters of the query. None is required."""
    names = {bool: "boolean", int: "integer", str: "string"}
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": {"type": names[kind]}}
            for name, kind in types.items()
        ]
    }


def answers(
    answer: type[msgspec.Struct],
    *statuses: int,
    stream: type[msgspec.Struct] | None = None,
    events: str = "",
    error: type[msgspec.Struct] = responses.Error,
) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route. `stream`: the object in each event of its stream, or `events`, what these are."""
    content: dict[str, Any] = {"application/json": {"schema": reference(answer.__name__)}}
    if stream is not None:
        events = f"server-sent events; the data of each is a {stream.__name__} object, that of the last is `[DONE]`"
    if events:
        content["text/event-stream"] = {"schema": {"description": events}}
    documented: dict[int | str, dict[str, Any]] = {200: {"description": "the answer", "content": content}}
    return documented | errors(*statuses, error=error)


def errors(*statuses: int, error: type[msgspec.Struct] = responses.Error) -> dict[int | str, dict[str, Any]]:
    """The errors among the `responses` of a route. `error`: their form."""
    documented: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        content = {"application/json": {"schema": reference(error.__name__)}}
        documented[status] = {"description": _ERRORS[status], "content": content}
    return documented
