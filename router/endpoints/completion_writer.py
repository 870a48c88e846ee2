"""Writes the answer to a request for plain completions as OpenAI's completions."""

import msgspec
from msgspec import UNSET, UnsetType

from router.endpoints.endings import prompt_logprobs, schema_report, stopped_by
from router.prepare.prepared_request import PreparedRequest
from router.streaming.sse import DONE, event
from router.text.output_text import Piece, TokenText
from router.text.tokenizer import Tokenizer
from router.wire.responses import ChunkUsage, Completion, CompletionChoice, CompletionLogprobs, Usage, finite
from worker.messages import TokenLogprobs


class CompletionFormat:
    """Writes pieces of text as chunks of a stream, or all of them as one object."""

    continues = True

    def __init__(self, prepared: PreparedRequest, model: str, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._model = model
        self._tokenizer = tokenizer
        self._begun: set[int] = set()  # choices whose prompt the stream has told

    def opening(self, index: int, usage: Usage) -> bytes:
        return b""

    def chunk(self, index: int, piece: Piece, usage: Usage) -> bytes:
        """The server-sent event for one piece; empty if it has no text, no tokens and no finish reason."""
        wanted_ids = self._prepared.wants_token_ids and piece.token_ids
        if not (piece.text or piece.tokens or piece.finish_reason or wanted_ids):
            return b""
        seen: ChunkUsage = None if self._prepared.include_usage else UNSET
        return event(self._completion([self._choice(index, piece)], usage if self._prepared.usage_so_far else seen))

    def closing(self, usage: Usage) -> bytes:
        """The end of the stream: the usage if the client asked for it, and `[DONE]`."""
        return (event(self._completion([], usage)) if self._prepared.include_usage else b"") + DONE

    def whole(self, answers: list[Piece], usage: Usage) -> bytes:
        choices: list[CompletionChoice] = []
        for sequence, answer in zip(self._prepared.sequences, answers, strict=True):
            choice = self._choice(sequence.index, answer)
            if sequence.first:
                choice.prompt_logprobs = prompt_logprobs(answer, self._prepared, sequence.index, self._tokenizer)
            else:
                choice.prompt_logprobs = choices[-1].prompt_logprobs
            choices.append(choice)
        return msgspec.json.encode(self._completion(choices, usage))

    def _completion(self, choices: list[CompletionChoice], usage: ChunkUsage) -> Completion:
        prepared = self._prepared
        return Completion(id=prepared.id, created=prepared.created, model=self._model, choices=choices, usage=usage)

    def _choice(self, index: int, piece: Piece) -> CompletionChoice:
        logprobs = self._logprobs(piece.tokens) if self._prepared.wants_logprobs else None
        prompt_ids: list[int] | UnsetType = UNSET
        if self._prepared.wants_prompt_ids and index not in self._begun:
            self._begun.add(index)
            prompt_ids = self._prepared.prompt_ids(index)
        return CompletionChoice(
            index,
            piece.text,
            logprobs,
            finish_reason=piece.finish_reason,
            token_ids=piece.token_ids if self._prepared.wants_token_ids else UNSET,
            prompt_token_ids=prompt_ids,
            schema_check=schema_report(piece),
            **stopped_by(piece, self._prepared),
        )

    def _logprobs(self, tokens: list[TokenText]) -> CompletionLogprobs:
        name = self._tokenizer.token_text
        return CompletionLogprobs(
            tokens=[name(token.token_id) for token in tokens],
            token_logprobs=[None if token.logprobs is None else finite(token.logprobs.logprob) for token in tokens],
            top_logprobs=[None if token.logprobs is None else self._top(token.logprobs) for token in tokens],
            text_offset=[token.offset for token in tokens],
        )

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        """Log probabilities by token text: the likeliest tokens, and the token itself if it is not among them. Where
        several tokens have the same text, the likeliest one's value counts."""
        top: dict[str, float] = {}
        for token_id, logprob in logprobs.top:
            top.setdefault(self._tokenizer.token_text(token_id), finite(logprob))
        top.setdefault(self._tokenizer.token_text(logprobs.token_id), finite(logprobs.logprob))
        return top
