"""The page that says what may be asked."""

import json
from typing import Any

import httpx
import jsonschema
import pytest

ROUTES = {
    ("/v1/chat/completions", "post"): {"200", "400", "401", "404", "408", "413", "415", "429", "500", "502", "503"},
    ("/v1/completions", "post"): {"200", "400", "401", "404", "408", "409", "413", "415", "429", "500", "502", "503"},
    ("/v1/choices", "post"): {"200", "400", "401", "404", "408", "409", "413", "415", "429", "500", "502", "503"},
    ("/v1/embeddings", "post"): {"200", "400", "401", "404", "408", "413", "415", "429", "500", "502", "503"},
    ("/v1/rerank", "post"): {"200", "400", "401", "404", "408", "413", "415", "429", "500", "502", "503"},
    ("/v1/score", "post"): {"200", "400", "401", "404", "408", "413", "415", "429", "500", "502", "503"},
    ("/v1/messages", "post"): {"200", "400", "401", "404", "408", "413", "415", "429", "500", "502", "503"},
    ("/v1/messages/count_tokens", "post"): {"200", "400", "401", "404", "408", "413", "415", "500", "502"},
    ("/v1/responses", "post"): {"200", "400", "401", "404", "408", "413", "415", "429", "500", "502", "503"},
    ("/v1/responses/{response_id}", "get"): {"200", "400", "401", "404", "503"},
    ("/v1/responses/{response_id}", "delete"): {"200", "401", "404", "503"},
    ("/v1/responses/{response_id}/cancel", "post"): {"200", "400", "401", "404", "503"},
    ("/v1/responses/{response_id}/input_items", "get"): {"200", "400", "401", "404", "503"},
    ("/v1/programs/{program_id}", "delete"): {"204", "401"},
    ("/v1/models", "get"): {"200", "401"},
    ("/v1/models/{model_id}", "get"): {"200", "401", "404"},
    ("/v1/load_lora_adapter", "post"): {"200", "400", "401", "403", "404"},
    ("/v1/unload_lora_adapter", "post"): {"200", "400", "401", "403", "404"},
    ("/tokenize", "post"): {"200", "400", "401", "404", "408", "413", "415", "500", "502"},
    ("/detokenize", "post"): {"200", "400", "401", "404", "408", "413", "415", "500", "502"},
    ("/tokenizer_info", "get"): {"200", "400", "401", "404"},
    ("/health", "get"): {"200"},
    ("/ping", "get"): {"200"},
    ("/version", "get"): {"200"},
    ("/ready", "get"): {"200", "503"},
    ("/metrics", "get"): {"200"},
    ("/health_generate", "get"): {"200", "503"},
    ("/flush_cache", "post"): {"200", "401", "403", "503"},
    ("/abort_request", "post"): {"200", "400", "401", "403"},
    ("/state", "get"): {"200"},
}

PATHS = {
    "ChatRequest": "v1/chat/completions",
    "CompletionRequest": "v1/completions",
    "EmbeddingsRequest": "v1/embeddings",
    "RerankRequest": "v1/rerank",
    "ScoreRequest": "v1/score",
    "MessagesRequest": "v1/messages",
}


@pytest.fixture(scope="module")
def pages() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def page(stack: Any, pages: list[dict[str, Any]]) -> dict[str, Any]:
    """The page of the module's first stack. All have the same, and it takes a quarter of a second to make."""
    if not pages:
        pages.append(httpx.get(f"{stack.url}/openapi.json").raise_for_status().json())
    return pages[0]


def check(page: dict[str, Any], name: str, value: Any) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": page["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


def test_every_route_and_status_is_there(page: dict[str, Any]) -> None:
    found = {
        (path, method): set(entry["responses"])
        for path, ways in page["paths"].items()
        for method, entry in ways.items()
    }
    assert {key: found[key] & statuses for key, statuses in ROUTES.items()} == ROUTES
    assert found.keys() == ROUTES.keys()
    assert not any("422" in statuses for statuses in found.values())  # the framework's own


def test_all_references_lead_somewhere(page: dict[str, Any]) -> None:
    text = json.dumps(page)
    for part in text.split('"$ref": "')[1:]:
        assert part.split('"')[0].removeprefix("#/components/schemas/") in page["components"]["schemas"]


