"""How many of the seeded faults the tests find: `python -m tests.mutants`, or `make mutants`.

    python -m tests.mutants                                       # this checkout
    python -m tests.mutants --tree ../shoal-old --json old.json   # another one: its product and its tests
    python -m tests.mutants --only one-tie-too-few

Each job has a copy of the tree's tracked files. There it puts in one fault at a time, runs the tests of the fault's
package up to the first that fails, and takes the fault out again. Before that, the tests of each package run once
without a fault.

| verdict | meaning |
| --- | --- |
| found | a test failed |
| missed | all tests passed |
| limit | no test had failed when the time was over, so the fault counts as missed: also where Hypothesis has failed, and still looks for a smaller example |
| broken | the fault or the tests say nothing: the text is not there, or a test cannot even be imported |

The exit code is 0 however many faults are found; 2 if one is broken, or if tests fail without a fault.
"""  # noqa: E501

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.mutants.faults import FAULTS, PACKAGES, Fault, Tests

ROOT = Path(__file__).parents[2]
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not ray and not gpu")
WITHOUT_A_FAULT = 10  # how many times the limit tests may take then
IMPORTED = "import radix, router, worker; print(*(each.__file__ for each in (radix, router, worker)), sep='\\n')"
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
VERDICTS = {0: "missed", 1: "found", None: "limit"}  # by pytest's exit status


class Run(NamedTuple):
    """One run of tests: pytest's exit status, None if the limit ended it; its time; the test that failed, empty if
    none did; and all that was printed."""

    status: int | None
    seconds: float
    failed: str
    printed: str


class Row(NamedTuple):
    """What came of one fault. `by`: the test that found it, or why it is broken."""

    fault: Fault
    verdict: str
    seconds: float
    by: str


class Copy:
    """A copy of a tree's tracked files, in which tests run, one run at a time."""

    def __init__(self, tree: Path, folder: Path) -> None:
        """Raises RuntimeError if Python would import the product from elsewhere, and CalledProcessError for a tree that
        is not under git."""
        self.root, self._scratch = folder / "tree", folder / "scratch"
        self._scratch.mkdir(parents=True)
        self._process: subprocess.Popen[bytes] | None = None
        listed = subprocess.run(["git", "-C", str(tree), "ls-files", "-z"], check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (tree / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, self.root / name)
        # No bytecode is kept. It counts as that of its source by the whole second and by the size, and a fault often
        # changes neither.
        self._env = os.environ | {
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._scratch),
        }
        self._env.pop("PYTEST_ADDOPTS", None)
        command = [sys.executable, "-c", IMPORTED]
        said = subprocess.run(command, cwd=self.root, env=self._env, check=True, capture_output=True, text=True)
        if elsewhere := [path for path in said.stdout.split("\n") if path and not Path(path).is_relative_to(self.root)]:
            raise RuntimeError(f"the copy in {self.root} would not be tested, but {', '.join(elsewhere)}")

    @contextlib.contextmanager
    def having(self, fault: Fault) -> Iterator[None]:
        """Has the fault meanwhile. Raises ValueError or OSError if it cannot be put in."""
        path = self.root / fault.file
        text = path.read_text()
        path.write_text(fault.put_into(text))
        try:
            yield
        finally:
            path.write_text(text)

    def test(self, tests: Tests, limit_s: float) -> Run:
        """Runs tests up to the first that fails. After `limit_s` they are ended, with all that they started."""
        began_s = time.perf_counter()
        with tempfile.TemporaryFile(dir=self._scratch) as printed:
            process = self._process = subprocess.Popen(
                [sys.executable, *PYTEST, *tests],
                cwd=self.root,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_s)
            self.end()
            seconds = time.perf_counter() - began_s
            printed.seek(0)
            text = printed.read().decode(errors="replace")
        failed = FAILED.search(text)
        return Run(status, seconds, "" if failed is None else failed[1], text)

    def end(self) -> None:
        """Ends the run, if there is one, and the processes that are left of it."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Copies:
    """As many copies as there are jobs. All are ended and removed on the way out."""

    def __init__(self, tree: Path, jobs: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self._all: list[Copy] = []
        self._free: SimpleQueue[Copy] = SimpleQueue()
        self._pool = ThreadPoolExecutor(jobs)
        try:
            for number in range(jobs):
                self._all.append(Copy(tree, self._folder / str(number)))
                self._free.put(self._all[-1])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for copy in self._all:
            copy.end()
        self._pool.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def without_faults(self, packages: Iterable[str], limit_s: float) -> Iterator[tuple[str, Run]]:
        """A run of each package's tests, as they end."""

        def run(package: str) -> tuple[str, Run]:
            with self._one() as copy:
                return package, copy.test(PACKAGES[package], limit_s)

        yield from (done.result() for done in as_completed([self._pool.submit(run, name) for name in packages]))

    def with_each(self, faults: Iterable[Fault], limit_s: float) -> Iterator[Row]:
        """What comes of each fault, as their runs end."""

        def run(fault: Fault) -> Row:
            with self._one() as copy:
                try:
                    with copy.having(fault):
                        run = copy.test(fault.tests, limit_s)
                except (OSError, ValueError) as error:
                    return Row(fault, "broken", 0.0, str(error))
                verdict = VERDICTS.get(run.status, "broken")
                by = run.failed if verdict != "broken" else f"pytest ended with {run.status}: {run.failed}"
                return Row(fault, verdict, run.seconds, by)

        yield from (done.result() for done in as_completed([self._pool.submit(run, fault) for fault in faults]))

    @contextlib.contextmanager
    def _one(self) -> Iterator[Copy]:
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("python -m tests.mutants", description="How many of the seeded faults the tests find.")
    p.add_argument("--tree", type=Path, default=ROOT, metavar="DIR", help="checkout that is tested (default: this one)")
    p.add_argument("--jobs", type=int, default=2, metavar="N", help="faults at a time (default: 2)")
    p.add_argument("--limit-s", type=float, default=60.0, metavar="S", help="time for each fault (default: 60)")
    p.add_argument("--only", choices=[fault.name for fault in FAULTS], metavar="NAME", help="this fault alone")
    p.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    return p


