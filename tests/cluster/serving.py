"""`shoal serve` as a process, as a terminal has it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

START_S = 240
END_S = 60


class Server:
    """The command in a process group of its own, as a terminal has it."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "shoal.cli", "serve", "--host", "127.0.0.1", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def wait_for(self, pattern: str) -> str:
        """Reads on to the first line with `pattern` in it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return self.lines[-1]
        raise AssertionError(f"no {pattern!r} in:\n" + "\n".join(self.lines))

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def family_with(self, name: str) -> list[psutil.Process]:
        """All descendants, once `name` is in a command line among them; before that none."""
        family = self.family()
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(name in " ".join(process.cmdline()) for process in family):
                return family
        return []

    def interrupt(self, signum: int) -> int:
        if signum == signal.SIGINT:
            os.killpg(self.process.pid, signum)  # as a terminal does
        else:
            self.process.send_signal(signum)
        self.process.communicate(timeout=END_S)
        return self.process.returncode


@contextmanager
def running(*arguments: str, **environment: str) -> Iterator[Server]:
    server = Server(*arguments, **environment)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            family = server.family()
            server.process.kill()
            server.process.wait()
            for process in family:
                process.kill()
