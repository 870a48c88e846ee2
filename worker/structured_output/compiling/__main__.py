"""The process that compiles grammars. Forks for each, so that a fork can be killed. Started by `process.py`."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from worker.niceness import YIELDING_NICE
from worker.structured_output.compiling.compilation import Compilation
from worker.structured_output.compiling.forks import (
    cpu_time_s,
    ended,
    has_memory_up_to,
    limit_memory,
    limit_time,
)
from worker.structured_output.compiling.process import (
    BROKEN,
    CHECK,
    NO_MEMORY,
    OK,
    REFUSED,
    TEXT_REFUSED,
    TOO_LARGE,
    YIELDS,
    Ending,
)
from worker.structured_output.error import GrammarError

# A reply for a large schema has 9 MB with SmolLM2's vocabulary. Reading it takes ten times as much memory for a moment.
_REPLY_LIMIT_BYTES = 48 << 20


def _serve(
    control: socket.socket, model_dir: Path, vocab_size: int, eos_token_ids: list[int], memory_bytes: int
) -> None:
    compilation = Compilation(model_dir, vocab_size, eos_token_ids)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        # If the fork fails, the connection closes without a reply, and the client notices.
        with socket.socket(fileno=fds[0]) as connection, contextlib.suppress(OSError):
            _fork(partial(_keep, control, connection, compilation, memory_bytes, message == YIELDS))


def _fork(work: Callable[[], None]) -> int:
    """Runs `work` in a fork, which ends with the work or with this process, whichever is first. Returns the fork's id.
    Raises OSError."""
    me = os.getpid()
    process = os.fork()
    if process == 0:
        try:
            _end_with(me)
            work()
        finally:
            os._exit(0)
    return process


def _keep(
    control: socket.socket, connection: socket.socket, compilation: Compilation, memory_bytes: int, yields: bool
) -> None:
    """Lets a fork answer, and reports how that fork ended. `yields`: both have a low priority."""
    if yields:
        os.setpriority(os.PRIO_PROCESS, 0, YIELDING_NICE)
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = _fork(partial(_answer, connection, compilation, memory_bytes))
    connection.sendall(Ending.from_status(ended(process)))


def _answer(connection: socket.socket, compilation: Compilation, memory_bytes: int) -> None:
    os.setpgid(0, 0)
    request = bytearray()
    while data := connection.recv(1 << 20):
        request += data
    kind, text, after, begin, strict, cpu_s, wall_s = json.loads(request)
    limit_time(cpu_s, wall_s)
    limit_bytes = limit_memory(memory_bytes)
    try:
        if kind == CHECK:
            connection.sendall(OK + compilation.check(text))
            return
        engine, reply, places, not_enforced, narrowed = compilation.run(kind, text, after, begin, strict=strict)
        if len(reply) > _REPLY_LIMIT_BYTES:
            raise GrammarError("the grammar is too large")
        head = json.dumps([engine, cpu_time_s(), places, not_enforced, narrowed]).encode()
        connection.sendall(OK + head + b"\n" + reply)
    except GrammarError as error:
        connection.sendall((TEXT_REFUSED if error.of_text else REFUSED) + str(error).encode("utf-8", "replace"))
    except MemoryError:
        connection.sendall(TOO_LARGE if has_memory_up_to(limit_bytes) else NO_MEMORY)
    except Exception as error:
        traceback.print_exc()
        connection.sendall(BROKEN + repr(error).encode("utf-8", "replace"))


def _end_with(parent: int) -> None:
    """Lets the kernel, if it is Linux, kill this process when its parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)


def _main() -> None:
    parent, model_dir, vocab_size, eos_token_ids, memory_bytes = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no parent waits for the forks
    _end_with(int(parent))
    eos = [int(token_id) for token_id in eos_token_ids.split(",") if token_id]
    _serve(socket.socket(fileno=0), Path(model_dir), int(vocab_size), eos, int(memory_bytes))


if __name__ == "__main__":
    _main()
