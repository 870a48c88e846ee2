"""The plain completions of one request, as OpenAI's clients read them."""

import msgspec
from msgspec import UNSET

from router.job import Job
from router.responses import Completion, CompletionChoice, CompletionLogprobs, Usage, finite
from router.sse import event
from router.tokenizer import Tokenizer
from router.transcript import Piece, TokenText
from worker.messages import TokenLogprobs


class CompletionFormat:
    """Writes pieces of text as chunks, or all of them as one object."""

    continues = True

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer

    def opening(self, index: int) -> bytes:
        return b""

    def chunk(self, index: int, piece: Piece) -> bytes:
        """Nothing if the piece says nothing."""
        if not (piece.text or piece.tokens or piece.finish_reason):
            return b""
        return event(self._completion([self._choice(index, piece)], None if self._job.include_usage else UNSET))

    def usage(self, usage: Usage) -> bytes:
        return event(self._completion([], usage))

    def whole(self, answers: list[Piece], usage: Usage) -> bytes:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return msgspec.json.encode(self._completion(choices, usage))

    def _completion(self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None) -> Completion:
        job = self._job
        return Completion(id=job.id, created=job.created, model=self._model, choices=choices, usage=usage)

    def _choice(self, index: int, piece: Piece) -> CompletionChoice:
        logprobs = self._logprobs(piece.tokens) if self._job.wants_logprobs else None
        return CompletionChoice(index, piece.text, logprobs, piece.finish_reason)

    def _logprobs(self, tokens: list[TokenText]) -> CompletionLogprobs:
        name = self._tokenizer.token_text
        return CompletionLogprobs(
            tokens=[name(token.token_id) for token in tokens],
            token_logprobs=[None if token.logprobs is None else finite(token.logprobs.logprob) for token in tokens],
            top_logprobs=[None if token.logprobs is None else self._top(token.logprobs) for token in tokens],
            text_offset=[token.offset for token in tokens],
        )

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that came if it is not among them. Tokens that look alike share an entry:
        the likeliest's."""
        top: dict[str, float] = {}
        for token_id, logprob in logprobs.top:
            top.setdefault(self._tokenizer.token_text(token_id), finite(logprob))
        top.setdefault(self._tokenizer.token_text(logprobs.token_id), finite(logprobs.logprob))
        return top
