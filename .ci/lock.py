"""`make lock`: writes the locks, exact versions with the checksums of all their files.

| file | what |
| --- | --- |
| `requirements.lock` | what Shoal needs on every machine |
| `requirements.dev.lock` | what its tests need besides |
| `requirements.gpu.lock` | what a machine with a GPU needs besides |

torch is in none: its builds for CPUs and for CUDA have the same version and other files. A version that is pinned stays
unless pyproject.toml, or `--upgrade`, asks for another.
"""

import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

UV = "uv==0.13.9"
ROOT = Path(__file__).resolve().parents[1]
BASE = "requirements.lock"
EXTRAS = {"dev": "requirements.dev.lock", "gpu": "requirements.gpu.lock"}
COMPILE = "pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes --no-annotate".split()


def main() -> None:
    """Raises CalledProcessError with the words of pip or uv above it."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, UV], check=True)
        before = (
            "" if "--upgrade" in sys.argv else "".join((ROOT / name).read_text() for name in (BASE, *EXTRAS.values()))
        )
        base = compiled(Path(folder), before)
        (ROOT / BASE).write_text(text(base))
        for extra, name in EXTRAS.items():
            whole = compiled(Path(folder), before, base, "--extra", extra)
            (ROOT / name).write_text(text({pin: hashes for pin, hashes in whole.items() if pin not in base}))


def compiled(folder: Path, before: str, base: Collection[str] = (), *arguments: str) -> dict[str, str]:
    """The hashes of each pin. `before`: the locks as they were, whose versions uv prefers. `base`: pins that must
    stay."""
    made, fixed = folder / "made", folder / "fixed"
    made.write_text(before)
    fixed.write_text("\n".join(base))
    command = [f"{folder}/bin/uv", *COMPILE, "--no-header", "--no-emit-package", "torch", *arguments]
    subprocess.run([*command, "--constraint", fixed, "--output-file", made], cwd=ROOT, check=True)
    return pins(made.read_text())


def pins(lock: str) -> dict[str, str]:
    """Every requirement of a lock, with its marker, and its hashes."""
    found = {}
    for entry in lock.replace("\\\n", " ").splitlines():
        if entry and not entry.startswith("#"):
            pin, *hashes = entry.split("--hash=")
            found[pin.strip()] = " ".join(part.strip() for part in hashes)
    return found


def text(found: dict[str, str]) -> str:
    """A lock: what `pins` reads."""
    lines = ["# Made by `make lock`."]
    for pin, hashes in found.items():
        lines.append(" \\\n    ".join([pin, *(f"--hash={part}" for part in hashes.split())]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
