"""A handle to the process that compiles grammars (`__main__.py`).

Compiling a grammar may never end, or take all memory, and nothing stops xgrammar in the middle. So each grammar is
compiled in its own process, under three limits:

| limit | at fault if exceeded |
| --- | --- |
| CPU time | the grammar |
| memory | the grammar; the machine, if it would not give as much as the limit |
| wall-clock time, far above the CPU time | the machine, which is too busy or hangs |

CPU time is that of all threads together. So neither the machine's load nor its number of cores decides which grammars
are refused. If the process is killed, the machine is at fault.

Processes:

1. The compiler process is small (60 MB: without torch, which xgrammar would import) and holds the vocabulary. It ends
   when its parent closes the socket between them, or dies.
2. For each grammar it forks a process that waits, and reports how the compilation ended.
3. That process forks the one that compiles.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from enum import Enum
from pathlib import Path
from typing import Any

from worker.structured_output.compiling.answer_verdict import AnswerToCheck, AnswerVerdict
from worker.structured_output.error import CompilerUnavailable, GrammarError
from worker.structured_output.json_schema.unique_places import Place
from worker.structured_output.matching.engines import CompiledText

_MIN_WALL_S, _WALL_PER_CPU_S = 60.0, 6.0  # ten seconds of CPU may take two minutes
_GRACE_S = 10.0  # for the process to start, and to report that a compilation has ended

# A reply consists of a verdict (one byte), its text, and an `Ending`: how the process that gave the verdict ended. The
# text of a grammar comes after a line with all else of `CompiledText`.
OK, REFUSED, TEXT_REFUSED, TOO_LARGE, NO_MEMORY, BROKEN = b"+", b"-", b"t", b"m", b"n", b"!"
YIELDS = b"y"  # with the connection, for forks of a low priority
CHECK = "check"  # in place of a grammar's kind


class Ending(bytes, Enum):
    """The last byte of a reply. None of these bytes occurs in UTF-8."""

    BY_ITSELF = b"\xfc"
    TOO_SLOW = b"\xfd"
    CRASHED = b"\xfe"
    KILLED = b"\xff"

    @classmethod
    def from_status(cls, status: int) -> "Ending":
        """The ending of a process with this status of `os.waitpid`."""
        if not os.WIFSIGNALED(status):
            return cls.BY_ITSELF
        if os.WTERMSIG(status) == signal.SIGPROF:
            return cls.TOO_SLOW
        crashes = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
        return cls.CRASHED if os.WTERMSIG(status) in crashes else cls.KILLED


class CompilerProcess:
    """Starts the process when it is first needed, and again if it has ended. Methods may be called from any thread. But
    threads that call `compile` must outlive the process, which ends with the thread that started it."""

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: list[int], *, memory_bytes: int) -> None:
        self._arguments = [str(model_dir), str(vocab_size), ",".join(map(str, eos_token_ids)), str(memory_bytes)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process's id, if it has been started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process unless it runs. Raises OSError."""
        with self._lock:
            self._start()

    def compile(
        self,
        kind: str,
        text: str,
        cpu_s: float,
        after: str | None = None,
        begin: str | None = None,
        *,
        strict: bool = True,
        yields: bool = False,
    ) -> CompiledText:
        """Compiles a `messages.Grammar`. `yields`: with a low priority from the beginning.

        Raises GrammarError if the grammar is at fault (`cpu_s` seconds of CPU time do not suffice, for example),
        CompilerUnavailable if the machine is, RuntimeError if the compiler is.
        """
        head, _, body = self._ask([kind, text, after, begin, strict], cpu_s, yields).partition(b"\n")
        engine, took_s, places, *lists = json.loads(head)
        return CompiledText(engine, body.decode(), took_s, [Place(*each) for each in places], *lists)

    def check(self, answer: AnswerToCheck, cpu_s: float) -> AnswerVerdict:
        """Judges an answer. Raises what `compile` does."""
        return AnswerVerdict(*json.loads(self._ask([CHECK, json.dumps(answer), None, None, True], cpu_s)))

    def _ask(self, question: list[Any], cpu_s: float, yields: bool = False) -> bytes:
        wall_s = _MIN_WALL_S + _WALL_PER_CPU_S * cpu_s
        try:
            connection = self._hand_over(yields)
        except OSError as error:
            raise CompilerUnavailable(f"the process that compiles grammars cannot be started: {error}") from error
        reply = bytearray()
        with connection:
            connection.settimeout(wall_s + _GRACE_S)
            try:
                connection.sendall(json.dumps([*question, cpu_s, wall_s]).encode())
                connection.shutdown(socket.SHUT_WR)
                while data := connection.recv(1 << 20):
                    reply += data
            except TimeoutError:
                self._end()  # it hangs, or is stopped
            except OSError:
                pass  # it ended, as the incomplete reply tells
        return _read(reply, cpu_s)

    def close(self) -> None:
        """Ends the process and all compilations in flight. Threads that wait for one get an error."""
        with self._lock:
            self._closed = True
            self._stop()

    def _end(self) -> None:
        with self._lock:
            self._stop()

    def _hand_over(self, yields: bool) -> socket.socket:
        """Opens a connection to a new fork of the process. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                self._start()
                try:
                    self._send(theirs, yields)
                except OSError:  # it has just ended
                    self._stop()
                    self._start()
                    self._send(theirs, yields)
        except BaseException:
            ours.close()
            raise
        return ours

    def _send(self, connection: socket.socket, yields: bool) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [YIELDS if yields else b"c"], [connection.fileno()])

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("closed")
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        self._control, theirs = socket.socketpair()
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "worker.structured_output.compiling", str(os.getpid()), *self._arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
            )

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _read(reply: bytearray, cpu_s: float) -> bytes:
    """The text of a reply, or the error that its verdict or its ending stands for."""
    verdict, body, ending = bytes(reply[:1]), reply[1:-1], bytes(reply[-1:])
    if ending == Ending.TOO_SLOW:
        raise GrammarError(f"the grammar takes more than {cpu_s:g} s of CPU time to compile: make it simpler")
    if ending == Ending.CRASHED or verdict == TOO_LARGE:
        raise GrammarError("the grammar takes too much memory to compile: make it simpler")
    if verdict == NO_MEMORY:
        raise CompilerUnavailable("the machine has too little memory to compile the grammar")
    if ending != Ending.BY_ITSELF:
        raise CompilerUnavailable("the process that compiled the grammar was killed, or got too little time")
    if verdict == OK:
        return bytes(body)
    if verdict in (REFUSED, TEXT_REFUSED):
        raise GrammarError(body.decode(), of_text=verdict == TEXT_REFUSED)
    raise RuntimeError(f"the grammar's compiler failed: {body.decode()}")
