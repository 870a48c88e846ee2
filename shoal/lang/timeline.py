"""A record of a program's calls: a table for people, and a time line that Perfetto opens."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallRecord:
    """A call that has ended. `begun_s` and `seconds` are on the clock of `time.perf_counter`; token counts are None
    where the backend does not tell them."""

    branch: int
    name: str
    place: str
    begun_s: float
    seconds: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


def record(branch: int, name: str | None, place: str, begun_s: float, seconds: float, meta: Any) -> CallRecord:
    """A record with the token counts of `Generated.meta`."""
    first = meta[0] if isinstance(meta, list) and meta else meta
    counts = first if isinstance(first, dict) else {}
    return CallRecord(
        branch,
        name or "",
        place,
        begun_s,
        seconds,
        counts.get("prompt_tokens"),
        counts.get("cached_tokens"),
        counts.get("completion_tokens"),
    )


def table(calls: Sequence[CallRecord]) -> str:
    """A line for each call, in the order in which they began."""
    lines = [
        f"{'branch':>6}  {'variable':<16} {'start':>8} {'took':>8} {'prompt':>7} {'cached':>7} {'output':>7}  line"
    ]
    start_s = min((call.begun_s for call in calls), default=0.0)
    for call in sorted(calls, key=lambda call: call.begun_s):
        counts = (call.prompt_tokens, call.cached_tokens, call.completion_tokens)
        tokens = " ".join(f"{'' if count is None else count:>7}" for count in counts)
        lines.append(
            f"{call.branch:>6}  {call.name[:16]:<16} {call.begun_s - start_s:7.2f}s {call.seconds:7.2f}s {tokens}  "
            f"{call.place.rpartition('/')[2]}"
        )
    return "\n".join(lines)


def trace_json(calls: Sequence[CallRecord]) -> str:
    """The calls in Chrome's trace format, a track for each branch (https://ui.perfetto.dev opens it). Microseconds."""
    start_s = min((call.begun_s for call in calls), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": branch, "name": "thread_name", "args": {"name": f"branch {branch}"}}
        for branch in sorted({call.branch for call in calls})
    ]
    for call in calls:
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": call.branch,
                "name": call.name or "gen",
                "ts": round((call.begun_s - start_s) * 1e6),
                "dur": round(call.seconds * 1e6),
                "args": {
                    "line": call.place,
                    "prompt_tokens": call.prompt_tokens,
                    "cached_tokens": call.cached_tokens,
                    "completion_tokens": call.completion_tokens,
                },
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
