"""What becomes of a valid body: sequences, seeds, limits, grammars."""

import json
import re
from time import perf_counter
from typing import Any

import msgspec
import pytest

from router.prepare.prepared_request import PreparedRequest, prepare_chat, prepare_completion
from router.prepare.sampling import sequence_seed
from router.text.tokenizer import Tokenizer
from router.wire.errors import ApiError
from router.wire.requests import ChatRequest, CompletionRequest
from worker.messages import Grammar, SamplingParams

CONTEXT = 64
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


def completion(tokenizer: Tokenizer, context: int = CONTEXT, **fields: Any) -> PreparedRequest:
    request = msgspec.convert({"model": "m", "prompt": "Hello"} | fields, CompletionRequest)
    return prepare_completion(request, tokenizer, context, 8, perf_counter())


def chat(tokenizer: Tokenizer, clamps: bool = False, **fields: Any) -> PreparedRequest:
    base = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    request = msgspec.convert(base | fields, ChatRequest)
    format = tokenizer.output_format("auto", "auto")
    return prepare_chat(request, format, tokenizer, CONTEXT, 8, perf_counter(), cut_at_context=clamps)


def test_defaults(tokenizer: Tokenizer) -> None:
    (sequence,) = completion(tokenizer).sequences
    seed = sequence.sampling.seed
    assert seed is not None and 0 <= seed < 1 << 63
    assert sequence.sampling == SamplingParams(max_tokens=16, seed=seed)
    assert sequence.prompt.token_ids == tokenizer.encode("Hello")
    assert completion(tokenizer).sequences[0].sampling.seed != seed


def test_every_parameter_arrives(tokenizer: Tokenizer) -> None:
    job = completion(
        tokenizer,
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.4,
        stop_token_ids=[5, 6],
        ignore_eos=True,
        seed=11,
        logprobs=2,
        echo=True,
        logit_bias={"3": 1.5},
        stop=["a", "b"],
        skip_special_tokens=False,
        priority=4,
    )
    assert job.sequences[0].sampling == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.4,
        stop_token_ids=(5, 6),
        ignore_eos=True,
        seed=11,
        logprobs=2,
        prompt_logprobs=2,
        logit_bias={3: 1.5},
    )
    assert (job.stop, job.skip_special_tokens, job.priority, job.echo) == (("a", "b"), False, 4, True)
    assert job.wants_logprobs


def test_a_nucleus_of_nothing_is_the_likeliest_token(tokenizer: Tokenizer) -> None:
    (sequence,) = completion(tokenizer, top_p=0, top_k=40, seed=1).sequences
    assert sequence.sampling == SamplingParams(max_tokens=16, top_k=1, seed=1)


def test_zero_is_not_nothing(tokenizer: Tokenizer) -> None:
    assert completion(tokenizer, temperature=0).sequences[0].sampling.temperature == 0
    assert completion(tokenizer, top_k=-1).sequences[0].sampling.top_k == 0
    assert completion(tokenizer, temperature=1e-30).sequences[0].sampling.temperature == 0  # would overflow
    assert chat(tokenizer, logprobs=True, top_logprobs=0).sequences[0].sampling.logprobs == 0
    assert chat(tokenizer, logprobs=True).sequences[0].sampling.logprobs == 0
    assert chat(tokenizer, logprobs=False).sequences[0].sampling.logprobs is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hello", ["Hello"]),
        (["Hello", "a b"], ["Hello", "a b"]),
        ([70, 71], [[70, 71]]),
        ([[70], [71, 72]], [[70], [71, 72]]),
    ],
)
def test_prompts_of_all_forms(tokenizer: Tokenizer, prompt: Any, expected: list[Any]) -> None:
    job = completion(tokenizer, prompt=prompt)
    ids = [entry if isinstance(entry, list) else tokenizer.encode(entry) for entry in expected]
    assert [sequence.prompt.token_ids for sequence in job.sequences] == ids
    assert job.prompt_tokens == sum(map(len, ids))


def test_choices_are_numbered_prompt_by_prompt(tokenizer: Tokenizer) -> None:
    job = completion(tokenizer, prompt=["Hello", "a"], n=2, seed=5)
    assert [sequence.index for sequence in job.sequences] == [0, 1, 2, 3]
    assert [sequence.first for sequence in job.sequences] == [True, False, True, False]
    texts = [sequence.prompt.text for sequence in job.sequences]
    assert texts == ["Hello", "Hello", "a", "a"]
    seeds = [sequence.sampling.seed for sequence in job.sequences]
    assert seeds[0] == seeds[2] == 5 and seeds[1] == seeds[3] != 5
    assert seeds == [
        sequence.sampling.seed for sequence in completion(tokenizer, n=2, prompt=["c", "d"], seed=5).sequences
    ]
    assert job.prompt_tokens == len(tokenizer.encode("Hello")) + 1  # each prompt once


