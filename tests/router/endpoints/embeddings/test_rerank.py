"""Rankings and scores: what replicas are asked, and how answers are written."""

import math
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from router.config import RouterConfig
from router.endpoints.embeddings.rerank import rerank_texts, score_texts
from router.endpoints.embeddings.scoring import prepare_scoring
from router.prepare.pooling import Pooling
from router.wire.requests import RerankRequest, ScoreRequest
from tests.router.conftest import CONTEXT, FakeReplica, Stack
from worker.messages import Generate, Output, TokenLogprobs

PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
TASK = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.fixture
def ranker(make_stack: Callable[..., Stack], make_replica: Callable[..., FakeReplica]) -> Stack:
    """A server whose replica embeds by the angle that the text says."""
    fake = make_replica()
    made = make_stack(fake, config=RouterConfig(max_prompts=4))

    def reply(request: Generate) -> Output:
        angle = float(made.tokenizer.decode(request.prompt_ids).rpartition(":")[2])
        values = 3 * np.array([math.cos(angle), math.sin(angle)], dtype="<f4")
        return Output(request_id=request.request_id, finish_reason="stop", embedding=values.tobytes())

    fake.reply = reply
    return made


@pytest.mark.parametrize("fields", [{"truncate_prompt_tokens": -1}, {"truncate": "END"}, {"truncate": True}])
def test_texts_that_are_cut(ranker: Stack, fields: dict[str, Any]) -> None:
    (fake,) = ranker.fakes.values()
    fake.reply = lambda request: Output(
        request_id=request.request_id, finish_reason="stop", embedding=np.ones(2, dtype="<f4").tobytes()
    )
    long = "a b c " * CONTEXT
    for path, body in (
        ("/v1/rerank", {"query": "0", "documents": [long, "0"]}),
        ("/v1/score", {"text_1": "0", "text_2": [long, "0"]}),
    ):
        assert post(ranker, path, **body).status_code == 400
        post(ranker, path, **body, **fields).raise_for_status()
        sizes = sorted(len(request.prompt_ids) for request in fake.requests()[-3:])
        assert sizes[-1] == CONTEXT - 1 and sizes[0] < 5


@pytest.mark.parametrize(("fields", "side"), [({}, "end"), ({"truncation_side": "left"}, "start")])
def test_a_rerankers_document_is_cut_and_not_what_is_asked(tokenizer: Any, fields: dict[str, Any], side: str) -> None:
    long = "".join(f"word {number} " for number in range(CONTEXT))
    request = RerankRequest(query="which?", documents=[long, "short"], truncate_prompt_tokens=300, **fields)
    pooling = Pooling(is_reranker=True)
    job = prepare_scoring("x-", rerank_texts(request, 4), tokenizer, CONTEXT, pooling, 0.0)
    first, _, short, _ = (tokenizer.decode(one.prompt.token_ids, False) for one in job.request.sequences)
    begin, end = PROMPT.format(TASK, "which?", "@").split("@")
    assert first.startswith(begin) and first.removesuffix("yes").endswith(end)
    kept = first.removeprefix(begin).removesuffix(end + "yes")
    assert long.startswith(kept) if side == "end" else long.strip().endswith(kept.strip())
    assert short == PROMPT.format(TASK, "which?", "short") + "yes"
    added = len(tokenizer.encode("yes", False))
    sizes = [len(one.prompt.token_ids) for one in job.request.sequences]
    assert sizes[0] == 300 + added


def post(stack: Stack, path: str, **body: Any) -> Any:
    return httpx.post(f"{stack.url}{path}", json={"model": "tiny", **body})


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_by_relevance(ranker: Stack, path: str) -> None:
    answer = post(ranker, path, query="0", documents=["3", {"text": "0.5"}, "0", "0.5"]).raise_for_status().json()
    assert [one["index"] for one in answer["results"]] == [2, 1, 3, 0]
    assert [one["document"]["text"] for one in answer["results"]] == ["0", "0.5", "0.5", "3"]
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == pytest.approx([1, math.cos(0.5), math.cos(0.5), math.cos(3)], abs=1e-6)
    assert answer["id"].startswith("rerank-") and answer["usage"]["total_tokens"] > 4
    short = post(ranker, path, query="0", documents=["3", "0"], top_n=1, return_documents=False, user="x").json()
    assert short["results"] == [{"index": 1, "relevance_score": pytest.approx(1.0)}]
    assert len(post(ranker, path, query="0", documents=["3", "0"], top_n=0).json()["results"]) == 2
    post(ranker, path, query="0", documents=["1"], instruction="Find")
    (fake,) = ranker.fakes.values()
    assert "Instruct: Find\nQuery:0" in {ranker.tokenizer.decode(one.prompt_ids) for one in fake.requests()}


