"""Chat completions as OpenAI's own client sees them."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from router.text.tokenizer import Tokenizer

REPLY = "The quick brown fox — naïve café 🦊👩‍👩‍👧 jumps over 12 lazy dogs."
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def tokens(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(REPLY)


def test_chat(stack: Any, tokenizer: Tokenizer, tokens: list[int]) -> None:
    answer = stack.client.chat.completions.create(model="tiny", messages=HELLO, extra_headers={"X-Request-Id": "mine"})
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REPLY, "stop")
    assert choice.logprobs is None and choice.index == 0
    prompt = tokenizer.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert stack.fakes["r0"].requests()[0].prompt_ids == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokens) + 1  # and the end of the turn
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer._request_id == "mine" and answer.service_tier is None


def test_chat_stream(make_stack: Callable[..., Any], make_replica: Callable[..., Any], tokens: list[int]) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake)
    got: list[Any] = []
    fake.allow(1)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        for chunk in stream:
            got.append(chunk)
            fake.allow(1)
    first, *middle, last = got
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert first.choices[0].finish_reason is None
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == REPLY
    assert len(middle) > 5 and all(chunk.choices[0].delta.role is None for chunk in middle)
    assert "\ufffd" not in "".join(chunk.choices[0].delta.content for chunk in middle)
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == (None, "stop")
    assert len({chunk.id for chunk in got}) == 1 and all(chunk.usage is None for chunk in got)
    assert all(chunk.object == "chat.completion.chunk" for chunk in got)


def test_stream_usage(stack: Any, tokens: list[int]) -> None:
    stream = stack.client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert last.choices == [] and last.usage.completion_tokens == len(tokens) + 1
    assert last.usage.prompt_tokens_details.cached_tokens == 3
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("asked", [True, False])
def test_every_chunk_may_count_what_there_is_so_far(stack: Any, tokens: list[int], asked: bool) -> None:
    """With include_usage only, as in vLLM."""
    body = {"model": "tiny", "messages": HELLO, "stream": True}
    options = {"include_usage": asked, "continuous_usage_stats": True}
    *chunks, last = stack.client.chat.completions.create(**body, stream_options=options)
    if not asked:
        assert all(chunk.usage is None for chunk in [*chunks, last])
        return
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] > 0 and counts[-1] == len(tokens) + 1
    for usage in (chunk.usage for chunk in [*chunks, last]):
        assert usage.prompt_tokens == last.usage.prompt_tokens > 0
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("stream", [True, False])
def test_whatever_tier_is_asked_for_the_answer_names_the_one_there_is(stack: Any, stream: bool) -> None:
    answer = stack.client.chat.completions.create(
        model="tiny", messages=HELLO, service_tier="flex", store=False, metadata={"a": "b"}, stream=stream
    )
    assert all(part.service_tier == "default" for part in (answer if stream else [answer]))


def test_the_bytes_of_a_stream(stack: Any) -> None:
    body = {"model": "tiny", "messages": HELLO, "stream": True, "max_tokens": 1}
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body) as response:
        text = response.read().decode()
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache" and "content-length" not in response.headers
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith('data: {"id":"chatcmpl-') for event in events[:-2])
    assert '"usage"' not in text  # only when it is asked for


def test_choices_and_seeds(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    """Each choice has a seed of its own, and the same request the same seeds."""
    fake = make_replica(script=lambda request: tokenizer.encode(f"seed {request.sampling.seed}"))
    stack = make_stack(fake)

    def texts(seed: int | None, n: int, stream: bool) -> list[str]:
        answer = stack.client.chat.completions.create(model="tiny", messages=HELLO, seed=seed, n=n, stream=stream)
        if not stream:
            assert [choice.index for choice in answer.choices] == list(range(n))
            return [choice.message.content for choice in answer.choices]
        text = [""] * n
        for chunk in answer:
            for choice in chunk.choices:
                text[choice.index] += choice.delta.content or ""
        return text

    three = texts(7, 3, False)
    assert len(set(three)) == 3 and three[0] == "seed 7"
    assert texts(7, 3, True) == three and texts(7, 1, False) == three[:1]
    assert texts(None, 1, False) != texts(None, 1, False)


def test_chat_logprobs(stack: Any, tokens: list[int], tokenizer: Tokenizer) -> None:
    answer = stack.client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content[:3]] == ["The", " quick", " brown"]
    assert b"".join(bytes(entry.bytes) for entry in content[:-1]).decode() == REPLY
    assert content[-1].token == "<|im_end|>"
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].top_logprobs[0].token == "The" and content[0].top_logprobs[1].logprob == -102
    assert len(content) == answer.usage.completion_tokens

    stream = stack.client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [entry for chunk in stream if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == content


@pytest.mark.parametrize("stream", [True, False])
def test_chat_token_ids(stack: Any, tokens: list[int], tokenizer: Tokenizer, stream: bool) -> None:
    answer = stack.client.chat.completions.create(
        model="tiny", messages=HELLO, stream=stream, extra_body={"return_token_ids": True}
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    token_ids = [token_id for choice in choices for token_id in getattr(choice, "token_ids", [])]
    assert token_ids == [*tokens, tokenizer.token_id("<|im_end|>")]


def test_impossible_tokens_have_a_finite_logprob(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any]
) -> None:
    fake = make_replica()
    fake.logprob = float("-inf")
    stack = make_stack(fake)
    answer = stack.client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, max_tokens=1)
    assert answer.choices[0].logprobs.content[0].logprob == -9999.0
