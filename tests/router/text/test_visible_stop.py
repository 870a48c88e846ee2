"""Stop strings and promises: what ends an answer that thinks and calls tools, and what its end is called."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from router.chat.chat_template import ChatTemplate
from router.chat.deltas import CallArguments, CallBegin, CallEnd, Delta, TextDelta, ThinkingDelta, joined
from router.generation import Answer
from router.prepare.prepared_request import PreparedRequest, prepare_chat, prepare_completion
from router.text.output_text import Piece
from router.text.tokenizer import Tokenizer
from router.wire.requests import ChatRequest, CompletionRequest
from tests.router.outputs import outputs

TEMPLATE = "{{ messages[0].content }}{% if tools %}{{ tools }}{% endif %}<tool_call></tool_call>"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
GLM_CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
THOUGHT = "<think>\nThe user asks: Question: 2+2?\n\nEasy.\n</think>\n\n"
JSON_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def thinker(byte_level_tokenizer_maker: Callable[[], tokenizers.Tokenizer]) -> Tokenizer:
    backend = byte_level_tokenizer_maker()
    backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return Tokenizer(backend, ChatTemplate(TEMPLATE, {}))


def prepared(tokenizer: Tokenizer, **fields: Any) -> PreparedRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]} | fields
    request = msgspec.convert(body, ChatRequest)
    return prepare_chat(request, tokenizer.output_format("auto", "auto"), tokenizer, 4096, 8, 0.0)


def answered(
    tokenizer: Tokenizer, job: PreparedRequest, text: str, cuts: Sequence[int] | None = None, ends: str = "stop"
) -> tuple[list[Delta], Piece, Answer, list[int]]:
    """The deltas of an answer, its last piece, and the offsets of its tokens."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    answer = Answer(tokenizer, job, job.sequences[0], False)
    deltas: list[Delta] = []
    offsets: list[int] = []
    piece = Piece()
    for output in outputs(token_ids, range(len(token_ids)) if cuts is None else cuts, finish_reason=ends):
        piece = answer.push(output)
        deltas += piece.parts
        offsets += [token.offset for token in piece.tokens]
        if piece.finish_reason is not None:
            break
    deltas = [CallBegin(each.index, each.name) if isinstance(each, CallBegin) else each for each in deltas]
    return joined(deltas), piece, answer, offsets


def content(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


def thought(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ThinkingDelta))


def arguments(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, CallArguments))


@pytest.mark.parametrize(
    ("stop", "text", "visible", "reason", "found"),
    [
        (["Question:"], THOUGHT + "Four.", "Four.", "stop", None),
        (["\n\n"], THOUGHT + "Four.\n\nSure.", "Four.", "stop", "\n\n"),
        (["asks", "Sure"], THOUGHT + "Four. Sure.", "Four. ", "stop", "Sure"),
        (["<think>", "</think>"], THOUGHT + "Four.", "Four.", "stop", None),
        (["}", "\n", '"'], THOUGHT + CALL, "", "tool_calls", None),
        (["<tool_call>", "weather", "Oslo"], CALL, "", "tool_calls", None),
        (["look"], "I look." + CALL, "I ", "stop", "look"),
        (["AB"], "A" + CALL + "B", "AB", "tool_calls", None),  # two texts, and none has it
        (["B"], "A" + CALL + "xB!", "Ax", "tool_calls", "B"),
        (["Four.Five"], THOUGHT + "Four.", "Four.", "stop", None),
    ],
)
def test_stop_strings_count_in_the_visible_text(
    thinker: Tokenizer, stop: list[str], text: str, visible: str, reason: str, found: str | None
) -> None:
    deltas, last, _, _ = answered(thinker, prepared(thinker, stop=stop), text)
    assert (content(deltas), last.finish_reason, last.stop) == (visible, reason, found)
    if THOUGHT in text:
        assert thought(deltas) == "The user asks: Question: 2+2?\n\nEasy."
    if reason == "tool_calls":
        assert json.loads(arguments(deltas)) == {"city": "Oslo"}
        assert sum(isinstance(delta, CallEnd) for delta in deltas) == 1


def test_the_stop_string_is_part_of_the_text_where_that_is_asked(thinker: Tokenizer) -> None:
    job = prepared(thinker, stop=["r.", "asks"], include_stop_str_in_output=True)
    deltas, last, _, _ = answered(thinker, job, THOUGHT + "Four. So.")
    assert (content(deltas), last.stop) == ("Four.", "r.")


@pytest.fixture(scope="module")
def glm(thinker: Tokenizer) -> Tokenizer:
    """A model with a format in which white space before calls is markup."""
    return Tokenizer(thinker._backend, ChatTemplate("{{ messages }}{{ tools }}<tool_call><arg_key>", {}))


@pytest.mark.parametrize(
    ("stop", "text", "visible", "reason", "found"),
    [
        ([" ", "\n"], "Look.\n" + GLM_CALL, "Look.", "tool_calls", None),
        (["\n"], "Look.\nSo." + GLM_CALL, "Look.", "stop", "\n"),
        ([".\n"], "Look.\n", "Look", "stop", ".\n"),
        ([], "Look. " + GLM_CALL[:14], "Look.", "length", None),  # breaks off
        ([], "Look. ", "Look. ", "stop", None),
    ],
)
def test_stop_strings_where_white_space_may_be_markup(
    glm: Tokenizer, stop: list[str], text: str, visible: str, reason: str, found: str | None
) -> None:
    deltas, last, _, _ = answered(glm, prepared(glm, stop=stop), text)
    assert (content(deltas), last.finish_reason, last.stop) == (visible, reason, found)


