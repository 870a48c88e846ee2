"""The three placement policies on one workload with shared prefixes, each through the real server.

    shoal bench router --trace mooncake_conversation.jsonl

For each placement in turn: start `shoal serve` with four replicas and small caches, send the same requests at the same
times, read the server's metrics, stop the server.

The trace is made smaller in a way that keeps its hit rates. All lengths are divided by --scale. Whole conversations are
sampled, one in --one-in, at random by --seed. A replica's cache is smaller than that of the full trace by the same two
factors (the sampling follows SHARDS: Waldspurger and others, FAST 2015).

The defaults stand for four caches of 5,760 blocks of 512 tokens under the whole Mooncake trace. At this size, affinity
matters most: far smaller caches keep nothing, and with far larger ones every replica has everything. The result depends
on the sample: simulated with other seeds, the ratio of the hit rates lies between 1.9 and 2.7. The full trace has 2.3.

hit rate        cached prompt tokens, divided by all prompt tokens, from the `usage` of the answers
token load      tokens that a replica computed during the run: uncached prompt tokens and output tokens
imbalance       largest token load of a replica, divided by the mean
held imbalance  the same for the tokens that a replica holds, waiting or as context, averaged over time
"""

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench import results
from bench.load import metrics, options, serve, trace
from bench.load.http import Http
from bench.load.workload import Lengths, Session, arriving, from_trace, unrelated
from bench.placement.conversations import BLOCK, conversations, sample
from bench.replica.server_process import ServerFailed, server
from bench.results import Figure
from shoal.help import Parser

PLACEMENTS = ("round_robin", "least_load", "cache_aware")
BASELINE, OURS = "round_robin", "cache_aware"
SETTLE_S = 10.0
POLL_S = 0.5
OUTPUT, WAITING, CONTEXT = "shoal_output_tokens_total", "shoal_waiting_tokens", "shoal_context_tokens"
COUNTERS = {
    "requests": "shoal_finished_requests_total",
    "prompt_tokens": "shoal_prompt_tokens_total",
    "cached_tokens": "shoal_cached_tokens_total",
    "output_tokens": OUTPUT,
}
Page = dict[str, dict[str, float]]  # metric: replica: value

# ---------------------------------------------------------------- the workload


@dataclass(frozen=True)
class Workload:
    """The requests for every placement. Prompts share whole pages of `page_size` tokens. `about` is for the result
    file."""

    sessions: list[Session]
    page_size: int
    about: dict[str, Any]


def workload(args: argparse.Namespace) -> Workload:
    """The requests that the options describe. Raises ValueError or OSError if the trace cannot be used."""
    if args.trace is None:
        sessions, block = conversations(args.seed, 160, 200.0, args.max_prompt), BLOCK
        about: dict[str, Any] = {"workload": "synthetic conversations"}
    else:
        rows = sample(trace.read(args.trace), args.one_in, args.seed)
        if not rows or rows[0].arrival_s is None:
            raise ValueError(f"{args.trace}: one conversation in {args.one_in} is none at all: use a smaller number")
        rows = rows[: args.requests]
        small = trace.shrink(rows, args.scale, args.max_prompt)
        sessions, block = from_trace(small, args.time_scale), small[0].block_tokens
        cut = sum(-(-row.prompt_tokens // args.scale) > args.max_prompt for row in rows)
        about = {"workload": f"trace {args.trace.name}", "prompts_cut": cut}
        about |= {key: getattr(args, key) for key in ("scale", "one_in", "time_scale")}
    sessions = sessions[: args.requests]
    first_s = sessions[0].arrival_s or 0.0
    sessions = arriving(sessions, [(session.arrival_s or 0.0) - first_s for session in sessions])
    lengths = [session.turns[0].prompt_tokens for session in sessions]
    about |= {"requests": len(sessions), "prompt_tokens": sum(lengths), "duration_s": sessions[-1].arrival_s}
    about |= {key: getattr(args, key) for key in ("seed", "max_prompt", "kv_tokens", "replicas")}
    return Workload(sessions, block, about | {"page_size": block})


# ---------------------------------------------------------------- a run


async def load(url: str, sessions: list[Session], args: argparse.Namespace) -> dict[str, Any]:
    """Warms the server up, sends the sessions at their times, and returns the measurements. Raises ServerFailed unless
    every request was answered, KeyboardInterrupt if interrupted."""
    line = ["--url", url, "--seed", str(args.seed), *(["--quiet"] if args.quiet else [])]
    short = unrelated(np.random.default_rng(0), 4 * args.replicas, Lengths.parse("64"), Lengths.parse("4"))
    # Another seed, so that no measured prompt gets into a cache. All at once, so that every replica is warmed up.
    warm = await _send([*line, "--seed", str(args.seed + 1_000_003), "--quiet"], arriving(short, [0.0] * len(short)))
    http = Http(url)
    before = await _settled(http, 0, warm)
    held: list[dict[str, float]] = []
    watcher = asyncio.ensure_future(_watch(url, held))
    try:
        samples = await _send(line, sessions)
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])
    after = await _settled(http, sum(before[OUTPUT].values()), samples)
    http.close()
    replicas = per_replica(before, after, held)
    return {
        "summary": metrics.summarise(samples),
        "imbalance": imbalance([replica["token_load"] for replica in replicas]),
        "held_imbalance": imbalance([replica["held_tokens"] for replica in replicas]),
        "replicas": replicas,
        "requests": serve.columns(samples),
    }


