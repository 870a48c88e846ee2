"""From a grammar's text to a compiled grammar: compiled in another process, cached here and on disk."""

import contextlib
import ctypes
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.client_turns import ClientTurns
from worker.formats.written import MARKERS
from worker.messages import Grammar
from worker.structured_output.compiling.answer_verdict import AnswerToCheck, AnswerVerdict
from worker.structured_output.compiling.compilation import keeps_markers_apart, kept_apart
from worker.structured_output.compiling.grammar_store import GrammarStore, identity
from worker.structured_output.compiling.process import CompilerProcess
from worker.structured_output.compiling.recent_cpu import RecentCpu
from worker.structured_output.error import CompilerUnavailable, GrammarError
from worker.structured_output.matching.engines import LLGUIDANCE, CompiledText
from worker.structured_output.matching.lazy_grammar import LAZY_BYTES, LAZY_BYTES_PER_BYTE, LazyGrammar
from worker.structured_output.matching.lazy_matcher import LazyVocabulary
from worker.structured_output.matching.state import CompiledGrammar
from worker.structured_output.tokens import GrammarVocabulary

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger(__name__)

_MAX_MEMORY_WAIT_S = 60.0  # longest wait for memory, until requests with large grammars end
_MAX_QUEUED_S = 60.0  # longest wait for a thread, while other grammars compile
_WORTH_A_TRIM_BYTES = 1 << 20
_MAX_AT_ONCE, _MAX_OF_ONE_CLIENT = 3, 2  # grammars that compile
_REFUSED_S = 600.0  # for which a refusal is remembered: one that took too long might not at another time
_MAX_REFUSED_CHARS = 4 << 20  # of grammars and refusals


@dataclass(eq=False)
class _Asked:
    """A grammar that compiles, or is compiled. `asked_s`: when it was asked for last. `waiting`: requests that wait for
    it. `is_counted`: whether its bytes are among those of the cache."""

    asked_s: float = field(default_factory=time.monotonic)
    waiting: int = 0
    is_counted: bool = False
    future: "Future[CompiledGrammar]" = field(init=False)


