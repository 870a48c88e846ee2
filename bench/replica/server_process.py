"""`shoal serve` as a child process of a benchmark."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

START_S, END_S, ORPHANS_S = 600.0, 30.0, 3.0


class ServerFailed(RuntimeError):
    """The server did not start, or did not answer all requests. The message can be shown to the user."""


@contextlib.contextmanager
def server(arguments: Sequence[str], checkout: Path | None = None) -> Iterator[str]:
    """Runs `shoal serve` with these arguments on a free port, as a child process, and yields its URL once it is ready.
    At the end, also after an exception or SIGTERM, the server and all its processes are ended. `checkout`: the folder
    of another checkout of Shoal, whose server is run. Raises ServerFailed if the server does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "shoal.cli", "serve", "--host", "127.0.0.1", "--port", str(port), *arguments]
    environment = None if checkout is None else environment_of(checkout)
    with tempfile.TemporaryFile() as said, sigterm_raises():
        # In a session of its own: Ctrl-C reaches only this process, which then ends the server properly.
        child = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True, env=environment, cwd=checkout
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _await_ready(child, url, said)
            yield url
        finally:
            end(child)


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM raises SystemExit within this context, so that `finally` runs. Python handles signals in the main thread
    alone: in another thread the context changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def environment_of(checkout: Path) -> dict[str, str]:
    """The environment in which Python finds the modules of another checkout of Shoal first."""
    paths = [str(checkout.resolve()), *(path for path in sys.path if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _await_ready(child: subprocess.Popen[bytes], url: str, said: IO[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and child.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()  # raises unless the server is ready
            return
        time.sleep(0.5)
    said.seek(0)
    tail = said.read().decode(errors="replace").strip().splitlines()[-10:]
    raise ServerFailed("\n  ".join(["the server did not start; its last words:", *tail]))


def end(child: subprocess.Popen[Any]) -> None:
    """Terminates the server. Kills it if it is still running after END_S, and its descendants if they are still running
    ORPHANS_S later."""
    try:
        family = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    child.terminate()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    _, alive = psutil.wait_procs(family, timeout=ORPHANS_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
