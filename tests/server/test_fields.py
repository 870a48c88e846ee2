"""Fields of other servers, from HTTP to a real replica: what they promise holds in what the model writes."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .bodies import CHAT, COMPLETIONS
from .conftest import WAIT_S, Whole

PROMPT = "Hello there!"


@pytest.fixture
def http(whole: Whole) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=whole.url, timeout=WAIT_S) as client:
        yield client
    whole.settled()


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 40, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return {**choice, "usage": answer.json()["usage"]}


def test_log_probabilities_of_a_prompt_are_those_of_an_echo(http: httpx.Client) -> None:
    echo = complete(http, echo=True, logprobs=3, max_tokens=1, return_token_ids=True)["logprobs"]
    choice = complete(http, prompt_logprobs=3, return_token_ids=True)
    nothing, *positions = choice["prompt_logprobs"]
    ids = choice["prompt_token_ids"]
    assert nothing is None and len(positions) == len(ids) - 1
    for token_id, entries, logprob, top in zip(
        ids[1:], positions, echo["token_logprobs"][1:-1], echo["top_logprobs"][1:-1], strict=True
    ):
        own = entries[str(token_id)]
        assert own["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert (own["rank"] <= 3) == (len(entries) == 3)
        ranked = sorted(entries.values(), key=lambda entry: entry["rank"])
        assert [entry["rank"] for entry in ranked[:3]] == [1, 2, 3]
        assert [entry["logprob"] for entry in ranked[:3]] == pytest.approx(sorted(top.values())[:-4:-1], abs=1e-4)
    chat = http.post(
        CHAT, json={"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 0, "max_tokens": 1}
    )
    assert all(len(entries) == 1 for entries in chat.json()["prompt_logprobs"][1:])


def test_only_allowed_tokens_are_written(http: httpx.Client) -> None:
    allowed = [ord(char) for char in "abc "]
    for fields in ({}, {"temperature": 1, "seed": 3}):
        choice = complete(http, allowed_token_ids=allowed, return_token_ids=True, **fields)
        assert set(choice["token_ids"]) <= set(allowed) and len(choice["token_ids"]) == 40


def test_bad_words_are_not_written(http: httpx.Client) -> None:
    free = complete(http, return_token_ids=True)["token_ids"]
    text = http.post("/detokenize", json={"tokens": free[3:6]}).json()["prompt"]
    for word in (text, http.post("/detokenize", json={"tokens": free[:1]}).json()["prompt"]):
        if not word.strip() or "\ufffd" in word:
            continue
        ids = http.post("/tokenize", json={"prompt": word, "add_special_tokens": False}).json()["tokens"]
        kept = complete(http, bad_words=[word], return_token_ids=True)["token_ids"]
        assert not any(kept[at : at + len(ids)] == ids for at in range(len(kept)))


def test_a_structural_tag_holds(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
    schema["additionalProperties"] = False
    tag = {"type": "tag", "begin": "<t>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</t>"}
    wanted = {"type": "structural_tag", "format": tag}
    for fields in ({"response_format": wanted}, {"structured_outputs": {"structural_tag": json.dumps(wanted)}}):
        choice = complete(http, max_tokens=200, **fields)
        (inside,) = re.fullmatch("<t>(.*)</t>", choice["text"]).groups()  # type: ignore[union-attr]
        assert isinstance(json.loads(inside)["n"], bool) and choice["finish_reason"] == "stop"
    wrong = http.post(COMPLETIONS, json={"prompt": "x", "response_format": {**wanted, "format": {"type": "nope"}}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "response_format")


def test_a_flush_empties_the_cache(http: httpx.Client) -> None:
    long = "A text of more than a page, which the cache keeps. " * 3

    def cached() -> int:
        tokens: int = complete(http, prompt=long, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    cached()
    assert cached() > 0
    assert http.post("/reset_prefix_cache").json()["replicas"] == 1
    assert cached() == 0


def test_a_probe(http: httpx.Client) -> None:
    assert http.get("/health_generate").status_code == 200
