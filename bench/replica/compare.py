"""A benchmark in two checkouts of Shoal, side by side: this one, and an older one.

    shoal bench compare --before ../shoal-old gpu --model llama-8b --workloads mini,bs1,prefill
    shoal bench compare --before ../shoal-old --turns 3 offline --rounds 1

The benchmark runs in both checkouts in turns (old, new, new, old, ...), each time in a process of its own with the
packages of this environment, so that a machine that becomes faster or slower meanwhile does so for both. Every figure
that both give becomes a ratio, new over old, of the medians of the turns; `.vs_before` is added to its name. A rate in
tokens/s loses its unit: gpu.llama8b.mini.output_tok_s becomes NAME.llama8b.mini.vs_before.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import results
from bench.load.options import count
from bench.replica.server_process import environment_of
from bench.results import Figure
from bench.targets import print_table
from shoal.help import Parser

ROOT = Path(__file__).parents[2]
Figures = dict[str, Figure]


class RunFailed(RuntimeError):
    """A benchmark did not give its result. The message can be shown to the user."""


def parser() -> Parser:
    """The command line of `shoal bench compare`."""
    p = Parser("shoal bench compare", __doc__)
    p.add_argument("--before", type=Path, required=True, metavar="DIR", help="folder of the older checkout")
    p.add_argument("--turns", type=count, default=2, metavar="N", help="runs in each checkout (default: 2)")
    results.add_options(p, "compare")
    p.add_argument("benchmark", nargs=argparse.REMAINDER, help="as after `shoal bench`")
    return p


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes the result file. Returns the exit code: 1 if a run failed."""
    args = parser().parse_args(argv)
    if not args.benchmark:
        parser().error("say which benchmark, for example gpu --model llama-8b --workloads mini")
    if not (args.before / "shoal" / "cli.py").is_file():
        parser().error(f"--before {args.before}: there is no shoal/cli.py in it, so it is not a checkout of Shoal")
    found: dict[str, list[Figures]] = {"before": [], "now": []}
    checkouts = {"before": args.before.resolve(), "now": ROOT}
    try:
        for turn in range(args.turns):
            for which in ("before", "now") if turn % 2 == 0 else ("now", "before"):
                print(f"turn {turn + 1} of {args.turns}, {which}: {checkouts[which]}", flush=True)
                found[which].append(run(checkouts[which], args.benchmark))
    except RunFailed as error:
        print(f"shoal bench compare: {error}", file=sys.stderr)
        return 1
    figures = list(ratios(args.name, found["before"], found["now"]))
    if not figures:
        print("shoal bench compare: the checkouts have no figure in common", file=sys.stderr)
        return 1
    print_table(figures, results.write(args.name, figures, _raw(args, found), folder=args.out))
    return 0


def run(checkout: Path, benchmark: list[str]) -> Figures:
    """Runs `shoal bench BENCHMARK` in a checkout, and returns its figures by name. What it prints is shown. Raises
    RunFailed."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        command = [sys.executable, "-m", "shoal.cli", "bench", *benchmark, "--name", "run", "--out", scratch]
        status = subprocess.run(command, cwd=checkout, env=environment_of(checkout)).returncode
        file = Path(scratch) / "run.json"
        if status != 0 or not file.is_file():
            raise RunFailed(f"shoal bench {' '.join(benchmark)} ended with status {status} in {checkout}")
        return {figure["name"]: Figure(**figure) for figure in json.loads(file.read_text())["figures"]}


def ratios(name: str, before: list[Figures], now: list[Figures]) -> Iterator[Figure]:
    """The ratio, new over old, of every figure that all runs have, in the order of the first run."""
    for figure in now[0].values():
        values = [[each[figure.name].value for each in runs if figure.name in each] for runs in (before, now)]
        if any(len(some) < len(runs) for some, runs in zip(values, (before, now), strict=True)):
            continue
        old, new = map(statistics.median, values)
        if old:
            yield Figure(f"{name}.{_shortened(figure)}.vs_before", new / old, "ratio", figure.higher_is_better)


def _shortened(figure: Figure) -> str:
    words = figure.name.removeprefix("gpu.").removeprefix("cpu.").split(".")
    return ".".join(words[:-1] if figure.unit == "tokens/s" and len(words) > 1 else words)


def _raw(args: argparse.Namespace, found: dict[str, list[Figures]]) -> dict[str, Any]:
    runs = {
        which: [{figure.name: figure.value for figure in each.values()} for each in turns]
        for which, turns in found.items()
    }
    return {"benchmark": args.benchmark, "commit_before": results.commit(args.before), "runs": runs}
