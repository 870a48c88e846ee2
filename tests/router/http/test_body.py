"""What is refused of a body, and under which name."""

import json
from typing import Any

import msgspec
import pytest

from router.chat.conversation import Message
from router.http.body import parse
from router.prepare.chat_reader import read_messages
from router.wire.errors import ApiError
from router.wire.messages_types import CountTokensRequest, MessagesRequest
from router.wire.neutral_fields import HINTS
from router.wire.neutral_fields import NEUTRAL as NEUTRAL_FIELDS
from router.wire.requests import (
    Body,
    ChatRequest,
    ChoicesRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from router.wire.responses_types import ResponsesRequest

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def refused(model: type, body: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(model, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert error.value.status == 400
    assert json.loads(error.value.body())["error"]["type"] == "invalid_request_error"
    return error.value


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0.5, "seed": -(1 << 63), "priority": -3},
        {"stop": "x", "stop_token_ids": [1], "min_tokens": 0, "ignore_eos": True, "skip_special_tokens": False},
        {"stop": ["x", "y"], "logit_bias": {"5": -100, "6": 1.5}, "user": "u", "stream": True},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.1},
        {"response_format": SCHEMA},
        {"response_format": {"type": "text"}},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"ebnf": 'root ::= "a"'},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"structured_outputs": {"regex": "a+", "disable_any_whitespace": True, "structural_tag": None}},
        {"guided_json": {"type": "object"}, "guided_decoding_backend": "xgrammar"},
        {"include_stop_str_in_output": True, "length_penalty": 1},
        {"n": None, "stop": None, "stream_options": None, "response_format": None, "logit_bias": None},
    ],
)
def test_accepted_in_both(fields: dict[str, Any]) -> None:
    for model, base in ((ChatRequest, CHAT), (CompletionRequest, COMPLETION)):
        request = parse(model, json.dumps(base | fields).encode())
        for name, value in fields.items():
            if name not in ("stream_options", "response_format", "structured_outputs"):
                assert getattr(request, name) == value


# What OpenAI's clients send at values that change nothing.
NEUTRAL = {
    "audio": None,
    "function_call": "none",
    "functions": [],
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "moderation": None,
    "parallel_tool_calls": True,
    "prediction": None,
    "prompt_cache_key": "k",
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
    "reasoning_effort": None,
    "safety_identifier": "u",
    "service_tier": "auto",
    "store": False,
    "tool_choice": "none",
    "tools": [],
    "verbosity": None,
    "web_search_options": None,
}


def test_neutral_values_are_accepted() -> None:
    parse(ChatRequest, json.dumps(CHAT | NEUTRAL).encode())
    parse(CompletionRequest, json.dumps(COMPLETION | {"suffix": None, "best_of": 1}).encode())
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": None, "audio": None}
    answer |= {"function_call": None, "tool_calls": None}
    parse(ChatRequest, json.dumps(CHAT | {"messages": [*CHAT["messages"], answer]}).encode())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio": {"voice": "a"}}, "audio"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"metadata": "a"}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
        ({"prediction": {"type": "content", "content": ""}}, "prediction.content"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type"),
        ({"prompt_cache_key": 1}, "prompt_cache_key"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"service_tier": "fast"}, "service_tier"),
        ({"length_penalty": 1.5}, "length_penalty"),
        ({"store": 1}, "store"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"think": "hard"}, "think"),
        ({"thinking": {"type": "some"}}, "thinking.type"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"nonsense": 1}, "nonsense"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_whitespace_pattern": "[ ]?"}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": 3}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        ({"structured_outputs": {"json": {}, "backend": "x"}}, "structured_outputs.backend"),
        ({"best_of": 2}, "best_of"),  # of completions only
        ({"echo": True}, "echo"),
        ({"n": "1"}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": 1 << 80}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop": ["a" * 1025]}, "stop[0]"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": "1"}, "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"priority": 1 << 31}, "priority"),
        ({"user": 3}, "user"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"regex": ""}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", 1]}, "choice[1]"),
        ({"ebnf": 1}, "ebnf"),
        ({"model": 1}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3, "y": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ],
)
def test_refused_by_name_in_chat(fields: dict[str, Any], param: str) -> None:
    assert refused(ChatRequest, CHAT | fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": "x"}, "echo"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
    ],
)
def test_refused_by_name_in_completions(fields: dict[str, Any], param: str) -> None:
    assert refused(CompletionRequest, COMPLETION | fields).param == param


@pytest.mark.parametrize(
    ("fields", "param", "given", "known"),
    [
        ({"tool_choice": "any"}, "tool_choice", "any", ["auto", "none", "required"]),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type", "x", ["function", "allowed_tools"]),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "custom", ["function"]),
        ({"modalities": ["text", "audio"]}, "modalities[1]", "audio", ["text"]),
        ({"messages": [{"role": "x", "content": "hi"}]}, "messages[0].role", "x", ["assistant", "user"]),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0].type", "x", ["text"]),
    ],
)
def test_an_unknown_literal_is_answered_with_those_that_are_known(
    fields: dict[str, Any], param: str, given: str, known: list[str]
) -> None:
    error = refused(ChatRequest, CHAT | fields)
    assert (error.param, error.code) == (param, "invalid_value")
    assert all(repr(literal) in error.message for literal in (given, *known))


