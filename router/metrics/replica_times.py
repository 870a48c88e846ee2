"""Histograms of the latencies and lengths that a router sees, by replica.

Every token is counted, so counting costs next to nothing: the form that Prometheus wants is made when it is asked for.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
LENGTH_TOKENS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

TIMES = {
    "first_token": (
        "shoal_time_to_first_token_seconds",
        "From the arrival of a request to its first token",
        LATENCY_S,
    ),
    "inter_token": ("shoal_inter_token_latency_seconds", "Between two tokens of a sequence", _TOKEN_S),
    "request": ("shoal_request_seconds", "From the arrival of a request to its last token", LATENCY_S),
    "queue": ("shoal_queue_seconds", "Time that a request waited in its replica", LATENCY_S),
    "prefill": (
        "shoal_prefill_seconds",
        "From the end of a request's wait in its replica to its first token there",
        LATENCY_S,
    ),
    "decode": (
        "shoal_decode_seconds",
        "From a request's first token to its last, at the replica that ended it",
        LATENCY_S,
    ),
    "prompt_tokens": ("shoal_request_prompt_tokens", "Tokens of a sequence's prompt", LENGTH_TOKENS),
    "output_tokens": ("shoal_request_output_tokens", "Tokens of a sequence's output, at its end", LENGTH_TOKENS),
}
"""Name, help text and buckets of `ReplicaTimes`, by attribute."""


class BucketHistogram:
    """Counts times in seconds, or tokens, by bucket. `bounds`: the largest value of each bucket but the last, which has
    none."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float, count: int = 1) -> None:
        """Counts a value, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        """The samples that Prometheus wants of the histogram."""
        at_most = [*map(floatToGoString, self._bounds), "+Inf"]
        for bound, count in zip(at_most, accumulate(self._counts), strict=True):
            yield Sample(f"{name}_bucket", labels | {"le": bound}, count)
        yield Sample(f"{name}_count", labels, self.count)
        yield Sample(f"{name}_sum", labels, self.sum)


class ReplicaTimes:
    """The latencies and lengths of one replica's sequences."""

    def __init__(self, model: str, replica_id: str) -> None:
        self._labels = {"model": model, "replica": replica_id}
        self._histograms = {field: BucketHistogram(bounds) for field, (_, _, bounds) in TIMES.items()}
        self.first_token, self.inter_token = self._histograms["first_token"], self._histograms["inter_token"]
        self.request, self.queue = self._histograms["request"], self._histograms["queue"]
        self.prefill, self.decode = self._histograms["prefill"], self._histograms["decode"]
        self.prompt_tokens, self.output_tokens = self._histograms["prompt_tokens"], self._histograms["output_tokens"]

    def totals(self, field: str) -> tuple[int, float]:
        """How many times one histogram has counted, and their sum in seconds."""
        histogram = self._histograms[field]
        return histogram.count, histogram.sum

    def samples(self, field: str) -> Iterator[Sample]:
        """The samples of one histogram."""
        return self._histograms[field].samples(TIMES[field][0], self._labels)
