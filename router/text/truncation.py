"""Prompts that are cut to a number of tokens where the client asks for it (vLLM's `truncate_prompt_tokens`, and
`truncate` as Cohere and text-embeddings-inference have it)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from router.text.tokenizer import CHARACTERS_PER_TOKEN, Tokenizer
from router.wire.errors import invalid

Side = Literal["left", "right"]


@dataclass(frozen=True)
class Truncation:
    """The part of a prompt that a client allows to be cut. `most`: tokens of a prompt; None for as many as fit.
    `side`: where tokens are cut off."""

    most: int | None
    side: Side

    @classmethod
    def asked(cls, request: Any, default: Side) -> "Truncation | None":
        """The truncation that a request asks for; None if its prompts must fit. `default`: the side that is cut unless
        it names one. Raises ApiError."""
        most, truncate = request.truncate_prompt_tokens, getattr(request, "truncate", None)
        if most == 0:
            raise invalid("'truncate_prompt_tokens' is 0: a prompt has at least one token.", "truncate_prompt_tokens")
        if truncate in (None, False, "NONE"):
            if most is None:
                return None
        elif truncate == "START":
            default = "left"
        return cls(None if most in (None, -1) else most, request.truncation_side or default)

    def cut(self, token_ids: list[int], room: int) -> list[int]:
        """As many of the tokens as are allowed. `room`: how many fit."""
        most = max(0, room if self.most is None else self.most)
        if len(token_ids) <= most:
            return token_ids
        return token_ids[:most] if self.side == "right" else token_ids[len(token_ids) - most :]

    def part(self, text: str, room: int) -> str:
        """A part of a long text that is surely enough: all of a large body need not be tokenised."""
        most = 2 * CHARACTERS_PER_TOKEN * max(1, room if self.most is None else self.most)
        return text if len(text) <= most else text[:most] if self.side == "right" else text[-most:]

    def tokens(self, text: str, tokenizer: Tokenizer, room: int) -> list[int]:
        """The tokens of a text with the tokenizer's special ones, of which none is cut."""
        part = self.part(text, room)
        token_ids = tokenizer.encode(part)
        if len(self.cut(token_ids, room)) == len(token_ids):
            return token_ids
        before, after = _around(tokenizer.encode)
        least = len(before) + len(after)
        inside = Truncation(None if self.most is None else max(0, self.most - least), self.side)
        return before + inside.cut(tokenizer.encode(part, False), room - least) + after


def _around(encode: Callable[..., list[int]]) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before a text, and after it."""
    text = "a"
    bare, whole = encode(text, False), encode(text)
    at = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return whole[:at], whole[at + len(bare) :]
