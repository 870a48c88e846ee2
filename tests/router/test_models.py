"""Several models at one door: each request goes to the model that it names, whichever endpoint it asks."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import tokenizers

from router.chat.chat_template import ChatTemplate
from router.config import RouterConfig
from router.metrics.metrics import Metrics
from router.models import Models
from router.prepare.defaults import SamplingDefaults
from router.text.tokenizer import Tokenizer
from router.wire.errors import ApiError
from worker.messages import Generate, Output

Make = Callable[..., Any]
HELLO = [{"role": "user", "content": "Hello"}]
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Door:
    """Two models: `tiny` (alias `gpt-4o`) says one, `org/large` (aliases `large`, `big`) says two."""

    def __init__(self, models: Models, server: Any, fakes: dict[str, Any]) -> None:
        self.models = models
        self.server = server
        self.url: str = server.url
        self.fakes = fakes
        self.client = server.client()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body)

    def asked(self) -> dict[str, int]:
        """The number of requests that each model's replica has received."""
        return {name: len(fake.requests()) for name, fake in self.fakes.items()}


@pytest.fixture
def door(
    make_service: Make,
    make_replica: Make,
    serve: Make,
    tokenizer: Tokenizer,
    byte_level_tokenizer_maker: Callable[[], tokenizers.Tokenizer],
) -> Door:
    other = Tokenizer(byte_level_tokenizer_maker(), ChatTemplate(PLAIN, {}))
    fakes = {"tiny": make_replica("one"), "org/large": make_replica("two")}
    metrics = Metrics()
    small = make_service(metrics, fakes["tiny"], config=RouterConfig(aliases=("gpt-4o",), max_prompts=2))
    large = make_service(
        metrics,
        fakes["org/large"],
        name="org/large",
        tokens=other,
        context_length=100,
        defaults=SamplingDefaults({"temperature": 0.25}),
        config=RouterConfig(aliases=("large", "big"), max_priority=7),
    )
    models = Models([small, large], metrics, RouterConfig())
    return Door(models, serve(models), fakes)


@pytest.mark.parametrize(("name", "text"), [("tiny", "one"), ("gpt-4o", "one"), ("org/large", "two"), ("big", "two")])
def test_every_endpoint_for_text_asks_the_model_that_is_named(door: Door, name: str, text: str) -> None:
    def said(path: str, **body: Any) -> Any:
        answer = door.post(path, model=name, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    chat = said("/v1/chat/completions", messages=HELLO)
    completion = said("/v1/completions", prompt="Hello", max_tokens=50)
    message = said("/v1/messages", messages=HELLO, max_tokens=50)
    response = said("/v1/responses", input="Hello")
    assert chat["choices"][0]["message"]["content"] == completion["choices"][0]["text"] == text
    assert message["content"][0]["text"] == response["output"][0]["content"][0]["text"] == text
    own = "tiny" if text == "one" else "org/large"
    assert {answer["model"] for answer in (chat, completion, message, response)} == {own}
    assert door.asked() == {"tiny": 0, "org/large": 0} | {own: 4}


def test_a_stream_is_the_models(door: Door) -> None:
    for name, text in (("tiny", "one"), ("large", "two")):
        with door.client.chat.completions.create(model=name, messages=HELLO, stream=True) as stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_each_model_has_its_template_its_length_its_defaults_and_its_limits(door: Door) -> None:
    for name in ("tiny", "large"):
        door.client.chat.completions.create(model=name, messages=HELLO)
    (small,), (large,) = (fake.requests() for fake in door.fakes.values())
    tokenizer = door.models.service("tiny").tokenizer
    assert small.prompt_ids == tokenizer.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert large.prompt_ids == tokenizer.encode("Hello")
    assert (small.sampling.temperature, large.sampling.temperature) == (1.0, 0.25)
    long = "a " * 150
    assert door.post("/v1/completions", model="tiny", prompt=long).status_code == 200
    assert door.post("/v1/completions", model="large", prompt=long).status_code == 400
    three = {"prompt": ["a", "b", "c"]}
    assert [door.post("/v1/completions", model=m, **three).status_code for m in ("tiny", "large")] == [400, 200]
    urgent = {"prompt": "a", "priority": 7}
    assert [door.post("/v1/completions", model=m, **urgent).status_code for m in ("tiny", "large")] == [400, 200]


def test_tokens_are_the_models(door: Door) -> None:
    counts = {name: door.post("/tokenize", model=name, messages=HELLO).json()["count"] for name in ("gpt-4o", "big")}
    assert counts["gpt-4o"] > counts["big"]
    count = {
        name: door.post("/v1/messages/count_tokens", model=name, messages=HELLO).json()["input_tokens"]
        for name in ("gpt-4o", "big")
    }
    assert count == counts
    ids = door.post("/tokenize", model="large", prompt="Hello").json()
    assert ids["max_model_len"] == 100
    assert door.post("/detokenize", model="large", tokens=ids["tokens"]).json() == {"prompt": "Hello"}
    infos = {name: httpx.get(f"{door.url}/tokenizer_info?model={name}").json() for name in ("tiny", "large")}
    assert infos["large"]["chat_template"] == PLAIN != infos["tiny"]["chat_template"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/tokenizer_info"])
def test_who_may_leave_the_model_out_must_not_where_there_are_two(door: Door, path: str) -> None:
    body = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [70]}}.get(path)
    answer = httpx.get(door.url + path) if body is None else httpx.post(door.url + path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "model"
    assert "'tiny', 'gpt-4o', 'org/large', 'large', 'big'" in error["message"]


UNKNOWN = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "a"},
    "/v1/choices": {"prompt": "a", "choices": ["b"]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [70]},
}


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": "default"}])
@pytest.mark.parametrize("path", UNKNOWN)
def test_the_only_model_need_not_be_named(stack: Any, door: Door, path: str, named: dict[str, Any]) -> None:
    assert httpx.post(stack.url + path, json=UNKNOWN[path] | named).status_code == 200
    answer = door.post(path, **UNKNOWN[path], **named)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "'tiny', 'gpt-4o', 'org/large', 'large', 'big'" in error["message"]


