"""A handle to the process that compiles grammars (`__main__.py`).

A grammar may take for ever to compile, or all memory, and nothing stops xgrammar in the middle. So each one is compiled
in a process of its own, a fork that ends itself by an alarm, under a limit of memory. They are forks of one small
process (60 MB: without torch, which xgrammar would import), which holds the vocabulary ready, and which ends when its
parent closes the socket between them, or dies.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from worker.grammar.error import GrammarError

_GRACE_S = 60.0  # for the process to start, and for a machine that is busy
# A reply is STARTED, one of OK, REFUSED and BROKEN, and a text, after OK with END behind it.
STARTED, OK, REFUSED, BROKEN, END = b"s", b"+", b"-", b"!", b"\0"


class CompilerProcess:
    """Starts the process when it is first needed, and again if it is gone. Its methods may be called from any thread,
    but the threads that call `compile` must outlive it: the process ends with the one that started it."""

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
        """Starts the process unless it runs."""
        with self._lock:
            self._start()

    def compile(self, kind: str, text: str, timeout_s: float) -> str:
        """A compiled grammar as xgrammar serialises it. Raises GrammarError if there is none to be had, RuntimeError if
        the process does not work."""
        with self._hand_over() as connection:
            connection.settimeout(timeout_s + _GRACE_S)
            reply = bytearray()
            began = 0.0
            try:
                connection.sendall(json.dumps([kind, text, timeout_s]).encode())
                connection.shutdown(socket.SHUT_WR)
                while data := connection.recv(1 << 20):
                    began = began or time.monotonic()
                    reply += data
            except OSError:
                pass  # it ended, which what is missing of the reply tells
        return _read(reply, time.monotonic() - began, timeout_s)

    def close(self) -> None:
        """Ends the process and whatever it compiles; whoever waits for that gets an error."""
        with self._lock:
            self._closed = True
            self._stop()

    def _hand_over(self) -> socket.socket:
        """One end of a connection whose other end a fork of the process serves."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            for attempt in (1, 2):
                self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [b"c"], [theirs.fileno()])
                    return ours
                except OSError:
                    self._stop()
                    if attempt == 2:
                        ours.close()
                        raise RuntimeError("the process that compiles grammars cannot be started") from None
        raise AssertionError

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
                [sys.executable, "-m", "worker.grammar", str(os.getpid()), *self._arguments],
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


def _read(reply: bytearray, took_s: float, timeout_s: float) -> str:
    """What a reply says, and what it means if the last part of it never came."""
    if not reply:
        raise RuntimeError("the process that compiles grammars ended")
    verdict, body = reply[1:2], reply[2:]
    if verdict == OK and reply.endswith(END):
        return body[: -len(END)].decode()
    if verdict == REFUSED:
        raise GrammarError(body.decode())
    if verdict == BROKEN:
        raise RuntimeError(f"the grammar's compiler failed: {body.decode()}")
    if took_s >= timeout_s:
        raise GrammarError(f"the grammar takes longer than {timeout_s:g} s to compile")
    raise GrammarError("the grammar takes too much memory to compile")
