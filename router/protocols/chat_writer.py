"""Writes the answer to a chat request as OpenAI's chat completions."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from router import deltas
from router.deltas import CallArguments, CallBegin, CallEnd, TextDelta, ThinkingDelta
from router.output_text import Piece, TokenText
from router.prepared_request import PreparedRequest
from router.protocols.logprobs import content_logprobs
from router.protocols.schema_report import schema_report
from router.responses import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChunkUsage,
    Delta,
    FunctionDelta,
    MessageToolCall,
    ToolCallDelta,
    Usage,
)
from router.sse import DONE, event
from router.tokenizer import Tokenizer

A = TypeVar("A", ChatCompletion, ChatChunk)


class ChatFormat:
    """Writes pieces of text as chunks of a stream, or all of them as one object."""

    continues = False

    def __init__(self, job: PreparedRequest, model: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        self._tier: Literal["default"] | UnsetType = "default" if job.names_tier else UNSET

    def opening(self, index: int, usage: Usage) -> bytes:
        """The event before the first piece of a choice: it carries the role."""
        return self._chunk(ChatChunkChoice(index, Delta(role="assistant", content="")), usage)

    def chunk(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """The server-sent events for one piece: one for each of its deltas, one for its finish reason. The first has
        the tokens. Empty if there is nothing to tell."""
        data = b""
        tokens, token_ids = piece.tokens, self._token_ids(piece)
        found = list(_deltas(piece.parts))
        if not found and (tokens or token_ids):
            found = [Delta(content="")]
        for delta in found:
            choice = ChatChunkChoice(index, delta, self._logprobs(tokens), token_ids=token_ids)
            data += self._chunk(choice, usage)
            tokens, token_ids = [], [] if self._job.wants_token_ids else UNSET
        if piece.finish_reason is not None:
            choice = ChatChunkChoice(index, Delta(), None, piece.finish_reason, schema_check=schema_report(piece))
            data += self._chunk(choice, usage)
        return data

    def closing(self, usage: Usage) -> bytes:
        """The end of the stream: the usage if the client asked for it, and `[DONE]`."""
        return (event(self._answer(ChatChunk, [], usage)) if self._job.include_usage else b"") + DONE

    def whole(self, answers: list[Piece], usage: Usage) -> bytes:
        choices = []
        for index, answer in enumerate(answers):
            assert answer.finish_reason is not None
            logprobs, token_ids = self._logprobs(answer.tokens), self._token_ids(answer)
            message, report = _message(answer.parts), schema_report(answer)
            choices.append(ChatChoice(index, message, logprobs, answer.finish_reason, token_ids, report))
        return msgspec.json.encode(self._answer(ChatCompletion, choices, usage))

    def _chunk(self, choice: ChatChunkChoice, usage: Usage) -> bytes:
        seen: ChunkUsage = None if self._job.include_usage else UNSET
        return event(self._answer(ChatChunk, [choice], usage if self._job.usage_so_far else seen))

    def _answer(self, kind: Callable[..., A], choices: list[Any], usage: ChunkUsage) -> A:
        """A whole answer or a chunk, which have these fields in common."""
        job = self._job
        return kind(
            id=job.id, created=job.created, model=self._model, choices=choices, service_tier=self._tier, usage=usage
        )

    def _token_ids(self, piece: Piece) -> list[int] | UnsetType:
        return piece.token_ids if self._job.wants_token_ids else UNSET

    def _logprobs(self, tokens: list[TokenText]) -> ChatLogprobs | None:
        if not self._job.wants_logprobs:
            return None
        return ChatLogprobs(content_logprobs(tokens, self._tokenizer))


def _deltas(parts: Iterable[deltas.Delta]) -> Iterator[Delta]:
    for part in parts:
        match part:
            case TextDelta(text):
                yield Delta(content=text)
            case ThinkingDelta(text):
                yield Delta(reasoning_content=text, reasoning=text)
            case CallBegin(index, name):
                function = FunctionDelta(name=name, arguments="")
                yield Delta(tool_calls=[ToolCallDelta(index, function, part.id or UNSET, "function")])
            case CallArguments(index, text):
                yield Delta(tool_calls=[ToolCallDelta(index, FunctionDelta(arguments=text))])
            case CallEnd():
                pass


def _message(parts: Iterable[deltas.Delta]) -> AnswerMessage:
    text, thinking = "", ""
    calls: list[MessageToolCall] = []
    for part in deltas.joined(parts):
        match part:
            case TextDelta(more):
                text += more
            case ThinkingDelta(more):
                thinking += more
            case CallBegin(_, name):
                calls.append(MessageToolCall(part.id or "", CalledFunction(name, "")))
            case CallArguments(index, more):
                calls[index].function.arguments += more
            case CallEnd():
                pass
    return AnswerMessage(
        content=None if calls and not text else text,
        tool_calls=calls or UNSET,
        reasoning_content=thinking or UNSET,
        reasoning=thinking or UNSET,
    )
