"""What a profiler's trace says of the GPU: how much of the time it computes, and what.

Works on the events of a trace as `torch.profiler` exports it (Chrome's format; times in microseconds).
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]

WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})


@dataclass(frozen=True)
class Kernel:
    """What all launches of one kernel took together. `busy_s` counts each for itself, overlapping or not."""

    name: str
    launches: int
    busy_s: float


@dataclass(frozen=True)
class Timeline:
    """A stretch of GPU work, from the beginning of its first kernel or copy to the end of its last one.

    `idle_s` is the part of `window_s` in which nothing runs; `idle_between_s` the part of that which lies between two
    launches from the host, not between kernels of one CUDA graph. `waited_s` is how long the host waited for the GPU
    in that time. `kernels` come longest first.
    """

    window_s: float
    idle_s: float
    idle_between_s: float
    waited_s: float
    kernels: tuple[Kernel, ...]

    @property
    def idle_fraction(self) -> float:
        return self.idle_s / self.window_s

    @property
    def idle_between_fraction(self) -> float:
        return self.idle_between_s / self.window_s


def record(work: Callable[[], None]) -> list[Event]:
    """The trace of what `work` makes the GPU do, empty without one. It must wait for the GPU itself, before it begins
    and at its end."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():
        work()
        return []
    # Of the GPU alone: to record what the host does as well would slow the host down.
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def read(events: Iterable[Event]) -> Timeline | None:
    """The timeline of a trace; None for one in which no GPU does anything. One process's, on one GPU."""
    work, waits = [], []
    for event in events:
        kind = event.get("cat")
        if kind in WORK:
            work.append(event)
        elif kind in RUNTIME and "Synchronize" in event["name"]:
            waits.append(event)
    if not work:
        return None
    work.sort(key=lambda event: event["ts"])
    start, end = work[0]["ts"], max(event["ts"] + event["dur"] for event in work)
    idle, between = _gaps(work)
    waited = sum(max(0.0, min(e["ts"] + e["dur"], end) - max(e["ts"], start)) for e in waits)
    return Timeline((end - start) * 1e-6, idle * 1e-6, between * 1e-6, waited * 1e-6, _kernels(work))


def _gaps(work: Sequence[Event]) -> tuple[float, float]:
    """Microseconds in which nothing runs, and those of them between launches. `work` is in the order of its starts."""
    idle = between = 0.0
    last = work[0]  # of those so far, the one that ends last
    for event in work[1:]:
        end = last["ts"] + last["dur"]
        if (gap := event["ts"] - end) > 0:
            idle += gap
            if _launch(event) is None or _launch(event) != _launch(last):
                between += gap
        if event["ts"] + event["dur"] > end:
            last = event
    return idle, between


def _launch(event: Event) -> Any:
    """All kernels of one launch of a graph carry the number of that launch."""
    return event.get("args", {}).get("correlation")


def _kernels(work: Iterable[Event]) -> tuple[Kernel, ...]:
    found: dict[str, list[float]] = defaultdict(list)
    for event in work:
        found[event["name"]].append(event["dur"])
    kernels = (Kernel(name, len(times), sum(times) * 1e-6) for name, times in found.items())
    return tuple(sorted(kernels, key=lambda kernel: -kernel.busy_s))
