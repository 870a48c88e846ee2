"""Writes the answer to a conversation as Anthropic's Messages."""

import uuid
from collections.abc import Iterator
from typing import cast

import msgspec
from msgspec import UNSET

from router.chat.deltas import CallArguments, CallBegin, CallEnd, Delta, TextDelta, ThinkingDelta, joined
from router.prepare.prepared_request import PreparedRequest
from router.streaming.sse import named_event
from router.text.output_text import Piece
from router.wire.messages_types import (
    AnswerBlock,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputPiece,
    MessageAnswer,
    MessageDelta,
    MessageEnding,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignaturePiece,
    StopReason,
    StreamEvent,
    TextPiece,
    ThinkingPiece,
    ThinkingTokens,
)
from router.wire.responses import Usage

_NO_INPUT = msgspec.Raw(b"{}")


class MessagesFormat:
    """Writes pieces of text as events of a stream, or all of them as one object. An answer has one choice.

    A block of text, thinking or a call is open until a delta of another kind comes, or the end.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        model: str,
        *,
        max_tokens: int,
        continues: bool = False,
        shows_thinking: bool = True,
    ) -> None:
        """`max_tokens`: what the client asked for, which may be more than fits into the context. `continues`: the
        answer goes on where the prompt's end has begun it. `shows_thinking`: blocks of thinking have their text."""
        self.continues = continues
        self._id = prepared.id
        self._model = model
        self._is_cut_at_context = prepared.sequences[0].sampling.max_tokens < max_tokens
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: type[AnswerBlock] | None = None
        self._ending: MessageEnding | None = None

    def opening(self, index: int, usage: Usage) -> bytes:
        """The events before the first piece: the message without content, with the real number of input tokens."""
        return _event(MessageStart(self._answer([], None, usage))) + _event(Ping())

    def chunk(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """The events for one piece. Empty if there is nothing to tell."""
        data = b"".join(_event(event) for part in joined(piece.parts) for event in self._events(part))
        if piece.finish_reason is not None:
            data += b"".join(map(_event, self._close()))
            self._ending = self._ended(piece)
        return data

    def closing(self, usage: Usage) -> bytes:
        """The end of the stream: why it ends, the usage, and the last event."""
        assert self._ending is not None
        return _event(MessageDelta(self._ending, _usage(usage))) + _event(MessageStop())

    def whole(self, answers: list[Piece], usage: Usage) -> bytes:
        (answer,) = answers
        return msgspec.json.encode(self._answer(self._blocks(answer.parts), self._ended(answer), usage))

    def _answer(self, content: list[AnswerBlock], ending: MessageEnding | None, usage: Usage) -> MessageAnswer:
        return MessageAnswer(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=None if ending is None else ending.stop_reason,
            stop_sequence=None if ending is None else ending.stop_sequence,
            usage=_usage(usage),
        )

    def _ended(self, piece: Piece) -> MessageEnding:
        reasons: dict[str, StopReason] = {
            "stop": "end_turn",
            "length": "model_context_window_exceeded" if self._is_cut_at_context else "max_tokens",
            "tool_calls": "tool_use",
        }
        if piece.stop is not None and piece.finish_reason != "tool_calls":
            return MessageEnding("stop_sequence", piece.stop)
        return MessageEnding(reasons[cast(str, piece.finish_reason)], None)

    def _events(self, part: Delta) -> Iterator[StreamEvent]:
        match part:
            case TextDelta(text):
                yield from self._go_on(AnswerText(""))
                yield BlockDelta(self._index, TextPiece(text))
            case ThinkingDelta(text):
                yield from self._go_on(AnswerThinking(""))
                if self._shows_thinking:
                    yield BlockDelta(self._index, ThinkingPiece(text))
            case CallBegin(_, name):
                yield from self._begin(AnswerToolUse(tool_use_id(part), name, _NO_INPUT))
            case CallArguments(_, text):
                yield BlockDelta(self._index, InputPiece(text))
            case CallEnd():
                yield from self._close()

    def _go_on(self, block: AnswerBlock) -> Iterator[StreamEvent]:
        if self._open is not type(block):
            yield from self._begin(block)

    def _begin(self, block: AnswerBlock) -> Iterator[StreamEvent]:
        yield from self._close()
        self._index += 1
        self._open = type(block)
        yield BlockStart(self._index, block)

    def _close(self) -> Iterator[StreamEvent]:
        if self._open is None:
            return
        if self._open is AnswerThinking:
            yield BlockDelta(self._index, SignaturePiece(""))
        self._open = None
        yield BlockStop(self._index)

    def _blocks(self, parts: list[Delta]) -> list[AnswerBlock]:
        blocks: list[AnswerBlock] = []
        for part in joined(parts):
            match part:
                case TextDelta(text):
                    blocks.append(AnswerText(text))
                case ThinkingDelta(text):
                    blocks.append(AnswerThinking(text if self._shows_thinking else ""))
                case CallBegin(_, name):
                    blocks.append(AnswerToolUse(tool_use_id(part), name, _NO_INPUT))
                case CallArguments(_, text):
                    call = blocks[-1]
                    assert isinstance(call, AnswerToolUse)
                    call.input = _object(text)
                case CallEnd():
                    pass
        return blocks


def tool_use_id(begin: CallBegin) -> str:
    """The id of a call: the model's own, or a new one."""
    return begin.id or f"toolu_{uuid.uuid4().hex[:24]}"


def _object(arguments: str) -> msgspec.Raw:
    """The arguments as they are. Arguments that were cut off, or are no object, leave an empty one."""
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return _NO_INPUT
    return msgspec.Raw(arguments.encode())


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    details = usage.completion_tokens_details
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=UNSET if details is UNSET else ThinkingTokens(details.reasoning_tokens),
    )


def _event(event: StreamEvent) -> bytes:
    return named_event(str(event.__struct_config__.tag), event)
