"""Fields of vLLM and SGLang on chat completions and completions, from HTTP to the replica and back."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import tokenizers

from router.chat.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from worker.messages import Generate

Make = Callable[..., Any]
HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "Hello", "max_tokens": 60}}
# Thinking in the history, and begun by the prompt where the client asks for it.
THINKER = (
    "{# tools #}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}"
    "{{ reasoning_effort | default('') }}{% endif %}{% endif %}"
)


@pytest.fixture
def thinker(byte_level_tokenizer_maker: Callable[[], tokenizers.Tokenizer]) -> Tokenizer:
    backend = byte_level_tokenizer_maker()
    backend.add_tokens(["<think>", "</think>"])
    return Tokenizer(backend, ChatTemplate(THINKER, {}))


@pytest.fixture
def says(make_stack: Make, make_replica: Make, thinker: Tokenizer) -> Make:
    """A server whose model thinks, and writes a text."""

    def make(text: str) -> Any:
        token_ids = [*thinker.encode(text), thinker.token_id("<|im_end|>")]
        return make_stack(make_replica(script=lambda request: token_ids), tokens=thinker)

    return make


def ask(stack: Any, path: str, **fields: Any) -> Any:
    answer = httpx.post(stack.url + path, json=ASK[path] | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(stack: Any, path: str, **fields: Any) -> str:
    answer = httpx.post(stack.url + path, json=ASK[path] | fields)
    assert answer.status_code == 400, answer.text
    param: str = answer.json()["error"]["param"]
    return param


def chunks(stack: Any, path: str, **fields: Any) -> list[Any]:
    text = httpx.post(stack.url + path, json=ASK[path] | fields | {"stream": True}).text
    return [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")]


def asked(stack: Any) -> Generate:
    """The last request that the replica got."""
    request: Generate = stack.fakes["r0"].requests()[-1]
    return request


def prompt(stack: Any) -> str:
    return str(stack.tokenizer.decode(asked(stack).prompt_ids, False))


# ---------------------------------------------------------------- what ended a choice


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_ended_a_choice(stack: Any, tokenizer: Tokenizer, path: str) -> None:
    fox, end = tokenizer.encode(" brown")[0], tokenizer.token_id("<|im_end|>")
    for fields, reason, matched in (
        ({"stop": ["naïve", "fox"]}, "fox", "fox"),
        ({"stop_token_ids": [fox]}, fox, fox),
        ({}, None, end),
        ({"max_tokens": 2}, None, None),
    ):
        (choice,) = ask(stack, path, **fields)["choices"]
        assert (choice["stop_reason"], choice["matched_stop"]) == (reason, matched)
        *rest, last = [chunk["choices"][0] for chunk in chunks(stack, path, **fields)]
        assert (last["stop_reason"], last["matched_stop"]) == (reason, matched)
        assert not any("stop_reason" in chunk or "matched_stop" in chunk for chunk in rest)


# ---------------------------------------------------------------- the prompt


@pytest.mark.parametrize("flag", ["return_token_ids", "return_prompt_token_ids"])
def test_the_prompts_tokens(stack: Any, tokenizer: Tokenizer, flag: str) -> None:
    whole = ask(stack, CHAT, **{flag: True}, n=2)
    assert whole["prompt_token_ids"] == asked(stack).prompt_ids
    assert all(("token_ids" in choice) == (flag == "return_token_ids") for choice in whole["choices"])
    first, *rest = chunks(stack, CHAT, **{flag: True}, n=2)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in rest)
    prompts = [tokenizer.encode("Hello"), tokenizer.encode("a b c")]
    body = {"prompt": ["Hello", "a b c"], "n": 2, flag: True}
    expected = [prompts[0], prompts[0], prompts[1], prompts[1]]
    assert [choice["prompt_token_ids"] for choice in ask(stack, COMPLETIONS, **body)["choices"]] == expected
    told: dict[int, list[list[int]]] = {}
    for chunk in chunks(stack, COMPLETIONS, **body):
        for choice in chunk["choices"]:
            if "prompt_token_ids" in choice:
                told.setdefault(choice["index"], []).append(choice["prompt_token_ids"])
    assert told == {index: [token_ids] for index, token_ids in enumerate(expected)}
    assert "prompt_token_ids" not in ask(stack, CHAT)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_log_probabilities_of_the_prompt(stack: Any, path: str) -> None:
    answer = ask(stack, path, prompt_logprobs=2, n=2)
    first, second = [request.sampling.prompt_logprobs for request in stack.fakes["r0"].requests()]
    assert {first, second} == {2, None}
    found = [part["prompt_logprobs"] for part in (answer["choices"] if path == COMPLETIONS else [answer])]
    for positions in found:
        nothing, *rest = positions
        assert nothing is None
        for token_id, entries in zip(asked(stack).prompt_ids[1:], rest, strict=True):
            own = entries[str(token_id)]
            assert own.keys() == {"logprob", "rank", "decoded_token"}
            assert own["decoded_token"] == stack.tokenizer.token_text(token_id)
            assert len(entries) == 2
    assert refused(stack, path, prompt_logprobs=2, stream=True) == "prompt_logprobs"
    assert chunks(stack, path, prompt_logprobs=0, logprobs=path == CHAT or 0) != []  # the default of others
    assert asked(stack).sampling.prompt_logprobs is None
    assert refused(stack, path, prompt_logprobs=21) == "prompt_logprobs"


def test_an_echo_with_fewer_of_the_likeliest_than_the_prompt(stack: Any) -> None:
    (choice,) = ask(stack, COMPLETIONS, echo=True, logprobs=1, prompt_logprobs=3, max_tokens=1)["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1] * (len(choice["prompt_logprobs"]))
    assert [len(entries) for entries in choice["prompt_logprobs"][1:]] == [3] * (len(choice["prompt_logprobs"]) - 1)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(3)),
        ({"truncate_prompt_tokens": -1}, slice(-502, None)),
        ({"truncate_prompt_tokens": 500}, slice(-500, None)),
    ],
)
def test_a_prompt_that_is_cut(stack: Any, tokenizer: Tokenizer, fields: dict[str, Any], kept: slice) -> None:
    text = "abcdefgh " * 600
    all_ids = tokenizer.encode(text)
    for sent in (text, all_ids):
        ask(stack, COMPLETIONS, prompt=sent, max_tokens=10, **fields)
        assert asked(stack).prompt_ids == all_ids[kept]
    ask(stack, CHAT, messages=[{"role": "user", "content": text}], max_tokens=10, **fields)
    whole = tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
    assert asked(stack).prompt_ids == whole[kept]
    ask(stack, COMPLETIONS, prompt="Hello", **fields)
    assert asked(stack).prompt_ids == tokenizer.encode("Hello")[kept]
    assert refused(stack, COMPLETIONS, prompt=text, max_tokens=10) == "prompt"
    assert refused(stack, CHAT, truncate_prompt_tokens=0) == "truncate_prompt_tokens"


# ---------------------------------------------------------------- what may be sampled


def test_tokens_that_are_allowed_and_words_that_are_not(stack: Any, tokenizer: Tokenizer) -> None:
    for path in ASK:
        ask(stack, path, allowed_token_ids=[70, 71, 70], bad_words=["fox", " over", "the capital"])
        sampling = asked(stack).sampling
        assert sampling.allowed_token_ids == (70, 71)
        words = [tokenizer.decode(word) for word in sampling.bad_words]
        assert words == ["fox", " fox", " over", "the capital", " the capital"]
        assert refused(stack, path, allowed_token_ids=[100_000]) == "allowed_token_ids"


# ---------------------------------------------------------------- an answer that is begun


def test_the_last_message_goes_on(says: Make) -> None:
    stack = says("is 4.")
    begun = [*HELLO, {"role": "assistant", "content": "The answer "}]
    for fields in ({}, {"add_generation_prompt": False}):
        answer = ask(stack, CHAT, messages=begun, continue_final_message=True, **fields)
        assert answer["choices"][0]["message"]["content"] == "is 4."
        assert prompt(stack).endswith("<|im_start|>assistant\nThe answer ")
        tokens = httpx.post(
            f"{stack.url}/tokenize", json={"messages": begun, "continue_final_message": True, **fields}
        ).json()["tokens"]
        assert tokens == asked(stack).prompt_ids
    ask(stack, CHAT, messages=begun, continue_final_message=False)
    assert prompt(stack).endswith("The answer <|im_end|>\n<|im_start|>assistant\n")
    ask(stack, CHAT, add_generation_prompt=False)
    assert prompt(stack) == "<|im_start|>user\nHello<|im_end|>\n"
    for wrong in (
        {"messages": HELLO},
        {"messages": begun, "add_generation_prompt": True},
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call("{}")], "content": None}]},
    ):
        assert refused(stack, CHAT, **wrong, continue_final_message=True) == "continue_final_message"
        refused_tokens = httpx.post(f"{stack.url}/tokenize", json=wrong | {"continue_final_message": True})
        assert refused_tokens.json()["error"]["param"] == "continue_final_message"


def test_thinking_that_goes_on(says: Make) -> None:
    stack = says("I know.</think>\n\nFour.")
    begun = {"role": "assistant", "content": "", "reasoning_content": "Two and two?"}
    message = ask(stack, CHAT, messages=[*HELLO, begun], continue_final_message=True)["choices"][0]["message"]
    assert prompt(stack).endswith("<|im_start|>assistant\n<think>\nTwo and two?")
    assert (message["reasoning_content"].strip(), message["content"]) == ("I know.", "Four.")
    stack = says("our.")
    message = ask(stack, CHAT, messages=[*HELLO, begun | {"content": "F"}], continue_final_message=True)
    assert prompt(stack).endswith("<think>\nTwo and two?\n</think>\n\nF")
    assert message["choices"][0]["message"]["content"] == "our."


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(("sent", "seen"), [({"q": "é"}, '{"q": "é"}'), (None, "{}"), ('{"q": 1}', '{"q": 1}')])
def test_arguments_of_a_past_call_as_an_object(says: Make, sent: Any, seen: str) -> None:
    stack = says("x")
    past = [{"role": "assistant", "content": "", "tool_calls": [call(sent)]}]
    ask(stack, CHAT, messages=[*HELLO, *past, {"role": "tool", "tool_call_id": "c", "content": "1"}])
    assert f'{{"name": "f", "arguments": {seen}}}' in prompt(stack)


# ---------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("fields", "enabled", "effort"),
    [
        ({"enable_thinking": True}, True, ""),
        ({"enable_thinking": False}, False, ""),
        ({"thinking": {"type": "enabled"}}, True, ""),
        ({"thinking": {"type": "disabled"}}, False, ""),
        ({"thinking": True}, True, ""),
        ({"think": False}, False, ""),
        ({"think": "high"}, True, "high"),
        ({"reasoning": {"effort": "low"}}, True, "low"),
        ({"reasoning": {"enabled": False}}, False, ""),
        ({"reasoning": {"effort": "none"}}, False, ""),
        ({"reasoning_effort": "low", "enable_thinking": True, "thinking": {"type": "adaptive"}}, True, "low"),
        ({"thinking": {"type": "auto"}}, None, ""),
        ({"reasoning": {}, "thinking": None, "think": None, "enable_thinking": None}, None, ""),
    ],
)
def test_switches_of_thinking(says: Make, fields: dict[str, Any], enabled: bool | None, effort: str) -> None:
    stack = says("x")
    ask(stack, CHAT, **fields)
    opened = {True: f"<think>\n{effort}", False: "<think>\n\n</think>\n\n", None: ""}[enabled]
    assert prompt(stack).endswith(f"<|im_start|>assistant\n{opened}")


def test_switches_that_contradict_each_other(says: Make) -> None:
    stack = says("x")
    assert refused(stack, CHAT, reasoning_effort="none", enable_thinking=True) == "enable_thinking"
    assert refused(stack, CHAT, reasoning_effort="low", think="high") == "think"
    two = {"thinking_token_budget": 3, "reasoning": {"max_tokens": 4}}
    assert refused(stack, CHAT, **two) == "reasoning.max_tokens"


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 3},
        {"thinking_budget": 3},
        {"reasoning": {"max_tokens": 3}},
        {"thinking": {"type": "enabled", "budget_tokens": 3}},
    ],
)
def test_budgets_of_thinking(says: Make, fields: dict[str, Any]) -> None:
    stack = says("<think>a b c d e f g h</think>\n\nx")
    ask(stack, CHAT, **fields)
    assert stack.fakes["r0"].requests()[0].sampling.max_tokens == 3
    ask(stack, CHAT, thinking_token_budget=-1)
    assert asked(stack).sampling.max_tokens > 100


def joined(stack: Any, **fields: Any) -> Iterator[tuple[str | None, ...]]:
    """Content and thinking, of a whole answer and of a stream."""
    message = ask(stack, CHAT, **fields)["choices"][0]["message"]
    yield message["content"], message.get("reasoning_content"), message.get("reasoning")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(stack, CHAT, **fields)]
    thinking = ["".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "reasoning")]
    yield "".join(delta.get("content") or "" for delta in deltas), *(text or None for text in thinking)


@pytest.mark.parametrize(
    ("fields", "content", "thinking"),
    [
        ({}, "Four.", "Two?"),
        ({"include_reasoning": True, "separate_reasoning": True}, "Four.", "Two?"),
        ({"include_reasoning": False}, "Four.", None),
        ({"reasoning": {"exclude": True}}, "Four.", None),
        ({"separate_reasoning": False}, "<think>\nTwo?\n</think>\n\nFour.", None),
    ],
)
def test_where_thinking_stands(says: Make, fields: dict[str, Any], content: str, thinking: str | None) -> None:
    stack = says("<think>Two?</think>\n\nFour.")
    assert list(joined(stack, **fields)) == [(content, thinking, thinking)] * 2


def test_thinking_that_is_not_there_is_null(says: Make, stack: Any) -> None:
    thinks = says("Four.")
    message = ask(thinks, CHAT)["choices"][0]["message"]
    assert message["reasoning"] is None and message["reasoning_content"] is None
    for chunk in chunks(thinks, CHAT):
        delta = chunk["choices"][0]["delta"]
        assert delta["reasoning"] is None and delta["reasoning_content"] is None
    assert "reasoning" not in ask(stack, CHAT)["choices"][0]["message"]  # a model that cannot think


# ---------------------------------------------------------------- hints, and /tokenize


def test_hints_change_nothing(stack: Any) -> None:
    hints = {"store": True, "verbosity": "low", "prompt_cache_retention": "24h", "metadata": {"a": 1}}
    hints |= {"stream_options": {"include_usage": True}, "top_logprobs": 0, "session_id": "s", "service_tier": "scale"}
    assert ask(stack, CHAT, **hints)["choices"] == ask(stack, CHAT)["choices"]


def test_tokens_as_the_vocabulary_spells_them(stack: Any, tokenizer: Tokenizer) -> None:
    bare = httpx.post(f"{stack.url}/tokenize", json={"prompt": "Hello there"}).json()
    assert bare["token_strs"] is None
    told = httpx.post(f"{stack.url}/tokenize", json={"prompt": "Hello there", "return_token_strs": True}).json()
    assert told["token_strs"] == tokenizer._backend.encode("Hello there").tokens
    assert told["tokens"] == bare["tokens"]