def test_bodies_are_those_that_are_accepted(page: dict[str, Any]) -> None:
    hello = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    check(page, "ChatRequest", {"model": "tiny", "messages": hello, "stop": ["a"], "n": 2, "store": False})
    check(page, "ChatRequest", {"messages": hello, "thinking": {"type": "enabled"}, "think": "low", "store": True})
    check(page, "ChatRequest", {"model": "default", "messages": hello, "thinking": True})
    for prompt in ("a", ["a"], [1], [[1], [2]]):
        check(page, "CompletionRequest", {"model": "tiny", "prompt": prompt, "logit_bias": {"7": 1}})
    for given in ("a", ["a"], [1], [[1], [2]]):
        check(page, "EmbeddingsRequest", {"model": "tiny", "input": given, "dimensions": 2})
    check(page, "RerankRequest", {"model": "tiny", "query": "a", "documents": ["a", {"text": "b"}]})
    check(page, "ScoreRequest", {"model": "tiny", "text_1": "a", "text_2": ["a"]})
    check(page, "ScoreRequest", {"model": "tiny", "queries": ["a"], "documents": "a", "text_1": None})
    check(page, "TokenizeRequest", {"prompt": "a", "messages": None})
    check(page, "TokenizeRequest", {"messages": hello})
    check(page, "MessagesRequest", {"model": "tiny", "max_tokens": 9, "messages": hello, "system": "Be brief."})
    check(page, "CountTokensRequest", {"model": "tiny", "messages": hello, "thinking": {"type": "adaptive"}})


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("CompletionRequest", {"model": "tiny"}),
        ("CompletionRequest", {"model": "other", "prompt": "a"}),
        ("CompletionRequest", {"model": "tiny", "prompt": "a", "x": 1}),
        ("CompletionRequest", {"model": "tiny", "prompt": [1, "a"]}),
        ("CompletionRequest", {"model": "tiny", "prompt": [100_000]}),
        ("CompletionRequest", {"model": "tiny", "prompt": "a", "logit_bias": {"x": 1}}),
        ("CompletionRequest", {"model": "tiny", "prompt": "a", "stop_token_ids": [100_000]}),
        ("CompletionRequest", {"model": "tiny", "prompt": "a", "stream_options": {"include_obfuscation": True}}),
        ("ChatRequest", {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}),
        ("ChatRequest", {"messages": [{"role": "user", "content": "a"}], "store": 1}),
        ("ChatRequest", {"model": "tiny", "messages": [{"role": "user", "content": [{"text": "a"}]}]}),
        ("CompletionRequest", {"model": "tiny", "prompt": "a", "priority": 1}),
        ("CompletionRequest", {"model": "tiny", "prompt": "a", "structured_outputs": {"structural_tag": 3}}),
        ("CompletionRequest", {"model": "tiny", "prompt": "a", "allowed_token_ids": [100_000]}),
        ("AbortRequest", {"request_ids": [""]}),
        ("CompletionRequest", {"model": "tiny", "prompt": "a", "length_penalty": 1.5}),
        ("EmbeddingsRequest", {"model": "tiny", "input": [1, "a"]}),
        ("EmbeddingsRequest", {"model": "tiny", "input": [100_000]}),
        ("EmbeddingsRequest", {"model": "other", "input": "a"}),
        ("RerankRequest", {"model": "tiny", "query": "a", "documents": [{"title": "b"}]}),
        ("ScoreRequest", {"model": "tiny", "text_1": "a"}),
        ("ScoreRequest", {"model": "tiny", "text_1": "a", "documents": "a"}),
        ("MessagesRequest", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}),
        ("MessagesRequest", {"model": "other", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
        ("MessagesRequest", {"model": "tiny", "max_tokens": 9, "messages": [{"role": "tool", "content": "a"}]}),
        ("DetokenizeRequest", {"tokens": [100_000]}),
        ("TokenizeRequest", {}),
        ("TokenizeRequest", {"prompt": None}),
    ],
)
def test_bodies_that_the_page_refuses_are_refused(stack: Any, page: dict[str, Any], name: str, body: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(page, name, body)
    path = PATHS.get(name, name[:-7].lower())
    assert httpx.post(f"{stack.url}/{path}", json=body).status_code in (400, 404)


def test_answers_are_what_the_page_says(stack: Any, page: dict[str, Any]) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        return httpx.post(stack.url + path, json=body).json()

    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
    check(page, "ChatCompletion", post("/v1/chat/completions", chat))
    check(page, "Completion", post("/v1/completions", {"model": "tiny", "prompt": "a b", "logprobs": 1, "echo": True}))
    check(page, "Error", post("/v1/completions", {}))
    message = {"model": "tiny", "max_tokens": 9, "messages": chat["messages"]}
    check(page, "MessageAnswer", post("/v1/messages", message))
    check(page, "InputTokens", post("/v1/messages/count_tokens", {"model": "tiny", "messages": chat["messages"]}))
    check(page, "AnthropicError", post("/v1/messages", {}))
    check(page, "TokenizeResponse", post("/tokenize", {"prompt": "a"}))
    check(page, "DetokenizeResponse", post("/detokenize", {"tokens": [70]}))
    paths = {"/v1/models": "ModelList", "/v1/models/tiny": "ModelCard", "/health": "Health", "/ping": "Health"}
    for path, name in (paths | {"/version": "Version", "/tokenizer_info": "TokenizerInfo"}).items():
        check(page, name, httpx.get(stack.url + path).json())
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=chat | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                check(page, "ChatChunk", json.loads(line.removeprefix("data: ")))
