"""`shoal bench serve`: a load on any server that speaks OpenAI's HTTP protocol.

Sends a workload (`bench.load.workload`) or a trace (`bench.load.trace`), measures it (`bench.load.metrics`), prints a
table, and writes a JSON file and a picture. `bench.load.options` has the options.
"""

import argparse
import asyncio
import gc
import signal
import sys
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import results
from bench.load import metrics, workload
from bench.load.client import Endpoint, probe
from bench.load.http import Http
from bench.load.load import LoadRun
from bench.load.options import UsageError, parser, plan, settings
from bench.load.report import show


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit code:

    | code | meaning |
    | --- | --- |
    | 0 | at least one request was answered |
    | 1 | none was, or the server cannot be used |
    | 2 | wrong command line |
    | 130 | interrupted; the measurements until then are still reported |
    """
    args = parser().parse_args(argv)
    try:
        sessions = plan(args)
        http = Http(args.url, args.api_key)
    except (UsageError, ValueError, OSError) as error:
        print(f"shoal bench serve: {error}", file=sys.stderr)
        return 2
    try:
        outcome = uvloop.run(run(args, sessions, http))
    except UnusableServer as error:
        print(f"shoal bench serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return report(args, outcome)


class UnusableServer(Exception):
    """The server refuses even the simplest request, or cannot be reached."""


@dataclass(frozen=True)
class Outcome:
    """A load that has ended. `refusals`: the server's messages when it refused an extension of the protocol."""

    load: LoadRun
    refusals: list[str]
    interrupted: bool


async def run(args: argparse.Namespace, sessions: list[workload.Session], http: Http) -> Outcome:
    """Find out which extensions the server accepts, warm it up, and put the load on it. Ctrl-C ends the load early.

    Raises UnusableServer if the server cannot be reached or refuses even the simplest request.
    """
    endpoint = Endpoint(args.endpoint == "chat", args.model or await _model(http), args.extra)
    # In a conversation, the next prompt continues the answers before it, and these come back as text.
    text = args.text or args.workload == "multi-turn"
    endpoint, first, refusals = await probe(http, endpoint, args.token_range[1] - 1, args.timeout, text)
    if first.error is not None:
        raise UnusableServer(f"{http.base}{endpoint.path} answers {first.error}: {first.message}")
    vocabulary = workload.Vocabulary(args.seed, *args.token_range)
    if args.warmup:
        short = workload.Lengths("fixed", 64), workload.Lengths("fixed", 16)
        # Another seed: the warm-up must not put the measured prompts into the server's cache.
        other = workload.Vocabulary(args.seed + 1_000_003, *args.token_range)
        warm = workload.unrelated(np.random.default_rng(0), args.warmup, *short)
        await LoadRun(warm, http, endpoint, other, args.timeout).run(args.concurrency or 8)
    load = LoadRun(sessions, http, endpoint, vocabulary, args.timeout)
    gc.collect()
    gc.freeze()  # garbage collection during a measurement then does not walk the workload
    task = asyncio.ensure_future(load.run(args.concurrency))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    watch = asyncio.ensure_future(_watch(load)) if not args.quiet else None
    try:
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        gc.unfreeze()
        if watch is not None:
            watch.cancel()
            await asyncio.wait([watch])
        http.close()
    wanted = replace(endpoint.abilities, prompt_ids=not (text or endpoint.chat), ignore_eos=True)
    return Outcome(load, refusals if endpoint.abilities != wanted else [], task.cancelled())


async def _model(http: Http) -> str:
    try:
        status, value = await asyncio.wait_for(http.get("/v1/models"), 30)
    except (OSError, TimeoutError) as error:
        raise UnusableServer(
            f"no server at {http.base} ({error}); start one with `shoal serve`, or say --url"
        ) from None
    try:
        return value["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        raise UnusableServer(f"{http.base}/v1/models answers {status} and lists no model; say --model") from None


async def _watch(load: LoadRun) -> None:
    """Shows the progress bar. It is drawn only twice a second, so that it does not disturb the measurement."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        bar = progress.add_task("requests", total=load.planned, now="")
        while True:
            ended = [sample for sample in load.samples if sample.end_s]
            failed = sum(sample.error is not None for sample in ended)
            chunks = sum(len(sample.chunk_s) for sample in load.samples)
            now = f"{len(load.samples) - len(ended)} in flight, {chunks / max(load.elapsed_s(), 1e-9):,.0f} chunks/s"
            progress.update(bar, completed=len(ended), now=now + (f", [red]{failed} failed[/]" if failed else ""))
            progress.refresh()
            await asyncio.sleep(0.5)


def report(args: argparse.Namespace, outcome: Outcome) -> int:
    """Print the table, write the JSON file and the picture. Returns the exit code."""
    load, interrupted = outcome.load, outcome.interrupted
    summary = metrics.summarise(load.samples, args.slo_ttft, args.slo_tbt)
    shared, total = workload.sharing(load.sessions)
    summary |= {"planned": load.planned, "interrupted": interrupted, "hit_rate_ceiling": shared / max(1, total)}
    abilities = load.endpoint.abilities
    setting = settings(args) | {"model": load.endpoint.model, "server_takes": asdict(abilities)}
    console = Console()
    show(console, summary, setting, load.samples, outcome.refusals)
    name = args.name or f"serve-{datetime.now():%Y%m%d-%H%M%S}"
    raw = {"settings": setting, "summary": summary, "requests": columns(load.samples)}
    path = results.write(name, metrics.figures(name, summary), raw, folder=args.out)
    picture = path.with_suffix(".png")
    if load.samples:
        from bench.load.plot import draw  # here, since matplotlib takes a while to import

        draw(load.samples, picture, f"{load.endpoint.model}: {setting['load']}", args.slo_ttft, args.slo_tbt)
    console.print(f"\n{path}\n{picture}", style="dim", highlight=False)
    return 130 if interrupted else 0 if summary["answered"] else 1


def columns(samples: list[metrics.Sample]) -> dict[str, list[Any]]:
    """The samples as columns for the result file, one list per field, without texts and chunks. Times are rounded to
    microseconds."""
    rows = [
        {
            "session": s.session,
            "turn": s.turn,
            "due_s": round(s.due_s, 6),
            "sent_s": round(s.sent_s, 6),
            "end_s": round(s.end_s, 6),
            "ttft_s": round(s.ttft_s, 6) if s.chunk_s else None,
            "tbt_max_s": round(max(s.gaps_s), 6) if len(s.chunk_s) > 1 else None,
            "prompt_tokens": s.prompt_tokens,
            "cached_tokens": s.cached_tokens,
            "output_tokens": s.output_tokens,
            "finish_reason": s.finish_reason,
            "error": s.error,
        }
        for s in samples
    ]
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


if __name__ == "__main__":
    sys.exit(main())
