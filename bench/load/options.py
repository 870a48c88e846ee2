"""The command line of `shoal bench serve`, and the sessions that its options describe."""

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.load import trace, workload
from shoal.help import Parser

EXAMPLES = """\
examples:
  shoal bench serve                                            100 prompts of 512 tokens, 8 at a time
  shoal bench serve --rate 4 --slo-ttft 1 --slo-tbt 0.1        4 requests/s on average, and goodput under an SLO
  shoal bench serve --prompt-tokens lognormal:1000:0.8:4000 --output-tokens uniform:16:256
  shoal bench serve --workload shared-prefix --groups 64 --members 8 --prefix-tokens 2048 --prompt-tokens 128
  shoal bench serve --workload multi-turn --sessions 16 --turns 4 --think 2 --endpoint chat
  shoal bench serve --trace mooncake.jsonl --scale 16 --max-prompt 4000 --time-scale 2 --requests 500
  shoal bench serve --url http://vllm:8000 --api-key KEY --model NAME --rate 10

Lengths are in tokens: N, uniform:A:B, or lognormal:MEDIAN:SIGMA[:MAX].

Trace formats, recognised by the first line:
  Azure     Azure's LLM inference trace (CSV)
  Mooncake  JSON lines. Prompts share the same 512-token blocks as in the trace.
  lengths   CSV with the columns num_prefill_tokens and num_decode_tokens

--scale N shrinks the blocks of a Mooncake trace too. Keep 512 / N at least as large as the server's pages, or prompts
can share nothing.

The same seed sends the same prompts. A server that has seen them before has them in its cache. The report warns when
more was cached than the workload shares.

Figures:
  TTFT     from sending a request to its first chunk with output
  TBT      between one chunk with output and the next
  TPOT     from the first chunk to the last, divided by the tokens after the first chunk
  goodput  answered requests per second whose TTFT and P99 of TBT are within the SLO
  lag      how late this generator sent a request. Unless it is small, this machine is too busy to measure.
"""
# Options of a single workload, with their defaults. With another workload they are an error, rather than ignored.
ONLY: dict[str, dict[str, Any]] = {
    "random": {"requests": 100},
    "shared-prefix": {"groups": 16, "members": 8, "prefix_tokens": "fixed:1024"},
    "multi-turn": {"sessions": 16, "turns": 4, "think": 0.0},
    "trace": {"requests": None, "scale": 1, "max_prompt": None, "time_scale": None},
}
LENGTHS = {"prompt_tokens": "fixed:512", "output_tokens": "fixed:128"}


class UsageError(Exception):
    """A command line with options that do not fit together. The message says what to do."""


def parser() -> Parser:
    """The command line of `shoal bench serve`."""
    made = Parser(
        "shoal bench serve",
        "Put a load on any server that speaks OpenAI's HTTP protocol, and measure it.",
        epilog=EXAMPLES,
    )
    server = made.add_argument_group("the server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    server.add_argument("--model", help="default: the first one that the server lists")
    server.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    server.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="default: %(default)s"
    )
    server.add_argument("--text", action="store_true", help="send prompts as text even if the server takes token ids")
    server.add_argument("--extra", type=_table, default={}, metavar="JSON", help="more fields for every request's body")
    server.add_argument(
        "--timeout", type=positive, default=600.0, metavar="S", help="limit for a request (default: 600 s)"
    )
    what = made.add_argument_group("the workload")
    kinds = what.add_mutually_exclusive_group()
    kinds.add_argument("--workload", choices=("random", "shared-prefix", "multi-turn"), default="random")
    kinds.add_argument("--trace", type=Path, metavar="FILE", help="lengths, arrivals and shared prefixes of a trace")
    what.add_argument(
        "--prompt-tokens", type=_lengths, metavar="LENGTH", help="length of a prompt or turn (default: 512)"
    )
    what.add_argument("--output-tokens", type=_lengths, metavar="LENGTH", help="length of an answer (default: 128)")
    what.add_argument(
        "--requests", type=count, metavar="N", help="random: default 100; trace: the first N (default: all)"
    )
    what.add_argument("--groups", type=count, metavar="N", help="shared-prefix: number of prefixes (default: 16)")
    what.add_argument("--members", type=count, metavar="N", help="shared-prefix: prompts per prefix (default: 8)")
    what.add_argument(
        "--prefix-tokens", type=_lengths, metavar="LENGTH", help="shared-prefix: length of a prefix (default: 1024)"
    )
    what.add_argument("--sessions", type=count, metavar="N", help="multi-turn: conversations (default: 16)")
    what.add_argument("--turns", type=count, metavar="N", help="multi-turn: turns per conversation (default: 4)")
    what.add_argument("--think", type=_zero_up, metavar="S", help="multi-turn: mean pause before a turn (default: 0 s)")
    what.add_argument("--scale", type=count, metavar="N", help="trace: divide all lengths by N (default: 1)")
    what.add_argument("--max-prompt", type=count, metavar="TOKENS", help="trace: cut longer prompts to this")
    what.add_argument("--seed", type=int, default=0, help="same seed, same prompts and arrivals (default: 0)")
    what.add_argument(
        "--token-range",
        type=_range,
        default=(1000, 30000),
        metavar="A:B",
        help="token ids in prompts (default: 1000:30000)",
    )
    when = made.add_argument_group("request times (at most one of these)").add_mutually_exclusive_group()
    when.add_argument("--concurrency", type=count, metavar="N", help="N sessions at once (default: 8)")
    when.add_argument("--rate", type=positive, metavar="R", help="mean arrivals per second (Poisson)")
    when.add_argument(
        "--time-scale",
        type=positive,
        metavar="F",
        help="the trace's own arrival times, multiplied by F (default with a trace: 1)",
    )
    out = made.add_argument_group("results")
    out.add_argument("--slo-ttft", type=positive, metavar="S", help="goodput: highest TTFT of a good request")
    out.add_argument("--slo-tbt", type=positive, metavar="S", help="goodput: highest P99 of TBT of a good request")
    out.add_argument(
        "--warmup", type=_zero_up_int, default=0, metavar="N", help="uncounted requests before the load (default: 0)"
    )
    out.add_argument("--name", help="name of the result (default: serve-DATE-TIME)")
    out.add_argument(
        "--out",
        type=Path,
        default=Path("shoal-bench"),
        metavar="DIR",
        help="folder of the result (default: %(default)s)",
    )
    out.add_argument("--quiet", action="store_true", help="no progress bar")
    made.set_defaults(cut=0)
    return made


