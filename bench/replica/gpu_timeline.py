"""GPU activity from a profiler's trace: busy and idle time, and the time of each kernel.

Reads the events of a trace that `torch.profiler` exports (Chrome's format, times in microseconds).
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
    """All launches of a kernel. `busy_s` is the sum of their durations, whether or not they overlap."""

    name: str
    launches: int
    busy_s: float


@dataclass(frozen=True)
class GpuTimeline:
    """GPU activity from the start of the first kernel or copy to the end of the last one.

    | field | meaning |
    | --- | --- |
    | `window_s` | length of this window |
    | `idle_s` | the part of the window in which nothing runs |
    | `idle_between_s` | the part of `idle_s` between launches from the host, without gaps within a CUDA graph |
    | `waited_s` | how long the host waited for the GPU within the window |
    | `kernels` | all kernels, the one with the longest time first |
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
    """Runs `work`. Returns the trace of its GPU activity, empty without a GPU. `work` must itself synchronise with the
    GPU at its beginning and its end."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():
        work()
        return []
    # Only GPU activity: recording the host's as well would slow the host down.
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def read(events: Iterable[Event]) -> GpuTimeline | None:
    """The timeline of a trace of one process on one GPU. None if the trace has no GPU activity."""
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
    return GpuTimeline((end - start) * 1e-6, idle * 1e-6, between * 1e-6, waited * 1e-6, _kernels(work))


def _gaps(work: Sequence[Event]) -> tuple[float, float]:
    """Returns the idle microseconds, and the part of them between launches. `work` is ordered by start time."""
    idle = between = 0.0
    last = work[0]  # the event so far that ends last
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
    """The number of the event's launch. All kernels of a CUDA graph's launch have the same number."""
    return event.get("args", {}).get("correlation")


def _kernels(work: Iterable[Event]) -> tuple[Kernel, ...]:
    found: dict[str, list[float]] = defaultdict(list)
    for event in work:
        found[event["name"]].append(event["dur"])
    kernels = (Kernel(name, len(times), sum(times) * 1e-6) for name, times in found.items())
    return tuple(sorted(kernels, key=lambda kernel: -kernel.busy_s))
