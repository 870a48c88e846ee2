"""A first `make serve` says what it does, and what installers print stays out of the way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
# In place of Python: makes an environment of itself and of a server, prints what installers print, and fails as told.
PYTHON = """\
#!/bin/sh
test "$1" = -c && exec "$REAL" "$1" "import sys; sys.version_info = tuple(map(int, '$VERSION'.split('.'))); $2"
echo "[notice] A new release of pip is available: $*"
echo "WARNING: $*" >&2
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; printf '#!/bin/sh\\necho "serving"\\n' > "$3/bin/shoal"
                 chmod +x "$3/bin/shoal" ;;
    *"$FAILS"*) echo "no such package" >&2; exit 1 ;;
esac
"""


def make(folder: Path, fails: str, version: str = "3.11") -> subprocess.CompletedProcess[str]:
    python, venv = folder / "python", folder / "venv"
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "serve", f"PYTHON={python}", f"VENV={venv}"]
    # Without what `make test` hands down to the `make` that is started here.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    env |= {"FAILS": fails, "REAL": sys.executable, "VERSION": version}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def test_a_first_serve_says_what_it_makes(tmp_path: Path) -> None:
    done = make(tmp_path, fails="nothing does")
    said = f"Making the environment in {tmp_path / 'venv'}: once, and it takes some minutes"
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, [said, "serving"], "")
    again = make(tmp_path, fails="everything would")
    assert (again.stdout, again.stderr) == ("serving\n", "")


@pytest.mark.parametrize("step", ["torch==", "--editable"])
def test_an_installer_that_fails_shows_all_that_it_said(tmp_path: Path, step: str) -> None:
    done = make(tmp_path, fails=step)
    assert done.returncode != 0 and "serving" not in done.stdout
    assert "no such package" in done.stderr and "[notice]" in done.stderr
    assert "serving" in make(tmp_path, fails="nothing does").stdout


def test_an_old_python_is_said_before_anything_is_fetched(tmp_path: Path) -> None:
    done = make(tmp_path, fails="nothing does", version="3.10")
    assert done.returncode != 0 and "Making" not in done.stdout and not (tmp_path / "venv").exists()
    assert "Shoal needs Python 3.11 or 3.12" in done.stderr
