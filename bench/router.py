"""The three placements on one workload of shared prefixes, each through the real server.

    python -m bench.router --trace mooncake_conversation.jsonl

For each placement in turn: start `shoal serve` with four replicas and small caches, send it the same requests at the
same times, read what it says of itself, stop it. A trace is made small in a way that keeps its hit rates: all lengths
are divided, whole conversations are sampled (one in so many, at random, by the seed), and a replica's cache is that of
the full trace by the same two factors (SHARDS: Waldspurger and others, FAST 2015, for the sampling). The defaults stand
for four caches of 5,760 blocks of 512 tokens under the whole Mooncake trace, where affinity is worth most: with far
smaller caches nothing stays, with far larger ones every replica has everything. A sample is a sample: simulated with
other seeds, the ratio of the hit rates lies between 1.9 and 2.7, around the 2.3 of the full trace.

hit rate        prompt tokens that were cached, by all prompt tokens, as the answers' `usage` has them
token load      of a replica: the tokens that it computed over the run, prompt tokens that were not cached and output
imbalance       the largest replica's token load by the mean
held imbalance  the same of the tokens that were waiting or held as context there, averaged over time
"""

import argparse
import asyncio
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench import metrics, options, results, serve, trace
from bench.child import ServerFailed, server
from bench.conversations import BLOCK, conversations, sample
from bench.http import Http
from bench.results import Figure
from bench.workload import Lengths, Session, arriving, from_trace, unrelated

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
    """What every placement is sent. Prompts share whole pages of `page_size` tokens. `about` is for the result file."""

    sessions: list[Session]
    page_size: int
    about: dict[str, Any]


def workload(args: argparse.Namespace) -> Workload:
    """The requests that the options ask for. Raises ValueError or OSError of a trace that cannot be used."""
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
    """Warms the server up, sends it the sessions at their times, and returns what came of it. Raises ServerFailed
    unless every request was answered, KeyboardInterrupt when it was interrupted."""
    line = ["--url", url, "--seed", str(args.seed), *(["--quiet"] if args.quiet else [])]
    short = unrelated(np.random.default_rng(0), 4 * args.replicas, Lengths.parse("64"), Lengths.parse("4"))
    # By another seed, so that it leaves no measured prompt in a cache; all at once, so that no replica is left out.
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
    except serve.ServerError as error:
        raise ServerFailed(str(error)) from None
    if outcome.interrupted:
        raise KeyboardInterrupt
    samples = outcome.load.samples
    if failed := [sample for sample in samples if sample.error is not None]:
        raise ServerFailed(f"{len(failed)} of {len(samples)} requests failed: {failed[0].error} ({failed[0].message})")
    return samples


async def _settled(http: Http, output_tokens: float, samples: Sequence[metrics.Sample]) -> Page:
    """The server's metrics once they count the samples' output on top of `output_tokens`: the replicas' last reports
    may come after the last answers. Raises ServerFailed if they never do."""
    wanted = output_tokens + sum(sample.output_tokens for sample in samples)
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        now = await _page(http)
        if sum(now.get(OUTPUT, {}).values()) >= wanted:
            return now
        await asyncio.sleep(0.1)
    raise ServerFailed(f"the server's metrics never counted all {wanted:g} tokens that it sent: was a replica lost?")


async def _watch(url: str, held: list[dict[str, float]]) -> None:
    """Notes what each replica holds, again and again."""
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
    """The samples of a Prometheus page that have one label, `replica`."""
    found: Page = {}
    for name, replica, value in re.findall(r'^(\w+)\{replica="([^"]*)"\} (\S+)', text, re.MULTILINE):
        found.setdefault(name, {})[replica] = float(value)
    return found


def per_replica(before: Page, after: Page, held: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """What each replica did between two pages, and what it held on average; their ids mean nothing and are left out.
    One of them also answered the load generator's probe, a token in and a token out.

    Raises ServerFailed if the replicas are not the same ones: then what the lost one did is unknown.
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
    """The largest by the mean: 1 is perfect, the number of loads the worst. 1 if there is no load at all."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


# ---------------------------------------------------------------- the command


def figures(placements: Mapping[str, dict[str, Any]]) -> list[Figure]:
    """Raises ValueError if the baseline hit nothing, so that there is no ratio."""
    rates = {name: measured["summary"]["hit_rate"] for name, measured in placements.items()}
    if not rates[BASELINE]:
        raise ValueError(f"{BASELINE} found nothing cached: use more requests, or larger caches")
    return [
        Figure("cpu.router.hit_rate.vs_round_robin", rates[OURS] / rates[BASELINE], "ratio", True),
        Figure("cpu.router.load_imbalance", placements[OURS]["imbalance"], "ratio", False),
    ]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="shoal bench router",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's JSON lines (default: made-up conversations)")
    p.add_argument("--scale", type=_count, default=64, metavar="N", help="trace: divide all lengths by N (default 64)")
    p.add_argument("--one-in", type=_count, default=40, metavar="N", help="trace: one conversation in N (default 40)")
    p.add_argument("--time-scale", type=float, default=0.06, metavar="F", help="trace: its times by F (default 0.06)")
    p.add_argument("--max-prompt", type=_count, default=512, metavar="TOKENS", help="cut longer prompts (default 512)")
    p.add_argument("--requests", type=_count, metavar="N", help="only the first N (default: all)")
    p.add_argument("--kv-tokens", type=_count, default=1152, metavar="N", help="cache of a replica (default 1152)")
    p.add_argument("--replicas", type=_count, default=4, metavar="N", help="default 4")
    p.add_argument("--model", default="SmolLM2-135M-Instruct", help="a known name, a folder, a .gguf file, or a hub id")
    p.add_argument("--seed", type=int, default=0, help="of the sample and the prompts (default 0)")
    p.add_argument("--name", default="cpu.router", help="of the result file (default cpu.router)")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    return p


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Runs the placements one after another, prints a table, writes the result file. Returns 0; 1 when a server failed,
    2 for a workload that cannot be, 130 when interrupted: then nothing is written."""
    args = parser().parse_args(argv)
    try:
        work = workload(args)
    except (ValueError, OSError) as error:
        print(f"shoal bench router: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{key} {value}" for key, value in work.about.items()), flush=True)
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(143))  # as an exception, so that the server ends too
    try:
        placements = {}
        for placement in PLACEMENTS:
            print(f"{placement}: starting the server", flush=True)
            with server(_arguments(args, work.page_size, placement)) as url:
                placements[placement] = uvloop.run(load(url, work.sessions, args))
            print(f"{placement}: {_line(placements[placement])}", flush=True)
        path = results.write(args.name, figures(placements), {"workload": work.about, "placements": placements})
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
