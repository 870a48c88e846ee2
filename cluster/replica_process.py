"""A replica in a child process, without Ray. Both ends of the process are here: `ReplicaProcess` starts it, and
`python -m cluster.replica_process` is the process itself.

| channel | what it carries |
| --- | --- |
| standard input | a `_ReplicaSpec`, then nothing: its end asks the replica to end |
| a pipe | `_Report`s: that the replica is ready, or why it ends; the pipe ends with the process |
| ZeroMQ | requests and tokens, as between any router and replica |

The child has a session of its own, so signals from a terminal or a notebook reach only the parent. The kernel kills it
when the parent dies. It starts the other ranks of the replica, and they end with it.
"""

import contextlib
import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from cluster.config import ReplicaConfig
from cluster.hang import Stalled
from worker.config import WorkerConfig
from worker.niceness import run_steps
from worker.spinning import limit_spinning

if TYPE_CHECKING:
    from worker.engine.server import Server

HOST = "127.0.0.1"
LOOK_S = 2.0  # interval between looks at the replica's loop
END_S = 10.0  # how long the process may take to end by itself
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class ReplicaEnded(RuntimeError):
    """The replica did not start, or has ended. The message is one line, for people."""


class _ReplicaSpec(msgspec.Struct):
    """All that a new process needs to become a replica: the model's folder, the secret of its socket, and the settings
    of `WorkerConfig`."""

    model: str
    secret: bytes
    settings: dict[str, Any]


class _Report(msgspec.Struct, omit_defaults=True):
    """A line from the child. `ready`: what `cluster.replica_server.published` says. `failed`: why the replica ends."""

    ready: dict[str, Any] | None = None
    failed: str | None = None


class ReplicaProcess:
    """A replica as a child process of this one."""

    def __init__(self, config: ReplicaConfig, secret: bytes, on_end: Callable[[str], None]) -> None:
        """Starts the process; `config.model` is a folder, `secret` that of its router. `on_end` is called from another
        thread, with the reason, when the process has ended before `close`."""
        self._on_end = on_end
        self._ready: Future[dict[str, Any]] = Future()
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._started = threading.Event()
        # Only what is set: a GPU has defaults of its own for the rest.
        settings = config.model_dump(include={*WorkerConfig.model_fields}, exclude_unset=True)
        self._spec = msgspec.json.encode(_ReplicaSpec(config.model, secret, settings)) + b"\n"
        # The kernel ties the child to the thread that starts it, which therefore stays until the child has ended.
        self._thread = threading.Thread(target=self._attend, name="replica", daemon=True)
        self._thread.start()

    def wait(self, within_s: float) -> dict[str, Any]:
        """Waits until the replica is ready, and returns what it has published. Raises ReplicaEnded."""
        try:
            return self._ready.result(within_s)
        except TimeoutError:
            raise ReplicaEnded(
                f"the replica is not loaded within start_timeout_s={within_s:g}; raise it if nothing hangs there"
            ) from None

    def close(self) -> None:
        """Ends the process: at once if it is not ready, otherwise it gets `END_S` to end by itself."""
        self._closing = True
        self._started.wait()
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # settings that it never read are written once more
                self._process.stdin.close()
            if not self._ready.done() or self._ready.exception() is not None:
                self._process.kill()
            self._thread.join(END_S)
            self._process.kill()
        self._thread.join()

    def _attend(self) -> None:
        """Starts the process, reads its reports, and waits for its end."""
        reader, writer = os.pipe()
        with open(reader, "rb") as reports:
            try:
                self._process = _start(writer, self._spec)
            except Exception as error:
                self._tell_end(f"the replica's process cannot be started: {error}")
                return
            finally:
                os.close(writer)
                self._started.set()
            failed = self._read(reports)
        code = self._process.wait()
        self._tell_end(failed or _end_of_process(code))

    def _read(self, reports: IO[bytes]) -> str | None:
        """Reads the reports to their end. Returns why the replica ended, if it said so."""
        for line in reports:
            report = msgspec.json.decode(line, type=_Report)
            if report.failed is not None:
                return report.failed
            assert report.ready is not None
            self._ready.set_result(report.ready)
        return None

    def _tell_end(self, reason: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(ReplicaEnded(reason))
        if not self._closing:
            self._on_end(reason)


def _start(reports: int, spec: bytes) -> "subprocess.Popen[bytes]":
    """Starts the process. `reports`: the file descriptor that it writes its reports to. Raises OSError."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": paths}
    limit_spinning(environment)
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.replica_process", str(reports), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=2,  # standard output is the program's own
        env=environment,
        pass_fds=(reports,),
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already; how is told by its exit code
        process.stdin.write(spec)
        process.stdin.flush()
    return process


def _end_of_process(code: int) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return (
        f"the replica's process {how}. If that was not on purpose, look into dmesg: the kernel may have killed it for "
        "lack of memory."
    )


# ---------------------------------------------------------------- the process itself


def _main() -> int:
    reports, parent = map(int, sys.argv[1:])
    _end_with(parent)
    logging.basicConfig(format="%(message)s")
    os.set_inheritable(reports, False)  # the pipe ends when this process ends, whatever it has started
    with open(reports, "wb", buffering=0) as pipe:
        try:
            return _serve(msgspec.json.decode(sys.stdin.buffer.readline(), type=_ReplicaSpec), pipe)
        except Exception as error:
            from worker.errors import one_line

            _report(pipe, _Report(failed=one_line(error, 500)))
            return 1


def _serve(spec: _ReplicaSpec, pipe: IO[bytes]) -> int:
    """Loads the replica, reports it, and runs it until the end of standard input. Returns the exit code."""
    # Imported only here: the parent must not import torch.
    from cluster.replica_server import open_server, published
    from worker.executor.gpu_defaults import resolve_device

    config = WorkerConfig(**spec.settings)
    device, _ = resolve_device(config)
    config = config.model_copy(update={"device": device.type})
    server = open_server(Path(spec.model), config, HOST, spec.secret)
    _report(pipe, _Report(ready=published(server)))
    threading.Thread(target=_attend, args=(server, pipe), daemon=True).start()
    run_steps(server.run, server.device)
    return 0


def _attend(server: "Server", pipe: IO[bytes]) -> None:
    """Stops the server at the end of standard input. Ends the process when its work does not get on."""
    stalled = Stalled(LOOK_S)
    while not select.select([sys.stdin.fileno()], [], [], LOOK_S)[0]:
        limit_s = stalled.look(server.progress)
        if limit_s is not None:
            _report(pipe, _Report(failed=f"the replica's loop hangs: no step has ended for {limit_s:g} s"))
            os._exit(1)
    server.stop()


def _report(pipe: IO[bytes], report: _Report) -> None:
    pipe.write(msgspec.json.encode(report) + b"\n")


def _end_with(parent: int) -> None:
    """Lets the kernel, if it is Linux, kill this process when its parent is gone. Elsewhere it ends when its standard
    input does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    code = _main()
    sys.stderr.flush()
    os._exit(code)  # at once: everything is closed, and the interpreter's own end takes seconds with torch