def test_a_missing_parameter_is_named() -> None:
    error = refused(ChatRequest, {"model": "m", "best_of": 1})
    assert (error.param, error.code) == ("messages", "missing_required_parameter")


KINDS: list[tuple[type[Body], dict[str, Any]]] = [
    (ChatRequest, CHAT),
    (CompletionRequest, COMPLETION),
    (ChoicesRequest, {"prompt": "hi", "choices": ["a"]}),
    (EmbeddingsRequest, {"input": "hi"}),
    (RerankRequest, {"query": "hi", "documents": ["a"]}),
    (ScoreRequest, {"text_1": "hi", "text_2": "a"}),
    (ResponsesRequest, {"input": "hi"}),
    (MessagesRequest, CHAT | {"max_tokens": 3}),
    (CountTokensRequest, CHAT),
    (TokenizeRequest, {"prompt": "hi"}),
    (DetokenizeRequest, {"tokens": [1]}),
]


@pytest.mark.parametrize(("kind", "body"), KINDS)
def test_fields_of_other_servers_that_ask_for_nothing_are_passed_over(kind: type[Body], body: dict[str, Any]) -> None:
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    others = {name: values for name, values in NEUTRAL_FIELDS.items() if name not in known}
    bare = parse(kind, json.dumps(body).encode())
    most = max(map(len, others.values()))
    for number in range(most):
        sent = {name: values[number] for name, values in others.items() if number < len(values)}
        assert parse(kind, json.dumps(body | sent).encode()) == bare
    sent = dict.fromkeys([*others, "whatever_comes_next"]) | dict.fromkeys(HINTS - known, "x")
    assert parse(kind, json.dumps(sent | body).encode()) == bare
    for name in others:
        assert refused(kind, body | {name: {"asks": "for something"}}).param == name
    assert refused(kind, body | dict.fromkeys(others) | {"nonsense": 0}).param == "nonsense"


@pytest.mark.parametrize(
    ("name", "value"), [("use_beam_search", 0), ("best_of", True), ("echo", 0), ("cache_prompt", 1), ("best_of", 2)]
)
def test_a_number_is_no_flag(name: str, value: Any) -> None:
    assert refused(ChatRequest, CHAT | {name: value}).param == name


@pytest.mark.parametrize("body", [b'{"a":', b'{"a": 1', b'{"model": 3, "prompt": ', b'{"prompt": "x", "n": "1"'])
def test_json_that_is_cut_off_is_told_before_what_is_wrong_in_it(body: bytes) -> None:
    assert refused(CompletionRequest, body).code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"nonsense", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"model": "m", "prompt": "\\ud800"}', "invalid_json"),  # half a surrogate pair is no text
        (b'{"model": "m", "prompt": "\xe9"}', "invalid_json"),
        (b'{"model": "m", "prompt": "x", "temperature": NaN}', "invalid_json"),
        (b'{"model": "m", "prompt": "x"} more', "invalid_json"),
        (b"[]", None),
        (b"3", None),
        (b"null", None),
        (b'{"model":"m","prompt":"x","logit_bias":' + b'{"a":' * 100_000, "invalid_json"),
        (b'{"model":"m","prompt":' + b"[" * 100_000, "invalid_json"),
    ],
)
def test_what_is_no_json_object(body: bytes, code: str | None) -> None:
    error = refused(CompletionRequest, body)
    if code is not None:
        assert error.code in (code, "invalid_value")


def test_deeply_nested_schemas_are_refused_not_fatal() -> None:
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    body = b'{"model":"m","prompt":"x","response_format":{"type":"json_schema","json_schema":{"name":"x","schema":'
    assert refused(CompletionRequest, body + deep + b"}}}").code == "invalid_json"


def test_text_parts_and_roles_become_what_templates_know() -> None:
    body = CHAT | {
        "messages": [
            {"role": "developer", "content": "be brief", "name": "dev"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
    }
    request = parse(ChatRequest, json.dumps(body).encode())
    assert read_messages(request.messages) == (Message("system", "be brief", name="dev"), Message("user", "a\nb"))


def test_the_small_endpoints() -> None:
    assert parse(TokenizeRequest, b'{"prompt": "a"}').prompt == "a"
    assert parse(DetokenizeRequest, b'{"tokens": [1]}').tokens == [1]
    assert refused(DetokenizeRequest, {"tokens": ["a"]}).param == "tokens[0]"
    assert refused(TokenizeRequest, {"prompt": 3}).param == "prompt"
