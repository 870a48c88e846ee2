"""Command-line programs of client packages, run as a user would, in this environment and without the network."""

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}
WAIT_S = 900


def run(program: str, *arguments: str, folder: Path) -> str:
    """The output of a program that is installed with this Python, run in `folder`. Raises AssertionError with the end
    of its output if it fails or takes longer than `WAIT_S`."""
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    return finish(command, folder, {**os.environ, **OFFLINE}, WAIT_S)


def finish(
    command: Sequence[str],
    folder: Path,
    variables: Mapping[str, str],
    within_s: float,
    ends: Collection[int] = (0,),
    told: Callable[[], object] = str,
) -> str:
    """The output of a command, run in `folder` without input. Raises AssertionError with the end of it, and with what
    `told` says, if the command takes longer than `within_s`, or ends with another code than one of `ends`."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"{name} took longer than {within_s} s: {str(late.output)[-2000:]} {told()}") from None
    assert done.returncode in ends, f"{name} ended with {done.returncode}: {done.stdout[-2000:]} {told()}"
    return done.stdout
