"""Answers whose schema is enforced in part: sampled again from what is wrong, and never valid silently."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from router.text.tokenizer import Tokenizer
from worker.messages import Generate, SchemaCheck

NAMED = ["contains at #/tags"]
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": False}}
HEAD = '{"tags": '
ANSWERS = [f"{HEAD}[1]}}", f"{HEAD}[2]}}", f"{HEAD}[3]}}"]


@pytest.fixture
def make(make_stack: Any, make_replica: Any, tokenizer: Tokenizer) -> Callable[..., Any]:
    """A replica that writes the answers in turn, of which the one number `valid` is valid."""

    def make(valid: int) -> Any:
        kept = len(tokenizer.encode(HEAD))

        def turn() -> int:
            return len(replica.requests()) - 1

        def script(request: Generate) -> list[int]:
            text = ANSWERS[min(turn(), len(ANSWERS) - 1)]
            return [*tokenizer.encode(HEAD), *tokenizer.encode(text[len(HEAD) :]), tokenizer.token_id("<|im_end|>")]

        def check(request: Generate) -> SchemaCheck:
            if turn() == valid:
                return SchemaCheck(NAMED, True, narrowed=["format at #/a"])
            return SchemaCheck(NAMED, False, "at #/tags: no", kept)

        replica = make_replica(script=script)
        replica.check = check
        return make_stack(replica)

    return make


def post(stack: Any, path: str = "chat/completions", **fields: Any) -> Any:
    asked = {"messages": [{"role": "user", "content": "a"}]} if path.startswith("chat") else {"prompt": "a"}
    body = {"model": "tiny", "response_format": FORM, "max_tokens": 99, "seed": 7, **asked, **fields}
    response = httpx.post(f"{stack.url}/v1/{path}", json=body)
    return response if fields.get("stream") else response.raise_for_status().json()


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("temperature", [0, 0.5])
def test_a_violation_is_sampled_again_from_its_place(
    make: Callable[..., Any], tokenizer: Tokenizer, path: str, temperature: float
) -> None:
    stack = make(valid=2)
    answer = post(stack, path, temperature=temperature, logprobs=True if path.startswith("chat") else 1)
    (choice,) = answer["choices"]
    text = choice["message"]["content"] if path.startswith("chat") else choice["text"]
    assert text == ANSWERS[2]
    assert choice["schema_check"] == {
        "not_enforced": NAMED,
        "valid": True,
        "violation": None,
        "sampled_again": 2,
        "narrowed": ["format at #/a"],
    }
    scored = choice["logprobs"]["content"] if path.startswith("chat") else choice["logprobs"]["tokens"]
    tokens = len(tokenizer.encode(HEAD)) + len(tokenizer.encode("[3]}"))
    assert tokens <= len(scored) <= answer["usage"]["completion_tokens"] == tokens + 1
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    first, *others = stack.fakes["r0"].requests()
    assert not first.sampling.grammar.strict and first.sampling.temperature == temperature
    assert [other.output_ids for other in others] == [tokenizer.encode(HEAD)] * 2
    assert {other.sampling.temperature for other in others} == {temperature or 1}
    assert len({request.sampling.seed for request in (first, *others)}) == 3


def test_an_answer_that_stays_wrong_says_so(make: Callable[..., Any]) -> None:
    stack = make(valid=99)
    (choice,) = post(stack)["choices"]
    assert choice["message"]["content"] == ANSWERS[2] and choice["finish_reason"] == "stop"
    report = {"not_enforced": NAMED, "valid": False, "violation": "at #/tags: no", "sampled_again": 3}
    assert choice["schema_check"] == report
    assert len(stack.fakes["r0"].requests()) == 4


def test_what_was_sent_stays(make: Callable[..., Any]) -> None:
    """A stream has its text at once, so its end says what is wrong with it."""
    stack = make(valid=99)
    lines = [line.removeprefix("data: ") for line in post(stack, stream=True).text.split("\n\n") if line]
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == ANSWERS[0]
    assert [choice.get("schema_check") for choice in choices[:-1]] == [None] * (len(choices) - 1)
    report = {"not_enforced": NAMED, "valid": False, "violation": "at #/tags: no", "sampled_again": 0}
    assert choices[-1]["schema_check"] == report
    assert len(stack.fakes["r0"].requests()) == 1


def test_whole_choices_are_sampled_again(make: Callable[..., Any]) -> None:
    stack = make(valid=1)
    response = post(stack, "completions", stream=True, stream_options={"whole_choices": True})
    (choice,) = json.loads(response.text.split("\n\n")[0].removeprefix("data: "))["choices"]
    assert choice["text"] == ANSWERS[1] and choice["schema_check"]["sampled_again"] == 1


@pytest.mark.parametrize("strict", [True, None])
def test_without_leave_all_is_enforced(make: Callable[..., Any], strict: bool | None) -> None:
    stack = make(valid=0)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": strict}}
    post(stack, response_format=form)
    assert stack.fakes["r0"].requests()[0].sampling.grammar.strict
