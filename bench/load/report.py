"""The summary of a load as a table in the terminal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.load.metrics import Sample
from bench.results import number

ROWS = (
    ("ttft_s", "TTFT", "time to first token"),
    ("tbt_s", "TBT", "between chunks with output"),
    ("tpot_s", "TPOT", "a token, amortised"),
    ("e2e_s", "E2E", "whole answer"),
    ("lag_s", "lag", "of this generator"),
)
LATE_S = 0.05


def show(
    console: Console,
    summary: dict[str, Any],
    setting: dict[str, Any],
    samples: Sequence[Sample],
    refusals: Sequence[str],
) -> None:
    """Print a summary by `bench.load.metrics.summarise`, and all warnings that a reader needs to judge it."""
    console.print(f"\n[bold]{setting['model']}[/]  {setting['load']}", highlight=False)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("")
    for heading in ("mean", "P50", "P90", "P99", "max", ""):
        table.add_column(heading, justify="right")
    for key, short, long in ROWS:
        if spread := summary[key]:
            scale, unit = (1000, "ms") if spread["p99"] < 10 else (1, "s")
            table.add_row(short, f"[dim]{long}[/]", *(number(value * scale) for value in spread.values()), unit)
    console.print(table, highlight=False)
    for line in lines(summary):
        console.print(line, highlight=False, soft_wrap=True)
    for line in warnings(summary, setting, samples, refusals):
        console.print(line, highlight=False, markup=False, soft_wrap=True, style="yellow")


def lines(summary: dict[str, Any]) -> list[str]:
    """Lines on throughput, cache hits and goodput."""
    found = [
        f"{summary['answered']} of {summary['planned']} requests answered in {number(summary['duration_s'])} s: "
        f"{number(summary['requests_per_s'])} requests/s, {number(summary['output_tokens_per_s'])} output tokens/s"
        + (f", {number(summary['input_tokens_per_s'])} input tokens/s" if summary["prompt_tokens"] is not None else "")
    ]
    if summary["hit_rate"] is not None:
        found.append(
            f"{summary['cached_tokens']:,} of {summary['prompt_tokens']:,} prompt tokens cached: "
            f"hit rate {summary['hit_rate']:.1%} (the workload shares {summary['hit_rate_ceiling']:.1%})"
        )
    if "goodput_per_s" in summary:
        found.append(
            f"goodput {number(summary['goodput_per_s'])} requests/s: {summary['attained']:.1%} of requests meet the SLO"
        )
    return found


def warnings(
    summary: dict[str, Any], setting: dict[str, Any], samples: Sequence[Sample], refusals: Sequence[str]
) -> list[str]:
    """Warnings: failures, and circumstances that change the meaning of the figures."""
    found = []
    for kind, count in summary["failures"].items():
        message = next((sample.message for sample in samples if sample.error == kind), "")
        found.append(f"{count} failed: {kind} ({' '.join(message.split())[:160]})")
    if summary["interrupted"]:
        found.append(f"interrupted: {summary['planned'] - summary['requests']} requests were not sent")
    if summary["answered"] and (short := summary["short_answers"]):
        why = "" if setting["server_takes"]["ignore_eos"] else "; the server does not take ignore_eos"
        found.append(f"{short} answers are shorter than asked for{why}")
    if setting["endpoint"] == "completions" and not setting["server_takes"]["prompt_ids"]:
        found.append("prompts were sent as text, so their lengths are about right, not exact")
    if summary["prompt_tokens"] is None and summary["answered"]:
        found.append("the server sends no usage: output tokens are chunks, and what was cached is unknown")
    if (per_chunk := summary["tokens_per_chunk"]) is not None and per_chunk > 1.05:
        found.append(
            f"{per_chunk:.2f} tokens came in a chunk: TBT is the wait between chunks, TPOT the time of a token"
        )
    if setting["endpoint"] == "completions" and (summary["hit_rate"] or 0) > summary["hit_rate_ceiling"] + 0.02:
        found.append("more was cached than the workload shares: from an earlier run; another --seed has new prompts")
    if "concurrency" not in setting and (lag := summary["lag_s"]) and lag["p99"] > LATE_S:
        found.append(
            f"the generator was late by {lag['p99'] * 1000:.0f} ms (P99): this machine is too busy to measure well"
        )
    if setting.get("prompts_cut"):
        found.append(f"prompts of the trace that were cut to {setting['max_prompt']} tokens: {setting['prompts_cut']}")
    if refusals:
        found.append(f"the server does not take all that is asked of it: {' '.join(refusals[0].split())[:160]}")
    return found
