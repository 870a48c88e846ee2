"""Measurements of a load: one `Sample` per request, and the summary of all samples.

All times are in seconds since the load began, by the client's monotonic clock.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.results import Figure

QUANTILES = (50, 90, 99)


@dataclass(slots=True)
class Sample:
    """A request as the client saw it.

    | field | meaning |
    | --- | --- |
    | `due_s` | when the workload wanted the request to be sent |
    | `sent_s` | when the first byte was written |
    | `end_s` | when the last byte was read, or the request failed |
    | `chunk_s` | arrival times of the server-sent events that carried output |
    | `chunk_tokens` | tokens in each of these events; empty if the server does not tell |
    | `output_tokens` | the server's count (its usage); the number of chunks if it sends none |
    | `prompt_tokens`, `cached_tokens` | the server's counts; None if it sends none |
    | `asked_tokens` | the requested output length |
    | `error`, `message` | the kind of failure, None for an answered request; and its description |
    """

    due_s: float
    asked_tokens: int
    session: int = 0
    turn: int = 0
    sent_s: float = 0.0
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    message: str = ""
    text: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to first token: from sending the request to the first chunk with output."""
        return self.chunk_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between tokens (TBT): the waits from each chunk with output to the next, as a reader sees them.

        A chunk of several tokens counts as one wait. The wait is not divided by the tokens, since that would hide a
        stall behind a burst. No waits of zero are added either, since these would make a server that sends rarely look
        smooth. The tokens per chunk are reported separately, and `tpot_s` is the amortised figure.
        """
        return [later - earlier for earlier, later in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token (TPOT): from the first chunk to the last, divided by the number of tokens after the
        first chunk. None if all tokens came at once."""
        first = self.chunk_tokens[0] if self.chunk_tokens else 1
        rest = self.output_tokens - first
        return (self.chunk_s[-1] - self.chunk_s[0]) / rest if rest > 0 and len(self.chunk_s) > 1 else None

    @property
    def e2e_s(self) -> float:
        """Time from sending the request to the end of its answer."""
        return self.end_s - self.sent_s

    @property
    def lag_s(self) -> float:
        """The generator's own delay in sending the request. No other figure includes it."""
        return self.sent_s - self.due_s

    def meets(self, slo_ttft_s: float | None, slo_tbt_s: float | None) -> bool:
        """Whether the request was answered, and its TTFT and the P99 of its own times between tokens are within the
        limits. A limit of None always holds."""
        if self.error is not None:
            return False
        if slo_ttft_s is not None and self.ttft_s > slo_ttft_s:
            return False
        return slo_tbt_s is None or not (gaps := self.gaps_s) or percentile(gaps, 99) <= slo_tbt_s


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between neighbours. Raises ValueError if there are no values."""
    if not len(values):
        raise ValueError("no values, no percentile")
    return float(np.percentile(values, q))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, P50, P90, P99 and maximum. Empty if there are no values."""
    if not len(values):
        return {}
    return {"mean": float(np.mean(values)), **{f"p{q}": percentile(values, q) for q in QUANTILES}, "max": max(values)}


def summarise(
    samples: Sequence[Sample], slo_ttft_s: float | None = None, slo_tbt_s: float | None = None
) -> dict[str, Any]:
    """All figures of a load, as a tree of plain numbers. The spreads (`ttft_s` and so on) are over answered requests;
    only `lag_s` is over all requests.

    | key | meaning |
    | --- | --- |
    | `duration_s` | from the first request sent to the end of the last answer |
    | `..._per_s` | counts of answered requests, divided by `duration_s` |
    | `goodput_per_s` | answered requests per second that meet both limits |
    | `attained` | the share of all requests, including failed ones, that meet both limits |
    | `hit_rate` | cached prompt tokens divided by prompt tokens; None if the server does not tell |
    """
    answered = [sample for sample in samples if sample.error is None]
    duration = max((s.end_s for s in samples), default=0.0) - min((s.sent_s for s in samples), default=0.0)
    duration = max(duration, 1e-9)
    output = sum(sample.output_tokens for sample in answered)
    told = [sample for sample in answered if sample.prompt_tokens is not None]
    cache = [sample for sample in told if sample.cached_tokens is not None]
    prompt = sum(sample.prompt_tokens or 0 for sample in told)
    cached = sum(sample.cached_tokens or 0 for sample in cache)
    chunks = sum(len(sample.chunk_s) for sample in answered)
    summary: dict[str, Any] = {
        "requests": len(samples),
        "answered": len(answered),
        "failures": dict(Counter(sample.error for sample in samples if sample.error is not None).most_common()),
        "duration_s": duration,
        "ttft_s": spread([sample.ttft_s for sample in answered]),
        "tpot_s": spread([tpot for sample in answered if (tpot := sample.tpot_s) is not None]),
        "tbt_s": spread([gap for sample in answered for gap in sample.gaps_s]),
        "e2e_s": spread([sample.e2e_s for sample in answered]),
        "lag_s": spread([sample.lag_s for sample in samples]),
        "requests_per_s": len(answered) / duration,
        "output_tokens": output,
        "output_tokens_per_s": output / duration,
        "tokens_per_chunk": output / chunks if chunks else None,
        "short_answers": sum(sample.output_tokens < sample.asked_tokens for sample in answered),
        "prompt_tokens": prompt if told else None,
        "input_tokens_per_s": prompt / duration if told else None,
        "cached_tokens": cached if cache else None,
        "hit_rate": cached / max(1, sum(sample.prompt_tokens or 0 for sample in cache)) if cache else None,
    }
    if slo_ttft_s is not None or slo_tbt_s is not None:
        good = sum(sample.meets(slo_ttft_s, slo_tbt_s) for sample in samples)
        summary |= {"goodput_per_s": good / duration, "attained": good / max(1, len(samples))}
    return summary


def figures(prefix: str, summary: dict[str, Any]) -> list[Figure]:
    """The numbers of a summary as figures of a result, named `PREFIX.ttft.p50` and so on."""
    made = []
    for key in ("ttft_s", "tpot_s", "tbt_s", "e2e_s"):
        for quantile in ("p50", "p90", "p99"):
            if quantile in summary[key]:
                made.append(Figure(f"{prefix}.{key[:-2]}.{quantile}", summary[key][quantile], "s", False))
    for key, unit in (
        ("requests_per_s", "requests/s"),
        ("input_tokens_per_s", "tokens/s"),
        ("output_tokens_per_s", "tokens/s"),
        ("goodput_per_s", "requests/s"),
        ("attained", "ratio"),
        ("hit_rate", "ratio"),
    ):
        if summary.get(key) is not None:
            made.append(Figure(f"{prefix}.{key.removesuffix('_per_s')}", summary[key], unit, True))
    made.append(Figure(f"{prefix}.failures", float(sum(summary["failures"].values())), "requests", False))
    return made
