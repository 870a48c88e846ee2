"""Meter of the stages' time: computing, or idle by cause. Always on.

A stage computes micro-batches in the order in which they were planned. The time between the end of one micro-batch and
the begin of the next (k) is a gap. Every second of a gap has one cause:

| cause | what the stage waited for |
| --- | --- |
| `communication` | k on its way from the previous stage, or its plan on its way to the first stage |
| `host` | the stage's host, which had not launched k although its input was there |
| `nothing_to_do` | the scheduler found nothing to send, and fewer sequences ran than there are stages |
| `too_few_micro_batches` | the scheduler found nothing to send although enough ran: all were in flight |
| `warm_up` | k to come through the previous stages; no other micro-batch was in flight when k was planned |
| `unequal_stages` | a stage that takes longer than another for the same micro-batch |
| `unequal_prefill` | a longer micro-batch; both that are compared have chunks of prompts |
| `prefill_beside_decode` | a longer micro-batch; one of the two has chunks, the other only decodes |
| `unequal_context` | a longer micro-batch; neither has chunks, or decodes make most of the difference |

A gap is divided in this order. Each step takes its part of what the steps before it left.

1. From the arrival of k's input (or plan) on: `host`.
2. While k's input (or plan) was on its way: `communication`. What remains lies before the previous stage ended k or, on
   the first stage, before k was planned.
3. First stage, from the moment when the scheduler found nothing: `nothing_to_do` or `too_few_micro_batches`.
4. First stage, before that moment: the scheduler waited for a place in flight, which the end of the oldest micro-batch
   made. In turn, each up to its own length:
    1. `communication`: that micro-batch kept later stages waiting while on links, or its tokens were on their way back;
    2. `host`: later stages waited for that micro-batch to be launched;
    3. `unequal_stages`: its slowest stage took longer for it than the first stage;
    4. the rest: the slowest and the fastest micro-batch then in flight are compared by their time on the first stage
       (the earliest if several are equal).

    A single stage has no links: the wait for its tokens to be taken is `host`, and the rest is as in the last item.
5. Later stage, k alone in flight: up to k's plan as in steps 3 and 4. After that, `warm_up` if the scheduler had more
   to send after k, else the cause for which it had not.
6. Later stage, k not alone: the gap before k on the previous stage moves down the pipeline with k, its causes in
   proportion. A longer gap arises because k took longer there than the micro-batch before k took here. This excess is
   `unequal_stages` as far as k takes less time here than there. For the rest those two micro-batches are compared.

At the end, `communication` and `host` are charged only where the pipeline would have been faster without them
(`_beside_the_slowest`). A stage that takes less time than the slowest one for the micro-batch before k waits for the
difference in any case. That much of its gap becomes `unequal_stages`, except what links and hosts made the slowest
stage wait as well.
"""

import itertools
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.shape import BatchShape

CAUSES = (
    "communication",
    "host",
    "nothing_to_do",
    "too_few_micro_batches",
    "warm_up",
    "unequal_stages",
    "unequal_prefill",
    "prefill_beside_decode",
    "unequal_context",
)
MAX_TRACED_BATCHES = 4096  # micro-batches in a trace


class Span(NamedTuple):
    """A micro-batch on a stage, in seconds of one clock: when its input (or plan) arrived, when it began and when it
    ended."""

    received_s: float
    begin_s: float
    end_s: float


@dataclass
class _Batch:
    """A micro-batch on its way.

    | field | meaning |
    | --- | --- |
    | `planned_s` | when all was sent that the first stage needs; before `_settle`, when it was planned |
    | `decode_s` | predicted part of its time on a stage that its decodes cause |
    | `under_way` | other micro-batches in flight when it was planned |
    | `nothing` | since when and why the scheduler had found nothing for it; None if it waited for a place at most |
    | `after` | step whose tokens it takes on the device, if it was planned before that step ended |
    | `then` | why there was nothing to send after it, if so |
    | `gaps` | by stage: seconds by cause, latest first |
    | `ways_s` | seconds that stages other than the first waited while it was on links |
    | `host_s` | seconds that stages other than the first waited while their hosts had not launched it |
    """

    step: int
    planned_s: float
    shape: BatchShape
    decode_s: float
    under_way: int
    nothing: tuple[float, str] | None
    after: int | None
    spans: list[Span | None]
    finished: bool = False
    then: str | None = None
    gaps: list[dict[str, float]] = field(default_factory=list)
    ways_s: float = 0.0
    host_s: float = 0.0