def test_a_model_may_be_called_default(make_service: Make, make_replica: Make, serve: Make) -> None:
    metrics = Metrics()
    named = make_service(metrics, make_replica("one"), config=RouterConfig(aliases=("default",)))
    models = Models([named, make_service(metrics, make_replica("two"), name="other")], metrics, RouterConfig())
    answer = httpx.post(f"{serve(models).url}/v1/completions", json={"prompt": "a", "model": "default"})
    assert answer.json()["choices"][0]["text"] == "one"


@pytest.mark.parametrize("path", UNKNOWN)
def test_an_unknown_model_is_told_which_there_are(door: Door, path: str) -> None:
    answer = door.post(path, model="gpt-9", **UNKNOWN[path])
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert all(told in error["message"] for told in ("'gpt-9'", "'tiny', 'gpt-4o', 'org/large'"))
    if path.startswith("/v1/messages"):
        assert (answer.json()["type"], error["type"]) == ("error", "not_found_error")
    else:
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert door.asked() == {"tiny": 0, "org/large": 0}


def test_embeddings_scores_and_choices_ask_the_model_that_is_named(door: Door) -> None:
    def embedded(request: Generate) -> Output | None:
        if request.sampling.pooling is None:
            return None
        return Output(request_id=request.request_id, finish_reason="stop", embedding=b"\0\0\x80?" * 2)

    for fake in door.fakes.values():
        fake.reply = embedded
    assert door.post("/v1/embeddings", model="big", input="a").json()["model"] == "org/large"
    assert door.asked() == {"tiny": 0, "org/large": 1}
    assert door.post("/v1/rerank", model="big", query="a", documents=["b"]).json()["model"] == "org/large"
    assert door.post("/v1/score", model="gpt-4o", text_1="a", text_2="b").json()["model"] == "tiny"
    assert door.asked() == {"tiny": 2, "org/large": 3}
    assert door.post("/v1/choices", model="large", prompt="a", choices=["b"]).json()["model"] == "org/large"
    assert door.asked()["tiny"] == 2


