"""Command-line programs of client packages, run as a user would, in this environment and without the network."""

import os
import subprocess
import sys
from pathlib import Path

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}
WAIT_S = 900


def run(program: str, *arguments: str, folder: Path) -> str:
    """The output of a program that is installed with this Python, run in `folder`. Raises AssertionError with the end
    of its output if it fails or takes longer than `WAIT_S`."""
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **OFFLINE},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"{program} took longer than {WAIT_S} s: {str(late.output)[-2000:]}") from None
    assert done.returncode == 0, f"{program} ended with {done.returncode}: {done.stdout[-2000:]}"
    return done.stdout
