"""Bytes that each token of a vocabulary stands for."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from worker.formats.token_bytes import BYTE_FALLBACK, BYTE_LEVEL, SPACE
from worker.structured_output.error import GrammarError

# Begin the bytes of tokens that a grammar may allow by their ids only. No text in UTF-8 has the first. The second is a
# control character that grammars of calls exclude from texts; the notation of grammars can only exclude characters.
BY_ID = b"\xff"
APART = "\x01"


class GrammarVocabulary:
    """The tokens of a model.

    | attribute | meaning |
    | --- | --- |
    | `added` | ids of added tokens by their texts |
    | `special` | those of them that are no text, which a grammar allows by their ids only |
    | `end_ids` | tokens that end an output |
    """

    def __init__(self, model_dir: Path, vocab_size: int, end_ids: Collection[int] = ()) -> None:
        """Raises GrammarError if there is no tokenizer.json."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise GrammarError("this model has no tokenizer.json, which grammars need")
        tokenizer = Tokenizer.from_file(str(path))
        spell = _speller(json.loads(tokenizer.to_str()))
        texts = [b""] * vocab_size
        for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
            if token_id < vocab_size:
                texts[token_id] = spell(token)
        added = {i: each for i, each in tokenizer.get_added_tokens_decoder().items() if i < vocab_size}
        for token_id, each in added.items():
            texts[token_id] = (BY_ID if each.special else b"") + each.content.encode()
        self.special: Mapping[str, int] = {each.content: i for i, each in added.items() if each.special}
        self._texts = texts
        self.added: Mapping[str, int] = {each.content: token_id for token_id, each in added.items()}
        self.end_ids = frozenset(end_ids)

    def token_bytes(self, apart: Collection[str] = ()) -> list[bytes]:
        """The bytes of all token ids. A grammar allows special tokens only by their ids. With `apart`, these and the
        added tokens in it begin with `APART`. Empty for ids that the tokenizer does not have."""
        texts = list(self._texts)
        if apart:
            for token_id in self.ids_apart(apart):
                texts[token_id] = APART.encode() + texts[token_id].removeprefix(BY_ID)
        return texts

    def lazy_bytes(self, apart: Collection[str] = ()) -> list[bytes]:
        """As `token_bytes`, for llguidance: of tokens that stand for no text, it needs no character to tell them by."""
        texts = list(self._texts)
        for token_id in self.ids_apart(apart) - {*self.special.values()}:
            texts[token_id] = BY_ID + texts[token_id]
        return texts

    def ids_apart(self, texts: Collection[str]) -> set[int]:
        """The tokens that stand for no text where these texts do not either."""
        return {*self.special.values(), *(self.added[text] for text in texts if text in self.added)}


def _speller(tokenizer: dict[str, Any]) -> Any:
    """A function from a token of this tokenizer's vocabulary to its bytes. Vocabularies are byte-level (GPT-2's
    alphabet), SentencePiece's, or plain text."""
    parts = json.dumps([tokenizer.get("decoder"), tokenizer.get("pre_tokenizer")])
    if '"ByteLevel"' in parts:
        alphabet = {character: bytes([value]) for character, value in BYTE_LEVEL.items()}
        return lambda token: b"".join(alphabet.get(char, char.encode()) for char in token)
    if '"Metaspace"' in parts or "\\u2581" in parts or '"ByteFallback"' in parts:
        return _sentencepiece
    return str.encode


def _sentencepiece(token: str) -> bytes:
    byte = BYTE_FALLBACK.get(token)
    return token.replace(SPACE, " ").encode() if byte is None else byte
