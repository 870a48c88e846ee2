"""Writes the answer to a request for a response as OpenAI's Responses."""

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from router.chat.deltas import CallArguments, CallBegin, CallEnd, Delta, TextDelta, ThinkingDelta, joined
from router.endpoints.logprobs import content_logprobs
from router.endpoints.responses.custom_input import CustomInput
from router.prepare.prepared_request import PreparedRequest
from router.text.output_text import Piece
from router.text.tokenizer import Tokenizer
from router.wire.errors import ApiError
from router.wire.responses import ContentLogprob, Usage
from router.wire.responses_objects import (
    AnsweredText,
    ArgumentsAdded,
    ArgumentsDone,
    CallItem,
    CustomCallItem,
    IncompleteDetails,
    InputAdded,
    InputDone,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputItem,
    PartAdded,
    PartDone,
    ReasoningItem,
    ReasoningPart,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponseUsage,
    StreamError,
    TextAdded,
    TextDone,
    ThoughtAdded,
    ThoughtDone,
)

_encoder = msgspec.json.Encoder()


class ResponsesFormat:
    """Writes pieces of text as the events of a stream, or all of them as one object. `response` is what there is of it
    at any time. An item is added when the first of it comes, and done when another begins or the answer ends."""

    continues = False

    def __init__(self, prepared: PreparedRequest, response: ResponseObject, tokenizer: Tokenizer) -> None:
        self.response = response
        self._wants_logprobs = prepared.wants_logprobs
        tools = prepared.syntax.tools if prepared.syntax else ()
        self._tools = {tool.name: tool for tool in tools if tool.namespace is not None or tool.is_custom}
        self._input = CustomInput()  # of the open item
        self._tokenizer = tokenizer
        self._number = 0
        self._open: OutputItem | None = None

    @property
    def begun(self) -> bool:
        """Whether a stream has events."""
        return self._number > 0

    @property
    def has_ended(self) -> bool:
        """Whether the response is complete, its usage included, or has failed."""
        return self.response.usage is not None or self.response.status == "failed"

    def opening(self, index: int, usage: Usage) -> bytes:
        """Nothing: events are numbered, and `chunk` makes the first ones."""
        return b""

    def chunk(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """The events for one piece, with those that begin a stream before the first."""
        begin = b"" if self.begun else self._begin()
        return begin + b"".join(map(written, self._take(piece)))

    def closing(self, usage: Usage) -> bytes:
        """The last event, with the whole response."""
        kind = ResponseIncomplete if self.response.status == "incomplete" else ResponseCompleted
        self._end(usage)
        return written(self._lifecycle(kind))

    def whole(self, answers: list[Piece], usage: Usage) -> bytes:
        (answer,) = answers
        if answer.deltas is not None:
            answer.deltas = joined(answer.deltas)
        if usage.completion_tokens_details:  # the tokens of thinking come first
            answer.tokens = answer.tokens[usage.completion_tokens_details.reasoning_tokens :]
        for _ in self._take(answer):
            pass
        self._end(usage)
        return _encoder.encode(self.response)

    def failed(self, error: ApiError) -> bytes:
        """The events of a stream that breaks off."""
        if self._open is not None:
            self._open.status = "incomplete"
        fail(self.response, error)
        said = StreamError(sequence_number=self._next(), code=error.code, message=error.message, param=error.param)
        return written(said) + written(self._lifecycle(ResponseFailed))

    def _begin(self) -> bytes:
        self.response.status = "in_progress"
        return written(self._lifecycle(ResponseCreated)) + written(self._lifecycle(ResponseInProgress))

    def _end(self, usage: Usage) -> None:
        self.response.usage = ResponseUsage.of(usage)
        self.response.completed_at = int(time.time())

    def _take(self, piece: Piece) -> Iterator[ResponseEvent]:
        logprobs = content_logprobs(piece.tokens, self._tokenizer) if self._wants_logprobs else []
        for part in piece.parts:
            match part:
                case TextDelta():  # the first has the tokens
                    yield from self._part(part, logprobs)
                    logprobs = []
                case _:
                    yield from self._part(part, [])
        if piece.finish_reason is None:
            return
        if logprobs and isinstance(self._open, MessageItem):  # tokens without text, such as a stop token
            self._open.content[0].logprobs += logprobs
        is_cut = piece.finish_reason == "length"
        if not is_cut and all(isinstance(item, ReasoningItem) for item in self.response.output):
            yield from self._message()
        yield from self._close("incomplete" if is_cut else "completed")
        self.response.status = "incomplete" if is_cut else "completed"
        self.response.incomplete_details = IncompleteDetails("max_output_tokens") if is_cut else None

    def _part(self, part: Delta, logprobs: list[ContentLogprob]) -> Iterator[ResponseEvent]:
        match part:
            case TextDelta(text):
                if not isinstance(self._open, MessageItem):
                    yield from self._message()
                assert isinstance(self._open, MessageItem)
                self._open.content[0].text += text
                self._open.content[0].logprobs += logprobs
                yield TextAdded(delta=text, logprobs=logprobs, **self._place())
            case ThinkingDelta(text):
                if not isinstance(self._open, ReasoningItem):
                    yield from self._thought()
                assert isinstance(self._open, ReasoningItem)
                self._open.content[0].text += text
                yield ThoughtAdded(delta=text, **self._place())
            case CallBegin(_, name, call_id):
                call_id, tool = call_id or new_id("call"), self._tools.get(name)
                call: CallItem | CustomCallItem
                if tool is not None and tool.is_custom:
                    call = CustomCallItem(id=new_id("ctc"), call_id=call_id, name=name)
                else:
                    call = CallItem(id=new_id("fc"), call_id=call_id, name=name)
                if tool is not None:
                    call.name, call.namespace = tool.own_name, tool.namespace or UNSET
                yield from self._add(call)
                self._input = CustomInput()
            case CallArguments(_, text) if isinstance(self._open, CustomCallItem):
                yield from self._put(self._input.push(text))
            case CallArguments(_, text):
                assert isinstance(self._open, CallItem)
                self._open.arguments += text
                yield ArgumentsAdded(delta=text, **self._place())
            case CallEnd():
                yield from self._close("completed")

    def _put(self, text: str) -> Iterator[ResponseEvent]:
        """More of the input of a custom tool."""
        assert isinstance(self._open, CustomCallItem)
        if text:
            self._open.input += text
            yield InputAdded(delta=text, **self._place())

    def _message(self) -> Iterator[ResponseEvent]:
        part = AnsweredText(text="")
        item = MessageItem(id=new_id("msg"))
        yield from self._add(item)
        item.content = [part]
        yield PartAdded(part=part, **self._place())

    def _thought(self) -> Iterator[ResponseEvent]:
        part = ReasoningPart("")
        item = ReasoningItem(id=new_id("rs"))
        yield from self._add(item)
        item.content = [part]
        yield PartAdded(part=part, **self._place())

    def _add(self, item: OutputItem) -> Iterator[ResponseEvent]:
        """Begins an item, and ends the one before."""
        yield from self._close("completed")
        self._open = item
        self.response.output.append(item)
        yield ItemAdded(sequence_number=self._next(), output_index=self._index, item=item)

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[ResponseEvent]:
        """Ends the open item, if there is one."""
        match self._open:
            case None:
                return
            case MessageItem(content=[part]):
                yield TextDone(text=part.text, logprobs=part.logprobs, **self._place())
                yield PartDone(part=part, **self._place())
            case ReasoningItem(content=[thought]):
                yield ThoughtDone(text=thought.text, **self._place())
                yield PartDone(part=thought, **self._place())
            case CallItem(name=name, arguments=arguments):
                yield ArgumentsDone(arguments=arguments, name=name, **self._place())
            case CustomCallItem() as call:
                yield from self._put(self._input.end())
                yield InputDone(input=call.input, **self._place())
        self._open.status = status
        yield ItemDone(sequence_number=self._next(), output_index=self._index, item=self._open)
        self._open = None

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _place(self) -> dict[str, Any]:
        """The fields that say where in the output an event is."""
        assert self._open is not None
        return {"sequence_number": self._next(), "output_index": self._index, "item_id": self._open.id}

    def _lifecycle(self, kind: Callable[..., ResponseEvent]) -> ResponseEvent:
        return kind(sequence_number=self._next(), response=self.response)

    def _next(self) -> int:
        self._number += 1
        return self._number - 1


def new_id(prefix: str) -> str:
    """A new id of a response or an item."""
    return f"{prefix}_{uuid.uuid4().hex}"


def fail(response: ResponseObject, error: ApiError) -> None:
    """Makes the response one that has failed."""
    code = "server_error" if error.status >= 500 else "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
    response.status = "failed"
    response.error = ResponseError(code, error.message)


def written(event: ResponseEvent) -> bytes:
    """The server-sent event."""
    kind = type(event).__struct_config__.tag
    return b"event: %s\ndata: %s\n\n" % (str(kind).encode(), _encoder.encode(event))
