"""Whether the benchmarks are as they were when `make test-bench` last passed: exit status 0, else 1. With `--write`, as
they are now. So a change of theirs is tested from end to end once, by whoever makes it or by CI, and no other change.
"""

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "passed.sha256"


def content() -> str:
    """A hash of all modules of the benchmarks and of their tests."""
    whole = hashlib.sha256()
    for path in sorted([*ROOT.glob("bench/**/*.py"), *ROOT.glob("tests/bench/**/*.py")]):
        whole.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


if __name__ == "__main__":
    if "--write" in sys.argv:
        FILE.write_text(content() + "\n")
    elif not FILE.exists() or FILE.read_text().strip() != content():
        print("The benchmarks have changed since `make test-bench` last passed")
        sys.exit(1)
