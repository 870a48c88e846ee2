"""The effect of each mechanism of `uniform` and of the cost model: simulated without it, relative to with it.

    python -m bench.pipeline.ablation --plan llama-70b --layout pp4 --rate 1.8
    python -m bench.pipeline.ablation --plan falcon-180b --layout tp8pp2 --rate 2.7 --trace azure_conv_2023.csv
    python -m bench.pipeline.ablation --plan llama-70b --layout pp4 --rate 1.8 --capacity --off whole_tiles,slack

The objective is the strict one. --capacity also searches for the capacity, which takes minutes for each mechanism.
docs/MECHANISMS.md has what was found.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.load.options import count, positive
from bench.pipeline.capacity_search import OBJECTIVES, OURS, CapacitySearch
from bench.pipeline.layout import ParallelLayout, Setting
from bench.pipeline.load_generator import OfferedLoad, ServiceObjective
from bench.pipeline.result_store import Points
from bench.pipeline.simulated_site import PLANS, SimulatedSite
from bench.pipeline.traffic import PUBLISHED, Traffic, published, traced
from pipeline.budget import EvenDecodes
from pipeline.cost import CostModel
from pipeline.padding import PaddedSizes
from pipeline.stage_balanced import StageBalanced
from pipeline.uniform import Uniform
from shoal.help import Parser

BUDGET, RUNNING = 8192, 256
# By name: class, attribute, and the value that switches the mechanism off.
MECHANISMS: dict[str, tuple[type, str, Any]] = {
    "late_planning": (StageBalanced, "_has_place", lambda self, view: not self._is_full(view)),
    "device_tokens": (StageBalanced, "_hands_over", lambda self, view: False),
    "fewer_in_flight": (StageBalanced, "_typical", lambda self, view, in_flight: None),
    "wave_in_flight": (StageBalanced, "_holding_a_wave", lambda self, view: self.most_in_flight),
    "smallest_chunk": (Uniform, "SMALLEST_STEP_COST", math.inf),
    "slack": (Uniform, "MAX_CONTEXT_FACTOR", math.inf),
    "whole_tiles": (Uniform, "_whole", lambda self, tokens: tokens),
    "pages": (Uniform, "SHRINK_FRACTION", 0.0),
    "margin": (Uniform, "finished", lambda self, gap_s: None),
    "even_decodes": (EvenDecodes, "_share", lambda self, contexts: -(-len(contexts) // self._unbuilt)),
    "far_off": (CostModel, "_is_far_off", lambda self: False),
}
SHOWN = {
    "TTFT P50": ("ttft_s", "p50"),
    "TTFT P99": ("ttft_s", "p99"),
    "TBT P50": ("tbt_s", "p50"),
    "TBT P99": ("tbt_s", "p99"),
}


@contextmanager
def without(name: str) -> Iterator[None]:
    """Switches a mechanism off."""
    owner, attribute, value = MECHANISMS[name]
    kept = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, kept)


def parser() -> Parser:
    p = Parser("python -m bench.pipeline.ablation", __doc__)
    p.add_argument("--plan", choices=sorted(PLANS), default="llama-70b", help="machines (default: %(default)s)")
    p.add_argument("--layout", type=ParallelLayout.parse, default="pp4", help="default: %(default)s")
    p.add_argument("--traffic", choices=sorted(PUBLISHED), default="long", help="default: %(default)s")
    p.add_argument("--trace", type=Path, metavar="FILE", help="lengths and arrivals of a trace instead")
    p.add_argument("--rate", type=positive, required=True, help="requests per second")
    p.add_argument("--requests", type=count, default=80, help="default: %(default)s")
    p.add_argument("--seed", type=int, default=0, help="of lengths and arrivals (default: 0)")
    p.add_argument("--off", default=",".join(MECHANISMS), metavar="A,B", help="default: %(default)s")
    p.add_argument("--capacity", action="store_true", help="search for the capacity, too")
    return p


def main(argv: list[str] | None = None) -> int:
    """Prints a table. Returns the exit code."""
    args = parser().parse_args(argv)
    names = args.off.split(",")
    if wrong := set(names) - set(MECHANISMS):
        print(f"there is no {', '.join(sorted(wrong))}: there are {', '.join(MECHANISMS)}", file=sys.stderr)
        return 2
    size = args.requests, args.seed
    measure = _measure(args, traced(args.trace, *size) if args.trace else published(args.traffic, *size))
    base = measure()
    print(f"{'with all':16}", *(f"{name} {value:.4g}" for name, value in base.items()), sep="  ")
    for name in names:
        with without(name):
            found = measure()
        print(f"{name:16}", *(f"{key} {found[key] / base[key] - 1:+.1%}" for key in base), sep="  ", flush=True)
    return 0


def _measure(args: argparse.Namespace, traffic: Traffic) -> Callable[[], dict[str, float]]:
    machines, rows = PLANS[args.plan], PaddedSizes.of_graphs(RUNNING, BUDGET)
    site = SimulatedSite(lambda layout: machines.hardware(layout, rows), machines.kv_tokens, RUNNING, rows)

    def search() -> CapacitySearch:
        return CapacitySearch(Points(), site, BUDGET, [], RUNNING, precision=0.02)

    objective = ServiceObjective("strict", OBJECTIVES["strict"] * search().decode_s(args.layout))

    def measure() -> dict[str, float]:
        load = OfferedLoad("", traffic.at(args.rate), args.rate)
        point = site.offer(args.layout, Setting(OURS, BUDGET, objective.tbt_s), load)
        figures = {name: point[of][quantile] for name, (of, quantile) in SHOWN.items()}
        figures["tokens/s"] = point["output_tok_s"]
        if args.capacity:
            figures["requests/s"] = search().carried(args.layout, OURS, traffic, objective).rate
        return figures

    return measure


if __name__ == "__main__":
    sys.exit(main())
