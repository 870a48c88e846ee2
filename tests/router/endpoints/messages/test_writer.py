"""Answers as Messages: every block, every event, every reason to stop."""

import json
from dataclasses import replace
from typing import Any

import pytest

from router.chat.deltas import CallArguments, CallBegin, CallEnd, Delta, TextDelta, ThinkingDelta
from router.endpoints.messages.writer import MessagesFormat
from router.prepare.prepared_request import Choice, PreparedRequest
from router.prepare.prompts import Prompt
from router.text.output_text import Piece
from router.wire.responses import CompletionTokensDetails, PromptTokensDetails, Usage
from worker.messages import SamplingParams

JOB = PreparedRequest(
    id="msg_1",
    sequences=[Choice(0, Prompt([1, 2, 3]), SamplingParams(max_tokens=9), True)],
    prompt_tokens=10,
    stop=(),
    include_stop=False,
    skip_special_tokens=True,
    priority=0,
    include_usage=False,
    usage_so_far=False,
    names_tier=False,
    prompt_param="messages",
    grammar_param=None,
)
USAGE = Usage(10, 5, 15, PromptTokensDetails(4), CompletionTokensDetails(2))
TOLD = {
    "input_tokens": 6,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 4,
    "output_tokens": 5,
    "output_tokens_details": {"thinking_tokens": 2},
    "service_tier": "standard",
}
ALL: list[Delta] = [
    ThinkingDelta("I "),
    ThinkingDelta("look."),
    TextDelta("Let me"),
    TextDelta(" see."),
    CallBegin(0, "weather"),
    CallArguments(0, '{"city":'),
    CallArguments(0, ' "Oslo"}'),
    CallEnd(0),
    CallBegin(1, "time", id="call_7"),
    CallArguments(1, "{}"),
    CallEnd(1),
]


def form(**fields: Any) -> MessagesFormat:
    return MessagesFormat(JOB, "tiny", **({"max_tokens": 9} | fields))


def events(written: MessagesFormat, *pieces: Piece) -> list[dict[str, Any]]:
    """The events of a stream. Each has its type as its name, too."""
    data = written.opening(0, USAGE) + b"".join(written.chunk(0, piece, USAGE) for piece in pieces)
    data += written.closing(USAGE)
    read = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, body = block.split("\n")
        read.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


def whole(written: MessagesFormat, *pieces: Piece) -> dict[str, Any]:
    deltas = [delta for piece in pieces for delta in piece.parts]
    last = replace(pieces[-1], deltas=deltas)
    answer: dict[str, Any] = json.loads(written.whole([last], USAGE))
    return answer


def test_all_blocks_as_events() -> None:
    pieces = [Piece(deltas=[delta]) for delta in ALL]
    start, ping, *middle, delta, stop = events(form(), *pieces, Piece(finish_reason="tool_calls", deltas=[]))
    message = start["message"]
    assert (message["id"], message["model"], message["role"], message["type"]) == (
        "msg_1",
        "tiny",
        "assistant",
        "message",
    )
    assert message["content"] == [] and message["stop_reason"] is None and message["stop_sequence"] is None
    assert message["usage"] == TOLD and ping == {"type": "ping"} and stop == {"type": "message_stop"}
    assert delta == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": TOLD,
    }
    call = middle[9]["content_block"]
    assert call["id"].startswith("toolu_")
    assert middle == [
        begin(0, type="thinking", thinking="", signature=""),
        more(0, type="thinking_delta", thinking="I "),
        more(0, type="thinking_delta", thinking="look."),
        more(0, type="signature_delta", signature=""),
        end(0),
        begin(1, type="text", text=""),
        more(1, type="text_delta", text="Let me"),
        more(1, type="text_delta", text=" see."),
        end(1),
        begin(2, type="tool_use", id=call["id"], name="weather", input={}),
        more(2, type="input_json_delta", partial_json='{"city":'),
        more(2, type="input_json_delta", partial_json=' "Oslo"}'),
        end(2),
        begin(3, type="tool_use", id="call_7", name="time", input={}),
        more(3, type="input_json_delta", partial_json="{}"),
        end(3),
    ]


def test_neighbours_in_a_piece_are_one_event() -> None:
    *_, first, second, _, _, _ = events(form(), Piece(deltas=ALL[:4], finish_reason="stop"))
    assert second == more(1, type="text_delta", text="Let me see.")
    assert first == begin(1, type="text", text="")


def begin(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def more(index: int, **delta: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def end(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def test_all_blocks_at_once() -> None:
    answer = whole(form(), Piece(finish_reason="tool_calls", deltas=ALL))
    thinking, text, first, second = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "I look.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert (first["name"], first["input"]) == ("weather", {"city": "Oslo"}) and first["id"].startswith("toolu_")
    assert second == {"type": "tool_use", "id": "call_7", "name": "time", "input": {}}
    assert (answer["stop_reason"], answer["usage"], answer["id"]) == ("tool_use", TOLD, "msg_1")


def test_text_without_a_lexer() -> None:
    assert whole(form(), Piece("Hello", finish_reason="stop"))["content"] == [{"type": "text", "text": "Hello"}]
    *_, block, stop, _, _ = events(form(), Piece("Hel"), Piece(), Piece("lo", finish_reason="stop"))
    assert block == more(0, type="text_delta", text="lo") and stop == end(0)
    assert whole(form(), Piece(finish_reason="stop"))["content"] == []
    assert len(events(form(), Piece(finish_reason="stop"))) == 4


@pytest.mark.parametrize(
    ("piece", "max_tokens", "reason", "sequence"),
    [
        (Piece(finish_reason="stop"), 9, "end_turn", None),
        (Piece(finish_reason="stop", stop="END"), 9, "stop_sequence", "END"),
        (Piece(finish_reason="tool_calls", stop="END"), 9, "tool_use", None),
        (Piece(finish_reason="length"), 9, "max_tokens", None),
        (Piece(finish_reason="length"), 32_000, "model_context_window_exceeded", None),
    ],
)
def test_reasons(piece: Piece, max_tokens: int, reason: str, sequence: str | None) -> None:
    expected = {"stop_reason": reason, "stop_sequence": sequence}
    answer = whole(form(max_tokens=max_tokens), piece)
    assert {name: answer[name] for name in expected} == expected
    assert events(form(max_tokens=max_tokens), piece)[-2]["delta"] == expected


def test_calls_that_are_cut_off_have_no_input() -> None:
    for arguments in ('{"city": "Os', "[1]", "[" * 100_000):
        deltas: list[Delta] = [CallBegin(0, "f"), CallArguments(0, arguments)]
        (call,) = whole(form(), Piece(finish_reason="length", deltas=deltas))["content"]
        assert call["input"] == {}
    assert events(form(), Piece(finish_reason="length", deltas=deltas))[-3] == end(0)


def test_thinking_that_is_not_shown() -> None:
    piece = Piece(finish_reason="stop", deltas=[ThinkingDelta("I look."), TextDelta("x")])
    assert whole(form(shows_thinking=False), piece)["content"][0] == {
        "type": "thinking",
        "thinking": "",
        "signature": "",
    }
    assert "I look." not in str(events(form(shows_thinking=False), piece))
