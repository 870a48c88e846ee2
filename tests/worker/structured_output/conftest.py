"""A vocabulary of bytes and a few longer tokens, and random walks through grammars over it."""

import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgrammar
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from worker.structured_output import GrammarCompiler
from worker.structured_output.compiling.process import CompilerProcess
from worker.structured_output.matching.engines import CompiledText

_EOS = 256

_LONGER = [
    '"',
    '":',
    '": ',
    '", "',
    '"}',
    '"]',
    "},",
    "}}",
    "]]",
    "true",
    "null",
    "fals",
    " the",
    "ab",
    "12",
    "0.5",
    "\n\n",
    "  ",
]
_LONGER += ["\\n", '\\"', "é", "中文", "😀", "-1", "e+", "http", "://", "a\nb", '{"a', "[1,", "[[", "{}", "[]", '"a"']
_ENDERS = frozenset('"]},') | {'"}', '"]', "}}", "]]"}


class Walker:
    """Follows grammars given as xgrammar's EBNF, token by token."""

    def __init__(self) -> None:
        self.tokens = [bytes([b]) for b in range(256)] + [text.encode() for text in dict.fromkeys(_LONGER)] + [b""]
        self.eos = len(self.tokens) - 1
        info = xgrammar.TokenizerInfo(self.tokens, xgrammar.VocabType.RAW, stop_token_ids=[self.eos])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self.compile = lru_cache(8)(self._compiler.compile_grammar)
        self._bitmask = xgrammar.allocate_token_bitmask(1, len(self.tokens))
        self._enders = [i for i, token in enumerate(self.tokens) if token.decode("utf-8", "ignore") in _ENDERS]

    def allowed(self, matcher: xgrammar.GrammarMatcher) -> list[int]:
        matcher.fill_next_token_bitmask(self._bitmask)
        bits = np.unpackbits(self._bitmask.numpy().view(np.uint8)[0], bitorder="little")[: len(self.tokens)]
        return np.flatnonzero(bits).tolist()

    def walk(self, ebnf: str, seed: int, max_tokens: int = 400) -> bytes | None:
        """A random text of the grammar, or None if it did not end in time. Never runs into a dead end."""
        matcher = xgrammar.GrammarMatcher(self.compile(ebnf))
        choose = random.Random(seed)
        eagerness = choose.choice([0.1, 0.4, 0.8])  # to end strings, lists, everything
        out = b""
        for _ in range(max_tokens):
            allowed = self.allowed(matcher)
            assert allowed, f"dead end after {out!r}"
            ending = [i for i in (self.eos, *self._enders) if i in set(allowed)]
            token = choose.choice(ending if ending and choose.random() < eagerness else allowed)
            assert matcher.accept_token(token)
            out += self.tokens[token]
            if matcher.is_terminated():
                return out
        return None

    def accepts(self, ebnf: str, text: str | bytes) -> bool:
        """Whether the text, byte by byte, is one of the grammar's."""
        matcher = xgrammar.GrammarMatcher(self.compile(ebnf))
        data = text.encode() if isinstance(text, str) else text
        return all(matcher.accept_token(byte) for byte in data) and matcher.accept_token(self.eos)


@pytest.fixture(scope="session")
def walker() -> Walker:
    return Walker()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of a model whose 256 tokens are bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def made(folder: Path) -> Iterator[Callable[..., GrammarCompiler]]:
    """Compilers that are closed after the test."""
    compilers = []

    def make(**options: Any) -> GrammarCompiler:
        compilers.append(GrammarCompiler(folder, _EOS + 1, 20.0, [_EOS], **options))
        return compilers[-1]

    yield make
    for each in compilers:
        each.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that processes were asked to compile."""
    texts = []
    compile_ = CompilerProcess.compile

    def count(self: CompilerProcess, kind: str, text: str, *rest: Any, **strict: Any) -> CompiledText:
        texts.append(text)
        return compile_(self, kind, text, *rest, **strict)

    monkeypatch.setattr(CompilerProcess, "compile", count)
    return texts
