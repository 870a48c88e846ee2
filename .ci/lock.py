"""`make lock`: prints requirements.lock, exact versions of all that Shoal and its extras bring; torch comes before.

What is installed is pinned as it is. What the extra `gpu` would bring besides is asked of pip, which installs nothing
for it: a machine without a GPU pins it all the same.
"""

import importlib.metadata
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def main() -> None:
    """Raises CalledProcessError with pip's words above it."""
    installed = _pip("freeze", "--exclude-editable", "--exclude", "torch").splitlines()
    print("\n".join(sorted({*installed, *_of_gpu(installed)}, key=lambda pin: pin.split("==")[0].lower())))


def _of_gpu(installed: list[str]) -> list[str]:
    """What pip would install for the extra `gpu` beside `installed` and this very torch."""
    wanted = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["gpu"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join([*installed, f"torch=={importlib.metadata.version('torch')}"]))
        constraints.flush()
        report = _pip("install", "--quiet", "--dry-run", "--report", "-", "--constraint", constraints.name, *wanted)
    found = [entry["metadata"] for entry in json.loads(report)["install"]]
    return [f"{metadata['name']}=={metadata['version']}" for metadata in found]


def _pip(*arguments: str) -> str:
    return subprocess.run([*PIP, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
