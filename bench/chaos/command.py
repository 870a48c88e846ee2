"""A fleet on two Ray nodes of this machine under steady load, while its processes and nodes are killed and stopped.

    shoal bench chaos                                     # 30 minutes
    shoal bench chaos --rounds 1 --faults rank_killed router_killed

Clients ask the same questions again and again. The answers are compared with those before the first fault. The next
fault comes some seconds after the fleet is whole again. Faults come in rounds, each once in a round, in an order by the
seed.

failed_requests   requests without a whole answer, but for the next
lost_with_router  requests whose own router was killed
wrong_answers     answers that differ from those of the undisturbed fleet
held_tokens       KV tokens that requests hold in the replicas at the end, where there are no requests
recovery_s        the longest time until everything was there again; most of it is that of noticing, and of starting
longest_wait_s    the longest time that the client of a stream waited for its next piece
faults, answered  faults, and right answers

The exit code is 0 if no request failed, no answer was wrong, and every page was free or cached at the end.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from bench import results
from bench.chaos.faults import FAULTS, order
from bench.chaos.steady_load import Failed, SteadyLoad, questions
from bench.chaos.two_nodes import NotRecovered, TwoNodes
from bench.load.options import count, positive
from bench.replica import dummy_models
from bench.results import Figure
from shoal.help import Parser

QUESTIONS = 24
NAME = "chaos"  # of the model
PAUSE_S = 2.0  # the mean time between a fleet that is whole and the next fault


def parser() -> Parser:
    p = Parser("shoal bench chaos", __doc__)
    how_long = p.add_mutually_exclusive_group()
    how_long.add_argument(
        "--minutes", type=positive, default=30.0, metavar="M", help="no fault comes later (default 30)"
    )
    how_long.add_argument("--rounds", type=count, metavar="N", help="rounds of all faults, in place of a time")
    p.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="default: all")
    p.add_argument("--model", help="a model's folder or name (default: a tiny one with random weights)")
    p.add_argument("--tp", type=count, default=1, metavar="N", help="ranks of a replica (default 1)")
    p.add_argument("--clients", type=count, default=4, metavar="N", help="requests at the same time (default 4)")
    p.add_argument("--seed", type=int, default=0, help="of faults and questions (default 0)")
    results.add_options(p, "fleet.chaos", "fleet.chaos; none: no result")
    return p


def settings(model: Path | str, dummy: bool, tp: int) -> dict[str, Any]:
    """Settings of the fleet. Its caches are so small that pages are evicted."""
    own = {"model": str(model), "served_model_name": NAME, "tp": tp, "kv_tokens": 4096, "drain_s": 30}
    return own | ({"load_format": "dummy"} if dummy else {})


def run(args: argparse.Namespace, fleet: TwoNodes) -> tuple[SteadyLoad, list[dict[str, Any]]]:
    """Runs the load and the faults. Returns the load, which has ended, and the log."""
    random = Random(args.seed)
    load = SteadyLoad(fleet.url, NAME, questions(random, QUESTIONS), args.clients, Random(args.seed))
    log: list[dict[str, Any]] = []
    load.start()
    began_s = time.monotonic()
    try:
        for number, names in enumerate(order(args.faults, random)):
            if number == args.rounds:
                break
            for name in names:
                time.sleep(random.uniform(0.5, 1.5) * PAUSE_S)  # the load goes on
                if args.rounds is None and time.monotonic() - began_s > 60 * args.minutes:
                    return load, log
                log.append(_suffer(name, fleet, load, random, began_s))
                if log[-1]["recovery_s"] is None:
                    return load, log
    finally:
        load.end()
    return load, log


def _suffer(name: str, fleet: TwoNodes, load: SteadyLoad, random: Random, began_s: float) -> dict[str, Any]:
    """Lets a fault happen. Returns its entry in the log, without a time of recovery if there was none."""
    now_s = time.monotonic()
    entry: dict[str, Any] = {"at_s": round(now_s - began_s, 1), "fault": name}
    try:
        entry["hit"] = FAULTS[name](fleet, load, random)
        entry["recovery_s"] = round(time.monotonic() - now_s, 1)
    except NotRecovered as error:
        entry |= {"hit": str(error), "recovery_s": None}
    counts = load.counts
    entry["longest_wait_s"] = round(load.longest_wait_s(), 2)
    entry |= {"answered": counts.right, "failed": counts.failed, "wrong": counts.wrong, "lost": counts.lost_with_router}
    print(", ".join(f"{key} {value}" for key, value in entry.items()), flush=True)
    return entry


def figures(load: SteadyLoad, log: list[dict[str, Any]], held: int) -> list[Figure]:
    """The figures of a run. `held`: KV tokens that requests hold after it."""
    counts, prefix = load.counts, "fleet.chaos"
    made = [
        Figure(f"{prefix}.failed_requests", counts.failed, "requests", False),
        Figure(f"{prefix}.lost_with_router", counts.lost_with_router, "requests", False),
        Figure(f"{prefix}.wrong_answers", counts.wrong, "requests", False),
        Figure(f"{prefix}.held_tokens", held, "tokens", False),
        Figure(f"{prefix}.faults", len(log), "faults", True),
        Figure(f"{prefix}.answered", counts.right, "requests", True),
        Figure(f"{prefix}.longest_wait_s", max([0.0, *(entry["longest_wait_s"] for entry in log)]), "s", False),
    ]
    if recovered := [entry["recovery_s"] for entry in log if entry["recovery_s"] is not None]:
        made.append(Figure(f"{prefix}.recovery_s", max(recovered), "s", False))
    return made


def main(argv: list[str] | None = None) -> int:
    args = (options := parser()).parse_args(argv)
    if ("scaled_up" in args.faults) != ("scaled_down" in args.faults):
        options.error(
            "--faults: scaled_up and scaled_down need each other, or the nodes are full or empty at some time"
        )
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        model = args.model or dummy_models.write("tiny", Path(scratch) / "tiny")
        try:
            fleet = TwoNodes(settings(model, args.model is None, args.tp))
            try:
                load, log = run(args, fleet)
                held = fleet.held_tokens()
            finally:
                fleet.close()
        except (NotRecovered, Failed, AssertionError) as error:
            print(f"shoal bench chaos: {error}", file=sys.stderr)
            return 1
    made = figures(load, log, sum(held))
    for message in load.counts.messages:
        print(message)
    about = {key: getattr(args, key) for key in ("minutes", "rounds", "faults", "tp", "clients", "seed")}
    results.publish(args.name, made, {"about": about, "log": log, "counts": asdict(load.counts)}, args.out)
    is_well = not (load.counts.failed or load.counts.wrong or sum(held))
    return 0 if is_well and log and all(entry["recovery_s"] is not None for entry in log) else 1


if __name__ == "__main__":
    sys.exit(main())
