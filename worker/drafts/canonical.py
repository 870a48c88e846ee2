"""Texts as the tokens that a model writes them in."""

import json
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from worker.structured_output.tokens import GrammarVocabulary

_MAX_CACHED_TEXTS = 8192
_MAX_CACHED_BYTES = 1024
_MAX_CUT_TOKENS = 4


class TokenisedText(NamedTuple):
    """A text in tokens.

    | field | meaning |
    | --- | --- |
    | `token_ids` | the tokens |
    | `num_certain` | as many of them stay the same whatever follows the text: no longer token begins within the last ones |
    """  # noqa: E501

    token_ids: tuple[int, ...]
    num_certain: int


class CanonicalTokenizer:
    """Tokenises pieces of text that stand within longer ones: without tokens or spaces that only a text's beginning
    has. Byte-level and SentencePiece vocabularies."""

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        """Raises GrammarError if there is no tokenizer.json."""
        texts = GrammarVocabulary(model_dir, vocab_size).token_bytes()
        self.token_bytes = texts
        """The bytes of every token id; empty for ids that the tokenizer does not have."""
        self._tokenizer = Tokenizer.from_str(json.dumps(_within((model_dir / "tokenizer.json").read_text())))
        self._by_text = sorted((i for i, text in enumerate(texts) if text), key=texts.__getitem__)
        self._sorted = [texts[i] for i in self._by_text]
        self._cached: OrderedDict[bytes, TokenisedText] = OrderedDict()

    def encode(self, data: bytes) -> TokenisedText:
        """The tokens of `data`. These may be of less than `data`: parts of characters at its end, and what the
        tokenizer would change, are left out."""
        found = self._cached.get(data)
        if found is not None:
            self._cached.move_to_end(data)
            return found
        found = self._encode(data)
        if len(data) <= _MAX_CACHED_BYTES:
            self._cached[data] = found
            if len(self._cached) > _MAX_CACHED_TEXTS:
                self._cached.popitem(last=False)
        return found

    def _encode(self, data: bytes) -> TokenisedText:
        begun = next((i for i, byte in enumerate(data) if byte & 0xC0 != 0x80), len(data))
        token_ids = self._character_rest(data[:begun])
        if token_ids is None:
            return TokenisedText((), 0)
        # An added token's bytes are no text, and a normalizer changes some texts: both end here.
        done = begun
        for token_id in self._tokenizer.encode(data[begun:].decode("utf-8", "ignore"), add_special_tokens=False).ids:
            text = self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""
            if not text or not data.startswith(text, done):
                break
            token_ids.append(token_id)
            done += len(text)
        return TokenisedText(tuple(token_ids), self._certain(token_ids, data[done:]))

    def _character_rest(self, rest: bytes) -> list[int] | None:
        """Tokens of the last bytes of a character; None if there are none."""
        whole = self._token_of(rest)
        if not rest or whole is not None:
            return [] if whole is None else [whole]
        single = [self._token_of(rest[i : i + 1]) for i in range(len(rest))]
        return None if None in single else [each for each in single if each is not None]

    def _token_of(self, text: bytes) -> int | None:
        at = bisect_left(self._sorted, text)
        return self._by_text[at] if at < len(self._sorted) and self._sorted[at] == text else None

    def _certain(self, token_ids: list[int], more: bytes) -> int:
        """How many of the tokens stay, whatever follows `more`, which follows them."""
        certain, rest = len(token_ids), more
        for count in range(len(token_ids), max(-1, len(token_ids) - _MAX_CUT_TOKENS - 1), -1):
            if count < len(token_ids):
                rest = self.token_bytes[token_ids[count]] + rest
            if rest and self._begins_longer(rest):
                certain = count
        return certain

    def _begins_longer(self, text: bytes) -> bool:
        """Whether a token is longer than `text` and begins with it."""
        at = bisect_right(self._sorted, text)
        return at < len(self._sorted) and self._sorted[at].startswith(text)


def _within(text: str) -> Any:
    """A tokenizer.json that adds no space to the beginning of a text."""

    def changed(part: Any) -> Any:
        if isinstance(part, list):
            return [new for each in part if (new := changed(each)) is not None]
        if not isinstance(part, dict):
            return part
        if part.get("type") == "Prepend":
            return None
        part = dict(part)
        if "prepend_scheme" in part:
            part["prepend_scheme"] = "never"
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
        for inner in ("normalizers", "pretokenizers"):
            if inner in part:
                part[inner] = changed(part[inner])
        return part

    tokenizer = json.loads(text)
    for name in ("normalizer", "pre_tokenizer"):
        tokenizer[name] = changed(tokenizer.get(name))
    return {**tokenizer, "truncation": None, "padding": None}
