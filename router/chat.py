"""Writes the answer to a chat request as OpenAI's chat completions."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from router.output_text import Piece, TokenText
from router.prepared_request import PreparedRequest
from router.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChunkUsage,
    ContentLogprob,
    Delta,
    TopLogprob,
    Usage,
    finite,
)
from router.sse import event
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

    def opening(self, index: int, usage: ChunkUsage) -> bytes:
        """The event before the first piece of a choice: it carries the role."""
        return self._chunk([ChatChunkChoice(index, Delta(role="assistant", content=""))], usage)

    def chunk(self, index: int, piece: Piece, usage: ChunkUsage) -> bytes:
        """The server-sent events for one piece: one for its text and tokens, one for its finish reason. Empty if it has
        neither."""
        data = b""
        if piece.text or piece.tokens or (self._job.wants_token_ids and piece.token_ids):
            delta, token_ids = Delta(content=piece.text), self._token_ids(piece)
            choice = ChatChunkChoice(index, delta, self._logprobs(piece.tokens), token_ids=token_ids)
            data = self._chunk([choice], usage)
        if piece.finish_reason is not None:
            data += self._chunk([ChatChunkChoice(index, Delta(), None, piece.finish_reason)], usage)
        return data

    def usage(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def whole(self, answers: list[Piece], usage: Usage) -> bytes:
        choices = []
        for index, answer in enumerate(answers):
            assert answer.finish_reason is not None
            message = AnswerMessage(answer.text)
            logprobs, token_ids = self._logprobs(answer.tokens), self._token_ids(answer)
            choices.append(ChatChoice(index, message, logprobs, answer.finish_reason, token_ids))
        return msgspec.json.encode(self._answer(ChatCompletion, choices, usage))

    def _chunk(self, choices: list[ChatChunkChoice], usage: ChunkUsage) -> bytes:
        return event(self._answer(ChatChunk, choices, usage))

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
        return ChatLogprobs([self._content(token) for token in tokens])

    def _content(self, token: TokenText) -> ContentLogprob:
        assert token.logprobs is not None
        top = [TopLogprob(*self._named(token_id, logprob)) for token_id, logprob in token.logprobs.top]
        return ContentLogprob(*self._named(token.token_id, token.logprobs.logprob), top)

    def _named(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        data = self._tokenizer.token_bytes[token_id]
        return self._tokenizer.token_text(token_id), finite(logprob), list(data)