async def _send(line: list[str], sessions: list[Session]) -> list[metrics.Sample]:
    args = options.parser().parse_args(line)
    try:
        outcome = await serve.run(args, sessions, Http(args.url))
    except serve.UnusableServer as error:
        raise ServerFailed(str(error)) from None
    if outcome.interrupted:
        raise KeyboardInterrupt
    samples = outcome.load.samples
    if failed := [sample for sample in samples if sample.error is not None]:
        raise ServerFailed(f"{len(failed)} of {len(samples)} requests failed: {failed[0].error} ({failed[0].message})")
    return samples


async def _settled(http: Http, output_tokens: float, samples: Sequence[metrics.Sample]) -> Page:
    """The server's metrics, once their count of output tokens has grown from `output_tokens` by the samples' output.
    The replicas' last reports may come after the last answers. Raises ServerFailed if this takes longer than
    SETTLE_S."""
    wanted = output_tokens + sum(sample.output_tokens for sample in samples)
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        now = await _page(http)
        if sum(now.get(OUTPUT, {}).values()) >= wanted:
            return now
        await asyncio.sleep(0.1)
    raise ServerFailed(f"the server's metrics never counted all {wanted:g} tokens that it sent: was a replica lost?")


async def _watch(url: str, held: list[dict[str, float]]) -> None:
    """Appends the tokens that each replica holds to `held`, every POLL_S seconds."""
    http = Http(url)
    try:
        while True:
            await asyncio.sleep(POLL_S)
            now = await _page(http)
            context = now.get(CONTEXT, {})
            held.append({name: tokens + context[name] for name, tokens in now.get(WAITING, {}).items()})
    finally:
        http.close()


async def _page(http: Http) -> Page:
    parts: list[bytes] = []
    await http.send("GET", "/metrics", b"", lambda data, _status, _now: parts.append(data))
    return page(b"".join(parts).decode())


def page(text: str) -> Page:
    """The samples of a Prometheus page whose only labels are `replica` and, if there is one, `model`."""
    found: Page = {}
    for name, replica, value in re.findall(r'^(\w+)\{(?:model="[^"]*",)?replica="([^"]*)"\} (\S+)', text, re.MULTILINE):
        found.setdefault(name, {})[replica] = float(value)
    return found


