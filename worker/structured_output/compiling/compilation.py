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

from worker.formats.written import MARKERS
from worker.structured_output.compiling.answer_verdict import AnswerToCheck, answer_verdict
from worker.structured_output.compiling.client_lark import client_lark, is_lark, lark_error
from worker.structured_output.compiling.forks import in_fork
from worker.structured_output.compiling.serialised import serialised
from worker.structured_output.conversion.relaxation import Relaxed
from worker.structured_output.conversion.schema import schema_grammar, schema_places
from worker.structured_output.conversion.text_rules import text_rules
from worker.structured_output.error import GrammarError
from worker.structured_output.json_schema.unique_places import Place
from worker.structured_output.matching.engines import (
    LLGUIDANCE,
    XGRAMMAR,
    XGRAMMAR_BYTES,
    XGRAMMAR_CPU_S,
    engine_for,
    needs_llguidance,
)
from worker.structured_output.matching.lazy_grammar import LazyGrammar
from worker.structured_output.matching.lazy_matcher import LazyMatcher, LazyVocabulary
from worker.structured_output.rules.charset import category
from worker.structured_output.rules.ebnf import START, Node, Ref, prune, rule_text, seq, to_text
from worker.structured_output.rules.lark import can_follow_markers, to_lark, unique_items
from worker.structured_output.tokens import GrammarVocabulary
from worker.structured_output.tool_calls.markers import Speller
from worker.structured_output.tool_calls.structural_tag import structural_tag_rules
from worker.structured_output.tool_calls.tool_calls import tool_call_rules

RAW_VOCABULARY = 0  # xgrammar.VocabType.RAW: tokens are given as bytes
TEXT_KINDS = ("json_schema", "json_object", "regex", "choice")
_TRIAL_TOKENS = 48
_LAZY_TRIAL_TOKENS = 16  # each may take a millisecond
SLOW_FILL_S = 0.25
_NUM_TRIALS = 3


class CompiledBytes(NamedTuple):
    """A compiled grammar: for which engine, as `serialised` or `to_lark` writes it, the places of unique items, what of
    its schema it leaves out, and where it is narrower."""

    engine: str
    data: bytes
    places: list[Place]
    not_enforced: list[str]
    narrowed: list[str]


def after(marker: str, begin: str | None, ebnf: str, vocabulary: GrammarVocabulary) -> tuple[str, str]:
    """The grammar of free text up to the marker, and then what `ebnf` matches from its rule `root` on. `begin`: as
    `messages.Grammar` has it. Returns the grammar with the name of the rule to begin with."""
    root = "after"
    while root in ebnf:
        root += "_"
    return f"{ebnf}\n{rule_text(root, _after(marker, begin, 'root', vocabulary))}\n", root


def _after(marker: str, begin: str | None, start: str, vocabulary: GrammarVocabulary) -> Node:
    if not marker or begin == "":
        raise GrammarError("the marker that a grammar comes after is empty")
    speller = Speller((*MARKERS, marker, *([] if begin is None else [begin])), vocabulary.added)
    return seq(speller.thinking_before(marker, begin), Ref(start))


def kept_apart(kind: str) -> tuple[str, ...]:
    """Tokens that a grammar of this kind allows only where it names them, never as text."""
    return MARKERS if kind == "tool_calls" else ()