class GrammarCompiler:
    """Compiles grammars in the background, and caches those used last.

    - Clients take turns: one that asks for many slow grammars waits for them itself. Whose grammars have taken more
      than a part of the machine lately (`RecentCpu`) compiles with a low priority, so that others' tokens do not wait.
    - A grammar for which no request waits any more is dropped, if its turn has not come.
    - Refusals are remembered for a while, too.
    - The cache takes up to `cache_bytes`. Evicted grammars that requests still hold may take as much again; then no
      other is compiled until some are freed.
    - With a folder, compiled grammars are also kept on disk, where all replicas of the machine find them. Of several
      replicas that need a grammar at once, one compiles it.
    - Reading the text of a compiled grammar takes ten times the text's size for a moment. So one is read at a time, and
      its memory is returned to the system.
    """

    def __init__(
        self,
        model_dir: Path | str,
        vocab_size: int,
        timeout_s: float,
        eos_token_ids: Iterable[int],
        *,
        memory_bytes: int = 1 << 30,
        cache_bytes: int = 256 << 20,
        folder: Path | None = None,
    ) -> None:
        """`model_dir` holds tokenizer.json. `vocab_size` is that of the logits. Compiling a grammar may take
        `timeout_s` seconds of CPU time and `memory_bytes`. Cached grammars may take `cache_bytes` together. `folder`:
        where compiled grammars are kept; without one they are not."""
        self._model_dir = Path(model_dir)
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._timeout_s = timeout_s
        self._cache_bytes = cache_bytes
        self._memory_bytes, self._folder = memory_bytes, folder
        self._process = CompilerProcess(self._model_dir, vocab_size, self._eos_token_ids, memory_bytes=memory_bytes)
        self._lock = threading.Lock()
        self._info_lock = threading.Lock()
        self._vocabulary: GrammarVocabulary | None = None
        self._lazy: dict[bool, LazyVocabulary] = {}
        self._infos: dict[tuple[str, ...], xgrammar.TokenizerInfo] = {}
        self._kept: OrderedDict[Grammar, _Asked] = OrderedDict()
        self._refused: dict[Grammar, tuple[GrammarError, float]] = {}  # and until when
        self._refused_chars = 0
        self._reading = threading.Lock()
        self._room = threading.Condition()
        self._bytes = 0  # of all grammars, in the cache or held by requests
        self._closed = threading.Event()
        self._cached_bytes = 0  # of those in the cache
        self._recent_cpu = RecentCpu()
        self._compiling = ClientTurns(_MAX_AT_ONCE, "grammar", each=_MAX_OF_ONE_CLIENT)
        self._judging = ClientTurns(2, "answers", each=1)
        if (self._model_dir / "tokenizer.json").is_file():  # otherwise requests with a grammar get an error
            self._compiling.submit("", self._process.start)
            self._compiling.submit("", self._lazy_vocabulary)

    def submit(self, grammar: Grammar, client: str = "") -> "Future[CompiledGrammar]":
        """Compiles a grammar in a turn of `client`, or takes it from the cache. Raises RuntimeError after `close`.

        The future fails with GrammarError if the grammar is at fault (the message is for the client), and with
        CompilerUnavailable if the machine is. Cancelling it does not affect other requests for the same grammar.
        """
        own: Future[CompiledGrammar] = Future()
        with self._lock:
            if (refusal := self._refusal(grammar)) is not None:
                own.set_exception(refusal)
                return own
            asked = self._kept.get(grammar)
            fresh = asked is None
            if asked is None:
                asked = _Asked()
                asked.future = self._compiling.submit(client, partial(self._compile, grammar, asked, client))
                self._kept[grammar] = asked
            else:
                self._compiling.join(client, asked.future)
                asked.asked_s = time.monotonic()
            asked.waiting += 1
            self._kept.move_to_end(grammar)
        if fresh:
            asked.future.add_done_callback(lambda done: self._settle(grammar, done))
        known = weakref.ref(asked)  # what is compiled is freed at once, so nothing that it has may lead back to it
        own.add_done_callback(lambda done: self._leave(grammar, known(), done))
        asked.future.add_done_callback(lambda done: _pass_on(done, own))
        return own

    def check(self, answer: AnswerToCheck, client: str = "") -> "Future[AnswerVerdict]":
        """Judges an answer by its schema, in the background, in a turn of `client` and within the limits of a
        compilation. The future fails with GrammarError if the schema takes too much, and with CompilerUnavailable if
        the machine is at fault."""
        return self._judging.submit(client, lambda: self._process.check(answer, self._timeout_s))

    def close(self) -> None:
        """Ends the process and the threads. Compilations in flight fail."""
        self._compiling.close()
        self._judging.close()
        self._closed.set()
        with self._room:
            self._room.notify_all()
        self._process.close()
        self._compiling.wait()
        self._judging.wait()

    @property
    def pid(self) -> int | None:
        """The id of the process that compiles, if there is one."""
        return self._process.pid

    def _compile(self, grammar: Grammar, asked: _Asked, client: str) -> CompiledGrammar:
        """Raises CompilerUnavailable if its turn comes too late: then those after it wait less."""
        if time.monotonic() - asked.asked_s > _MAX_QUEUED_S:
            raise CompilerUnavailable(f"the grammars of other requests took more than {_MAX_QUEUED_S:g} s to compile")
        info = self._tokenizer_info(grammar.kind)
        self._wait_for_room()
        found = self._compiled_text(grammar, client)
        with self._reading:
            return self._read(found, grammar, info)

    def _compiled_text(self, grammar: Grammar, client: str) -> CompiledText:
        """From disk, or compiled."""
        store = self._store
        if store is None:
            return self._ask_process(grammar, client)
        if (found := store.read(grammar)) is None:
            with store.alone(grammar, self._closed):
                if (found := store.read(grammar)) is None:  # by another replica
                    found = self._ask_process(grammar, client)
                    store.write(grammar, found)
        return found

    def _ask_process(self, grammar: Grammar, client: str) -> CompiledText:
        began_s, cpu_s = time.monotonic(), None
        try:
            found = self._process.compile(
                grammar.kind,
                grammar.text,
                self._timeout_s,
                grammar.after,
                grammar.begin,
                strict=grammar.strict,
                yields=self._recent_cpu.is_much(client),
            )
            cpu_s = found.cpu_s
        finally:  # what a grammar took that was refused is not told
            wall_s = time.monotonic() - began_s
            self._recent_cpu.add(client, min(self._timeout_s, wall_s) if cpu_s is None else cpu_s)
        log.info("a grammar (%s) is followed by %s: %.3f s of CPU", grammar.kind, found.engine, found.cpu_s)
        return found

    @cached_property
    def _store(self) -> GrammarStore | None:
        """Made by the first grammar: it takes the digest of the tokenizer."""
        if self._folder is None:
            return None
        limits = self._timeout_s, self._memory_bytes
        return GrammarStore(self._folder, identity(self._model_dir, self._vocab_size, self._eos_token_ids, *limits))

    def _read(self, found: CompiledText, grammar: Grammar, info: "xgrammar.TokenizerInfo") -> CompiledGrammar:
        import xgrammar

        if found.engine == LLGUIDANCE:
            vocabulary = self._lazy_vocabulary(apart=keeps_markers_apart(grammar.kind, grammar.after))
            handle: Any = LazyGrammar(found.text, vocabulary, found.places)
            size_bytes = LAZY_BYTES + LAZY_BYTES_PER_BYTE * len(found.text)
        else:
            handle = xgrammar.CompiledGrammar.deserialize_json(found.text, info)
            # The size that xgrammar reports leaves out the automata of rules, which may be most of it. The text has
            # them.
            size_bytes = len(found.text)
        compiled = CompiledGrammar(
            handle,
            grammar.kind,
            size_bytes,
            engine=found.engine,
            cpu_s=found.cpu_s,
            not_enforced=found.not_enforced,
            narrowed=found.narrowed,
        )
        with self._room:
            self._bytes += compiled.size_bytes
        weakref.finalize(compiled, self._gone, compiled.size_bytes).atexit = False
        if compiled.size_bytes > _WORTH_A_TRIM_BYTES:
            _trim()
        return compiled

    def _wait_for_room(self) -> None:
        """Waits while grammars, including evicted ones that requests still hold, take too much memory. Raises
        CompilerUnavailable after `_MAX_MEMORY_WAIT_S`."""
        with self._room:
            if not self._room.wait_for(
                lambda: self._closed.is_set() or self._bytes <= 2 * self._cache_bytes, _MAX_MEMORY_WAIT_S
            ):
                raise CompilerUnavailable("the grammars of other requests take all memory that there is for grammars")

    def _gone(self, size_bytes: int) -> None:
        with self._room:
            self._bytes -= size_bytes
            self._room.notify_all()

    def _tokenizer_info(self, kind: str) -> "xgrammar.TokenizerInfo":
        """The vocabulary for grammars of a kind, equal to that of the process: xgrammar compares them."""
        import xgrammar

        apart = kept_apart(kind)
        with self._info_lock:
            if self._vocabulary is None:
                self._vocabulary = GrammarVocabulary(self._model_dir, self._vocab_size)
            if apart not in self._infos:
                self._infos[apart] = xgrammar.TokenizerInfo(
                    self._vocabulary.token_bytes(apart),
                    xgrammar.VocabType.RAW,
                    vocab_size=self._vocab_size,
                    stop_token_ids=self._eos_token_ids,
                )
            return self._infos[apart]

    def _lazy_vocabulary(self, *, apart: bool = False) -> LazyVocabulary:
        """The vocabulary of llguidance's grammars. `apart`: tokens of markers stand for no text."""
        self._tokenizer_info("")  # makes the vocabulary
        with self._info_lock:
            if apart not in self._lazy:
                assert self._vocabulary is not None
                plain, texts = self._vocabulary.lazy_bytes(), self._vocabulary.lazy_bytes(MARKERS if apart else ())
                same = self._lazy.get(not apart) if texts == plain else None
                self._lazy[apart] = same or LazyVocabulary(texts, self._eos_token_ids)
            return self._lazy[apart]

    def _settle(self, grammar: Grammar, done: "Future[CompiledGrammar]") -> None:
        """Drops a grammar that failed, and remembers why if it is at fault itself. Otherwise evicts the least recently
        used while the cache is too large."""
        evicted = []  # freed after the lock is released
        with self._lock:
            error = None if done.cancelled() else done.exception()
            if isinstance(error, GrammarError):
                self._refuse(grammar, error)
            if not self._keeps(grammar, done):
                return  # no request waited for it any more when its turn came
            if done.cancelled() or error is not None:
                del self._kept[grammar]
                return
            self._cached_bytes += done.result().size_bytes
            self._kept[grammar].is_counted = True
            while self._cached_bytes > self._cache_bytes:  # of what has not been counted yet, nothing is taken off
                oldest = next(kept for kept, each in self._kept.items() if each.is_counted)
                if oldest == grammar:
                    break
                evicted.append(self._kept.pop(oldest))
                self._cached_bytes -= evicted[-1].future.result().size_bytes
        if evicted:
            evicted.clear()
            _trim()

    def _leave(self, grammar: Grammar, asked: _Asked | None, own: "Future[CompiledGrammar]") -> None:
        """Drops a grammar whose turn has not come, if this was the last request that waited for it."""
        if asked is None or not own.cancelled():
            return
        with self._lock:
            asked.waiting -= 1
            has_begun = asked.future.running() or asked.future.done()
            if asked.waiting or has_begun or not self._keeps(grammar, asked.future):
                return
            del self._kept[grammar]
        asked.future.cancel()

    def _keeps(self, grammar: Grammar, future: "Future[CompiledGrammar]") -> bool:
        asked = self._kept.get(grammar)
        return asked is not None and asked.future is future

    def _refusal(self, grammar: Grammar) -> GrammarError | None:
        """The error of a grammar that was refused, while it is remembered."""
        error, until_s = self._refused.get(grammar, (None, 0.0))
        if error is None or time.monotonic() < until_s:
            return error
        self._forget(grammar)
        return None

    def _refuse(self, grammar: Grammar, error: GrammarError) -> None:
        self._forget(grammar)
        self._refused[grammar] = error, time.monotonic() + _REFUSED_S
        self._refused_chars += _chars(grammar, error)
        while self._refused_chars > _MAX_REFUSED_CHARS:
            self._forget(next(iter(self._refused)))

    def _forget(self, grammar: Grammar) -> None:
        error, _ = self._refused.pop(grammar, (None, 0.0))
        if error is not None:
            self._refused_chars -= _chars(grammar, error)


def _chars(grammar: Grammar, error: GrammarError) -> int:
    return len(grammar.text) + len(str(error)) + 200  # and what an entry takes by itself


def _trim() -> None:
    """Returns free memory to the system. By itself, glibc does not if memory in use lies above it."""
    with contextlib.suppress(AttributeError):  # only GNU's C library has this function
        ctypes.CDLL(None).malloc_trim(0)


def _pass_on(done: "Future[CompiledGrammar]", own: "Future[CompiledGrammar]") -> None:
    if not own.set_running_or_notify_cancel():
        return
    if done.cancelled():
        own.set_exception(RuntimeError("the compiler is closed"))
    elif (error := done.exception()) is not None:
        own.set_exception(error)
    else:
        own.set_result(done.result())