def test_the_list_has_every_name(door: Door) -> None:
    cards = {card.id: card for card in door.client.models.list().data}
    assert list(cards) == ["tiny", "gpt-4o", "org/large", "large", "big"]
    told = {name: (card.root, card.parent, card.max_model_len) for name, card in cards.items()}  # type: ignore[attr-defined]
    assert told["tiny"] == ("tiny", None, 512) and told["gpt-4o"] == ("tiny", "tiny", 512)
    assert told["org/large"] == ("org/large", None, 100) and told["big"] == ("org/large", "org/large", 100)
    for name, card in cards.items():
        assert door.client.models.retrieve(name) == card
    anthropic = {"anthropic-version": "2023-06-01"}
    page = httpx.get(f"{door.url}/v1/models", headers=anthropic).json()
    assert [card["id"] for card in page["data"]] == list(cards) and (page["first_id"], page["last_id"]) == (
        "tiny",
        "big",
    )
    one = httpx.get(f"{door.url}/v1/models/org/large", headers=anthropic).json()
    assert (one["id"], one["max_input_tokens"]) == ("org/large", 100)
    enum = httpx.get(f"{door.url}/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    assert enum["enum"] == list(cards)


def test_a_model_without_replicas_is_named_and_the_other_answers(door: Door) -> None:
    large = door.models.service("large")
    large._placer.wait_s = 0
    large.replicas.set_replicas({})

    async def gone() -> None:
        while large.replicas.ready:
            await large.replicas.changed()

    door.server.do(gone())
    answer = door.post("/v1/chat/completions", model="big", messages=HELLO)
    assert answer.status_code == 503 and "'org/large'" in answer.json()["error"]["message"]
    assert door.client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content == "one"
    ready = httpx.get(f"{door.url}/ready")
    assert ready.status_code == 200
    assert ready.json() == {"status": "ok", "replicas": 1, "models": {"tiny": 1, "org/large": 0}}


def test_what_is_counted_is_counted_for_the_model(door: Door) -> None:
    for name in ("tiny", "gpt-4o", "big"):
        door.client.chat.completions.create(model=name, messages=HELLO)
    page = httpx.get(f"{door.url}/metrics").text.splitlines()
    path = 'path="/v1/chat/completions",status="200"'
    assert f'shoal_http_responses_total{{model="tiny",{path}}} 2.0' in page
    assert f'shoal_http_responses_total{{model="org/large",{path}}} 1.0' in page
    assert 'shoal_sequences_total{finish_reason="stop",model="org/large"} 1.0' in page
    assert 'shoal_request_seconds_count{model="tiny",replica="r0"} 2.0' in page
    assert 'shoal_kv_tokens{model="tiny",replica="r0"} 1000.0' in page
    assert 'shoal_replicas_ready{model="org/large"} 1.0' in page


def test_a_program_is_the_models_and_ends_everywhere(door: Door) -> None:
    for name in ("tiny", "large"):
        program = {"id": "p", "branch": "b", "lease_s": 60}
        assert door.post("/v1/completions", model=name, prompt="a", program=program).status_code == 200
    assert [len(service.programs) for service in door.models.services] == [1, 1]
    more = {"id": "p", "branch": "b", "continues": True}
    assert door.post("/v1/completions", model="tiny", prompt="b", program=more).status_code == 200
    assert httpx.delete(f"{door.url}/v1/programs/p").status_code == 204
    assert [len(service.programs) for service in door.models.services] == [0, 0]


def test_a_response_may_be_continued_by_another_model(
    make_service: Make, make_replica: Make, serve: Make, tmp_path: Any
) -> None:
    metrics = Metrics()
    services = [make_service(metrics, make_replica(text), name=name) for name, text in (("a", "one"), ("b", "two"))]
    models = Models(services, metrics, RouterConfig(response_store_dir=tmp_path))
    client = serve(models).client()
    first = client.responses.create(model="a", input="Hello")
    second = client.responses.create(model="b", input="Hello", previous_response_id=first.id)
    assert (first.model, first.output_text, second.model, second.output_text) == ("a", "one", "b", "two")
    assert client.responses.retrieve(first.id).model == "a"


def test_two_models_of_one_name_are_refused(make_service: Make) -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="'a'"):
        Models(
            [make_service(metrics, name="a"), make_service(metrics, name="b", config=RouterConfig(aliases=("a",)))],
            metrics,
            RouterConfig(),
        )
    with pytest.raises(ValueError, match="no model"):
        Models([], metrics, RouterConfig())


def test_many_names_are_cut_short(make_service: Make) -> None:
    metrics = Metrics()
    aliases = tuple(f"alias-{number}" for number in range(30))
    models = Models([make_service(metrics, name="a", config=RouterConfig(aliases=aliases))], metrics, RouterConfig())
    with pytest.raises(ApiError, match=r"'alias-18' .*\b11\b.*/v1/models") as error:
        models.find("x" * 1000)
    assert error.value.code == "model_not_found" and len(str(error.value)) < 700
