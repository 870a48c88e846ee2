"""Whether the parts that take minutes are as they were when their tests last passed: exit status 0, else 1. With
`--write`, as they are now. So a change of theirs is tested from end to end once, by whoever makes it or by CI, and no
other change.

    python -m tests.passed benchmarks
    python -m tests.passed rehearsals --write
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.hosts import missing

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """Files by their patterns, which the target `make` tests. `file`: where the hash of them is kept."""

    target: str
    file: str
    patterns: tuple[str, ...]

    def files(self) -> Iterator[Path]:
        found = {path for pattern in self.patterns for path in ROOT.glob(pattern) if path.is_file()}
        yield from sorted(path for path in found if "__pycache__" not in path.parts)

    def content(self) -> str:
        """A hash of all files, with their names."""
        whole = hashlib.sha256()
        for path in self.files():
            whole.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        return whole.hexdigest()


PARTS = {
    "kernels": Part(
        "test-kernels",
        "tests/kernels/passed.sha256",
        (
            *("kernels/**/*.py", "tests/kernels/**/*.py", "tests/interpreter.py", "requirements.lock"),
            *("worker/executor/attention_selector.py", "worker/parallel/*.py"),  # which a few of their tests use
        ),
    ),
    "benchmarks": Part("test-bench", "tests/bench/passed.sha256", ("bench/**/*.py", "tests/bench/**/*.py")),
    # The ways in: what starts, changes and ends a server, and Ray's version, which does most of it.
    "rehearsals": Part(
        "rehearse",
        "tests/deploy/passed.sha256",
        ("cluster/**/*", "helm/shoal/**/*", "tests/deploy/*.py", "requirements.lock"),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--write", action="store_true", help="after the tests have passed")
    args = parser.parse_args()
    part = PARTS[args.part]
    file = ROOT / part.file
    if args.write:
        if args.part == "rehearsals" and (why := missing()):
            print(f"Nothing was rehearsed: {why}")
            return 0
        file.write_text(part.content() + "\n")
    elif not file.exists() or file.read_text().strip() != part.content():
        print(f"The {args.part} have changed since `make {part.target}` last passed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
