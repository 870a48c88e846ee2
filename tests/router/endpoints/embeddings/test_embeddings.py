"""Embeddings: what replicas are asked, and how the answer is written. The vectors are a script's; `tests/server` has
real ones."""

import base64
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from tokenizers import processors

from router.config import RouterConfig
from router.prepare.pooling import Pooling
from router.text.tokenizer import Tokenizer
from tests.router.conftest import CONTEXT, FakeReplica, Stack, byte_level_backend
from worker.messages import Failure, Generate, Output

SIZE = 4


def vector(request: Generate) -> np.ndarray:
    """An embedding that tells prompts apart."""
    return np.array([len(request.prompt_ids), sum(request.prompt_ids), 1, 2], dtype="<f4")


def embeds(request: Generate) -> Output:
    assert request.sampling.pooling == "last" and request.sampling.max_tokens == 1
    return Output(request_id=request.request_id, finish_reason="stop", embedding=vector(request).tobytes())


@pytest.fixture
def embedder(make_stack: Callable[..., Stack], make_replica: Callable[..., FakeReplica]) -> Stack:
    """A server whose replica embeds."""
    fake = make_replica()
    fake.reply = embeds
    made = make_stack(fake, config=RouterConfig(max_prompts=3))
    made.service.pooling = Pooling(size=SIZE)
    return made


def expected(token_ids: list[int], dimensions: int | None = None) -> np.ndarray:
    values = np.array([len(token_ids), sum(token_ids), 1, 2], dtype="f4")[:dimensions]
    return values / np.linalg.norm(values)


def test_inputs_and_formats(embedder: Stack) -> None:
    client: OpenAI = embedder.client
    encode = embedder.tokenizer.encode
    ids = [encode("Hello"), encode("The quick fox")]
    for given, wanted in (("Hello", ids[:1]), (["Hello", "The quick fox"], ids), (ids[0], ids[:1]), (ids, ids)):
        for form in ("float", "base64"):
            for dimensions in (None, 2):
                body = {"model": "tiny", "input": given, "encoding_format": form, "dimensions": dimensions, "user": "x"}
                answer = httpx.post(f"{embedder.url}/v1/embeddings", json=body).raise_for_status().json()
                found = [one["embedding"] for one in answer["data"]]
                if form == "base64":
                    found = [np.frombuffer(base64.b64decode(one), "<f4") for one in found]
                for values, token_ids in zip(found, wanted, strict=True):
                    np.testing.assert_allclose(values, expected(token_ids, dimensions), rtol=1e-6)
                tokens = sum(map(len, wanted))
                assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert len(client.embeddings.create(model="tiny", input="Hello").data[0].embedding) == SIZE


def ending_texts(make_stack: Any, make_replica: Any) -> tuple[Any, Any, int]:
    """A router whose tokenizer ends every text with a token, its replica, and the token."""
    backend = byte_level_backend()
    end = backend.token_to_id("<|endoftext|>")
    backend.post_processor = processors.TemplateProcessing("$A <|endoftext|>", None, [("<|endoftext|>", end)])
    fake = make_replica()
    fake.reply = embeds
    stack = make_stack(fake, tokens=Tokenizer(backend))
    return stack, fake, end


def test_the_tokenizer_adds_the_tokens_that_the_model_expects(make_stack: Any, make_replica: Any) -> None:
    """Qwen3-Embedding's ends every text with a token, whose hidden state is the embedding."""
    stack, fake, end = ending_texts(make_stack, make_replica)
    stack.client.embeddings.create(model="tiny", input=["Hello", ""])
    assert [request.prompt_ids[-1] for request in fake.requests()] == [end, end]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": -1}, slice(CONTEXT - 2)),
        ({"truncate_prompt_tokens": 4}, slice(3)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, slice(-3, None)),
        ({"truncate": "END"}, slice(CONTEXT - 2)),
        ({"truncate": "START"}, slice(-(CONTEXT - 2), None)),
        ({"truncate": True}, slice(CONTEXT - 2)),
    ],
)
def test_a_text_that_is_cut_keeps_its_special_tokens(
    make_stack: Any, make_replica: Any, fields: dict[str, Any], kept: slice
) -> None:
    stack, fake, end = ending_texts(make_stack, make_replica)
    long = "The capital of France. " * CONTEXT
    plain = stack.tokenizer.encode(long, False)
    ask = f"{stack.url}/v1/embeddings"
    answer = httpx.post(ask, json={"input": [long, "Hello"], **fields}).raise_for_status().json()
    first, second = (request.prompt_ids for request in fake.requests())
    assert first == [*plain[kept], end]
    assert second == [*stack.tokenizer.encode("Hello", False)[: max(3, (kept.stop or 99))], end]
    assert answer["usage"]["prompt_tokens"] == len(first) + len(second)
    assert httpx.post(ask, json={"input": long, "truncate": False}).status_code == 400


def test_as_many_texts_as_openai_takes(make_stack: Any, make_replica: Any) -> None:
    fake = make_replica()
    fake.reply = embeds
    stack = make_stack(fake)
    told = stack.client.embeddings.create(model="tiny", input=[[70 + number % 9] for number in range(600)])
    assert [one.embedding for one in told.data] == [told.data[number % 9].embedding for number in range(600)]
    assert stack.service.config.max_prompts == 2048
    assert httpx.post(f"{stack.url}/v1/embeddings", json={"input": [[70]] * 2049}).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": None}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [100_000]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["a"] * 4}, "input"),
        ({"input": "a b c " * CONTEXT}, "input"),
        ({"input": "x" * 100 * CONTEXT}, "input"),
        ({"input": [7] * CONTEXT}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ({"input": "a", "dimensions": 2.5}, "dimensions"),
        ({"input": "a", "user": 1}, "user"),
        ({"input": "a", "task": "x"}, "task"),
    ],
)
def test_bad_bodies_are_refused_by_name(embedder: Stack, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{embedder.url}/v1/embeddings", json={"model": "tiny", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].partition("[")[0] == param


def test_another_model_is_not_there(embedder: Stack) -> None:
    for path, body in (
        ("embeddings", {"input": "a"}),
        ("rerank", {"query": "a", "documents": ["b"]}),
        ("score", {"text_1": "a", "text_2": "b"}),
    ):
        answer = httpx.post(f"{embedder.url}/v1/{path}", json={"model": "other", **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def test_a_replicas_refusal_names_the_input(embedder: Stack) -> None:
    (fake,) = embedder.fakes.values()
    fake.fail(Failure("invalid", "too long", "prompt"))
    answer = httpx.post(f"{embedder.url}/v1/embeddings", json={"model": "tiny", "input": "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_a_request_whose_replica_dies_goes_to_another(make_stack: Any, make_replica: Any) -> None:
    asked, other = make_replica().hold(), make_replica().hold()
    stack = make_stack(asked, other)
    with stack.raw("/v1/embeddings", {"model": "tiny", "input": "Hello"}) as connection:
        while not asked.requests():
            asked, other = other, asked
        other.reply = embeds
        asked.die()
        stack.read_until(connection, b'"embedding":[')
    assert other.requests()[0].output_ids == []
