"""A server as a user starts it, under online loads, optionally compared with another checkout of Shoal.

    shoal bench online --shape llama-8b --loads online=azure_conv_2023.csv@24,long=arxiv.csv@8
    shoal bench online --shape llama-8b --before ../shoal-before --name first_day
    shoal bench online --shape tiny --device cpu --loads online@4 --requests 20 --burst 10

`shoal serve` runs one replica of a shape with random weights. Its settings are the defaults, apart from the flags that
are given here. The other checkout does not get these flags, except --device.

Loads, one after the other, each after a smaller one of the same kind that does not count:

LOAD=TRACE@RATE  RATE requests per second on average (Poisson arrivals) with the lengths of a trace
LOAD@RATE        the same with lengths like those of Azure's conversations
alone            prompts of `--alone` tokens, one after the other, on a replica with nothing else to do
burst            `--burst` chats at once, of 220 prompt tokens and 190 output tokens on average

Figures are named `NAME.LOAD.FIGURE`. A name that ends in `.vs_before` has the figure divided by the other checkout's.
"""

import argparse
import re
import sys
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench import results
from bench.load import metrics, options, serve
from bench.load.http import Http
from bench.replica import dummy_models
from bench.replica.over_http import flags as as_flags
from bench.replica.server_process import ServerFailed, server
from bench.results import Figure
from bench.targets import print_table
from cluster.config import Config
from shoal import flags
from shoal.help import Parser

# Lengths like those of Azure's conversations of 2023: medians of 1,020 prompt tokens and 129 output tokens.
LIKE_CONVERSATIONS = ["--prompt-tokens", "lognormal:1020:0.9:8192", "--output-tokens", "lognormal:129:1.0:1024"]
CHATS = ["--prompt-tokens", "uniform:60:380", "--output-tokens", "uniform:60:320"]
ALONE = 20  # prompts, one after the other
WARM_S = 6.0  # duration of the warm-up of a load with a rate
WARM_PART = 8  # the warm-up of a burst is this fraction of it
OURS = ("model", "load_format", "replicas", "host", "port", "address")  # settings that this command chooses itself
STAGE_SECONDS = re.compile(r'^shoal_stage_seconds_total\{.*spent="(\w+)".*\} (\S+)$', re.M)
SLO_TTFT_S, SLO_TPOT_S = 1.0, 0.05
FIGURES = {
    "ttft_p50": ("ttft_s", "p50"),
    "ttft_p99": ("ttft_s", "p99"),
    "tpot_p50": ("tpot_s", "p50"),
    "tpot_p99": ("tpot_s", "p99"),
    "gap_p99": ("tbt_s", "p99"),
}


@dataclass(frozen=True)
class OnlineCase:
    """A load: options of `shoal bench serve` for the measurement (`options`) and for the warm-up (`warm`)."""

    name: str
    options: list[str]
    warm: list[str]


def parser() -> argparse.ArgumentParser:
    """The command line. Every setting of a server is a flag, except those that this command chooses."""
    p = Parser("shoal bench online", __doc__)
    p.add_argument("--shape", choices=sorted(dummy_models.SHAPES), default="llama-8b", help="default: %(default)s")
    p.add_argument("--loads", type=_loads, default="online@24", metavar="L,M", help="loads (default: %(default)s)")
    p.add_argument(
        "--requests", type=options.count, default=1000, metavar="N", help="requests per load (default: 1000)"
    )
    p.add_argument("--alone", type=options.count, metavar="N", help="tokens of prompts that are alone (default: none)")
    p.add_argument("--burst", type=int, default=2000, metavar="N", help="chats at once, 0 for none (default: 2000)")
    p.add_argument("--before", type=Path, metavar="DIR", help="another checkout of Shoal, measured first")
    results.add_options(p, "gpu.online")
    flags.add(p, Config, OURS)
    return p


def _loads(text: str) -> list[tuple[str, str, float]]:
    """The name, the trace (or an empty string) and the rate of each load."""
    made = []
    for load in text.split(","):
        what, at, rate = load.rpartition("@")
        name, _, trace = what.partition("=")
        if not at or not re.fullmatch(r"\w+", name):
            raise argparse.ArgumentTypeError(f"{load!r} is not a load: use LOAD=TRACE@RATE, as in online=conv.csv@24")
        made.append((name, trace, options.positive(rate)))
    return made


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    given = flags.given(args, Config)
    with dummy_models.written(args.shape) as folder:
        common = {"model": str(folder), "load_format": "dummy", "replicas": 1}
        common |= {"device": given["device"]} if "device" in given else {}
        measured: dict[str, dict[str, Any]] = {}
        try:
            if args.before is not None:
                measured["before"] = measure(common, cases(args), args.before)
            measured["now"] = measure(common | given, cases(args))
        except ServerFailed as error:
            print(f"bench.replica.online: {error}", file=sys.stderr)
            return 1
    figures = list(figures_of(args.name, measured["now"], measured.get("before")))
    raw = {"shape": args.shape, "settings": {key: str(value) for key, value in given.items()}, "loads": measured}
    print_table(figures, results.write(args.name, figures, raw, folder=args.out))
    return 0


