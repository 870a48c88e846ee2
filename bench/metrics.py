"""What a load measured: one `Sample` a request, and the numbers that a report makes of them.

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
    """One request as the client saw it.

    `due_s` is when the workload wanted it sent, `sent_s` when its first byte was written, `end_s` when its last byte
    (or its failure) was read. `chunk_s` has the arrival of every server-sent event that carried output, and
    `chunk_tokens` how many tokens were in each, where the server says so; otherwise it is empty. `output_tokens`,
    `prompt_tokens` and `cached_tokens` are the server's own count (its usage); where it sends none, `output_tokens` is
    the number of chunks and the others are None. `error` is the kind of failure, None for a request that was answered.
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
        """Times between tokens (TBT): the waits between one chunk with output and the next, as a reader sees them.

        A chunk of several tokens is one wait, neither divided by its tokens (that would hide a stall behind a burst)
        nor followed by waits of zero (that would make a server that sends rarely look smooth). How many tokens a chunk
        carries is reported beside it; `tpot_s` is the amortised figure.
        """
        return [later - earlier for earlier, later in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first chunk: from the first chunk to the last, by the tokens that came in
        between; None when all came at once."""
        first = self.chunk_tokens[0] if self.chunk_tokens else 1
        rest = self.output_tokens - first
        return (self.chunk_s[-1] - self.chunk_s[0]) / rest if rest > 0 and len(self.chunk_s) > 1 else None

    @property
    def e2e_s(self) -> float:
        """From sending the request to the end of its answer."""
        return self.end_s - self.sent_s

    @property
    def lag_s(self) -> float:
        """How late the generator itself sent the request. It is not in any of the other figures."""
        return self.sent_s - self.due_s

    def meets(self, slo_ttft_s: float | None, slo_tbt_s: float | None) -> bool:
        """Whether the request was answered, its TTFT is within the limit, and the P99 of its own times between tokens
        is within the limit. A limit of None holds always."""
        if self.error is not None:
            return False
        if slo_ttft_s is not None and self.ttft_s > slo_ttft_s:
            return False
        return slo_tbt_s is None or not (gaps := self.gaps_s) or percentile(gaps, 99) <= slo_tbt_s


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between neighbours. Raises ValueError without values."""
    if not len(values):
        raise ValueError("no values, no percentile")
    return float(np.percentile(values, q))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, P50, P90, P99 and maximum; empty without values."""
    if not len(values):
        return {}
    return {"mean": float(np.mean(values)), **{f"p{q}": percentile(values, q) for q in QUANTILES}, "max": max(values)}


def summarise(
    samples: Sequence[Sample], slo_ttft_s: float | None = None, slo_tbt_s: float | None = None
) -> dict[str, Any]:
    """All figures of a load, as a tree of plain numbers. Spreads (`ttft_s`, ...) are over answered requests.

    `duration_s` runs from the first request sent to the last answer ended; throughputs are what answered requests
    brought, by that time. Goodput is the answered requests a second that meet both limits; `attained` their share of
    all requests, failed ones included. `hit_rate` is cached prompt tokens by prompt tokens, where the server tells.
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
    """A summary's numbers as figures of a result, named `PREFIX.ttft.p50` and so on."""
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
