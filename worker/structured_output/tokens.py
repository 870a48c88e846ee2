"""Bytes that each token of a vocabulary stands for."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from worker.structured_output.error import GrammarError


def token_bytes(model_dir: Path, vocab_size: int) -> list[bytes]:
    """The bytes of token ids 0 to `vocab_size` - 1. Empty for special tokens, which a grammar must never allow, and for
    ids that the tokenizer does not have. Raises GrammarError if there is no tokenizer.json."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise GrammarError("this model has no tokenizer.json, which grammars need")
    tokenizer = Tokenizer.from_file(str(path))
    spell = _speller(json.loads(tokenizer.to_str()))
    texts = [b""] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
        if token_id < vocab_size:
            texts[token_id] = spell(token)
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if token_id < vocab_size:
            texts[token_id] = b"" if added.special else added.content.encode()
    return texts


def _speller(tokenizer: dict[str, Any]) -> Any:
    """A function from a token of this tokenizer's vocabulary to its bytes. Vocabularies are byte-level (GPT-2's
    alphabet), SentencePiece's, or plain text."""
    parts = json.dumps([tokenizer.get("decoder"), tokenizer.get("pre_tokenizer")])
    if '"ByteLevel"' in parts:
        alphabet = _byte_level_alphabet()
        return lambda token: b"".join(alphabet.get(char, char.encode()) for char in token)
    if '"Metaspace"' in parts or "\\u2581" in parts or '"ByteFallback"' in parts:
        return _sentencepiece
    return str.encode


def _byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's alphabet: printable Latin-1 characters stand for their own bytes, characters from U+0100 on for the
    others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): bytes([b]) for b in printable} | {chr(0x100 + i): bytes([b]) for i, b in enumerate(others)}


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
