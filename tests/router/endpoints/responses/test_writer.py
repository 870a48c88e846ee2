"""Deltas as events, one after the other, and as one object."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from router.chat.deltas import CallArguments, CallBegin, CallEnd, Delta, TextDelta, ThinkingDelta
from router.endpoints.responses.reader import Asked, response_object
from router.endpoints.responses.writer import ResponsesFormat
from router.http.body import parse
from router.prepare.prepared_request import PreparedRequest
from router.text.output_text import Piece
from router.text.tokenizer import Tokenizer
from router.wire.errors import ApiError
from router.wire.requests import GenerationRequest
from router.wire.responses import CompletionTokensDetails, PromptTokensDetails, Usage
from router.wire.responses_types import ResponsesRequest

USAGE = Usage(5, 7, 12, PromptTokensDetails(2), CompletionTokensDetails(3))
DELTAS: list[Delta] = [
    ThinkingDelta("h"),
    ThinkingDelta("m"),
    TextDelta("yes"),
    CallBegin(0, "f", "c1"),
    CallArguments(0, '{"a"'),
    CallArguments(0, ":1}"),
    CallEnd(0),
    CallBegin(1, "g", "c2"),
    CallArguments(1, "{}"),
    CallEnd(1),
]


@pytest.fixture
def form(tokenizer: Tokenizer) -> ResponsesFormat:
    request = parse(ResponsesRequest, b'{"model": "m", "input": "x"}')
    job = PreparedRequest("resp_1", [], 5, (), False, True, 0, False, False, False, "input", None)
    return ResponsesFormat(job, response_object(Asked(request), job, GenerationRequest(model="m"), "m"), tokenizer)


def events(data: bytes) -> list[dict[str, Any]]:
    told = [block.split("\n") for block in data.decode().split("\n\n")[:-1]]
    read = [json.loads(data.removeprefix("data: ")) for _, data in told]
    assert [name for name, _ in told] == [f"event: {event['type']}" for event in read]
    return read


def streamed(form: ResponsesFormat, deltas: Sequence[Delta], reason: Any = "stop") -> list[dict[str, Any]]:
    data = form.opening(0, USAGE)
    for delta in deltas:
        data += form.chunk(0, Piece(deltas=[delta]), USAGE)
    data += form.chunk(0, Piece(deltas=[], finish_reason=reason), USAGE)
    return events(data + form.closing(USAGE))


def test_the_events_of_all_kinds_of_items(form: ResponsesFormat) -> None:
    told = streamed(form, DELTAS, "tool_calls")
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"].removeprefix("response.") for event in told] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event["output_index"] for event in told if "output_index" in event] == [0] * 7 + [1] * 6 + [2] * 5 + [3] * 4
    assert told[0]["response"]["status"] == "in_progress" and told[0]["response"]["output"] == []
    assert told[0]["response"]["usage"] is None
    assert (told[2]["item"]["status"], told[2]["item"]["content"]) == ("in_progress", [])
    assert told[3]["part"] == {"type": "reasoning_text", "text": ""}
    assert told[6]["text"] == "hm" and told[12]["text"] == "yes" and told[18]["arguments"] == '{"a":1}'
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert told[-1]["response"]["output"] == done
    assert done[2] == done[2] | {"call_id": "c1", "name": "f", "arguments": '{"a":1}', "status": "completed"}
    assert told[-1]["response"]["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 12,
    }


def test_the_whole_is_the_same(form: ResponsesFormat) -> None:
    whole = json.loads(form.whole([Piece(deltas=list(DELTAS), finish_reason="tool_calls")], USAGE))
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["status"] == "completed" and whole["completed_at"] >= whole["created_at"]


@pytest.mark.parametrize(("deltas", "kind"), [(DELTAS[:1], "reasoning"), (DELTAS[:5], "function_call")])
def test_an_answer_that_is_cut_off(form: ResponsesFormat, deltas: list[Delta], kind: str) -> None:
    told = streamed(form, deltas, "length")
    response = told[-1]["response"]
    assert told[-1]["type"] == "response.incomplete" and response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["type"] == kind and response["output"][-1]["status"] == "incomplete"


@pytest.mark.parametrize("deltas", [[], DELTAS[:2]])
def test_an_answer_without_text_has_an_empty_message(form: ResponsesFormat, deltas: list[Delta]) -> None:
    message = streamed(form, deltas)[-1]["response"]["output"][-1]
    assert message["type"] == "message" and message["content"][0]["text"] == ""


def test_a_stream_that_fails(form: ResponsesFormat) -> None:
    data = form.chunk(0, Piece(deltas=DELTAS[:3]), USAGE) + form.failed(ApiError(503, "gone", code="no_replica"))
    *_, error, failed = events(data)
    assert error == error | {"type": "error", "message": "gone", "code": "no_replica", "param": None}
    assert failed["sequence_number"] == error["sequence_number"] + 1
    assert failed["response"]["status"] == "failed" and failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["output"][-1]["status"] == "incomplete"


def test_a_response_survives_the_disk(form: ResponsesFormat) -> None:
    streamed(form, DELTAS)
    data = msgspec.json.encode(form.response)
    assert msgspec.json.decode(data, type=type(form.response)) == form.response
