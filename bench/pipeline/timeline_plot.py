"""A picture of a pipeline: the micro-batches that each stage computes and the causes of its idle time, over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipeline.meter import CAUSES

SHOWN = 24  # micro-batches
PAUSES = 4.0  # longest time shown, relative to the computing time of those
KINDS = {"decode": "#2a6f97", "mixed": "#5fa8d3", "prefill": "#a9d6e5"}
WAITS = dict(
    zip(
        CAUSES,
        ("#e07a1f", "#8d6a9f", "#e5e7eb", "#f2cc8f", "#c9cdd3", "#7f5539", "#b3261e", "#e76f51", "#6a994e"),
        strict=True,
    )
)


def draw(traces: dict[str, dict[str, Any]], path: Path, title: str) -> bool:
    """Writes a PNG of traces (`Meter.trace`) by name, one below the other. Each shows the time around its middle
    micro-batch, on a scale of its own. Returns whether there was something to draw."""
    named = {name: _spans(trace) for name, trace in traces.items()}
    named = {name: spans for name, spans in named.items() if any(kind in KINDS for _, kind, _, _ in spans)}
    if not named:
        return False
    stages = 1 + max(stage for spans in named.values() for stage, *_ in spans)
    figure = Figure(figsize=(13, 1.2 + len(named) * (0.7 + 0.28 * stages)), dpi=120, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    for axes, (name, spans) in zip(figure.subplots(len(named), 1, squeeze=False)[:, 0], named.items(), strict=True):
        _lines(axes, name, spans)
    present = {kind for spans in named.values() for _, kind, _, _ in spans}
    colours = {kind: colour for kind, colour in (KINDS | WAITS).items() if kind in present}
    figure.legend(
        handles=[Patch(color=colour, label=kind.replace("_", " ")) for kind, colour in colours.items()],
        loc="outside lower center",
        ncols=6,
        fontsize=9,
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True


def _spans(trace: dict[str, Any]) -> list[tuple[int, str, float, float]]:
    """Stage, kind of micro-batch or cause of idle time, begin and duration in seconds."""
    return [
        (event["pid"], event["name"].split()[0], event["ts"] * 1e-6, event["dur"] * 1e-6)
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]


def _window(spans: Sequence[tuple[int, str, float, float]]) -> tuple[float, float]:
    """Begin and duration, in seconds, of the part to show: SHOWN micro-batches in the middle of the last stage's. With
    long pauses it is a shorter time around the middle one, as micro-batches would be invisible otherwise."""
    last = max(stage for stage, *_ in spans)
    computes = sorted((begin, seconds) for stage, kind, begin, seconds in spans if stage == last and kind in KINDS)
    first = max(0, len(computes) // 2 - SHOWN // 2)
    shown = computes[first : first + SHOWN]
    begin_s, whole_s = shown[0][0], shown[-1][0] + shown[-1][1] - shown[0][0]
    longest_s = PAUSES * sum(seconds for _, seconds in shown)
    if whole_s <= longest_s:
        return begin_s, whole_s
    middle_s = shown[len(shown) // 2][0]
    return middle_s - longest_s / 2, longest_s


def _lines(axes: Axes, name: str, spans: Sequence[tuple[int, str, float, float]]) -> None:
    start, window_s = _window(spans)
    stages = 1 + max(stage for stage, *_ in spans)
    for kind, colour in (KINDS | WAITS).items():
        for stage in range(stages):
            bars = [(begin - start, seconds) for of, what, begin, seconds in spans if (of, what) == (stage, kind)]
            seen = [(begin * 1e3, seconds * 1e3) for begin, seconds in bars if -seconds < begin < window_s]
            edge = "white" if kind in KINDS else "none"
            axes.broken_barh(seen, (stage - 0.42, 0.84), facecolors=colour, edgecolors=edge, linewidth=0.5)
    axes.set_title(name, loc="left", fontsize=10)
    axes.set_xlim(0, window_s * 1e3)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)], fontsize=9)
    axes.set_xlabel("ms", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
