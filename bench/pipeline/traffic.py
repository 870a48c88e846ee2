"""Requests that arrive over time, at any rate: the two workloads of Sarathi-Serve, and traces.

The lengths of a workload and the pattern of its arrivals are the same at every rate, so that rates can be compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.load import trace
from bench.load.trace import TraceRequest
from bench.load.workload import Session, from_trace, poisson
from bench.replica.offline_workloads import JOBS

MIN_REQUESTS = 16  # requests in a load
NORMAL_90 = 1.2816  # standard deviations from the median to the 90th percentile


@dataclass(frozen=True)
class Published:
    """A paper's description of its requests, in tokens: median and 90th percentile of prompts and of outputs, and the
    limit of their sum."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    most: int

    def rows(self, count: int, seed: int) -> list[TraceRequest]:
        """`count` requests, lognormal in both lengths. Requests over the limit are drawn again."""
        rng = np.random.default_rng(seed)
        rows: list[TraceRequest] = []
        while len(rows) < count:
            prompt, output = (
                max(1, round(rng.lognormal(math.log(median), math.log(most / median) / NORMAL_90)))
                for median, most in (self.prompt, self.output)
            )
            if prompt + output <= self.most:
                rows.append(TraceRequest(prompt, output))
        return rows


# A. Agrawal et al., OSDI 2024, https://arxiv.org/abs/2403.02310, table 2: openchat_sharegpt4, arxiv_summarization.
PUBLISHED = {
    "chat": Published((1730, 5696), (415, 834), 8192),
    "long": Published((7059, 12985), (208, 371), 16384),
}


@dataclass(frozen=True)
class Traffic:
    """Requests of one turn each, with arrival times at a rate of 1 per second. Requests of a job arrive all at once."""

    name: str
    sessions: tuple[Session, ...]
    is_job: bool = False

    def at(self, rate: float, seconds: float = math.inf) -> list[Session]:
        """The requests that arrive within `seconds` at `rate` requests per second, but at least FEWEST."""
        timed = [replace(session, arrival_s=(session.arrival_s or 0.0) / rate) for session in self.sessions]
        return timed[: max(MIN_REQUESTS, sum((session.arrival_s or 0.0) <= seconds for session in timed))]

    def at_once(self) -> list[Session]:
        """The requests, all arriving at the beginning."""
        return [replace(session, arrival_s=0.0) for session in self.sessions]

    @property
    def tokens(self) -> int:
        """Prompt and output tokens of an average request."""
        turns = [session.turns[0] for session in self.sessions]
        return sum(turn.prompt_tokens + turn.output_tokens for turn in turns) // len(turns)


def published(name: str, count: int, seed: int, shrink: int = 1) -> Traffic:
    """`count` requests of a workload of PUBLISHED, arriving as a Poisson process. `shrink` divides lengths."""
    return _arriving(name, trace.shrink(PUBLISHED[name].rows(count, seed), shrink), seed)


def traced(path: Path, count: int, seed: int, shrink: int = 1, most: int | None = None) -> Traffic:
    """The first `count` requests of a trace, without those of more than `most` tokens (after `shrink`).

    Arrivals have the trace's pattern, or are a Poisson process if the trace has no times. The name is the file's with
    the prefix `trace_`, as it could be that of a workload. Raises as `trace.read`, and ValueError if no request is left
    or the trace cannot be shrunk.
    """
    rows = trace.read(path)
    try:
        rows = trace.shrink(rows, shrink)
    except ValueError as error:
        raise ValueError(f"{path}: {error}: use another --shrink") from error
    rows = [row for row in rows if most is None or row.prompt_tokens + row.output_tokens <= most][:count]
    if not rows:
        raise ValueError(f"{path}: no request has {most} tokens or fewer")
    return _arriving(f"trace_{path.stem}", rows, seed)


# Workloads of `bench.replica.offline_workloads` and their scales: with 1,024 and 512 sequences, and at half the usual
# scale.
OFFLINE = {
    "mini_1024": ("mini", 4.0),
    "mini_512": ("mini", 2.0),
    "mini_half": ("mini", 0.5),
    "prefill_half": ("prefill", 0.5),
}


def offline(name: str, shrink: int = 1) -> Traffic:
    """The requests of a workload of OFFLINE. `shrink` divides lengths."""
    job, scale = OFFLINE[name]
    prompts, outputs = JOBS[job](scale)
    rows = [TraceRequest(len(prompt), output) for prompt, output in zip(prompts, outputs, strict=True)]
    return Traffic(name, tuple(from_trace(trace.shrink(rows, shrink), None)), is_job=True)


def _arriving(name: str, rows: Sequence[TraceRequest], seed: int) -> Traffic:
    times = [row.arrival_s for row in rows]
    first, last = times[0], times[-1]
    if first is None or last is None or last <= first:
        at = poisson(np.random.default_rng([seed, 1]), 1.0, len(rows))
    else:
        at = [((time or 0.0) - first) * (len(rows) - 1) / (last - first) for time in times]
    sessions = [replace(session, arrival_s=time) for session, time in zip(from_trace(rows, None), at, strict=True)]
    return Traffic(name, tuple(sessions))