PARTS = (
    THOUGHT,
    CALL,
    GLM_CALL,
    "<think>",
    "</think>",
    "<tool_call>",
    "a",
    "b",
    "ab",
    "\n",
    "<",
    '{"name": "weather"',
    "🦊",
    " ",
)


@settings(deadline=None, max_examples=200)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=8),
    stop=st.lists(st.sampled_from(("ab", "a", "\n", "🦊", "b\n", "<", "ba")), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 80), max_size=6),
    ends=st.sampled_from(("stop", "length")),
    include=st.booleans(),
    trims=st.booleans(),
)
def test_nothing_depends_on_how_many_tokens_come_at_once(
    thinker: Tokenizer,
    glm: Tokenizer,
    parts: list[str],
    stop: list[str],
    cuts: list[int],
    ends: str,
    include: bool,
    trims: bool,
) -> None:
    model = glm if trims else thinker
    job = prepared(model, stop=stop, logprobs=True, include_stop_str_in_output=include)
    one, last, answer, offsets = answered(model, job, "".join(parts), ends=ends)
    other, last_of_other, other_answer, other_offsets = answered(model, job, "".join(parts), cuts, ends)
    assert (one, offsets) == (other, other_offsets)
    assert (last.finish_reason, last.stop) == (last_of_other.finish_reason, last_of_other.stop)
    assert answer.text.num_tokens == other_answer.text.num_tokens
    for delta in one:
        if isinstance(delta, TextDelta) and not include:
            assert not any(each in delta.text for each in stop)


def test_log_probabilities_end_before_the_stop_string(thinker: Tokenizer) -> None:
    text = THOUGHT + "Four a b c d"
    deltas, _, _, offsets = answered(thinker, prepared(thinker, stop=["b c"], logprobs=True), text)
    assert content(deltas) == "Four a "
    assert offsets == sorted(offsets) and max(offsets) < text.index("b c") <= max(offsets) + 2


# ---------------------------------------------------------------- promises


@pytest.mark.parametrize("ends", ["stop", "length"])
@pytest.mark.parametrize(
    ("text", "visible"),
    [
        (CALL[:40], ""),
        (CALL[:20], ""),  # in the name
        ("<tool_call>", ""),
        ("<tool_call>\n{", ""),
        ("I look. <tool_call>\n", "I look. "),
        (CALL + "\n<tool_call>\n{", ""),
        (CALL + '\n<tool_call>\n{"name": "weather", "arguments": {"city', ""),
    ],
)
def test_a_call_that_breaks_off(thinker: Tokenizer, text: str, visible: str, ends: str) -> None:
    """It is neither text nor a reason to say that the answer is whole."""
    deltas, last, _, _ = answered(thinker, prepared(thinker), text, ends=ends)
    assert (content(deltas), last.finish_reason) == (visible, "length")


def test_what_is_no_call_is_text(thinker: Tokenizer) -> None:
    deltas, last, _, _ = answered(thinker, prepared(thinker), "Write <tool_call> and <b>.")
    assert (content(deltas), last.finish_reason) == ("Write <tool_call> and <b>.", "stop")


@pytest.mark.parametrize("text", ["", "<tool", "Well.", THOUGHT])
def test_a_call_that_had_to_be_made(thinker: Tokenizer, text: str) -> None:
    job = prepared(thinker, tool_choice="required")
    for ends in ("stop", "length"):
        assert answered(thinker, job, text or " ", ends=ends)[1].finish_reason == "length"
    deltas, last, _, _ = answered(thinker, job, CALL)
    assert last.finish_reason == "tool_calls" and isinstance(deltas[0], CallBegin)


def test_markup_of_a_call_that_had_to_be_made_is_no_text(thinker: Tokenizer) -> None:
    plain = Tokenizer(thinker._backend, ChatTemplate("{{ messages }}{{ tools }}<seed:tool_call>", {}))
    job = prepared(plain, tool_choice="required")
    for size in range(1, 18):
        assert content(answered(plain, job, "<seed:tool_call>\n<"[:size], ends="length")[0]) == ""


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["}"], '{"a": 1}', "length"),
        (["\n"], '{\n"a": 1}', "length"),
        (["\n"], '{"a": 1}\n', "stop"),
        ([], '{"a": 1}', "stop"),
        ([], '{"a": ', "length"),  # by a stop token, or the model's own end
        (["Question:"], THOUGHT + '{"a": 1}', "stop"),
    ],
)
def test_json_that_breaks_off(thinker: Tokenizer, stop: list[str], text: str, reason: str) -> None:
    for fields in ({"response_format": JSON_FORM}, {"response_format": {"type": "json_object"}}):
        job = prepared(thinker, stop=stop, tools=None, **fields)
        assert answered(thinker, job, text)[1].finish_reason == reason
    job = prepared(thinker, stop=stop, response_format=JSON_FORM)  # or calls
    assert answered(thinker, job, text)[1].finish_reason == reason
    assert answered(thinker, job, CALL)[1].finish_reason == "tool_calls"


def test_json_of_completions(thinker: Tokenizer) -> None:
    request = msgspec.convert(
        {"model": "m", "prompt": "a", "guided_json": {"type": "object"}, "stop": "}", "max_tokens": 50},
        CompletionRequest,
    )
    job = prepare_completion(request, thinker, 4096, 8, 0.0)
    deltas, last, _, _ = answered(thinker, job, '{"a": 1}')
    assert (content(deltas), last.finish_reason, last.stop) == ('{"a": 1', "length", "}")
    regex = msgspec.convert({"model": "m", "prompt": "a", "regex": "a+", "stop": "aa"}, CompletionRequest)
    assert answered(thinker, prepare_completion(regex, thinker, 4096, 8, 0.0), "aaa")[1].finish_reason == "stop"
