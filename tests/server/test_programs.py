"""Programs at a whole server: what branches say is what plain requests with their whole token ids say, and their KV is
there when they go on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .conftest import MODEL, WAIT_S, Whole, until

PAGE = 16
PROMPT = "A program of many calls begins with a text that all of them share. "


@pytest.fixture(autouse=True)
def empty_cache(whole: Whole) -> Iterator[None]:
    whole.settled()
    whole.replica.at_rest(lambda engine: engine.reset_cache())
    yield
    httpx.delete(f"{whole.url}/v1/programs/p").raise_for_status()
    until(lambda: leased(whole) == 0, lambda: "a lease is left")
    whole.settled()


def leased(whole: Whole) -> int:
    """Tokens with a lease."""
    tokens: int = whole.replica.at_rest(lambda engine: engine.load().kv_tokens_leased)
    return tokens


def ask(whole: Whole, prompt: Any, **fields: Any) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "temperature": 0} | fields
    answer = httpx.post(f"{whole.url}/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def call(branch: str, **fields: Any) -> dict[str, Any]:
    return {"id": "p", "branch": branch, "lease_s": 60} | fields


def held(whole: Whole, branch: str) -> list[int]:
    return whole.service.programs.look("/p", branch, None, continues=True).branch.token_ids.tolist()


def test_forks_say_what_plain_requests_say_and_find_their_parent_cached(whole: Whole) -> None:
    first, _ = ask(whole, PROMPT, program=call("root"), stop="e")
    assert "e" not in first
    texts, parent = {}, held(whole, "root")
    tail = whole.service.programs.look("/p", "root", None, continues=True).branch.tail
    for branch in ("a", "b", "c"):
        program = call(branch, parent="root", continues=True)
        texts[branch], cached = ask(whole, f" Fork {branch}: ", program=program)
        assert cached >= (len(parent) - 1) // PAGE * PAGE
    for branch, text in texts.items():
        prompt = parent + whole.service.tokenizer.encode(f"{tail} Fork {branch}: ")
        assert ask(whole, prompt)[0] == text
        assert held(whole, branch)[: len(prompt)] == prompt
    assert leased(whole) >= len(parent) // PAGE * PAGE


def test_forks_of_one_request_share_a_context_that_is_computed_once(whole: Whole) -> None:
    essay = PROMPT * 2
    forks = [{"branch": str(number), "prompt": f"Fork {number}: "} for number in range(4)]
    body = {"model": MODEL, "prompt": essay, "max_tokens": 20, "temperature": 0}
    before = whole.engine.load()
    program = {"id": "p", "lease_s": 60, "forks": forks}
    answer = httpx.post(f"{whole.url}/v1/completions", json=body | {"program": program}, timeout=WAIT_S).json()
    whole.settled()
    after = whole.engine.load()
    computed = after.prompt_tokens - after.cached_tokens - (before.prompt_tokens - before.cached_tokens)
    tokenizer = whole.service.tokenizer
    assert computed < len(tokenizer.encode(essay)) + 4 * (PAGE + len(tokenizer.encode("Fork 0: ")))
    for number, choice in enumerate(answer["choices"]):
        prompt = tokenizer.encode(f"{essay}Fork {number}: ")
        assert ask(whole, prompt)[0] == choice["text"]
        assert held(whole, str(number))[: len(prompt)] == prompt


@pytest.mark.slow
def test_a_leased_branch_is_there_after_others_have_filled_the_cache(whole: Whole) -> None:
    ask(whole, PROMPT * 2, program=call("leased"))
    size = len(held(whole, "leased"))
    ask(whole, PROMPT[::-1] * 2, program=call("not leased", lease_s=0))
    for number in range(16):
        ask(whole, [10 + number] * 250, max_tokens=1)
    _, cached = ask(whole, " And", program=call("leased", continues=True))
    assert cached >= (size - 1) // PAGE * PAGE
    assert ask(whole, " And", program=call("not leased", continues=True, lease_s=0))[1] == 0


def test_the_text_that_follows_is_cached(whole: Whole) -> None:
    follows = "\nThe next question is constant, and long enough for some pages of tokens: " * 4
    follows = follows[:256]  # the shortest that is computed ahead
    ask(whole, "A program", program=call("a", then=follows), max_tokens=5)
    size = len(held(whole, "a")) + len(whole.service.tokenizer.encode(follows))
    until(lambda: not whole.service._prefetches, lambda: "it is still computed")
    whole.settled()
    text, cached = ask(whole, follows + "x", program=call("a", continues=True))
    assert cached == size // PAGE * PAGE
    prompt = held(whole, "a")[: size + 1]
    assert ask(whole, prompt)[0] == text


CALLS: list[dict[str, Any]] = [
    {"prompt": PROMPT, "max_tokens": 12, "stop": "e", "temperature": 0},
    {"prompt": " Then ", "max_tokens": 9, "temperature": 0.8, "seed": 7},
    {"prompt": "", "max_tokens": 6, "structured_outputs": {"regex": "[0-9]{3}"}, "temperature": 0},
]


def send_template(whole: Whole, calls: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    program = call("templated", template=calls[1:], remaining=len(calls) - 1)
    options = {"whole_choices": True, "include_usage": True}
    body = {"model": MODEL, "program": program, "stream": True, "stream_options": options} | calls[0] | fields
    return httpx.post(f"{whole.url}/v1/completions", json=body, timeout=WAIT_S)


def template(whole: Whole, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of a request with a template."""
    answer = send_template(whole, calls)
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def test_calls_of_a_template_say_what_they_say_one_by_one(whole: Whole) -> None:
    texts = [ask(whole, **one, program=call("alone", continues=i > 0))[0] for i, one in enumerate(CALLS)]
    *events, end = template(whole, CALLS)
    assert [event["choices"][0]["text"] for event in events] == texts
    assert [event["choices"][0]["index"] for event in events] == [0, 1, 2]
    assert len({event["id"] for event in (*events, end)}) == 1
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert end["usage"][name] == sum(event["usage"][name] for event in events)
    assert held(whole, "templated") == held(whole, "alone")


