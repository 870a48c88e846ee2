"""Writes the answer to a chat request as OpenAI's chat completions."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from router.chat import deltas
from router.chat.deltas import CallArguments, CallBegin, CallEnd, TextDelta, ThinkingDelta
from router.endpoints.endings import prompt_logprobs, schema_report, stopped_by
from router.endpoints.logprobs import content_logprobs
from router.prepare.answer_syntax import AnswerSyntax
from router.prepare.prepared_request import PreparedRequest
from router.streaming.sse import DONE, event
from router.text.output_text import Piece, TokenText
from router.text.tokenizer import Tokenizer
from router.wire.responses import (
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

A = TypeVar("A", ChatCompletion, ChatChunk)


class ChatFormat:
    """Writes pieces of text as chunks of a stream, or all of them as one object."""

    def __init__(self, prepared: PreparedRequest, model: str, tokenizer: Tokenizer) -> None:
        self.continues = prepared.continues
        self._prepared = prepared
        self._model = model
        self._tokenizer = tokenizer
        self._told_prompt = False
        self._may_think = (
            prepared.syntax is not None and prepared.syntax.may_think and prepared.thinking_place == "apart"
        )
        self._written: dict[int, _ThinkingAsText] = {}  # by choice, where thinking is part of the content
        self._tier: Literal["default"] | UnsetType = "default" if prepared.names_tier else UNSET

    def opening(self, index: int, usage: Usage) -> bytes:
        """The event before the first piece of a choice: it carries the role."""
        told, self._told_prompt = self._told_prompt, True
        choice = ChatChunkChoice(index, self._delta(Delta(role="assistant", content="")))
        chunk = self._answer(ChatChunk, [choice], self._usage(usage))
        if self._prepared.wants_prompt_ids and not told:
            chunk.prompt_token_ids = self._prepared.prompt_ids(index)
        return event(chunk)

    def chunk(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """The server-sent events for one piece: one for each of its deltas, one for its finish reason. The first has
        the tokens. Empty if there is nothing to tell."""
        data = b""
        tokens, token_ids = piece.tokens, self._token_ids(piece)
        found = [self._delta(delta) for delta in _deltas(self._placed(index, piece))]
        if not found and (tokens or token_ids):
            found = [Delta(content="")]
        for delta in found:
            choice = ChatChunkChoice(index, delta, self._logprobs(tokens), token_ids=token_ids)
            data += self._chunk(choice, usage)
            tokens, token_ids = [], [] if self._prepared.wants_token_ids else UNSET
        if piece.finish_reason is not None:
            report, ending = schema_report(piece), stopped_by(piece, self._prepared)
            end = self._delta(Delta())
            choice = ChatChunkChoice(index, end, finish_reason=piece.finish_reason, schema_check=report, **ending)
            data += self._chunk(choice, usage)
        return data

    def closing(self, usage: Usage) -> bytes:
        """The end of the stream: the usage if the client asked for it, and `[DONE]`."""
        return (event(self._answer(ChatChunk, [], usage)) if self._prepared.include_usage else b"") + DONE

    def whole(self, answers: list[Piece], usage: Usage) -> bytes:
        choices = []
        for index, answer in enumerate(answers):
            assert answer.finish_reason is not None
            logprobs, token_ids = self._logprobs(answer.tokens), self._token_ids(answer)
            message, report = self._message(self._placed(index, answer)), schema_report(answer)
            ending = stopped_by(answer, self._prepared)
            choices.append(ChatChoice(index, message, logprobs, answer.finish_reason, token_ids, report, **ending))
        made = self._answer(ChatCompletion, choices, usage)
        if self._prepared.wants_prompt_ids:
            made.prompt_token_ids = self._prepared.prompt_ids(0)
        made.prompt_logprobs = prompt_logprobs(answers[0], self._prepared, 0, self._tokenizer)
        return msgspec.json.encode(made)

    def _placed(self, index: int, piece: Piece) -> Iterable[deltas.Delta]:
        """The piece's deltas, with thinking where the client wants it."""
        place, syntax = self._prepared.thinking_place, self._prepared.syntax
        if place == "apart" or syntax is None:
            return piece.parts
        if place == "nowhere":
            return [part for part in piece.parts if not isinstance(part, ThinkingDelta)]
        written = self._written.setdefault(index, _ThinkingAsText(syntax))
        return [*written.written(piece.parts), *(written.closing() if piece.finish_reason == "stop" else ())]

    def _delta(self, delta: Delta) -> Delta:
        """The delta with the names of thinking, null where it has none, for a model that can think: clients read them
        without a look whether they are there."""
        if self._may_think and delta.reasoning is UNSET:
            delta.reasoning = delta.reasoning_content = None
        return delta

    def _chunk(self, choice: ChatChunkChoice, usage: Usage) -> bytes:
        return event(self._answer(ChatChunk, [choice], self._usage(usage)))

    def _usage(self, usage: Usage) -> ChunkUsage:
        seen: ChunkUsage = None if self._prepared.include_usage else UNSET
        return usage if self._prepared.usage_so_far else seen

    def _answer(self, kind: Callable[..., A], choices: list[Any], usage: ChunkUsage) -> A:
        """A whole answer or a chunk, which have these fields in common."""
        prepared = self._prepared
        return kind(
            id=prepared.id,
            created=prepared.created,
            model=self._model,
            choices=choices,
            service_tier=self._tier,
            usage=usage,
        )

    def _message(self, parts: Iterable[deltas.Delta]) -> AnswerMessage:
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
        reasoning = thinking or (None if self._may_think else UNSET)
        return AnswerMessage(
            content=None if calls and not text else text,
            tool_calls=calls or UNSET,
            reasoning_content=reasoning,
            reasoning=reasoning,
        )

    def _token_ids(self, piece: Piece) -> list[int] | UnsetType:
        return piece.token_ids if self._prepared.wants_token_ids else UNSET

    def _logprobs(self, tokens: list[TokenText]) -> ChatLogprobs | None:
        if not self._prepared.wants_logprobs:
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


class _ThinkingAsText:
    """Writes what the model thought as a part of the content, between the markers of its family."""

    def __init__(self, syntax: AnswerSyntax) -> None:
        marks = syntax.format.thinking
        self._begin, self._end = ("<think>", "</think>") if marks is None else (marks.begin, marks.end)
        self._is_open = False

    def written(self, parts: Iterable[deltas.Delta]) -> Iterator[deltas.Delta]:
        """The parts, with thinking as text."""
        for part in parts:
            if isinstance(part, ThinkingDelta):
                if not self._is_open:
                    self._is_open = True
                    yield TextDelta(f"{self._begin}\n")
                yield TextDelta(part.text)
            else:
                yield from self.closing()
                yield part

    def closing(self) -> Iterator[deltas.Delta]:
        """The end of thinking that is open."""
        if self._is_open:
            self._is_open = False
            yield TextDelta(f"\n{self._end}\n\n")
