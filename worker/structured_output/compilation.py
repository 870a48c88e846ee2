"""Compilation of one grammar, inside the process that is made for it, for the engine that suits it."""

import importlib.util
import json
import os
import random
import re
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from worker.structured_output.answer_verdict import AnswerToCheck, answer_verdict
from worker.structured_output.call_formats import MARKERS
from worker.structured_output.client_lark import client_lark, is_lark, lark_error
from worker.structured_output.ebnf import START, Node, Ref, rule_text, seq, to_text
from worker.structured_output.engines import LLGUIDANCE, XGRAMMAR, XGRAMMAR_BYTES, XGRAMMAR_CPU_S, engine_for
from worker.structured_output.error import GrammarError
from worker.structured_output.forks import in_fork
from worker.structured_output.lark import has_unique_items, to_lark
from worker.structured_output.lazy_grammar import LazyGrammar
from worker.structured_output.lazy_matcher import LazyMatcher, LazyVocabulary
from worker.structured_output.markers import Speller
from worker.structured_output.relaxation import Relaxed
from worker.structured_output.schema import schema_places
from worker.structured_output.serialised import serialised
from worker.structured_output.structural_tag import structural_tag_to_ebnf
from worker.structured_output.text_rules import text_rules
from worker.structured_output.tokens import GrammarVocabulary
from worker.structured_output.tool_calls import tool_calls_to_ebnf
from worker.structured_output.unique_places import Place

RAW_VOCABULARY = 0  # xgrammar.VocabType.RAW: tokens are given as bytes
TEXT_KINDS = ("json_schema", "json_object", "regex", "choice")
_TRIAL_TOKENS = 48
_LAZY_TRIAL_TOKENS = 16  # each may take a millisecond
SLOW_FILL_S = 0.25
_TRIALS = 3


class CompiledBytes(NamedTuple):
    """A compiled grammar: for which engine, as `serialised` or `to_lark` writes it, the places of unique items, and
    what of its schema it leaves out."""

    engine: str
    data: bytes
    places: list[Place]
    not_enforced: list[str]


def to_ebnf(kind: str, text: str, vocabulary: GrammarVocabulary) -> str:
    """Converts any `messages.Grammar` to xgrammar's EBNF, without its `after`. Raises GrammarError."""
    match kind:
        case "tool_calls":
            return tool_calls_to_ebnf(text, vocabulary)
        case "structural_tag":
            return structural_tag_to_ebnf(text, vocabulary)
        case "json_schema" | "json_object" | "regex" | "choice":
            return to_text(text_rules(kind, text), START)
        case "ebnf":
            if is_lark(text):
                raise GrammarError(
                    "a grammar in Lark cannot follow the model's thinking: turn thinking off, or write rules in EBNF, "
                    'such as root ::= "a"'
                )
            return text
    raise GrammarError(f"there is no kind of grammar called {kind!r}")


def after(marker: str, begin: str | None, ebnf: str, vocabulary: GrammarVocabulary) -> tuple[str, str]:
    """The grammar of free text up to the marker, and then what `ebnf` matches from its rule `root` on. `begin`: as
    `messages.Grammar` has it. Returns the grammar with the name of the rule to begin with."""
    if not marker or begin == "":
        raise GrammarError("the marker that a grammar comes after is empty")
    root = "after"
    while root in ebnf:
        root += "_"
    speller = Speller((*MARKERS, marker, *([] if begin is None else [begin])), vocabulary.added)
    return f"{ebnf}\n{rule_text(root, seq(speller.thinking_before(marker, begin), Ref('root')))}\n", root


def kept_apart(kind: str) -> tuple[str, ...]:
    """Tokens that a grammar of this kind allows only where it names them, never as text."""
    return MARKERS if kind == "tool_calls" else ()


