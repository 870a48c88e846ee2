"""What a pipeline's meter says of a load, as a result file holds it."""

import json
from pathlib import Path
from typing import Any

from bench.pipelines.layout import Layout, Setting
from bench.pipelines.offered import Load
from pipeline.meter import CAUSES, Meter


def metered(meter: Meter) -> dict[str, Any]:
    """The bubble, the parts of all stages' time and of each one's, and the bubble among micro-batches of decodes."""
    return {
        "bubble": _or_zero(meter.bubble()),
        "parts": _present(meter.fractions()),
        "stages": [_present(meter.fractions(stage)) for stage in range(meter.stages)],
        "micro_batches": meter.num_batches,
        "decode_bubble": decode_bubble(meter.trace(meter.num_batches)),
    }


def decode_bubble(trace: dict[str, Any]) -> float:
    """The part of the stages' time, while they computed nothing but decodes, that was lost while there was something to
    do. From a trace (`Meter.trace`); 0 where it has none."""
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
    """The largest causes of waiting, for people."""
    waits = sorted(((part, cause) for cause, part in parts.items() if cause != "compute"), reverse=True)
    named = [f"{cause.replace('_', ' ')} {part:.1%}" for part, cause in waits[:most] if part >= 0.001]
    return ", ".join(named) or "nothing"


def _present(parts: dict[str, float]) -> dict[str, float]:
    return {cause: part for cause, part in parts.items() if part > 0}


def _or_zero(value: float) -> float:
    return value if value == value else 0.0


def keep(meter: Meter, folder: Path, layout: Layout, setting: Setting, load: Load) -> None:
    """Writes the meter's trace of a load: of one that arrives at a rate, at the newest of its rates."""
    name = f"{layout}.{load.name}.{setting.schedule}.{'rate' if load.rate else 'flood'}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.trace.json").write_text(json.dumps(meter.trace(meter.num_batches)))


def draw_kept(folder: Path, picture: Path, title: str) -> None:
    """A picture of the traces in a folder."""
    from bench.pipelines.picture import draw

    traces = {path.name.removesuffix(".trace.json"): path for path in sorted(folder.glob("*.trace.json"))}
    draw({name.replace(".", " "): json.loads(path.read_text()) for name, path in traces.items()}, picture, title)
