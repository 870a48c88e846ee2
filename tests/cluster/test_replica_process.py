"""A replica's process: how it notices a step that hangs, and what its parent makes of its end. Nothing is loaded."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import replica_process
from cluster.config import Config
from cluster.replica_process import ReplicaEnded, ReplicaProcess, _attend
from tests.plane import SECRET
from worker.progress import WorkProgress

WAIT_S = 20.0
POPEN = subprocess.Popen


class Exited(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Standard input ends after that many looks at the loop."""

    def end_after(number: int) -> None:
        left = iter(range(number))
        found = lambda *its: ([], [], []) if next(left, None) is not None else ([0], [], [])  # noqa: E731
        monkeypatch.setattr(replica_process, "select", SimpleNamespace(select=found))

    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: 0))
    return end_after


LIMIT_S = 3 * replica_process.LOOK_S


class Loop:
    """A server whose work is at one number after another, one a look. `stopped` says whether it was told to stop."""

    def __init__(self, numbers: Iterable[int | None]) -> None:
        self._numbers = iter(numbers)
        self.stopped = False

    @property
    def progress(self) -> WorkProgress | None:
        number = next(self._numbers)
        return None if number is None else WorkProgress(number, LIMIT_S)

    def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize("numbers", [[1, 2, 3, 4, 5, 6], [None] * 6, [1, 1, 1, 2, 2, 2], [1, None, 1, None, 1, None]])
def test_a_loop_that_goes_on_is_stopped_at_the_end_of_the_input(
    looks: Callable[[int], None], numbers: list[int | None]
) -> None:
    looks(6)
    loop, pipe = Loop(numbers), io.BytesIO()
    _attend(loop, pipe)  # type: ignore[arg-type]
    assert loop.stopped and pipe.getvalue() == b""


def test_a_step_that_hangs_ends_the_process_with_the_reason(looks: Callable[[int], None]) -> None:
    looks(6)
    loop, pipe = Loop([1, 2, 2, 2, 2, 2]), io.BytesIO()
    with pytest.raises(Exited):
        _attend(loop, pipe)  # type: ignore[arg-type]
    assert not loop.stopped and b"no step has ended for 6 s" in pipe.getvalue()


# ---------------------------------------------------------------- the parent


def run_instead(monkeypatch: pytest.MonkeyPatch, code: str, ends_first: bool = False) -> None:
    """Starts a process instead of a replica. It runs `code`, with the pipe for reports as `reports`. `ends_first`: it
    ends before it is told its settings."""

    def start(command: list[str], **settings: Any) -> "subprocess.Popen[bytes]":
        process = POPEN([sys.executable, "-c", f"import os, sys; reports = {command[3]}\n{code}"], **settings)
        if ends_first:
            process.wait()
        return process

    monkeypatch.setattr(replica_process.subprocess, "Popen", start)


def ended(code: str, monkeypatch: pytest.MonkeyPatch) -> tuple[ReplicaProcess, "Future[str]"]:
    """A process that runs `code`, and the reason of its end."""
    run_instead(monkeypatch, code)
    reason: Future[str] = Future()
    return ReplicaProcess(Config(), SECRET, reason.set_result), reason


READY = """os.write(reports, b'{"ready": {"address": "here"}}\\n')\n"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("""os.write(reports, b'{"failed": "ValueError: no"}\\n')""", "ValueError: no"),
    ],
)
def test_a_process_that_ends_says_how(code: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process, reason = ended(code, monkeypatch)
    with pytest.raises(ReplicaEnded, match=says):
        process.wait(WAIT_S)
    assert says in reason.result(WAIT_S)
    process.close()
    process, reason = ended(READY + code, monkeypatch)
    assert process.wait(WAIT_S) == {"address": "here"}
    assert says in reason.result(WAIT_S)
    process.close()


def test_a_process_that_ends_before_it_knows_its_settings_is_closed_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, "sys.exit(3)", ends_first=True)
    process = ReplicaProcess(Config(), SECRET, lambda reason: None)
    with pytest.raises(ReplicaEnded, match="exit code 3"):
        process.wait(WAIT_S)
    process.close()


def test_a_process_that_is_closed_ends_by_itself_and_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    process, reason = ended(READY + "sys.stdin.read()", monkeypatch)
    process.wait(WAIT_S)
    process.close()
    assert process._process is not None and process._process.returncode == 0
    assert not reason.done()


def test_a_process_that_does_not_end_or_load_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_process, "END_S", 0.0)
    hangs = "import signal\nsignal.pause()"
    for code in (READY + hangs, hangs):
        process, _ = ended(code, monkeypatch)
        if code == hangs:
            with pytest.raises(ReplicaEnded, match="start_timeout_s=0"):
                process.wait(0)
        else:
            process.wait(WAIT_S)
        process.close()
        assert process._process is not None and process._process.returncode == -signal.SIGKILL


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    reason: Future[str] = Future()
    process = ReplicaProcess(Config(), SECRET, reason.set_result)
    with pytest.raises(ReplicaEnded, match="/nowhere/python"):
        process.wait(WAIT_S)
    process.close()
    assert "/nowhere/python" in reason.result(WAIT_S)