def keeps_markers_apart(kind: str, marker: str | None) -> bool:
    """Whether llguidance follows a grammar of this kind, whose `after` is `marker`, with tokens of markers that stand
    for no text."""
    return kind == "tool_calls" or marker is not None


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
        texts = self._vocabulary.lazy_bytes()
        apart = self._vocabulary.lazy_bytes(MARKERS)
        plain = LazyVocabulary(texts, eos_token_ids)
        self._lazy = plain, plain if apart == texts else LazyVocabulary(apart, eos_token_ids)
        for escape in "dsw":
            category(escape)  # kept for the forks, each of which would need 0.1 s for one
        self._threads = max(1, min(4, (os.cpu_count() or 1) // 2))

    def run(
        self, kind: str, text: str, marker: str | None = None, begin: str | None = None, *, strict: bool = True
    ) -> CompiledBytes:
        """Compiles a `messages.Grammar`, whose `after` is `marker`. Raises GrammarError or MemoryError."""
        not_enforced, narrowed, lexes = list[str](), list[str](), True
        try:
            if kind == "ebnf":
                return self._of_client(text, marker, begin)
            if not strict and kind == "json_schema":
                relaxed = Relaxed(text)
                text, not_enforced, narrowed = json.dumps(relaxed.schema), relaxed.not_enforced, relaxed.narrowed
                rules, start = relaxed.rules, START
            elif kind == "json_schema":
                (rules, narrowed), start = schema_grammar(text), START
            elif kind == "tool_calls":
                rules, start, lexes = tool_call_rules(text, self._vocabulary)
            elif kind == "structural_tag":
                rules, start, lexes = *structural_tag_rules(text, self._vocabulary), False
            elif kind in TEXT_KINDS:
                rules, start = text_rules(kind, text), START
            else:
                raise GrammarError(f"there is no kind of grammar called {kind!r}")
            if marker is not None:
                rules, start = {**rules, "after": _after(marker, begin, start, self._vocabulary)}, "after"
            if kind == "structural_tag" or keeps_markers_apart(kind, marker):
                found = self._marked(rules, start, kind, lexes=lexes)
            else:
                found = self._with_rules(rules, schema_places(text) if unique_items(rules) else [])
            return found._replace(not_enforced=not_enforced, narrowed=narrowed)
        except RecursionError:
            raise GrammarError("the grammar is nested too deeply") from None

    def _of_client(self, text: str, marker: str | None, begin: str | None) -> CompiledBytes:
        """Compiles a grammar in the client's own words."""
        if not is_lark(text):
            ebnf, root = (text, "root") if marker is None else after(marker, begin, text, self._vocabulary)
            return CompiledBytes(XGRAMMAR, self._with_xgrammar("ebnf", ebnf, root), [], [], [])
        if marker is not None:
            raise GrammarError(
                "a grammar in Lark cannot follow the model's thinking: turn thinking off, or write rules in EBNF, "
                'such as root ::= "a"'
            )
        lark = self._with_llguidance(client_lark(text), self._lazy[False], [], lark_error)
        return CompiledBytes(LLGUIDANCE, lark, [], [], [])

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
                return CompiledBytes(XGRAMMAR, found, [], [], [])
        lark = self._with_llguidance(to_lark(rules, START), self._lazy[False], places, _readable)
        return CompiledBytes(LLGUIDANCE, lark, places, [], [])

    def _marked(self, rules: dict[str, Node], start: str, kind: str, *, lexes: bool) -> CompiledBytes:
        """Compiles rules in which markers stand apart from text. xgrammar, whose masks of free text cost nothing,
        follows all but those whose strings it cannot follow. `lexes`: as `CallRules` has it."""
        rules = prune(rules, start) or {}
        if (found := unique_items(rules)) is not None:
            raise GrammarError(f"{found.what} is not supported in calls of tools, and after thinking")
        lexes = lexes and can_follow_markers(rules, self._vocabulary.ids_apart(MARKERS))
        if not lexes or not needs_llguidance(rules):
            return CompiledBytes(XGRAMMAR, self._with_xgrammar(kind, to_text(rules, start), "root"), [], [], [])
        lark = self._with_llguidance(to_lark(rules, start), self._lazy[True], [], _readable)
        return CompiledBytes(LLGUIDANCE, lark, [], [], [])

    def _with_llguidance(
        self, lark: str, vocabulary: LazyVocabulary, places: list[Place], readable: Callable[[str], str]
    ) -> bytes:
        """`readable`: what the client is told of llguidance's error."""

        def matcher() -> LazyMatcher:
            try:
                return LazyGrammar(lark, vocabulary, places).matcher()
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
        a slow grammar has `_NUM_TRIALS` trials, each with a matcher that has no mask yet."""
        for _ in range(_NUM_TRIALS):
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
