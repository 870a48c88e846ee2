"""A picture of a load: distributions of TTFT and TBT, and throughput and requests in flight over time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from bench.load.metrics import Sample, percentile
from bench.results import number

BLUE, ORANGE, RED, GREY = "#2a6f97", "#e07a1f", "#b3261e", "#6b7280"


def draw(samples: Sequence[Sample], path: Path, title: str, slo_ttft_s: float | None, slo_tbt_s: float | None) -> None:
    """Write a PNG of a load's samples.

    - Top: cumulative distributions of TTFT and TBT, with P50, P99 and the limits of the SLO.
    - Below: output tokens per second, requests in flight and failures, all over time.
    """
    answered = [sample for sample in samples if sample.error is None]
    figure = Figure(figsize=(10, 8), dpi=120, layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=[1.5, 1, 0.8])
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    ttfts, gaps = [s.ttft_s for s in answered], [gap for s in answered for gap in s.gaps_s]
    _distribution(figure.add_subplot(grid[0, 0]), ttfts, "Time to first token (TTFT)", slo_ttft_s)
    _distribution(figure.add_subplot(grid[0, 1]), gaps, "Time between tokens (TBT)", slo_tbt_s)
    throughput = figure.add_subplot(grid[1, :])
    _throughput(throughput, samples)
    _in_flight(figure.add_subplot(grid[2, :], sharex=throughput), samples)
    throughput.tick_params(labelbottom=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _distribution(axes: Axes, values: Sequence[float], name: str, limit_s: float | None) -> None:
    axes.set_title(name, loc="left", fontsize=10)
    _clean(axes)
    if not values:
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=GREY)
        return
    scale, unit = (1.0, "s") if percentile(values, 99) >= 1 else (1000.0, "ms")
    ordered = np.sort(np.asarray(values)) * scale
    steps = np.concatenate([ordered[:1], ordered]), np.arange(len(ordered) + 1) / len(ordered)
    axes.plot(*steps, color=BLUE, lw=1.8, drawstyle="steps-post")
    for q, style in ((50, "-"), (99, "--")):
        at = percentile(values, q) * scale
        axes.axvline(at, color=GREY, lw=0.9, ls=style, label=f"P{q}  {number(at)} {unit}")
    if limit_s is not None:
        axes.axvline(limit_s * scale, color=RED, lw=1.2, ls=":", label=f"SLO  {number(limit_s * scale)} {unit}")
    # On a linear axis, a few stalls would squeeze the other values against the left edge. Cutting the axis would hide
    # them. So the axis is logarithmic if there are any.
    if ordered[-1] > 12 * max(np.median(ordered), 1e-9):
        axes.set_xscale("log")
        axes.set_xlim(left=max(float(np.percentile(ordered, 1)), 1e-3) / 1.5)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _position: f"{value:g}")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(unit, fontsize=9)
    axes.set_ylabel("share", fontsize=9)
    axes.legend(fontsize=9, framealpha=0.9, edgecolor="none", loc="lower right", handlelength=1.6)


def _throughput(axes: Axes, samples: Sequence[Sample]) -> None:
    times: list[float] = []
    tokens: list[float] = []
    for sample in samples:
        counts: list[float] = [*sample.chunk_tokens] or [sample.output_tokens / max(1, len(sample.chunk_s))] * len(
            sample.chunk_s
        )
        times += sample.chunk_s
        tokens += counts
    axes.set_title("Output tokens a second", loc="left", fontsize=10)
    _clean(axes)
    if not times:
        return
    edges = np.linspace(0, max(sample.end_s for sample in samples), bins(max(sample.end_s for sample in samples)) + 1)
    rate = np.histogram(times, bins=edges, weights=tokens)[0] / np.diff(edges)
    axes.stairs(rate, edges, color=BLUE, fill=True, alpha=0.25)
    axes.stairs(rate, edges, color=BLUE, lw=1.4)
    axes.set_ylim(bottom=0)


def _in_flight(axes: Axes, samples: Sequence[Sample]) -> None:
    failed = [sample.end_s for sample in samples if sample.error is not None]
    axes.set_title(
        "Requests in flight" + (f", and {len(failed)} failed (x)" if failed else ""), loc="left", fontsize=10
    )
    _clean(axes)
    changes = sorted([(s.sent_s, 1) for s in samples] + [(s.end_s, -1) for s in samples])
    times = [0.0, *(when for when, _ in changes)]
    axes.step(times, [0, *np.cumsum([by for _, by in changes]).tolist()], where="post", color=ORANGE, lw=1.4)
    axes.plot(failed, [0] * len(failed), "x", color=RED, ms=6, clip_on=False)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, max(max(times), 1e-9))
    axes.set_xlabel("seconds since the load began", fontsize=9)


def bins(duration_s: float) -> int:
    """The number of bars of the timeline: about one per second, at least 20, at most 200."""
    return int(np.clip(round(duration_s), 20, 200))


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e5e7eb", lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)
