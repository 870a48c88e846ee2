"""The text of a sequence as it grows: detokenisation, stop strings, and log probabilities that go with the text."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from router.chat.deltas import Delta, TextDelta
from router.text.stop import StopMatcher
from router.text.tokenizer import Tokenizer
from worker.messages import Output, SchemaCheck, TokenLogprobs


@dataclass(slots=True)
class TokenText:
    """A token of the text. `offset`: characters before it. `logprobs`: None for the first token of a prompt."""

    offset: int
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class Piece:
    """New text that is final, the tokens that begin in it (if log probabilities are wanted), the output tokens that
    came with it, and the finish reason. Text may come later than its tokens, while it may be part of a stop string.
    `stop`: the stop string that ended the text; `stop_token_id`: the token that did.

    `marks`: markers that are single tokens: the number of characters before each, and the number of output tokens.
    They come with their token or earlier than their text. `deltas`: what a lexer made of the text; None if there is no
    lexer, and all is text. `embedding`: of a pooled prompt. `check`, in the last piece: how the text keeps to a schema
    that is enforced in part; `sampled_again`: how often a part of it was thrown away for that. `prompt_logprobs`: of
    the prompt's tokens, in a piece of their own.
    """

    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    marks: dict[int, int] = field(default_factory=dict)
    deltas: list[Delta] | None = None
    embedding: bytes = b""
    stop: str | None = None
    stop_token_id: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    check: SchemaCheck | None = None
    sampled_again: int = 0

    @property
    def parts(self) -> list[Delta]:
        """The deltas that the piece adds to the answer."""
        if self.deltas is not None:
            return self.deltas
        return [TextDelta(self.text)] if self.text else []


class OutputText:
    """Turns the outputs of one sequence into pieces of text. `num_tokens` counts the output tokens so far.

    - Stop strings are searched for in the text after the first `min_tokens` tokens.
    - The stop string or stop token that ends the text is part of the text only with `include_stop`.
    - Log probabilities are held back with the text of their token. Those of tokens that begin in or after a stop string
      are dropped with it.
    - `continues`: the text continues a prompt that is not part of it.
    - `is_cut`: whether a stop string has ended the text.
    - `wants_ends`: the output tokens are listed in `token_ids`, without a stop token that is not part of the text.
      `ends` has the number of characters up to the end of each; None for one that ends inside a character.
    - `marker_ids`: tokens that a lexer looks for. They are part of the text even where special tokens are left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        continues: bool = False,
        wants_logprobs: bool = False,
        wants_ends: bool = False,
        marker_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens, continues, marker_ids)
        self._marker_ids = marker_ids
        self._text_of = tokenizer.token_text
        self._stop = StopMatcher(stop, include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._wants_logprobs = wants_logprobs
        self._wants_ends = wants_ends
        self._is_plain = not (stop or wants_logprobs or wants_ends)
        self._waiting: deque[TokenText] = deque()
        self._seen = self._sent = 0  # characters detokenised, and returned in pieces
        self.num_tokens = 0
        self.is_cut = False
        self.token_ids: list[int] = []
        self.ends: list[int | None] = []

    def echo(self, token_ids: list[int], text: str | None, logprobs: list[TokenLogprobs | None] | None) -> Piece:
        """The prompt as the beginning of the text, before any output. `text`: the prompt as sent, None if it was sent
        as tokens."""
        piece = Piece()
        parts: list[str] = []
        for number, token_id in enumerate(token_ids):
            if logprobs is not None:
                piece.tokens.append(TokenText(self._seen, token_id, logprobs[number]))
            parts.append(self._detokenizer.push(token_id))
            self._seen += len(parts[-1])
        piece.text = "".join(parts) if text is None else text
        self._seen = self._sent = len(piece.text)
        return piece

    def push(self, output: Output) -> Piece:
        if self._is_plain and output.finish_reason is None and len(output.token_ids) == 1:
            (token_id,) = output.token_ids
            if token_id not in self._marker_ids:
                return self._push_plain(token_id, output.token_ids)
        piece = Piece(token_ids=output.token_ids, embedding=output.embedding or b"")
        text: list[str] = []
        last = len(output.token_ids) - 1
        for number, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if self._wants_logprobs:
                self._waiting.append(TokenText(self._seen, token_id, output.logprobs[number]))
            if number == last and output.stop_token_id is not None and not self._include_stop:
                break
            new = self._detokenizer.push(token_id)
            if token_id in self._marker_ids:  # the end of `new`: it may begin with what an earlier token left open
                piece.marks[self._seen + len(new) - len(self._text_of(token_id))] = self.num_tokens - 1
            stopped = self._take(new, text)
            if self._wants_ends:
                self.token_ids.append(token_id)
                self.ends.append(None if self._detokenizer.is_inside_character else self._seen)
            if stopped:
                piece.finish_reason = "stop"
                piece.token_ids = output.token_ids[: number + 1]
                break
        if output.finish_reason is not None and piece.finish_reason is None:
            assert output.finish_reason != "error"
            piece.finish_reason = output.finish_reason
            if self._take(self._detokenizer.flush(), text):
                piece.finish_reason = "stop"
            else:
                text.append(self._stop.flush())
                self._sent += len(text[-1])
                piece.tokens.extend(self._waiting)
                self._waiting.clear()
        piece.text = "".join(text)
        piece.stop = self._stop.found
        while self._waiting and self._waiting[0].offset < self._sent:
            piece.tokens.append(self._waiting.popleft())
        return piece

    def _push_plain(self, token_id: int, token_ids: list[int]) -> Piece:
        """As `push` for an output of one token that is like most: nothing has to be searched for, and nothing ends."""
        text = self._detokenizer.push(token_id)
        self.num_tokens += 1
        self._seen += len(text)
        self._sent += len(text)
        return Piece(text, token_ids=token_ids)

    def _take(self, new: str, text: list[str]) -> bool:
        """Appends to `text` what is final of `new`. Returns whether a stop string is complete."""
        if not new:
            return False
        self._seen += len(new)
        stopped = False
        if self.num_tokens > self._min_tokens:
            new, stopped = self._stop.push(new)
        self._sent += len(new)
        text.append(new)
        self.is_cut |= stopped
        return stopped
