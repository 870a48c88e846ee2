"""Where the time of the stages goes: computing, or waiting and for what. Always on.

A stage computes micro-batches in the order in which they were planned. The time between the end of one and the begin of
the next (k) is a gap, and every second of a gap has one cause:

    communication           k was on its way from the stage before, or its plan on its way to the first stage; and what
                            the first stage waited for a place in flight because of such ways
    host                    k was there, and the stage's host had not launched it
    nothing_to_do           the scheduler found nothing for a micro-batch, and fewer sequences ran than there are stages
    clumped                 it found nothing though as many or more ran: all were in the micro-batches under way
    warm_up                 no other was under way when k was planned, and it had yet to come through the stages before
    unequal_stages          one stage takes longer than another for the same micro-batch
    unequal_prefill         k, or what k waited for, took longer than the other: both have chunks of prompts
    prefill_beside_decode   the same, where one of the two has chunks and the other has decodes only
    unequal_context         the same, where neither has chunks, or where their decodes make most of the difference

On the first stage, the gap up to the plan of k is nothing_to_do or clumped from the moment when the scheduler found
nothing; what comes before it, the scheduler waited for a place in flight. That is communication as far as the oldest
micro-batch, whose end made the place, kept stages waiting while it was on links, and its tokens on the way back; it is
the host's as far as stages waited for that one to be launched, and of unequal stages as far as its slowest stage took
longer for it than the first; for the rest, the slowest and the fastest of those under way are compared, the first of
them where several are equal. Where there is one stage, which has no ways, what it waited for its tokens to be taken is
the host's.

On a later stage, the gap up to the end of k on the stage before is first what made that stage wait before k: its gap,
with its causes in proportion, moves down the pipeline with k. What is longer than that gap comes from k taking longer
there than the one before k took here: as far as k takes less here than there, stages are unequal, and for the rest
those two are compared. Where k was alone under way, the gap up to its plan is as on the first stage, and what follows
is warm_up if the scheduler had more to send after k, else the cause for which it had not.

Last of all, ways and hosts are no cause where the pipeline would have been no faster without them. A stage that takes
less than the slowest one for the micro-batch before k waits for the difference in any case: as much of its gap is of
unequal stages, however long k was on links or with a host, but for what these made the slowest stage wait as well.
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
    "clumped",
    "warm_up",
    "unequal_stages",
    "unequal_prefill",
    "prefill_beside_decode",
    "unequal_context",
)
KEPT = 4096  # micro-batches in a trace


class Span(NamedTuple):
    """One micro-batch on one stage, in seconds of one clock: its input (or plan) was there, it began, it ended."""

    received_s: float
    begin_s: float
    end_s: float


@dataclass
class _Batch:
    """A micro-batch on its way. `nothing`: since when the scheduler had found nothing to put into it, and why; None if
    it waited for a place in flight at most. `after`: the step whose tokens it takes on the device, if it was planned
    before that one had ended. `then`: why there was nothing to send after it, if so. `under_way`: the
    others in flight when it was planned. `ways_s`, `host_s`: for which stages but the first waited while it was on
    links, and while their hosts had not launched it. The causes in `gaps` [stages] come latest first."""

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
    """Takes what the scheduler did and the records of all stages, in the order of the steps from each, and attributes
    gaps once a micro-batch has been through. Clocks of stages on other machines must have been set to one before."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.compute_s = [0.0] * stages
        self.gap_s = [dict.fromkeys(CAUSES, 0.0) for _ in range(stages)]
        self.num_batches = 0
        self._under_way = 0
        self._nothing: tuple[float, str] | None = None
        self._open: dict[int, _Batch] = {}  # by step, in their order
        self._done: deque[_Batch] = deque(maxlen=KEPT)

    def planned(self, step: int, at_s: float, shape: BatchShape, decode_s: float, after: int | None = None) -> None:
        """A micro-batch is sent. Steps ascend. `decode_s`: the predicted part of its time on a stage that its decodes
        cause. `after`: a step under way whose tokens it waits for on the first stage, as if it had been planned then.
        `shape` is kept."""
        under_way = self._under_way - (after is not None)
        batch = _Batch(step, at_s, shape, decode_s, under_way, self._nothing, after, [None] * self.stages)
        self._open[step] = batch
        self._under_way += 1
        self._nothing = None

    def nothing(self, at_s: float, cause: str) -> None:
        """The scheduler has looked for a next micro-batch, had a place for it, and found nothing to put into it.
        `cause` is nothing_to_do or clumped."""
        if self._nothing is None or self._nothing[1] != cause:
            self._nothing = at_s, cause
        if self._open:
            newest = self._open[next(reversed(self._open))]
            newest.then = newest.then or cause

    def sent_s(self, step: int) -> float:
        """When all was sent that the first stage needs for a step that is under way and has been through: its plan, and
        the tokens that it waits for."""
        return self._sent_s(self._open[step])

    def ran(self, step: int, stage: int, span: Span) -> None:
        """A stage has computed it. Unknown steps are ignored."""
        batch = self._open.get(step)
        if batch is not None:
            batch.spans[stage] = span
            if batch.finished:
                self._settle_all()

    def finished(self, step: int, computed: bool = True) -> None:
        """Its tokens are back with the scheduler; or, with `computed` False, it failed and some stages will never say
        that they computed it. Steps ascend."""
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
        """Parts of a stage's time (of all stages' together) by cause, `compute` among them; empty before the first
        gap."""
        which = range(self.stages) if stage is None else (stage,)
        seconds = {"compute": sum(self.compute_s[s] for s in which)}
        for cause in CAUSES:
            seconds[cause] = sum(self.gap_s[s][cause] for s in which)
        total = sum(seconds.values())
        return {cause: value / total for cause, value in seconds.items()} if total else {}

    @property
    def under_way(self) -> int:
        """Micro-batches that have yet to end, or of which a stage has yet to tell."""
        return len(self._open)

    def bubble(self) -> float:
        """The part of the stages' time that was lost while there was something to do. NaN before the first gap."""
        parts = self.fractions()
        if not parts or parts["nothing_to_do"] >= 1.0:
            return float("nan")
        return 1.0 - parts["compute"] / (1.0 - parts["nothing_to_do"])

    def reset(self) -> None:
        """Begins to count anew; what is under way goes on."""
        self.compute_s = [0.0] * self.stages
        self.gap_s = [dict.fromkeys(CAUSES, 0.0) for _ in range(self.stages)]
        self.num_batches = 0

    # ------------------------------------------------------------ attribution

    def _settle_all(self) -> None:
        """Those that have been through and of which all stages have told, in their order."""
        while self._open:
            batch = next(iter(self._open.values()))
            if not batch.finished or None in batch.spans:
                return
            del self._open[batch.step]
            self._settle(batch)

    def _settle(self, batch: _Batch) -> None:
        """Attributes the gaps before it."""
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
        """A wait for a plan, from `begin` on."""
        parts: dict[str, float] = {}
        seconds = batch.planned_s - begin
        if batch.nothing is not None:
            since_s, cause = batch.nothing
            parts[cause] = batch.planned_s - max(begin, since_s)
            seconds -= parts[cause]
        if seconds <= 0:
            return parts
        # Those that were under way until the oldest of them ended.
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
        """A later stage's wait for the stage before to end `batch`."""
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
        """Takes back from ways and hosts what stages would have waited for the slowest one without them."""
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

    def trace(self, newest: int = KEPT) -> dict[str, Any]:
        """The `newest` micro-batches as a trace that Perfetto opens (Trace Event Format): a process for each stage,
        with a thread for what it computed and one for what it waited for."""
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
    """Its time on a stage."""
    span = batch.spans[stage]
    assert span is not None
    return span.end_s - span.begin_s


def _unequal(one: _Batch, one_s: float, other: _Batch, other_s: float) -> str:
    """Why two micro-batches took different times."""
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
