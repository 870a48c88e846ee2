"""Plain completions as OpenAI's own client sees them."""

from collections.abc import Callable
from typing import Any

import pytest

from router.config import RouterConfig
from router.text.tokenizer import Tokenizer


def test_completion(stack: Any, tokenizer: Tokenizer) -> None:
    answer = stack.client.completions.create(model="tiny", prompt="Hello", max_tokens=2)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("The quick", "length", None)
    assert (answer.object, answer.usage.completion_tokens) == ("text_completion", 2)
    assert stack.fakes["r0"].requests()[0].prompt_ids == tokenizer.encode("Hello")


@pytest.mark.parametrize("stream", [True, False])
def test_many_prompts_and_choices(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any], tokenizer: Tokenizer, stream: bool
) -> None:
    fake = make_replica(script=lambda request: tokenizer.encode(f"<{request.prompt_ids[0]} {request.sampling.seed}>"))
    stack = make_stack(fake)
    answer = stack.client.completions.create(model="tiny", prompt=[[70], [71]], n=2, seed=1, stream=stream)
    text = [""] * 4
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            text[choice.index] += choice.text
    assert [entry.split(" ")[0] for entry in text] == ["<70", "<70", "<71", "<71"]
    assert text[0] == "<70 1>" and text[2] == "<71 1>" and text[1][3:] == text[3][3:] != " 1>"


@pytest.mark.parametrize("stream", [True, False])
def test_echo_with_logprobs(stack: Any, tokenizer: Tokenizer, stream: bool) -> None:
    answer = stack.client.completions.create(
        model="tiny", prompt="Hello there", max_tokens=2, echo=True, logprobs=1, stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "Hello thereThe quick"
    names = [name for choice in choices for name in choice.logprobs.tokens]
    assert "".join(names) == "Hello thereThe quick"
    logprobs = [value for choice in choices for value in choice.logprobs.token_logprobs]
    assert logprobs == [None, *[-0.5] * (len(names) - 1)]
    offsets = [value for choice in choices for value in choice.logprobs.text_offset]
    assert offsets == [sum(map(len, names[:i])) for i in range(len(names))]
    tops = [value for choice in choices for value in choice.logprobs.top_logprobs]
    assert tops[0] is None and tops[-1] == {" quick": -0.5}


@pytest.mark.parametrize("stream", [True, False])
def test_token_ids_are_those_of_the_output(stack: Any, tokenizer: Tokenizer, stream: bool) -> None:
    settings = {"model": "tiny", "prompt": "Hello", "max_tokens": 99, "stop": ["fox"], "echo": True, "stream": stream}
    answer = stack.client.completions.create(**settings, extra_body={"return_token_ids": True})
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "HelloThe quick brown "
    token_ids = [token_id for choice in choices for token_id in choice.token_ids]
    assert tokenizer.decode(token_ids) == "The quick brown fox"
    without = stack.client.completions.create(**settings)
    assert not any(hasattr(part.choices[0], "token_ids") for part in (without if stream else [without]))


def test_tokens_after_a_stop_string_are_not_returned(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    stack = make_stack(make_replica(per_step=100))
    answer = stack.client.completions.create(
        model="tiny", prompt="Hello", max_tokens=99, stop="quick", extra_body={"return_token_ids": True}
    )
    (choice,) = answer.choices
    assert tokenizer.decode(choice.token_ids) == "The quick"
    assert len(choice.token_ids) == answer.usage.completion_tokens


@pytest.mark.parametrize("stream", [True, False])
def test_scoring_a_prompt_makes_no_tokens(stack: Any, tokenizer: Tokenizer, stream: bool) -> None:
    answer = stack.client.completions.create(
        model="tiny", prompt="Hello there", max_tokens=0, echo=True, logprobs=0, stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "Hello there"
    assert "".join(name for choice in choices for name in choice.logprobs.tokens) == "Hello there"
    assert choices[-1].finish_reason == "length"
    # The token that came is there, however few are asked for.
    tops = [value for choice in choices for value in choice.logprobs.top_logprobs]
    names = [name for choice in choices for name in choice.logprobs.tokens]
    assert tops == [None, *({name: -0.5} for name in names[1:])]
    if not stream:
        assert answer.usage.completion_tokens == 0


def test_echo_of_token_ids(stack: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello there")
    answer = stack.client.completions.create(model="tiny", prompt=ids, max_tokens=1, echo=True)
    assert answer.choices[0].text == "Hello thereThe"


@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings_across_tokens(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any], tokenizer: Tokenizer, stream: bool
) -> None:
    """The text ends before the stop string, and the replica is told at once: the script has no end."""
    endless = tokenizer.encode("one two three stop here ") * 40
    fake = make_replica(script=lambda request: endless).hold()
    fake.allow(len(tokenizer.encode("one two three stop here")))
    stack = make_stack(fake)
    answer = stack.client.completions.create(
        model="tiny", prompt="x", max_tokens=400, stop=["ee sto", "zzz"], stream=stream, logprobs=0
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "one two thr"
    assert choices[-1].finish_reason == "stop"
    assert "".join(name for choice in choices for name in choice.logprobs.tokens).startswith("one two thr")
    fake.wait_for(lambda: fake.aborted())
    assert fake.running == []


@pytest.mark.parametrize("stream", [True, False])
def test_what_ends_the_text_may_be_part_of_it(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any], tokenizer: Tokenizer, stream: bool
) -> None:
    """As vLLM has it: a stop string, and a stop token where its text is not skipped."""
    endless = tokenizer.encode("one two three stop here ") * 40
    stack = make_stack(make_replica(script=lambda request: endless))

    def text(**fields: Any) -> str:
        extra = {"include_stop_str_in_output": True, **fields.pop("extra", {})}
        answer = stack.client.completions.create(
            model="tiny", prompt="x", max_tokens=400, stream=stream, extra_body=extra, **fields
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert choices[-1].finish_reason == "stop"
        return "".join(choice.text for choice in choices)

    assert text(stop=["ee sto", "zzz"]) == "one two three sto"
    token = tokenizer.token_id("w")
    assert token in endless
    assert text(extra={"stop_token_ids": [token]}) == "one tw"
    assert text(extra={"stop_token_ids": [token], "include_stop_str_in_output": False}) == "one t"


def test_special_tokens_on_demand(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    ids = [tokenizer.token_id("a"), tokenizer.token_id("<|im_start|>"), tokenizer.token_id("b")]
    stack = make_stack(make_replica(script=lambda request: ids))
    for skip, text in ((None, "ab"), (False, "a<|im_start|>b")):
        extra = {} if skip is None else {"skip_special_tokens": skip}
        answer = stack.client.completions.create(model="tiny", prompt="x", max_tokens=3, extra_body=extra)
        assert answer.choices[0].text == text


def test_extra_fields_reach_the_replica(make_stack: Callable[..., Any], make_replica: Callable[..., Any]) -> None:
    stack = make_stack(make_replica(), config=RouterConfig(max_priority=5))
    stack.client.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=2,
        user="u",
        extra_body={"top_k": 3, "min_p": 0.1, "priority": 5, "regex": "a+", "ignore_eos": True, "min_tokens": 1},
    )
    (request,) = stack.fakes["r0"].requests()
    assert request.priority == 5 and request.booking == 1
    assert request.sampling.grammar.text == "a+" and request.sampling.top_k == 3
