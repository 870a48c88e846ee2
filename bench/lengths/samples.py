"""How soon the first samples of a job are finished with `finish: most`, against first come, first served, simulated.

    python -m bench.lengths.samples --trace azure_conv_2023.csv --tau 0.35

All requests come at once, and their outputs end where the trace says, as in `bench.lengths.order`. A client takes the
first quarter of the outputs, and cancels the others.

| figure | meaning |
| --- | --- |
| `vs_fcfs` | time until the first quarter has ended, of `scheduling_policy: fcfs` over that of `finish: most` |
| `useless.vs_fcfs` | the same, with predictions that know nothing (tau 0) |
| `whole_job` | time until the last request has ended, of `finish: most` over that of `scheduling_policy: fcfs` |
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.lengths.order import add_options, read_requests, run
from bench.pipeline.simulator import Request
from bench.results import FOLDER, Figure, write
from shoal.help import Parser

RUNS = {  # settings, and whether the predictions know anything
    "fcfs": ({"schedule": "uniform", "scheduling_policy": "fcfs"}, True),
    "all": ({"schedule": "offline"}, True),
    "most": ({"schedule": "offline", "finish": "most"}, True),
    "useless": ({"schedule": "offline", "finish": "most"}, False),
}


def ends_s(requests: Sequence[Request], name: str, model: str, max_running: int, tau: float, seed: int) -> list[float]:
    """Seconds until each of the requests has ended, ascending, in the run of that name."""
    own, knows = RUNS[name]
    outcome = run(model, requests, own, max_running, tau if knows else 0.0, seed)
    return sorted(life.tokens_s[-1] for life in outcome.lives)


def main(argv: list[str] | None = None) -> int:
    """Simulates, prints a line for each run, writes the result."""
    p = Parser("python -m bench.lengths.samples", __doc__)
    add_options(p, 4096)
    p.add_argument("--name", help="of the result; default: ranks.samples.MODEL.TRACE")
    p.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="default: bench/results")
    args = p.parse_args(argv)
    requests = read_requests(p, args)
    raw: dict[str, dict[str, float]] = {}
    for name in RUNS:
        found = ends_s(requests, name, args.model, args.max_running, args.tau, args.seed)
        raw[name] = {
            "quarter_s": found[len(found) // 4 - 1],
            "half_s": found[len(found) // 2 - 1],
            "whole_s": found[-1],
        }
        print(f"  {name:8}", *(f"{key} {value:.4g}" for key, value in raw[name].items()), flush=True)
    fcfs, most, useless = raw["fcfs"], raw["most"], raw["useless"]
    title = args.name or f"ranks.samples.{args.model}.{args.trace.stem}"
    figures = [
        Figure(f"{title}.vs_fcfs", fcfs["quarter_s"] / most["quarter_s"], "ratio", True),
        Figure(f"{title}.useless.vs_fcfs", fcfs["quarter_s"] / useless["quarter_s"], "ratio", True),
        Figure(f"{title}.whole_job", most["whole_s"] / fcfs["whole_s"], "ratio", False),
    ]
    for figure in figures:
        print(f"{figure.name:60} {figure.value:.3f}")
    about = {"runs": raw, "tau": args.tau, "trace": args.trace.name, "requests": len(requests)}
    print(f"written: {write(title, figures, about, folder=args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