class Meter:
    """Attributes gaps to causes, once a micro-batch has passed all stages.

    The scheduler reports its decisions, and every stage reports its spans, each in the order of the steps. Clocks of
    stages on other machines must have been aligned before.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.compute_s = [0.0] * stages
        self.gap_s = [dict.fromkeys(CAUSES, 0.0) for _ in range(stages)]
        self.num_batches = 0
        self._under_way = 0
        self._nothing: tuple[float, str] | None = None
        self._open: dict[int, _Batch] = {}  # by step, in their order
        self._done: deque[_Batch] = deque(maxlen=MAX_TRACED_BATCHES)

    def planned(self, step: int, at_s: float, shape: BatchShape, decode_s: float, after: int | None = None) -> None:
        """Records that a micro-batch is sent. Steps ascend.

        - `decode_s`: predicted part of its time on a stage that its decodes cause.
        - `after`: step in flight whose tokens it waits for on the first stage, as if it had been planned when that step
          ends.
        - `shape` is kept.
        """
        under_way = self._under_way - (after is not None)
        batch = _Batch(step, at_s, shape, decode_s, under_way, self._nothing, after, [None] * self.stages)
        self._open[step] = batch
        self._under_way += 1
        self._nothing = None

    def nothing(self, at_s: float, cause: str) -> None:
        """Records that the scheduler had a place for a micro-batch and found nothing to put into it. `cause`:
        `nothing_to_do` or `too_few_micro_batches`."""
        if self._nothing is None or self._nothing[1] != cause:
            self._nothing = at_s, cause
        if self._open:
            newest = self._open[next(reversed(self._open))]
            newest.then = newest.then or cause

    def sent_s(self, step: int) -> float:
        """When all was sent that the first stage needs for an open step that has passed all stages: the plan, and the
        tokens that it waits for."""
        return self._sent_s(self._open[step])

    def ran(self, step: int, stage: int, span: Span) -> None:
        """Records that a stage has computed a step. Unknown steps are ignored."""
        batch = self._open.get(step)
        if batch is not None:
            batch.spans[stage] = span
            if batch.finished:
                self._settle_all()

    def finished(self, step: int, computed: bool = True) -> None:
        """Records that the tokens of a step are back with the scheduler. With `computed` False, the step failed and
        some stages will never report it. Steps ascend."""
        batch = self._open.get(step)
        if batch is None:
            return
        self._under_way -= 1
        batch.finished = True
        if not computed:
            del self._open[step]
        self._settle_all()

    # ------------------------------------------------------------ what there is

    def fractions(self, stage: int | None = None) -> dict[str, float]:
        """Fractions of a stage's time (default: of all stages together) by cause, `compute` included. Empty before the
        first gap."""
        which = range(self.stages) if stage is None else (stage,)
        seconds = {"compute": sum(self.compute_s[s] for s in which)}
        for cause in CAUSES:
            seconds[cause] = sum(self.gap_s[s][cause] for s in which)
        total = sum(seconds.values())
        return {cause: value / total for cause, value in seconds.items()} if total else {}

    @property
    def under_way(self) -> int:
        """Number of micro-batches that have not ended, or that some stage has not reported yet."""
        return len(self._open)

    def bubble(self) -> float:
        """Fraction of the stages' time that was lost while there was something to do. NaN before the first gap."""
        parts = self.fractions()
        if not parts or parts["nothing_to_do"] >= 1.0:
            return float("nan")
        return 1.0 - parts["compute"] / (1.0 - parts["nothing_to_do"])

    def reset(self) -> None:
        """Sets all sums to zero. Micro-batches in flight stay known."""
        self.compute_s = [0.0] * self.stages
        self.gap_s = [dict.fromkeys(CAUSES, 0.0) for _ in range(self.stages)]
        self.num_batches = 0

    # ------------------------------------------------------------ attribution

    def _settle_all(self) -> None:
        """Settles the micro-batches that have ended and that all stages have reported, in order."""
        while self._open:
            batch = next(iter(self._open.values()))
            if not batch.finished or None in batch.spans:
                return
            del self._open[batch.step]
            self._settle(batch)

    def _settle(self, batch: _Batch) -> None:
        """Attributes the gaps before `batch`."""
        previous = self._done[-1] if self._done else None
        batch.planned_s = self._sent_s(batch)
        if previous is None:
            spans = [span for span in batch.spans if span is not None]
            batch.ways_s = sum(b.received_s - a.end_s for a, b in itertools.pairwise(spans))
            batch.host_s = sum(span.begin_s - span.received_s for span in spans[1:])
        for stage, span in enumerate(batch.spans):
            assert span is not None
            self.compute_s[stage] += span.end_s - span.begin_s
            batch.gaps.append({} if previous is None else self._gap(stage, batch, previous))
        if previous is not None:
            self._beside_the_slowest(batch, previous)
        for totals, gap in zip(self.gap_s, batch.gaps, strict=True):
            for cause, seconds in gap.items():
                totals[cause] += seconds
        self.num_batches += 1
        self._done.append(batch)

    def _sent_s(self, batch: _Batch) -> float:
        recent = itertools.islice(reversed(self._done), self.stages + 2)
        before = next((one for one in recent if one.step == batch.after), None)
        if before is None:
            return batch.planned_s
        last = before.spans[-1]
        assert last is not None
        return max(batch.planned_s, last.end_s)

    def _gap(self, stage: int, batch: _Batch, previous: _Batch) -> dict[str, float]:
        """Seconds by cause between `previous` and `batch` on a stage."""
        span, before = batch.spans[stage], previous.spans[stage]
        assert span is not None and before is not None
        begin = before.end_s
        if span.begin_s <= begin:
            return {}
        gap: dict[str, float] = {}
        if span.begin_s > span.received_s:
            gap["host"] = span.begin_s - max(span.received_s, begin)
            batch.host_s += gap["host"] if stage else 0.0
        if stage == 0:
            sent = batch.planned_s
        else:
            upstream = batch.spans[stage - 1]
            assert upstream is not None
            sent = upstream.end_s
        if span.received_s > begin:
            gap["communication"] = span.received_s - max(sent, begin)
            batch.ways_s += gap["communication"] if stage else 0.0
        if sent <= begin:
            return gap
        if stage == 0:
            _add(gap, self._before_plan(batch, begin))
        elif batch.under_way == 0:
            idle = max(0.0, batch.planned_s - begin)
            _add(gap, {batch.then or "warm_up": sent - begin - idle})
            if idle > 0:
                _add(gap, self._before_plan(batch, begin))
        else:
            _add(gap, self._from_upstream(stage, batch, previous, sent - begin))
        return gap

    def _before_plan(self, batch: _Batch, begin: float) -> dict[str, float]:
        """Causes of the first stage's wait for a plan, from `begin` on: steps 3 and 4 of the module's docstring."""
        parts: dict[str, float] = {}
        seconds = batch.planned_s - begin
        if batch.nothing is not None:
            since_s, cause = batch.nothing
            parts[cause] = batch.planned_s - max(begin, since_s)
            seconds -= parts[cause]
        if seconds <= 0:
            return parts
        # The micro-batches that were in flight until the oldest of them ended.
        flight = [self._done[i] for i in range(-min(len(self._done), batch.under_way + 1), 0)]
        last = flight[0].spans[-1]
        assert last is not None
        ways = flight[0].ways_s + max(0.0, batch.planned_s - last.end_s)
        causes = [("host", ways)]
        if self.stages > 1:
            times = [_seconds(flight[0], stage) for stage in range(self.stages)]
            causes = [("communication", ways), ("host", flight[0].host_s), ("unequal_stages", max(times) - times[0])]
        for cause, most in causes:
            _add(parts, {cause: min(seconds, most)})
            seconds = max(0.0, seconds - most)
        if seconds > 0:
            slowest, fastest = max(flight, key=_seconds), min(flight, key=_seconds)
            cause = _unequal(slowest, _seconds(slowest), fastest, _seconds(fastest))
            _add(parts, {cause: seconds})
        return parts

    def _from_upstream(self, stage: int, batch: _Batch, previous: _Batch, seconds: float) -> dict[str, float]:
        """Causes of a later stage's wait for the previous stage to end `batch`: step 6 of the module's docstring."""
        above = batch.gaps[stage - 1]
        total = sum(above.values())
        parts = {}
        if total > 0:
            scale = min(1.0, seconds / total)
            parts = {cause: part * scale for cause, part in above.items()}
        if seconds > total:
            own_s = _seconds(batch, stage)
            longer_s = min(seconds - total, max(0.0, _seconds(batch, stage - 1) - own_s))
            cause = _unequal(batch, own_s, previous, _seconds(previous, stage))
            _add(parts, {"unequal_stages": longer_s})
            _add(parts, {cause: seconds - total - longer_s})
        return parts

    def _beside_the_slowest(self, batch: _Batch, previous: _Batch) -> None:
        """Moves to `unequal_stages` what stages would have waited for the slowest one without any links and hosts."""
        times = [_seconds(previous, stage) for stage in range(self.stages)]
        slowest = max(range(self.stages), key=times.__getitem__)
        waited = sum(batch.gaps[slowest].values())
        for gap, seconds in zip(batch.gaps, times, strict=True):
            exposed = gap.get("communication", 0.0) + gap.get("host", 0.0) - waited
            anyway = min(exposed, times[slowest] - seconds - gap.get("unequal_stages", 0.0))
            for cause in ("communication", "host"):
                if anyway > 0 and (part := min(anyway, gap.get(cause, 0.0))) > 0:
                    gap[cause] -= part
                    anyway -= part
                    _add(gap, {"unequal_stages": part})

    # ------------------------------------------------------------ a trace

    def trace(self, newest: int = MAX_TRACED_BATCHES) -> dict[str, Any]:
        """The `newest` micro-batches in the Trace Event Format, which Perfetto opens. A process for each stage, with
        one thread for computing and one for waiting."""
        events: list[dict[str, Any]] = []
        for stage in range(self.stages):
            events.append(_meta("process_name", stage, 0, f"stage {stage}"))
            events += [_meta("thread_name", stage, 0, "computes"), _meta("thread_name", stage, 1, "waits")]
        for batch in itertools.islice(self._done, max(0, len(self._done) - newest), None):
            shape = batch.shape
            kind = "mixed" if shape.chunks and shape.decodes else "prefill" if shape.chunks else "decode"
            args = {"step": batch.step, "tokens": shape.tokens, "chunks": shape.chunks, "decodes": shape.decodes}
            for stage, span in enumerate(batch.spans):
                assert span is not None
                events.append(_event(f"{kind} {batch.step}", stage, 0, span.begin_s, span.end_s, args))
                end = span.begin_s
                for cause, seconds in batch.gaps[stage].items():
                    if seconds > 0:
                        events.append(_event(cause, stage, 1, end - seconds, end, {"before": batch.step}))
                        end -= seconds
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def trace_json(self) -> str:
        return json.dumps(self.trace())


def _add(gap: dict[str, float], parts: dict[str, float]) -> None:
    for cause, seconds in parts.items():
        if seconds > 0:
            gap[cause] = gap.get(cause, 0.0) + seconds


def _seconds(batch: _Batch, stage: int = 0) -> float:
    """Seconds of a micro-batch on a stage."""
    span = batch.spans[stage]
    assert span is not None
    return span.end_s - span.begin_s


def _unequal(one: _Batch, one_s: float, other: _Batch, other_s: float) -> str:
    """The cause for which two micro-batches took different times."""
    if bool(one.shape.chunks) != bool(other.shape.chunks):
        return "prefill_beside_decode"
    if not one.shape.chunks or abs(one.decode_s - other.decode_s) > abs(one_s - other_s) / 2:
        return "unequal_context"
    return "unequal_prefill"


def _meta(name: str, stage: int, thread: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": stage, "tid": thread, "args": {"name": value}}


def _event(name: str, stage: int, thread: int, begin_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": stage,
        "tid": thread,
        "ts": begin_s * 1e6,
        "dur": (end_s - begin_s) * 1e6,
        "args": args,
    }