class Compilation:
    """Compiles grammars for one vocabulary."""

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._core = _xgrammar()
        self._vocab_size = vocab_size
        self._vocabulary = GrammarVocabulary(model_dir, vocab_size, eos_token_ids)
        self._infos = {
            texts: self._core.TokenizerInfo(
                self._vocabulary.token_bytes(texts), RAW_VOCABULARY, vocab_size, eos_token_ids, False
            )
            for texts in (kept_apart(""), kept_apart("tool_calls"))
        }
        self._lazy = LazyVocabulary(self._vocabulary.token_bytes(kept_apart("")), eos_token_ids)
        self._threads = max(1, min(4, (os.cpu_count() or 1) // 2))

    def run(
        self, kind: str, text: str, marker: str | None = None, begin: str | None = None, *, strict: bool = True
    ) -> CompiledBytes:
        """Compiles a `messages.Grammar`, whose `after` is `marker`. Raises GrammarError or MemoryError."""
        not_enforced, rules = list[str](), None
        try:
            if not strict and kind == "json_schema":
                relaxed = Relaxed(text)
                text, not_enforced, rules = json.dumps(relaxed.schema), relaxed.not_enforced, relaxed.rules
            if marker is None and kind in TEXT_KINDS:
                rules = text_rules(kind, text) if rules is None else rules
                places = schema_places(text) if has_unique_items(rules) else []
                return self._with_rules(rules, places)._replace(not_enforced=not_enforced)
            if marker is None and kind == "ebnf" and is_lark(text):
                return CompiledBytes(LLGUIDANCE, self._with_llguidance(client_lark(text), [], lark_error), [], [])
            ebnf, root = to_ebnf(kind, text, self._vocabulary), "root"
            if marker is not None:
                ebnf, root = after(marker, begin, ebnf, self._vocabulary)
        except RecursionError:
            raise GrammarError("the grammar is nested too deeply") from None
        return CompiledBytes(XGRAMMAR, self._with_xgrammar(kind, ebnf, root), [], not_enforced)

    def check(self, text: str) -> bytes:
        """The `AnswerVerdict` on an `AnswerToCheck`, both as JSON."""
        answer = AnswerToCheck(*json.loads(text))
        return json.dumps(answer_verdict(answer, self._vocabulary.token_bytes())).encode()

    def _with_rules(self, rules: dict[str, Node], places: list[Place]) -> CompiledBytes:
        """Compiles rules for the first engine that can follow them at a moderate cost."""
        if XGRAMMAR in engine_for(rules):
            ebnf = to_text(rules, START)
            found = in_fork(lambda: self._with_xgrammar("", ebnf, "root"), XGRAMMAR_CPU_S, XGRAMMAR_BYTES)
            if found is not None:
                return CompiledBytes(XGRAMMAR, found, [], [])
        return CompiledBytes(LLGUIDANCE, self._with_llguidance(to_lark(rules, START), places, _readable), places, [])

    def _with_llguidance(self, lark: str, places: list[Place], readable: Callable[[str], str]) -> bytes:
        """`readable`: what the client is told of llguidance's error."""

        def matcher() -> LazyMatcher:
            try:
                return LazyGrammar(lark, self._lazy, places).matcher()
            except ValueError as error:
                raise GrammarError(readable(str(error))) from None

        self._try_out(matcher, _LAZY_TRIAL_TOKENS)
        return lark.encode()

    def _with_xgrammar(self, kind: str, ebnf: str, root: str) -> bytes:
        if "\0" in ebnf:
            raise GrammarError("a grammar cannot contain the character U+0000")
        compiler = self._core.GrammarCompiler(self._infos[kept_apart(kind)], self._threads, True, -1)
        try:
            compiled = compiler.compile_grammar_from_strings(ebnf, root)
            self._try_out(lambda: self._core.GrammarMatcher(compiled, None, False, -1, None), _TRIAL_TOKENS)
            return serialised(compiled)
        except RuntimeError as error:
            if "bad_alloc" in str(error):
                raise MemoryError from None
            raise GrammarError(_readable(str(error))) from None
        except UnicodeDecodeError as error:  # xgrammar's message may contain a part of a character
            raise GrammarError(_readable(error.object.decode(errors="replace"))) from None

    def _try_out(self, new_matcher: Callable[[], Any], tokens: int) -> None:
        """Follows the grammar along random tokens. Raises GrammarError if it allows no token, or is too slow for a
        server, which waits for it at every token. A mask takes twice as long where other processes use the memory, so
        a slow grammar has `_TRIALS` trials, each with a matcher that has no mask yet."""
        for _ in range(_TRIALS):
            if self._is_quick(new_matcher(), tokens):
                return
        raise GrammarError("the grammar is too slow to follow: write it with fewer nested repetitions")

    def _is_quick(self, matcher: Any, tokens: int) -> bool:
        """Whether each of some masks takes at most `SLOW_FILL_S` of CPU time. Raises GrammarError for a grammar that
        allows no token."""
        bitmask = np.zeros((1, -(-self._vocab_size // 32)), dtype=np.int32)
        choose = random.Random(0)
        debug = () if isinstance(matcher, LazyMatcher) else (False,)  # xgrammar's classes have no defaults
        for step in range(tokens):
            began = time.thread_time()
            matcher.fill_next_token_bitmask(bitmask, 0, *debug)
            if time.thread_time() - began > SLOW_FILL_S:
                return False
            allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: self._vocab_size])
            if step == 0 and not len(allowed):
                raise GrammarError("the grammar allows no token of this model to begin with")
            if not len(allowed) or not matcher.accept_token(int(choose.choice(allowed)), *debug):
                return True
            if matcher.is_terminated():
                return True
        return True


def _readable(message: str) -> str:
    """xgrammar's message without its prefix: time, source file and condition."""
    lines = [line for line in message.splitlines() if line.strip()]
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", lines[0] if lines else "unknown error")
    text = re.sub(r"^Check failed: \(.*?\) is false: ", "", text)
    return f"the grammar does not compile: {text[:500]}"


def _xgrammar() -> Any:
    """xgrammar's C++ classes alone. The package would also import torch and transformers, which takes seconds and
    200 MB, for parts that are not needed here."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise RuntimeError("xgrammar is not installed")
    package = types.ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["xgrammar"] = package
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.tvm_ffi_binding._ffi_api")
