"""The chat completions of one request, as OpenAI's clients read them."""

import msgspec
from msgspec import UNSET

from router.job import Job
from router.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ContentLogprob,
    Delta,
    TopLogprob,
    Usage,
    finite,
)
from router.sse import event
from router.tokenizer import Tokenizer
from router.transcript import Piece, TokenText


class ChatFormat:
    """Writes pieces of text as chat chunks, or all of them as one object."""

    continues = False

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer

    def opening(self, index: int) -> bytes:
        """What comes before the first piece of a choice."""
        return self._chunk(ChatChunkChoice(index, Delta(role="assistant", content="")))

    def chunk(self, index: int, piece: Piece) -> bytes:
        """Nothing if the piece says nothing."""
        data = b""
        if piece.text or piece.tokens:
            data = self._chunk(ChatChunkChoice(index, Delta(content=piece.text), self._logprobs(piece.tokens)))
        if piece.finish_reason is not None:
            data += self._chunk(ChatChunkChoice(index, Delta(), None, piece.finish_reason))
        return data

    def usage(self, usage: Usage) -> bytes:
        job = self._job
        return event(ChatChunk(id=job.id, created=job.created, model=self._model, choices=[], usage=usage))

    def whole(self, answers: list[Piece], usage: Usage) -> bytes:
        choices = []
        for index, answer in enumerate(answers):
            assert answer.finish_reason is not None
            message = AnswerMessage(answer.text)
            choices.append(ChatChoice(index, message, self._logprobs(answer.tokens), answer.finish_reason))
        job = self._job
        return msgspec.json.encode(
            ChatCompletion(id=job.id, created=job.created, model=self._model, choices=choices, usage=usage)
        )

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        job = self._job
        usage = None if job.include_usage else UNSET
        return event(ChatChunk(id=job.id, created=job.created, model=self._model, choices=[choice], usage=usage))

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