def main() -> int:
    """Prints a table, and writes the result. Returns the exit code."""
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    faults = [fault for fault in FAULTS if args.only in (None, fault.name)]
    packages = list(dict.fromkeys(fault.package for fault in faults))
    began = datetime.now(UTC).isoformat(timespec="seconds")
    unchanged, rows = dict[str, float](), list[Row]()
    with contextlib.closing(Copies(args.tree.resolve(), args.jobs)) as copies:
        for package, run in copies.without_faults(packages, WITHOUT_A_FAULT * args.limit_s):
            unchanged[package] = round(run.seconds, 1)
            print(_line(package, "(no fault)", "passed" if run.status == 0 else "failed", run.seconds, ""), flush=True)
            if run.status != 0:
                print(f"{run.printed}\ntests of the {package} fail without a fault: this measures nothing")
                return 2
        for row in copies.with_each(faults, args.limit_s):
            rows.append(row)
            print(_line(row.fault.package, row.fault.name, row.verdict, row.seconds, row.by), flush=True)
    rows.sort(key=lambda row: FAULTS.index(row.fault))
    found = {package: _counts(row for row in rows if row.fault.package == package) for package in packages}
    if args.json is not None:
        result = {
            "when": began,
            "commit": _commit(args.tree),
            "versions": {"python": platform.python_version(), "torch": importlib.metadata.version("torch")},
            "jobs": args.jobs,
            "limit_s": args.limit_s,
            "seconds_without_a_fault": unchanged,
            "faults": [
                {
                    "name": row.fault.name,
                    "package": row.fault.package,
                    "file": row.fault.file,
                    "verdict": row.verdict,
                    "seconds": round(row.seconds, 1),
                    "by": row.by,
                }
                for row in rows
            ],
            "found": {**found, "all": _counts(rows)},
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    shown = ", ".join(f"{package} {got}/{total}" for package, (got, total) in found.items())
    print("found: {}; in all {}/{}".format(shown, *_counts(rows)))
    return 2 if any(row.verdict == "broken" for row in rows) else 0


def _line(package: str, name: str, verdict: str, seconds: float, by: str) -> str:
    return f"{package:<10} {name:<46} {verdict:<7} {seconds:6.1f} s  {by}".rstrip()


def _counts(rows: Iterable[Row]) -> tuple[int, int]:
    """The faults that were found, and all; broken ones are in neither."""
    verdicts = [row.verdict for row in rows if row.verdict != "broken"]
    return verdicts.count("found"), len(verdicts)


def _commit(tree: Path) -> str:
    """The tree's commit, with "-dirty" appended if tracked files have changed."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(tree), *arguments], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("-dirty" if changed else "")


if __name__ == "__main__":
    sys.exit(main())