def cases(args: Namespace) -> list[OnlineCase]:
    """The loads of a run, in order."""
    made = []
    for name, trace, rate in args.loads:
        at = [*(["--trace", trace] if trace else LIKE_CONVERSATIONS), "--rate", str(rate), "--requests"]
        made.append(OnlineCase(name, [*at, str(args.requests)], [*at, str(max(1, int(WARM_S * rate)))]))
    if args.alone:
        one_by_one = ["--prompt-tokens", str(args.alone), "--output-tokens", "2", "--concurrency", "1", "--requests"]
        made.append(OnlineCase("alone", [*one_by_one, str(ALONE)], [*one_by_one, str(ALONE // 4)]))
    if args.burst:
        count, part = str(args.burst), str(max(1, args.burst // WARM_PART))
        at_once = [*CHATS, "--requests"]
        made.append(
            OnlineCase("burst", [*at_once, count, "--concurrency", count], [*at_once, part, "--concurrency", part])
        )
    return made


def measure(settings: dict[str, Any], loads: list[OnlineCase], checkout: Path | None = None) -> dict[str, Any]:
    """Starts a server (of another `checkout`, if given), puts the loads on it, and ends it. Returns the summaries of
    the loads by name. Raises ServerFailed if the server fails or a request failed."""
    found: dict[str, Any] = {}
    with server(as_flags(settings), checkout) as url:
        for number, case in enumerate(loads):
            # No seed twice: the server has prompts that it has seen in its cache.
            put(url, [*case.warm, "--seed", str(2 * number + 1)])
            found[case.name] = summary = put(url, [*case.options, "--seed", str(2 * number)])
            if summary["failures"]:
                raise ServerFailed(f"{case.name}: requests failed: {summary['failures']}")
            summary["stage_seconds"] = _stage_seconds(url)
            where = "now" if checkout is None else "before"
            said = ", ".join(f"{name} {1e3 * summary[key][part]:.1f}" for name, (key, part) in FIGURES.items())
            print(f"{where:7s}{case.name:14s}{said} ms, {summary['output_tokens_per_s']:,.0f} tokens/s", flush=True)
    return found


def _stage_seconds(url: str) -> dict[str, float]:
    """Seconds that the replica's device has spent since its start, by cause (computing or a kind of waiting)."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    return {spent: float(seconds) for spent, seconds in STAGE_SECONDS.findall(page) if float(seconds)}


def put(url: str, arguments: list[str]) -> dict[str, Any]:
    """Puts a load, options of `shoal bench serve`, on the server and returns its summary."""
    args = options.parser().parse_args([*arguments, "--url", url, "--quiet"])
    outcome = uvloop.run(serve.run(args, options.plan(args), Http(url)))
    return metrics.summarise(outcome.load.samples, args.slo_ttft or SLO_TTFT_S, args.slo_tbt or SLO_TPOT_S)


def figures_of(name: str, now: dict[str, Any], before: dict[str, Any] | None) -> Iterator[Figure]:
    """The figures of every load, and their ratios to those of the other checkout if there is one."""
    for load, summary in now.items():
        kinds: list[tuple[str, tuple[str, ...], str, bool]]
        if load == "burst":
            kinds = [("output_tok_s", ("output_tokens_per_s",), "tokens/s", True)]
        else:
            kinds = [(kind, path, "s", False) for kind, path in FIGURES.items()]
        for kind, path, unit, is_higher in kinds:
            value = _at(summary, path)
            yield Figure(f"{name}.{load}.{kind}", value, unit, is_higher)
            if before is not None and (other := _at(before[load], path)):
                ratio = value / other
                of = f"{name}.{load}" if load == "burst" else f"{name}.{load}.{kind}"
                yield Figure(f"{of}.vs_before", ratio, "ratio", is_higher)


def _at(summary: dict[str, Any], path: tuple[str, ...]) -> float:
    value: Any = summary
    for key in path:
        value = value[key]
    return float(value)


if __name__ == "__main__":
    sys.exit(main())
