"""Grammars from text to what a sequence can follow: compiled elsewhere, kept here."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from worker.grammar.process import CompilerProcess
from worker.grammar.state import CompiledGrammar
from worker.grammar.tokens import token_bytes
from worker.messages import Grammar

if TYPE_CHECKING:
    import xgrammar


class GrammarCompiler:
    """Compiles grammars in the background, two at a time, and keeps those used last."""

    def __init__(
        self,
        model_dir: Path | str,
        vocab_size: int,
        timeout_s: float,
        eos_token_ids: Iterable[int],
        *,
        memory_bytes: int = 1 << 30,
        cache_bytes: int = 256 << 20,
    ) -> None:
        """`model_dir` holds tokenizer.json; `vocab_size` is that of the logits. A grammar may take `timeout_s` seconds
        and `memory_bytes` to compile. Grammars are kept until they take more than `cache_bytes` together."""
        self._model_dir = Path(model_dir)
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._timeout_s = timeout_s
        self._cache_bytes = cache_bytes
        self._process = CompilerProcess(self._model_dir, vocab_size, self._eos_token_ids, memory_bytes=memory_bytes)
        self._lock = threading.Lock()
        self._info_lock = threading.Lock()
        self._info: xgrammar.TokenizerInfo | None = None
        self._kept: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")
        if (self._model_dir / "tokenizer.json").is_file():  # else whoever comes with a grammar is told
            self._threads.submit(self._process.start)
            self._threads.submit(self._tokenizer_info)

    def submit(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Compiles a grammar, or finds it compiled. The future fails with GrammarError, whose message is for the
        client, where the grammar is at fault; cancelling it disturbs no other. Raises RuntimeError after `close`."""
        with self._lock:
            shared = self._kept.get(grammar)
            fresh = shared is None
            if shared is None:
                shared = self._kept[grammar] = self._threads.submit(self._compile, grammar)
            self._kept.move_to_end(grammar)
        if fresh:
            shared.add_done_callback(lambda done: self._settle(grammar, done))
        own: Future[CompiledGrammar] = Future()
        shared.add_done_callback(lambda done: _pass_on(done, own))
        return own

    def close(self) -> None:
        """Ends the process and the threads; what is under way fails."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._process.close()
        self._threads.shutdown(wait=True)

    @property
    def pid(self) -> int | None:
        """The id of the process that compiles, if there is one."""
        return self._process.pid

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        import xgrammar

        info = self._tokenizer_info()
        text = self._process.compile(grammar.kind, grammar.text, self._timeout_s)
        return CompiledGrammar(xgrammar.CompiledGrammar.deserialize_json(text, info), grammar.kind)

    def _tokenizer_info(self) -> "xgrammar.TokenizerInfo":
        """The same vocabulary as that of the process: xgrammar compares them."""
        import xgrammar

        with self._info_lock:
            if self._info is None:
                texts = token_bytes(self._model_dir, self._vocab_size)
                self._info = xgrammar.TokenizerInfo(
                    texts, xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=self._eos_token_ids
                )
            return self._info

    def _settle(self, grammar: Grammar, done: "Future[CompiledGrammar]") -> None:
        """Forgets a grammar that failed, and the least recently used of the others while they take too much."""
        with self._lock:
            if done.cancelled() or done.exception() is not None:
                del self._kept[grammar]
                return
            sizes = {g: f.result().size_bytes for g, f in self._kept.items() if _succeeded(f)}
            total = sum(sizes.values())
            for oldest, size in sizes.items():
                if total <= self._cache_bytes or oldest == grammar:
                    break
                del self._kept[oldest]
                total -= size


def _succeeded(future: "Future[CompiledGrammar]") -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _pass_on(done: "Future[CompiledGrammar]", own: "Future[CompiledGrammar]") -> None:
    if not own.set_running_or_notify_cancel():
        return
    if done.cancelled():
        own.set_exception(RuntimeError("the compiler is closed"))
    elif (error := done.exception()) is not None:
        own.set_exception(error)
    else:
        own.set_result(done.result())
