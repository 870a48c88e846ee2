"""A meter's report on a load, as a result file holds it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.pipeline.load_generator import OfferedLoad
from pipeline.meter import CAUSES, Meter


def metered(meter: Meter) -> dict[str, Any]:
    """The bubble, the fractions of the time of all stages together and of each stage, and the bubble of decodes
    alone."""
    return {
        "bubble": _or_zero(meter.bubble()),
        "parts": _present(meter.fractions()),
        "stages": [_present(meter.fractions(stage)) for stage in range(meter.stages)],
        "micro_batches": meter.num_batches,
        "decode_bubble": decode_bubble(meter.trace(meter.num_batches)),
    }


def decode_bubble(trace: dict[str, Any]) -> float:
    """The fraction of the stages' time lost while there was something to do, counting only micro-batches of decodes and
    the gaps before them. From a trace (`Meter.trace`); 0 if it has no such micro-batches."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    decodes = {event["args"]["step"] for event in events if event["name"].startswith("decode ")}
    computed = sum(event["dur"] for event in events if event["args"].get("step") in decodes)
    waited = sum(
        event["dur"]
        for event in events
        if event["name"] in CAUSES and event["name"] != "nothing_to_do" and event["args"]["before"] in decodes
    )
    return float(waited / (computed + waited)) if computed else 0.0


def causes(parts: dict[str, float], most: int = 3) -> str:
    """The largest causes of idle time, in words."""
    waits = sorted(((part, cause) for cause, part in parts.items() if cause != "compute"), reverse=True)
    named = [f"{cause.replace('_', ' ')} {part:.1%}" for part, cause in waits[:most] if part >= 0.001]
    return ", ".join(named) or "nothing"


def _present(parts: dict[str, float]) -> dict[str, float]:
    return {cause: part for cause, part in parts.items() if part > 0}


def _or_zero(value: float) -> float:
    return value if value == value else 0.0


def keep(meter: Meter, folder: Path, load: OfferedLoad, point: dict[str, Any]) -> None:
    """Writes the meter's trace of a load with the outcome `point`. Loads that missed their objective, as half of the
    loads of a search do, are left out."""
    if load.objective is not None and not load.objective.holds(point):
        return
    folder.mkdir(parents=True, exist_ok=True)
    _trace(folder, load.key).write_text(json.dumps(meter.trace(meter.num_batches)))


def draw_kept(folder: Path, keys: Mapping[str, str], picture: Path, title: str) -> bool:
    """Draws the kept traces of points in `folder`. `keys`: keys of the points by the titles of their time lines.
    Returns whether there are any."""
    from bench.pipeline.timeline_plot import draw

    traces = {name: path for name, key in keys.items() if (path := _trace(folder, key)).exists()}
    return draw({name: json.loads(path.read_text()) for name, path in traces.items()}, picture, title)


def _trace(folder: Path, key: str) -> Path:
    return folder / f"{key.replace('/', '.')}.trace.json"