def test_what_clients_keep_with_a_document_is_passed_over(ranker: Stack) -> None:
    kept = {"text": "0", "title": "A tale", "metadata": {"page": 3}}
    answer = post(ranker, "/v1/rerank", query="0", documents=["3", kept]).raise_for_status()
    assert [one["index"] for one in answer.json()["results"]] == [1, 0]
    assert answer.headers["x-shoal-ignored"] == "documents[].metadata, documents[].title"


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_scores_of_pairs(ranker: Stack, path: str, names: tuple[str, str]) -> None:
    for first, second, expected in (
        ("0", "1", [1.0]),
        ("0", ["1", "2"], [1.0, 2.0]),
        (["0"], ["1", "2"], [1.0, 2.0]),
        (["1", "2"], ["1", "4"], [0.0, 2.0]),
    ):
        answer = post(ranker, path, **dict(zip(names, (first, second), strict=True))).raise_for_status().json()
        assert [one["index"] for one in answer["data"]] == list(range(len(expected)))
        found = [one["score"] for one in answer["data"]]
        assert found == pytest.approx([math.cos(angle) for angle in expected], abs=1e-6)


def test_a_reranker_is_asked_by_its_published_prompt(tokenizer: Any) -> None:
    request = ScoreRequest(model="tiny", queries=["a?", "b?"], documents=["The fox", "Paris"])
    job = prepare_scoring("score-", score_texts(request, 9), tokenizer, 10 * CONTEXT, Pooling(is_reranker=True), 0.0)
    asked = [(one.prompt.token_ids, one.sampling.prompt_logprobs_start, one.first) for one in job.request.sequences]
    prompts = [PROMPT.format(TASK, "a?", "The fox"), PROMPT.format(TASK, "b?", "Paris")]
    assert [tokenizer.decode(ids[:start], False) for ids, start, _ in asked] == [
        prompt for prompt in prompts for _ in "yn"
    ]
    assert [tokenizer.decode(ids[start:], False) for ids, start, _ in asked] == ["yes", "no"] * 2
    assert [first for _, _, first in asked] == [True, False] * 2
    assert job.request.prompt_tokens == sum(len(ids) for ids, _, first in asked if first)


def test_a_rerankers_scores(ranker: Stack) -> None:
    ranker.service.pooling = Pooling(is_reranker=True)
    ranker.service.context_length = 10 * CONTEXT
    logprobs = {"yes": -1.0, "no": -3.0}
    (fake,) = ranker.fakes.values()

    def reply(request: Generate) -> Output:
        tail = request.prompt_ids[request.sampling.prompt_logprobs_start :]
        total = logprobs[ranker.tokenizer.decode(tail)]
        if "hopeless" in ranker.tokenizer.decode(request.prompt_ids):
            total = -math.inf if total == -1.0 else 0.0
        return Output(
            request_id=request.request_id,
            token_ids=[5],
            prompt_logprobs=[TokenLogprobs(token, total / len(tail)) for token in tail],
            finish_reason="length",
        )

    fake.reply = reply
    answer = post(ranker, "/v1/rerank", query="a", documents=["hopeless", "b"]).raise_for_status().json()
    assert [one["index"] for one in answer["results"]] == [1, 0]
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([1 / (1 + math.exp(-2.0)), 0.0])


RERANK: dict[str, Any] = {"query": "0", "documents": ["0"]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("rerank", {"documents": ["0"]}, "query"),
        ("rerank", {"query": "0"}, "documents"),
        ("rerank", RERANK | {"documents": []}, "documents"),
        ("rerank", RERANK | {"documents": [{"title": "0"}]}, "documents[0].text"),
        ("rerank", RERANK | {"documents": ["0"] * 5}, "documents"),
        ("rerank", RERANK | {"documents": [1]}, "documents[0]"),
        ("rerank", RERANK | {"documents": ["0", ""]}, "documents[1]"),
        ("rerank", RERANK | {"documents": ["a b " * CONTEXT]}, "documents"),
        ("rerank", RERANK | {"query": ""}, "query"),
        ("rerank", RERANK | {"query": "a b " * CONTEXT}, "query"),
        ("rerank", RERANK | {"query": "x" * 100 * CONTEXT}, "query"),
        ("rerank", RERANK | {"top_n": -1}, "top_n"),
        ("rerank", RERANK | {"max_chunks_per_doc": 2}, "max_chunks_per_doc"),
        ("score", {}, "text_1"),
        ("score", {"text_1": "0"}, "text_1"),
        ("score", {"text_1": "0", "documents": "0"}, "text_1"),
        ("score", {"text_1": "0", "text_2": "0", "queries": "0", "documents": "0"}, "text_1"),
        ("score", {"text_1": ["0", "0"], "text_2": "0"}, "text_1"),
        ("score", {"queries": ["0", "0"], "documents": ["0"] * 3}, "queries"),
        ("score", {"text_1": "0", "text_2": []}, "text_2"),
        ("score", {"text_1": "0", "text_2": ["0"] * 5}, "text_2"),
        ("score", {"text_1": "0", "text_2": "0", "items": []}, "items"),
    ],
)
def test_bad_bodies_are_refused_by_name(ranker: Stack, path: str, body: dict[str, Any], param: str) -> None:
    answer = post(ranker, f"/v1/{path}", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    if path == "rerank" and param == "documents" and len(body.get("documents", [])) == 1:
        ranker.service.pooling = Pooling(is_reranker=True)
        answer = post(ranker, f"/v1/{path}", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