def test_seeds_are_for_ever() -> None:
    """Written down, because a client may keep them."""
    assert [sequence_seed(7, choice) for choice in range(3)] == [7, 6064367806889537054, 6335935501756667560]
    assert sequence_seed(-1, 0) == (1 << 63) - 1
    assert len({sequence_seed(seed, choice) for seed in range(50) for choice in range(50)}) == 2500


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"b": 1, "a": "é"}}}},
            Grammar("json_schema", json.dumps({"b": 1, "a": "é"})),
        ),
        ({"regex": "a|b"}, Grammar("regex", "a|b")),
        ({"choice": ["é", 'b"']}, Grammar("choice", json.dumps(["é", 'b"']))),
        ({"ebnf": 'root ::= "x"'}, Grammar("ebnf", 'root ::= "x"')),
        ({"regex": "a", "response_format": {"type": "text"}}, Grammar("regex", "a")),
        ({"guided_json": {"b": 1}}, Grammar("json_schema", '{"b": 1}')),
        ({"guided_json": '{"b":1}'}, Grammar("json_schema", '{"b":1}')),
        ({"guided_regex": "a"}, Grammar("regex", "a")),
        ({"guided_choice": ["a"], "guided_json_object": False}, Grammar("choice", '["a"]')),
        ({"guided_grammar": "x"}, Grammar("ebnf", "x")),
        ({"guided_json_object": True}, Grammar("json_object")),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, Grammar("json_schema", "{}")),
        ({"structured_outputs": {"json": '{"b":1}'}}, Grammar("json_schema", '{"b":1}')),
        ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a", "b"]')),
        ({"structured_outputs": {"grammar": "x"}}, Grammar("ebnf", "x")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"response_format": TAG}, Grammar("structural_tag", json.dumps(TAG))),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
            Grammar("structural_tag", json.dumps(TAG)),
        ),
    ],
)
def test_grammars(tokenizer: Tokenizer, fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert completion(tokenizer, **fields).sequences[0].sampling.grammar == grammar
    assert chat(tokenizer, **fields).sequences[0].sampling.grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [70, "a"]}, "prompt"),
        ({"prompt": [70, [70]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [100_000]}, "prompt"),
        ({"prompt": [[1], [100_000]]}, "prompt"),
        ({"prompt": [70] * CONTEXT}, "prompt"),
        ({"prompt": "xyz " * 10_000}, "prompt"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": ["a"] * 5, "n": 2}, "n"),
        ({"n": 9}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"max_tokens": CONTEXT}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stop_token_ids": [1, 100_000]}, "stop_token_ids"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"regex": "a", "choice": ["a"]}, "choice"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"ebnf": "a", "choice": ["a"]}, "ebnf"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"structural_tag": {"structures": [1]}}},
            "structured_outputs.structural_tag.structures[0]",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": TAG | {"structures": [{"begin": "a", "end": "b"}]}}, "response_format"),
        ({"response_format": TAG, "regex": "a"}, "regex"),
    ],
)
def test_refused_completions(tokenizer: Tokenizer, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        completion(tokenizer, **fields)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        ({"max_tokens": CONTEXT}, "max_tokens"),
        ({"max_completion_tokens": CONTEXT}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "a " * CONTEXT}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a " * 100_000}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
def test_refused_chats(tokenizer: Tokenizer, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        chat(tokenizer, **fields)
    assert (error.value.status, error.value.param) == (400, param)


def test_the_template_gets_its_arguments(tokenizer: Tokenizer) -> None:
    plain, opened = (chat(tokenizer, chat_template_kwargs=given) for given in (None, {"opening": "Hello"}))
    assert opened.sequences[0].prompt.token_ids == plain.sequences[0].prompt.token_ids + tokenizer.encode("Hello")


def test_words_of_a_full_context(tokenizer: Tokenizer) -> None:
    """Agents know them, and shorten the conversation."""
    for text in ("a " * CONTEXT, "a " * 100_000):  # the second is not even tokenised
        with pytest.raises(ApiError) as caught:
            chat(tokenizer, messages=[{"role": "user", "content": text}])
        known = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", caught.value.message)
        assert known is not None and int(known[1]) > int(known[2]) == CONTEXT
        assert re.search(rf"maximum context length is {CONTEXT} tokens", caught.value.message)
        assert caught.value.code == "context_length_exceeded"


def test_limits_follow_from_the_context(tokenizer: Tokenizer) -> None:
    room = CONTEXT - len(chat(tokenizer).sequences[0].prompt.token_ids)
    assert chat(tokenizer).sequences[0].sampling.max_tokens == room
    assert chat(tokenizer, max_tokens=room).sequences[0].sampling.max_tokens == room
    assert chat(tokenizer, max_tokens=5, max_completion_tokens=5).sequences[0].sampling.max_tokens == 5
    assert chat(tokenizer, max_completion_tokens=6).sequences[0].sampling.max_tokens == 6
    assert completion(tokenizer, prompt=[70] * (CONTEXT - 3)).sequences[0].sampling.max_tokens == 3  # of 16


def test_no_tokens_at_all(tokenizer: Tokenizer) -> None:
    job = completion(tokenizer, max_tokens=0, echo=True, logprobs=1)
    assert job.discard and job.sequences[0].sampling.max_tokens == 1


def test_a_whole_answer_with_too_many_logprobs(tokenizer: Tokenizer) -> None:
    fields = {"prompt": ["a"] * 8, "max_tokens": 60_000, "logprobs": 20}
    with pytest.raises(ApiError) as error:
        completion(tokenizer, 100_000, **fields)
    assert error.value.param == "logprobs"
    assert completion(tokenizer, 100_000, **fields, stream=True).wants_logprobs