def test_a_call_of_a_template_that_fails_ends_the_stream_after_those_before_it(whole: Whole) -> None:
    wrong = {"prompt": "", "max_tokens": 5, "min_tokens": 6}
    first, second, error = template(whole, [*CALLS[:2], wrong, CALLS[2]])
    assert first["choices"][0]["index"] == 0 and second["choices"][0]["index"] == 1
    assert "min_tokens" in error["error"]["message"]
    assert ask(whole, "", program=call("templated", continues=True), max_tokens=1)  # the branch goes on from there


def test_a_template_has_one_time_for_all_of_its_calls(whole: Whole) -> None:
    endless = [{"prompt": "And ", "max_tokens": 60, "ignore_eos": True}] * 64
    answer = send_template(whole, endless, timeout=0.2)  # an error's status, if no call has ended by then
    assert "deadline_exceeded" in answer.text and "0.2 s" in answer.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": False, "stream_options": None}, "whole_choices"),
        ({"program": {"id": "p", "forks": [{"branch": "a", "prompt": ""}], "template": CALLS[1:]}}, "Forks"),
        ({"program": {"id": "p", "branch": "a", "template": []}}, "template"),
        ({"program": {"id": "p", "branch": "a", "template": [{"prompt": "", "n": 2}]}}, "template[0].n"),
    ],
)
def test_templates_that_are_refused(whole: Whole, fields: dict[str, Any], message: str) -> None:
    body = {
        "model": MODEL,
        "prompt": "A",
        "stream": True,
        "stream_options": {"whole_choices": True},
        "program": call("a", template=CALLS[1:]),
    } | fields
    answer = httpx.post(f"{whole.url}/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 400 and message in answer.text


def test_choices_share_the_prompt(whole: Whole) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "choices": ["one", "two", "three", "four"]}
    before = whole.engine.load()
    assert httpx.post(f"{whole.url}/v1/choices", json=body, timeout=WAIT_S).status_code == 200
    whole.settled()
    after = whole.engine.load()
    computed = after.prompt_tokens - after.cached_tokens - (before.prompt_tokens - before.cached_tokens)
    assert computed < 2 * len(PROMPT)
