"""The effect of the power limit of GPUs on the capacities of a measured pipeline, and the energy of a token.

    python -m bench.pipeline.power bench/results/pipeline.sockets.json

The file is a result of `shoal bench pipeline` on GPUs. Nothing is measured again, and no GPU is needed. Of the first
layout of the file there are, for each schedule that was measured:

| figure | meaning |
| --- | --- |
| `SCHEDULE.joules_per_token` | energy of all GPUs at the capacity, over tokens of prompts and outputs |
| `SCHEDULE.capacity.measured` | the capacity that was measured, in requests per second |
| `SCHEDULE.capacity.simulated` | the same in the simulator, with the costs of steps that were learned under the limit |
| `SCHEDULE.capacity.simulated_unlimited` | the same if arithmetic ran at the rate that the GPU reaches for a moment (`flops` in place of `sustained_flops` of `pipeline.roofline.DEVICES`) |

All names begin with `pipeline.power`. The table also has the next rate that was tried above a measured capacity, and
what it missed. A schedule of which no rate was carried has no figures.
"""  # noqa: E501

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import results
from bench.pipeline.capacity_search import OBJECTIVES, SIMULATED, CapacitySearch
from bench.pipeline.figures import Twin, measured_link
from bench.pipeline.layout import ParallelLayout
from bench.pipeline.load_generator import ServiceObjective
from bench.pipeline.result_store import Points
from bench.pipeline.traffic import published
from bench.replica import dummy_models
from bench.results import FOLDER, Figure, number
from pipeline.padding import PaddedSizes
from pipeline.roofline import DEVICES, DeviceSpec
from shoal.help import Parser

TRAFFIC, OBJECTIVE = "long", "strict"
BUDGET = 8192  # the default of a GPU
KEY = re.compile(rf"(?P<layout>\w+)/{TRAFFIC}/(?P<schedule>\w+)/(?P<budget>\d+)\S*/{OBJECTIVE}@\d+ms/(?P<rate>[\d.]+)")


@dataclass
class Measured:
    """The loads of one schedule. `carried`, `missed`: the highest rate that was carried and the lowest above it that
    was not, with their outcomes."""

    budgets: list[int]
    carried: tuple[float, dict[str, Any]] | None = None
    missed: tuple[float, dict[str, Any]] | None = None


def measured(points: dict[str, Any]) -> tuple[ParallelLayout, dict[str, Measured]]:
    """The layout of the first load of the traffic, and by schedule what was measured on it.

    Raises ValueError if there is no load of that traffic.
    """
    found: dict[str, Measured] = {}
    layout = None
    loads = sorted(_loads(points), key=lambda load: load[1])
    for key, rate, point in loads:
        layout = layout or key["layout"]
        if key["layout"] != layout:
            continue
        schedule = found.setdefault(key["schedule"], Measured([]))
        schedule.budgets.append(int(key["budget"]))
        if point["given_up"] is None:
            schedule.carried, schedule.missed = (rate, point), None
        elif schedule.missed is None:
            schedule.missed = rate, point
    if layout is None:
        raise ValueError(
            f"there is no load of {TRAFFIC} with the objective {OBJECTIVE}: measure with --traffic {TRAFFIC}"
        )
    return ParallelLayout.parse(layout), found


def _loads(points: dict[str, Any]) -> Iterator[tuple[re.Match[str], float, dict[str, Any]]]:
    for name, point in points.items():
        if key := KEY.fullmatch(name):
            yield key, float(key["rate"]), point


def joules_per_token(point: dict[str, Any]) -> float:
    """Joules of all GPUs for each token of a load, of prompts and outputs."""
    tokens = point["seconds"] * (point["input_tok_s"] + point["output_tok_s"])
    return float(sum(point["joules"]) / tokens)