def per_replica(before: Page, after: Page, held: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The work of each replica between two pages, and the mean number of tokens that it held. Replica ids are left out,
    since they differ from run to run. One replica also answered the load generator's probe, with one prompt token and
    one output token.

    Raises ServerFailed if the two pages have different replicas, since the work of a lost replica is unknown.
    """
    if before[OUTPUT].keys() != after[OUTPUT].keys():
        raise ServerFailed("a replica was lost during the run")
    made = []
    for name in sorted(after[OUTPUT]):
        row = {field: after[metric][name] - before[metric][name] for field, metric in COUNTERS.items()}
        row["token_load"] = row["prompt_tokens"] - row["cached_tokens"] + row["output_tokens"]
        row["held_tokens"] = float(np.mean([now.get(name, 0.0) for now in held])) if held else 0.0
        made.append(row)
    return made


def imbalance(loads: Sequence[float]) -> float:
    """The largest load divided by the mean, from 1 (perfect) to the number of loads. 1 if all loads are zero."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


# ---------------------------------------------------------------- the command


def figures(placements: Mapping[str, dict[str, Any]]) -> list[Figure]:
    """The figures of the result. Raises ValueError if the hit rate of the baseline is zero, so that there is no
    ratio."""
    rates = {name: measured["summary"]["hit_rate"] for name, measured in placements.items()}
    if not rates[BASELINE]:
        raise ValueError(f"{BASELINE} found nothing cached: use more requests, or larger caches")
    return [
        Figure("cpu.router.hit_rate.vs_round_robin", rates[OURS] / rates[BASELINE], "ratio", True),
        Figure("cpu.router.load_imbalance", placements[OURS]["imbalance"], "ratio", False),
    ]


def parser() -> Parser:
    p = Parser("shoal bench router", __doc__)
    p.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's JSON lines (default: made-up conversations)")
    p.add_argument("--scale", type=_count, default=64, metavar="N", help="trace: divide all lengths by N (default 64)")
    p.add_argument("--one-in", type=_count, default=40, metavar="N", help="trace: one conversation in N (default 40)")
    p.add_argument(
        "--time-scale", type=float, default=0.06, metavar="F", help="trace: multiply its times by F (default 0.06)"
    )
    p.add_argument("--max-prompt", type=_count, default=512, metavar="TOKENS", help="cut longer prompts (default 512)")
    p.add_argument("--requests", type=_count, metavar="N", help="only the first N requests (default: all)")
    p.add_argument(
        "--kv-tokens", type=_count, default=1152, metavar="N", help="tokens in a replica's cache (default 1152)"
    )
    p.add_argument("--replicas", type=_count, default=4, metavar="N", help="number of replicas (default 4)")
    p.add_argument("--model", default="SmolLM2-135M-Instruct", help="a known name, a folder, a .gguf file, or a hub id")
    p.add_argument("--seed", type=int, default=0, help="seed of the sample and the prompts (default 0)")
    results.add_options(p, "cpu.router")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    return p


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Runs the placements one after another, prints a table, writes the result file. Returns the exit code: 0, or 1 if
    a server failed, 2 if the workload cannot be made, 130 if interrupted. Only with 0 is the result written."""
    args = parser().parse_args(argv)
    try:
        work = workload(args)
    except (ValueError, OSError) as error:
        print(f"shoal bench router: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{key} {value}" for key, value in work.about.items()), flush=True)
    try:
        placements = {}
        for placement in PLACEMENTS:
            print(f"{placement}: starting the server", flush=True)
            with server(_arguments(args, work.page_size, placement)) as url:
                placements[placement] = uvloop.run(load(url, work.sessions, args))
            print(f"{placement}: {_line(placements[placement])}", flush=True)
        raw = {"workload": work.about, "placements": placements}
        path = results.write(args.name, figures(placements), raw, folder=args.out)
    except (ServerFailed, ValueError) as error:
        print(f"shoal bench router: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print_table(placements)
    print(f"written: {path}")
    return 0


def _arguments(args: argparse.Namespace, page_size: int, placement: str) -> list[str]:
    settings = {"model": args.model, "replicas": args.replicas, "placement": placement}
    settings |= {"kv-tokens": args.kv_tokens, "page-size": page_size}
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def _line(measured: dict[str, Any]) -> str:
    ttft = measured["summary"]["ttft_s"]
    return f"hit rate {measured['summary']['hit_rate']:.3f}, TTFT P50 {ttft['p50']:.2f} s, P99 {ttft['p99']:.2f} s"


def print_table(placements: Mapping[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("placement", "hit rate", "TTFT s: mean", "P50", "P90", "P99", "imbalance", "held", box=None)
    for name, measured in placements.items():
        spread = [f"{measured['summary']['ttft_s'][key]:.2f}" for key in ("mean", "p50", "p90", "p99")]
        even = [f"{measured[key]:.2f}" for key in ("imbalance", "held_imbalance")]
        table.add_row(name, f"{measured['summary']['hit_rate']:.3f}", *spread, *even)
    console = Console()
    console.print(table)
    for figure in figures(placements):
        console.print(f"{figure.name}: {figure.value:.2f}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
