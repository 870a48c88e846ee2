"""The process that compiles grammars: forks for every one, so that a fork may be killed. Started by `process.py`."""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path

from worker.grammar.compilation import Compilation
from worker.grammar.error import GrammarError
from worker.grammar.process import BROKEN, END, OK, REFUSED, STARTED

_REPLY_LIMIT_BYTES = 96 << 20


def _serve(
    control: socket.socket, model_dir: Path, vocab_size: int, eos_token_ids: list[int], memory_bytes: int
) -> None:
    compilation = Compilation(model_dir, vocab_size, eos_token_ids)
    me = os.getpid()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            try:
                control.close()
                _end_with(me)
                with socket.socket(fileno=fds[0]) as connection:
                    _answer(connection, compilation, memory_bytes)
            finally:
                os._exit(0)
        os.close(fds[0])


def _answer(connection: socket.socket, compilation: Compilation, memory_bytes: int) -> None:
    request = bytearray()
    while data := connection.recv(1 << 20):
        request += data
    kind, text, timeout_s = json.loads(request)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    _limit_memory(memory_bytes)
    connection.sendall(STARTED)
    try:
        reply = compilation.run(kind, text)
        if len(reply) > _REPLY_LIMIT_BYTES:
            raise GrammarError("the grammar is too large")
        connection.sendall(OK + reply + END)
    except GrammarError as error:
        connection.sendall(REFUSED + str(error).encode("utf-8", "replace"))
    except MemoryError:
        pass  # ending without a verdict says so
    except Exception as error:
        traceback.print_exc()
        connection.sendall(BROKEN + repr(error).encode("utf-8", "replace"))


def _limit_memory(more_bytes: int) -> None:
    """Lets this process take that much more than it has."""
    limit, hard = _data_bytes() + more_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _data_bytes() -> int:
    """What RLIMIT_DATA counts of this process now."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    except (OSError, StopIteration):
        return 0


def _end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent is gone, where the kernel can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)


def _main() -> None:
    parent, model_dir, vocab_size, eos_token_ids, memory_bytes = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    _end_with(int(parent))
    eos = [int(token_id) for token_id in eos_token_ids.split(",") if token_id]
    _serve(socket.socket(fileno=0), Path(model_dir), int(vocab_size), eos, int(memory_bytes))


if __name__ == "__main__":
    _main()