def plan(args: argparse.Namespace) -> list[workload.Session]:
    """The sessions that the options describe. Fills in the defaults in `args`.

    Sessions have arrival times if the load is open (--rate, or a trace's own times), and none if it is closed
    (--concurrency). Raises UsageError, or ValueError or OSError if a trace cannot be read.
    """
    kind = "trace" if args.trace else args.workload
    _defaults(args, kind)
    # A stream of random numbers for each purpose, so that a change of the rate does not change the prompts.
    shape, clock = (np.random.default_rng([args.seed, purpose]) for purpose in (1, 2))
    prompt, output = args.prompt_tokens, args.output_tokens
    match kind:
        case "random":
            sessions = workload.unrelated(shape, args.requests, prompt, output)
        case "shared-prefix":
            sessions = workload.shared_prefix(shape, args.groups, args.members, args.prefix_tokens, prompt, output)
        case "multi-turn":
            sessions = workload.multi_turn(shape, args.sessions, args.turns, prompt, output, args.think)
        case _:
            rows = trace.read(args.trace, args.requests)
            timed = rows[0].arrival_s is not None
            if args.time_scale is not None and not timed:
                raise UsageError(f"{args.trace} has no times: use --rate or --concurrency instead of --time-scale")
            if timed and args.rate is None and args.concurrency is None and args.time_scale is None:
                args.time_scale = 1.0
            args.cut = sum(-(-row.prompt_tokens // args.scale) > (args.max_prompt or math.inf) for row in rows)
            sessions = workload.from_trace(trace.shrink(rows, args.scale, args.max_prompt), args.time_scale)
    if args.rate is not None:
        return workload.arriving(sessions, workload.poisson(clock, args.rate, len(sessions)))
    if args.time_scale is None and args.concurrency is None:
        args.concurrency = 8
    return sessions


def _defaults(args: argparse.Namespace, kind: str) -> None:
    mine = ONLY[kind] | ({} if kind == "trace" else LENGTHS)
    for option in {name for options in ONLY.values() for name in options} | LENGTHS.keys():
        if getattr(args, option) is not None:
            if option not in mine:
                owner = f"--workload {kind}" if kind != "trace" else "--trace"
                raise UsageError(f"--{option.replace('_', '-')} does nothing with {owner}")
        elif option in mine:
            default = mine[option]
            is_length = option.endswith("_tokens")
            setattr(args, option, workload.Lengths.parse(str(default)) if is_length else default)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options that describe the load, as JSON values. The value of `load` is a description in words."""
    kind = "trace" if args.trace else args.workload
    when = f"{args.concurrency} at once" if args.concurrency else f"{args.rate:g} requests/s" if args.rate else ""
    when = when or f"the trace's times x {args.time_scale:g}"
    what = f"trace {args.trace.name}" if args.trace else kind
    kept: dict[str, Any] = {"load": f"{what}, {when}", "endpoint": args.endpoint, "workload": kind}
    for option in (*ONLY[kind], *(() if args.trace else LENGTHS), "rate", "concurrency", "seed", "extra"):
        value = getattr(args, option)
        kept[option] = asdict(value) if isinstance(value, workload.Lengths) else value
    if kind == "trace":
        kept |= {"trace": args.trace.name, "prompts_cut": args.cut}
    return {key: value for key, value in kept.items() if value not in (None, {}, math.inf)}


def on_gpu(settings: dict[str, Any]) -> bool:
    """Whether a replica with these settings runs on a GPU. Raises ValueError if the settings ask for a GPU and there is
    none."""
    from worker.config import WorkerConfig
    from worker.executor.gpu_defaults import resolve_device  # imports torch

    where = {name: value for name, value in settings.items() if name == "device"}
    return resolve_device(WorkerConfig(**where))[0].type == "cuda"


# ---------------------------------------------------------------- values of options


def _number(kind: Callable[[str], Any], holds: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a {wanted}")
        return value

    return parse


count = _number(int, lambda value: value >= 1, "whole number of at least 1")
_zero_up_int = _number(int, lambda value: value >= 0, "whole number of at least 0")
positive = _number(float, lambda value: value > 0, "number above 0")
_zero_up = _number(float, lambda value: value >= 0, "number of at least 0")


def fractions(text: str) -> list[float]:
    """Probabilities, separated by commas, as the type of an option."""
    try:
        fractions = [float(one) for one in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are not numbers: use 0.8,0.7,0.6") from None
    if not all(0 <= one <= 1 for one in fractions):
        raise argparse.ArgumentTypeError(f"{text!r}: probabilities are from 0 to 1")
    return fractions


def counts(text: str) -> list[int]:
    """The numbers of a comma-separated list."""
    return [count(word) for word in text.split(",")]


def _lengths(text: str) -> workload.Lengths:
    try:
        return workload.Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of ids: use A:B with A < B")
    return int(low), int(high)


def _table(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
