"""`shoal serve` as a child process, for a benchmark that needs servers of its own."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import IO, Any

import psutil

START_S, END_S, ORPHANS_S = 600.0, 30.0, 3.0


class ServerFailed(RuntimeError):
    """The server did not start, or did not answer everything. The message is for the user as it stands."""


@contextlib.contextmanager
def server(arguments: Sequence[str]) -> Iterator[str]:
    """`shoal serve` with these arguments on a free port, as a child; its URL once it is ready. Whatever happens inside,
    nothing of it is left. Raises ServerFailed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "shoal.cli", "serve", "--host", "127.0.0.1", "--port", str(port), *arguments]
    with tempfile.TemporaryFile() as said:
        # In a session of its own: Ctrl-C is for this process, which ends the server in order.
        child = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _await_ready(child, url, said)
            yield url
        finally:
            end(child)


def _await_ready(child: subprocess.Popen[bytes], url: str, said: IO[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and child.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()  # raises unless it is ready
            return
        time.sleep(0.5)
    said.seek(0)
    tail = said.read().decode(errors="replace").strip().splitlines()[-10:]
    raise ServerFailed("\n  ".join(["the server did not start; its last words:", *tail]))


def end(child: subprocess.Popen[Any]) -> None:
    """Asks the server to end; what is left of it after END_S, and of its descendants ORPHANS_S later, is killed."""
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
