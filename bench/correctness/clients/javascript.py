"""The clients in JavaScript: scripts that node runs with packages that npm has installed."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.correctness.clients.checks import Check, Checks

WAIT_S = 240


def modules() -> Path:
    """The folder with npm's packages for this environment. Raises AssertionError if there is none."""
    folders = [Path(sys.prefix) / "node_modules"]
    folders += [Path(each).parent for each in os.environ.get("PATH", "").split(os.pathsep) if each.endswith(".bin")]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise AssertionError("there are no packages of npm's: run with --environments, or have npm install them")


def add(checks: Checks, script: str, features: Mapping[str, str]) -> None:
    """Adds features of a script of this folder. `features`: what each is about, by its name in the script."""

    def check(feature: str) -> Check:
        return lambda at: run(script, feature, at.url, at.model)

    for name, about in features.items():
        checks(about)(check(name))


def run(script: str, feature: str, url: str, model: str) -> None:
    """Runs a feature of a script of this folder. Raises AssertionError with what node said if it fails."""
    # Node looks for packages above the script, so the script goes where they are.
    with tempfile.TemporaryDirectory(dir=modules().parent) as folder:
        there = shutil.copy(Path(__file__).with_name(script), folder)
        done = subprocess.run(
            ["node", str(there), feature, url, model],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    assert done.returncode == 0, f"node ended with {done.returncode}: {done.stdout[-2000:]}"
