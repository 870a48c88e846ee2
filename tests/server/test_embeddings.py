"""Embeddings, rankings and scores against `transformers`, in float32, by OpenAI's client and by HTTP."""

import base64
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from router.prepare.pooling import Pooling

from .conftest import CONTEXT, MODEL, WAIT_S, Whole

TEXTS = ["a", "Hello there!", "naïve café 🦊", "the same beginning, and one end", "the same beginning, and another"]
HIDDEN = 64


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def client(whole: Whole) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{whole.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client
    whole.settled()


@pytest.fixture(scope="module")
def http(whole: Whole, client: openai.OpenAI) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=whole.url, timeout=WAIT_S) as client:
        yield client


def hidden(model: Any, token_ids: list[int]) -> np.ndarray:
    """Hidden states after the final norm, float32 [tokens, hidden_size]."""
    with torch.inference_mode():
        return model.model(torch.tensor([token_ids])).last_hidden_state[0].numpy()


def unit(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values)


def embedded(whole: Whole, model: Any, text: str) -> np.ndarray:
    return unit(hidden(model, whole.service.tokenizer.encode(text))[-1])


def equal(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("encoding_format", ["float", "base64", openai.omit])
def test_embeddings_by_openais_client(whole: Whole, client: openai.OpenAI, reference: Any, encoding_format) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format=encoding_format)
    assert [one.index for one in answer.data] == list(range(len(TEXTS))) and answer.model == MODEL
    for text, one in zip(TEXTS, answer.data, strict=True):
        values = one.embedding
        if isinstance(values, str):
            values = np.frombuffer(base64.b64decode(values), "<f4").tolist()
        equal(values, embedded(whole, reference, text))
    tokens = sum(len(whole.service.tokenizer.encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


def test_inputs_of_every_form(whole: Whole, client: openai.OpenAI, reference: Any) -> None:
    encode = whole.service.tokenizer.encode
    one, two = (embedded(whole, reference, text) for text in TEXTS[1:3])
    for given, expected in (
        (TEXTS[1], [one]),
        (encode(TEXTS[1]), [one]),
        ([encode(TEXTS[1]), encode(TEXTS[2])], [one, two]),
    ):
        answer = client.embeddings.create(model=MODEL, input=given)
        for found, vector in zip(answer.data, expected, strict=True):
            equal(found.embedding, vector)


def test_fewer_dimensions(whole: Whole, client: openai.OpenAI, reference: Any) -> None:
    (found,) = client.embeddings.create(model=MODEL, input=TEXTS[2], dimensions=16).data
    equal(found.embedding, unit(embedded(whole, reference, TEXTS[2])[:16]))


def test_the_mean_over_a_long_text(whole: Whole, client: openai.OpenAI, reference: Any, monkeypatch) -> None:
    """Its length is several times that of a step."""
    monkeypatch.setattr(whole.service, "pooling", Pooling("mean", normalises=False))
    token_ids = [(7 * n) % 256 for n in range(CONTEXT - 1)]
    for _ in range(2):
        (found,) = client.embeddings.create(model=MODEL, input=token_ids).data
        equal(found.embedding, hidden(reference, token_ids).mean(axis=0))


def test_a_ranking_by_embeddings(whole: Whole, http: httpx.Client, reference: Any) -> None:
    query, *documents = TEXTS
    body = {"model": MODEL, "query": query, "documents": [documents[0], *({"text": text} for text in documents[1:])]}
    cosines = [embedded(whole, reference, query) @ embedded(whole, reference, text) for text in documents]
    order = np.argsort(cosines)[::-1].tolist()
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        answer = http.post(path, json=body).raise_for_status().json()
        assert [result["index"] for result in answer["results"]] == order
        assert [result["document"]["text"] for result in answer["results"]] == [documents[i] for i in order]
        equal([result["relevance_score"] for result in answer["results"]], np.array(cosines)[order])
    short = http.post("/v1/rerank", json=body | {"top_n": 2, "return_documents": False}).json()
    assert short["results"] == [{k: v for k, v in one.items() if k != "document"} for one in answer["results"][:2]]
    told = http.post("/v1/rerank", json=body | {"instruction": "Find it"}).json()["results"]
    first = embedded(whole, reference, f"Instruct: Find it\nQuery:{query}")
    equal(told[0]["relevance_score"], max(first @ embedded(whole, reference, text) for text in documents))


def test_scores_by_embeddings(whole: Whole, http: httpx.Client, reference: Any) -> None:
    vectors = [embedded(whole, reference, text) for text in TEXTS]
    for body, expected in (
        ({"text_1": TEXTS[0], "text_2": TEXTS[1]}, [vectors[0] @ vectors[1]]),
        ({"text_1": TEXTS[0], "text_2": TEXTS}, [vectors[0] @ vector for vector in vectors]),
        ({"queries": TEXTS, "documents": TEXTS}, [1.0] * len(TEXTS)),
    ):
        for path in ("/v1/score", "/score"):
            answer = http.post(path, json={"model": MODEL, **body}).raise_for_status().json()
            assert [one["index"] for one in answer["data"]] == list(range(len(expected)))
            equal([one["score"] for one in answer["data"]], np.array(expected))


def test_a_reranker(whole: Whole, http: httpx.Client, reference: Any, monkeypatch) -> None:
    monkeypatch.setattr(whole.service, "pooling", Pooling(is_reranker=True))
    monkeypatch.setattr("router.endpoints.embeddings.scoring.BEFORE", "<|start|>Yes or no?\n")  # every byte is a token
    encode = whole.service.tokenizer.encode
    texts = TEXTS[1:]

    def chance(text: str, answer: str) -> float:
        pair = f"<Instruct>: Find\n<Query>: a?\n<Document>: {text}"
        end = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        prompt = encode("<|start|>Yes or no?\n") + encode(pair) + encode(end)
        with torch.inference_mode():
            logprobs = reference(torch.tensor([prompt + encode(answer)])).logits[0].log_softmax(-1)
        return sum(float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(encode(answer)))

    expected = [1 / (1 + math.exp(chance(text, "no") - chance(text, "yes"))) for text in texts]
    body = {"model": MODEL, "query": "a?", "documents": texts, "instruction": "Find"}
    for _ in range(2):
        answer = http.post("/v1/rerank", json=body).raise_for_status().json()
        found = {result["index"]: result["relevance_score"] for result in answer["results"]}
        assert list(found) == sorted(found, key=lambda index: -expected[index])
        equal([found[index] for index in range(len(texts))], np.array(expected))


@pytest.mark.slow
def test_embeddings_and_texts_at_once(whole: Whole, http: httpx.Client, client: openai.OpenAI, reference: Any) -> None:
    body = {"model": MODEL, "prompt": "A text", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    alone = http.post("/v1/completions", json=body).json()["choices"]
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        answer = client.embeddings.create(model=MODEL, input=TEXTS * 2)
        for text, one in zip(TEXTS * 2, answer.data, strict=True):
            equal(one.embedding, embedded(whole, reference, text))
        assert sum(1 for line in lines if line) > 1
    assert http.post("/v1/completions", json=body).json()["choices"] == alone
