"""Incremental detokenisation: one token at a time, with no character cut in two.

Text is made from the bytes of the tokens (`TokenBytes`), not by decoding ever longer lists of tokens. So each token
costs the same, and the streamed text always equals the text of all tokens decoded at once.
"""

import codecs
import json
from collections.abc import Iterable
from typing import Any

import tokenizers

_BYTE_TOKENS = {f"<0x{value:02X}>": bytes([value]) for value in range(256)}


class TokenBytes:
    """The bytes that each token of a vocabulary contributes to a text. `texts`: those of tokens that were asked for, as
    text; None for a token that is not whole characters.

    Supports the two families of decoders that language models use. ByteLevel: GPT-2, Llama 3, Qwen. SentencePiece,
    where a mark stands for the space and byte tokens stand for single bytes: Llama 2, Mistral, Gemma.
    `strips_first_space`: whether a text loses one space at its start, because the tokenizer put one there. Raises
    ValueError for any other decoder.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self.texts: dict[int, str | None] = {}
        self._replacements: list[tuple[str, str]] = []
        self._byte_level = self._byte_fallback = self.strips_first_space = False
        decoder = tokenizer.decoder
        if decoder is None:
            raise ValueError("tokenizer.json has no decoder, so its tokens cannot be turned into text")
        for step in _steps(json.loads(decoder.__getstate__())):
            self._add(step)

    def _add(self, step: dict[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self._replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self._replacements.append((step["replacement"], " "))
            self.strips_first_space |= step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and step["content"] == " " and step["start"] <= 1 and step["stop"] == 0:
            self.strips_first_space |= step["start"] == 1
        elif kind != "Fuse":
            raise ValueError(f"the decoder step {step} of tokenizer.json is not supported")

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an id that is no token."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._of(self._tokenizer.id_to_token(token_id))
            try:
                self.texts[token_id] = known.decode()
            except UnicodeDecodeError:
                self.texts[token_id] = None
        return known

    def _of(self, token: str | None) -> bytes:
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF[character] for character in token)
            except KeyError:  # an added token: its text is literal
                return token.encode()
        if self._byte_fallback and token in _BYTE_TOKENS:
            return _BYTE_TOKENS[token]
        for mark, text in self._replacements:
            token = token.replace(mark, text)
        return token.encode()


def _steps(decoder: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _steps(inner)
    else:
        yield decoder


def _byte_of_character() -> dict[str, int]:
    """The byte of each character in GPT-2's byte-level alphabet. Printable Latin-1 characters stand for themselves; the
    other bytes are written as the characters from U+0100 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


_BYTE_OF = _byte_of_character()


class Detokenizer:
    """The text of one sequence, token by token.

    Bytes of an incomplete character wait for the next token. Invalid UTF-8 becomes U+FFFD. Tokens in `skip` have no
    text. `continues`: the tokens continue an earlier text, so a space at their start is kept.
    """

    def __init__(self, token_bytes: TokenBytes, skip: frozenset[int] = frozenset(), continues: bool = False) -> None:
        self._bytes = token_bytes
        self._skip = skip
        self._strip = token_bytes.strips_first_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_inside_character = False  # the bytes so far end inside of one

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes: often all of the token's own text, sometimes none."""
        if token_id in self._skip:
            return ""
        # Nearly every token is whole characters, and the decoder is slow.
        text = None if self.is_inside_character else self._bytes.texts.get(token_id)
        if text is None:
            text = self._decoder.decode(self._bytes[token_id])
            self.is_inside_character = bool(self._decoder.getstate()[0])
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        """Returns U+FFFD if the tokens ended in the middle of a character, otherwise an empty text."""
        self.is_inside_character = False
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
