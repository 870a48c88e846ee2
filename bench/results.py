"""Results of benchmarks: one JSON file per run in `bench/results/`, and `bench/RESULTS.md` made from all of them.

Every benchmark calls `write`. `python -m bench.results` makes the page; `--check` says whether the page is stale.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
PAGE = Path(__file__).parent / "RESULTS.md"
PACKAGES = ("torch", "ray", "transformers", "xgrammar", "flashinfer-python", "vllm", "sglang")
SECRET_OPTIONS = ("--api-key",)


@dataclass(frozen=True)
class Figure:
    """A number of a result. `name` is dotted, for example `cpu.router.hit_rate`, and never changes its meaning. `unit`
    is "s", "tokens/s", "ratio" or the like."""

    name: str
    value: float
    unit: str
    higher_is_better: bool


def write(
    name: str,
    figures: Iterable[Figure],
    raw: Mapping[str, Any] | None = None,
    *,
    command: str | None = None,
    folder: Path = FOLDER,
) -> Path:
    """Write `folder/NAME.json` and return its path. An existing file of that name is replaced.

    The keys of `raw` are added to the top level of the file, next to `when`, `command`, `commit`, `machine`, `versions`
    and `figures`, and must differ from these. `command` defaults to the command line of this process.

    Raises ValueError if `name` is not a plain file name, if two figures have the same name, if a figure is not a finite
    number, or if `raw` has one of the reserved keys.
    """
    check_name(name)
    figures = list(figures)
    names = [figure.name for figure in figures]
    if twice := sorted({figure for figure in names if names.count(figure) > 1}):
        raise ValueError(f"figures named twice: {', '.join(twice)}")
    if wrong := [figure.name for figure in figures if not math.isfinite(figure.value)]:
        raise ValueError(f"figures that are not finite numbers: {', '.join(wrong)}")
    result: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command if command is not None else typed(sys.argv),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "figures": [asdict(figure) for figure in figures],
    }
    if clash := sorted(result.keys() & (raw or {}).keys()):
        raise ValueError(f"raw may not name {', '.join(clash)}")
    result.update(raw or {})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    partial.replace(path)
    return path


def publish(name: str, figures: Iterable[Figure], raw: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Print figures, write them as `write` does unless `name` is "none", and print the name of the file."""
    figures = list(figures)
    widest = max((len(figure.name) for figure in figures), default=0)
    for figure in figures:
        print(f"{figure.name:{widest}} {number(figure.value)} {figure.unit}")
    if name != "none":
        print(f"written: {write(name, figures, raw, folder=folder).name}")


def add_options(parser: Any, name: str | None, otherwise: str | None = None) -> None:
    """Add `--name` and `--out` to the parser or group of a benchmark. `name` is the default, None where it depends on
    the measurement, as `otherwise` says in words."""
    words = f"default: {name if otherwise is None else otherwise}"
    parser.add_argument("--name", default=name, help=f"name of the result ({words})")
    where = "folder of the result (default: bench/results)"
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help=where)


def check_name(name: str) -> None:
    """Raises ValueError if the name of a result is not a plain file name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"result name {name!r}: use letters, digits, '.', '_' and '-'")


def typed(argv: Sequence[str]) -> str:
    """The command line of `argv` as a user would type it, fit to publish. Secrets are replaced by `***`. A path that is
    absolute or leads out of the working folder is cut to its last component."""
    program = Path(argv[0])
    room = next((at for at in (1, 2) if program.parts[-at - 1 : -at] in (("bench",), ("shoal",))), None)
    if room is not None and program.suffix == ".py":
        words = ["python", "-m", ".".join(program.with_suffix("").parts[-room - 1 :])]
    else:
        words = [program.name]
    secret = False
    for word in argv[1:]:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if not equals and option:
            secret = option in SECRET_OPTIONS
            words.append(option)
            continue
        value = "***" if secret or option in SECRET_OPTIONS else _short(value)
        secret = False
        words.append(option + equals + value)
    return " ".join(word if word == "***" or word.endswith("=***") else shlex.quote(word) for word in words)


def _short(word: str) -> str:
    return Path(word).name if word.startswith(("/", "~", "../")) and len(word) > 1 else word


def commit(root: Path = PAGE.parents[1]) -> str | None:
    """The repository's commit, with "-dirty" appended if tracked files other than results have changed. None outside
    git."""
    results = [f":!{path.relative_to(PAGE.parents[1])}" for path in (FOLDER, PAGE)]
    head = _output("git", "-C", str(root), "rev-parse", "--short=10", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", ".", *results)
    return f"{head}-dirty" if head and changed else head


def machine() -> dict[str, Any]:
    """The machine of the run: CPU model, cores that this process may use, memory in bytes, GPUs with their memory."""
    model = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader") or ""
    return {
        "cpu": model.group(1).strip() if model else platform.processor() or platform.machine(),
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [line.strip() for line in gpus.splitlines() if line.strip()],
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Versions of Python, Shoal and those installed packages on which figures depend. The packages are not imported."""
    found = {"python": platform.python_version()}
    for package in ("shoal", *PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _output(*command: str) -> str | None:
    """The output of a command, stripped. None if the command does not exist, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


# ---------------------------------------------------------------- the page


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of RESULTS.md, from results by name. Equal results give equal pages, byte for byte."""
    parts = [
        "# Results\n",
        "Made by `python -m bench.results` from the files in `bench/results/`; never edited by hand.\n",
        "A command belongs to the commit that is next to it. Later commits may not have it: an instrument that has",
        "answered its question goes.\n",
    ]
    parts += [_section(name, results[name]) for name in sorted(results)]
    if not results:
        parts.append("There are none yet.\n")
    return "\n".join(parts)


def _section(name: str, result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    where = [f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"]
    where += machine["gpus"] or ["no GPU"]
    versions = ", ".join(f"{package} {version}" for package, version in sorted(result["versions"].items()))
    bounds = result.get("bounds", {})  # by figure name: figures of which only a lower bound is known
    lines = [
        f"## {name}\n",
        f"    {result['command']}\n",
        f"{result['when']}, commit {result['commit'] or 'unknown'}; {'; '.join(where)}; {versions}.\n",
        "| figure | value | unit | better |",
        "| --- | ---: | --- | --- |",
    ]
    for figure in sorted(result["figures"], key=lambda figure: figure["name"]):
        better = "higher" if figure["higher_is_better"] else "lower"
        value = f"{'>= ' if figure['name'] in bounds else ''}{number(figure['value'])}"
        lines.append(f"| {figure['name']} | {value} | {figure['unit']} | {better} |")
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """A figure as people read it: four significant digits, grouped thousands, an exponent only for very small or very
    large values."""
    if value == 0 or 1e-4 <= abs(value) < 1e9:
        digits = 0 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.3e}"


def read(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """All results in `folder` by name. Raises ValueError for a file that is not a result."""
    results = {}
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text())
            _section(path.stem, result)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a result of bench.results.write: {error!r}") from error
        results[path.stem] = result
    return results


def main(argv: list[str] | None = None) -> int:
    """Write RESULTS.md, or with --check only say whether it is up to date. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.results", description="Make bench/RESULTS.md from the files in bench/results/."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is stale")
    args = parser.parse_args(argv)
    try:
        text = page(read())
    except ValueError as error:
        print(f"bench.results: {error}", file=sys.stderr)
        return 1
    if not args.check:
        PAGE.write_text(text)
        return 0
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    print(f"{PAGE.name} is stale: run `python -m bench.results` and commit it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