def search(result: dict[str, Any], layout: ParallelLayout, arithmetic: float = 1.0) -> CapacitySearch:
    """Searches in the simulator for capacities of `layout`, with the learned costs and the measured links of `result`.

    `arithmetic`: factor on the time that arithmetic takes.
    """
    points, settings = result["points"], result["settings"]
    running = settings["replica"]["max_running"]
    rows = PaddedSizes.of_graphs(running, BUDGET)
    token_bytes = 2 * dummy_models.SHAPES[settings["model"]].config["hidden_size"]
    learned, link = points[f"{layout}/calibration"], measured_link(points["link"])
    twin = Twin.of(learned, link, token_bytes, running, rows, arithmetic)
    return CapacitySearch(
        Points(), twin.site(), BUDGET, [], running, settings["shrink"], 0.02, settings["seconds"], progress=SIMULATED
    )


def parser() -> Parser:
    p = Parser("python -m bench.pipeline.power", __doc__, usage="FILE [options]")
    p.add_argument("file", type=Path, metavar="FILE", help="a result of `shoal bench pipeline` on GPUs")
    p.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="folder of the result")
    return p


def main(argv: list[str] | None = None) -> int:
    """Prints a table and writes the result file. Returns the exit code: 1 if the file is no such result."""
    args: argparse.Namespace = parser().parse_args(argv)
    try:
        result = json.loads(args.file.read_text())
        layout, schedules = measured(result["points"])
        decode_s = result["points"][f"{layout}/decode_iteration"]["tbt_s"]["p50"]
        device = _device(result["machine"]["gpus"])
    except (OSError, ValueError) as error:
        print(f"python -m bench.pipeline.power: {args.file}: {error}", file=sys.stderr)
        return 1
    except KeyError as error:
        print(
            f"python -m bench.pipeline.power: {args.file} is no result of shoal bench pipeline: {error} is missing",
            file=sys.stderr,
        )
        return 1
    settings = result["settings"]
    traffic = published(TRAFFIC, settings["requests"], settings["seed"], settings["shrink"])
    objective = ServiceObjective(OBJECTIVE, OBJECTIVES[OBJECTIVE] * decode_s)
    unlimited = device.sustained_flops / device.flops
    figures, lines = [], []
    for name, load in schedules.items():
        if load.carried is None:
            continue
        rate, point = load.carried
        drawn = point["watts"] / point["limit_watts"]
        figures += [
            _figure(f"{name}.joules_per_token", joules_per_token(point), "J", False),
            _figure(f"{name}.capacity.measured", rate, "requests/s"),
        ]
        row = [name, number(rate), _missed(load), number(joules_per_token(point)), f"{drawn:.0%}"]
        for kind, arithmetic in (("simulated", 1.0), ("simulated_unlimited", unlimited)):
            simulated = replace(search(result, layout, arithmetic), chunk_budgets=sorted(set(load.budgets)))
            found = simulated.carried(layout, name, traffic, objective).rate
            figures.append(_figure(f"{name}.capacity.{kind}", found, "requests/s"))
            row.append(number(found))
        lines.append(row)
    _print(lines)
    raw = {"of": args.file.name, "measured_at": result["commit"], "arithmetic_unlimited": unlimited}
    print(f"written: {results.write('pipeline.power', figures, raw, folder=args.out)}")
    return 0


def _device(gpus: list[str]) -> DeviceSpec:
    """Raises ValueError if there is no GPU, or one whose rates are not known."""
    known = (spec for name, spec in DEVICES.items() if gpus and name in gpus[0].lower())
    if (found := next(known, None)) is None:
        raise ValueError(f"it needs a GPU of pipeline.roofline.DEVICES, and these are {', '.join(gpus) or 'none'}")
    return found


def _figure(name: str, value: float, unit: str, higher_is_better: bool = True) -> Figure:
    return Figure(f"pipeline.power.{name}", value, unit, higher_is_better)


def _missed(load: Measured) -> str:
    return f"{number(load.missed[0])} ({load.missed[1]['given_up']})" if load.missed else "-"


def _print(rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="dim")
    for heading in ("schedule", "carries", "misses at", "J/token", "of the limit", "simulated", "without the limit"):
        table.add_column(heading)
    for row in rows:
        table.add_row(*row)
    Console(width=120, highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
