"""Prometheus metrics: requests as this router sees them, and replicas as they report themselves.

The metrics of a replica go away with the replica, so the page does not grow with every replica that ever was.
"""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.programs import Programs
from worker.messages import ReplicaLoad

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)

# Name and help text of the metrics that are read off `ReplicaLoad`, by field.
_GAUGES = {
    "running": ("shoal_running_requests", "Requests in the batch"),
    "waiting": ("shoal_waiting_requests", "Requests that wait for a place in the batch"),
    "waiting_tokens": ("shoal_waiting_tokens", "Prompt tokens still to be computed"),
    "context_tokens": ("shoal_context_tokens", "KV tokens that running requests attend to"),
    "kv_tokens_total": ("shoal_kv_tokens", "Tokens that the KV cache can hold"),
    "kv_tokens_used": ("shoal_kv_tokens_used", "KV tokens held by running requests"),
    "kv_tokens_cached": ("shoal_kv_tokens_cached", "KV tokens of past requests, kept for reuse"),
}
_COUNTERS = {
    "steps": ("shoal_steps", "Steps that the scheduler made"),
    "prompt_tokens": ("shoal_prompt_tokens", "Prompt tokens of requests that began"),
    "cached_tokens": ("shoal_cached_tokens", "Prompt tokens that were in the cache"),
    "output_tokens": ("shoal_output_tokens", "Tokens sampled"),
    "preemptions": ("shoal_preemptions", "Times that a running request gave up its KV pages for another"),
    "aborts": ("shoal_aborts", "Requests that the router stopped"),
    "finished": ("shoal_finished_requests", "Requests that finished"),
    "failed": ("shoal_failed_requests", "Requests that ended in an error"),
}
_STAGE_SECONDS = (
    "shoal_stage_seconds",
    "Time of a replica's pipeline stages: compute, or the cause of a bubble: communication, host, nothing_to_do, "
    "clumped, warm_up, unequal_stages, unequal_prefill, prefill_beside_decode, unequal_context",
)
_REPORTED = {name for name, _ in (*_COUNTERS.values(), _STAGE_SECONDS)}  # by replicas, to all routers alike


class ReplicaTimes:
    """The latency histograms of one replica, in seconds."""

    def __init__(self, metrics: "Metrics", replica_id: str) -> None:
        self.first_token = metrics.first_token.labels(replica_id)
        self.inter_token = metrics.inter_token.labels(replica_id)
        self.request = metrics.request.labels(replica_id)
        self.queue = metrics.queue.labels(replica_id)


class Metrics:
    """The metrics of one router, in a registry of their own.

    | attribute | meaning |
    | --- | --- |
    | `loads` | the last report of each connected replica |
    | `attention` | for each running replica: the attention backend, and why it is not the fastest ("" if it is) |
    | `wanted` | the number of replicas that there should be |
    """

    def __init__(self, router: str = "") -> None:
        """`router`: a unique name for each of several routers behind one address, any of which may answer a scrape. It
        becomes a label. Without it, counters would seem to go back when another router answers."""
        self.loads: dict[str, ReplicaLoad] = {}
        self.attention: dict[str, tuple[str, str]] = {}
        self._router = router
        self._registry = CollectorRegistry()
        self._replicas: dict[str, ReplicaTimes] = {}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("replica",), buckets=buckets, registry=self._registry)

        self.first_token = histogram(
            "shoal_time_to_first_token_seconds", "From the arrival of a request to its first token", _LATENCY_S
        )
        self.inter_token = histogram("shoal_inter_token_latency_seconds", "Between two tokens of a sequence", _TOKEN_S)
        self.request = histogram("shoal_request_seconds", "From the arrival of a request to its last token", _LATENCY_S)
        self.queue = histogram("shoal_queue_seconds", "Time that a request waited in its replica", _LATENCY_S)
        self.responses = Counter(
            "shoal_http_responses", "Answers by path and HTTP status", ("path", "status"), registry=self._registry
        )
        self.sequences = Counter(
            "shoal_sequences",
            "Sequences by how they ended: stop, length, error (the request's: a 4xx), failed (the server's: a 5xx), or "
            "abandoned by the client",
            ("finish_reason",),
            registry=self._registry,
        )
        self.sequences.labels("failed")  # starts at 0: the rate of a counter that begins with 1 misses the first
        self.resumed = Counter(
            "shoal_resumed_sequences",
            "Sequences that were resumed after their replica was lost, or after their reader was too slow",
            ("reason",),
            registry=self._registry,
        )
        ready = Gauge("shoal_replicas_ready", "Replicas that this router can send to", registry=self._registry)
        ready.set_function(lambda: len(self.loads))
        self.wanted = Gauge("shoal_replicas_wanted", "Replicas that there should be", registry=self._registry)
        self._programs = Gauge(
            "shoal_programs", "Programs whose text this router holds, or that have a request", registry=self._registry
        )
        self._program_tokens = Gauge(
            "shoal_program_tokens", "Tokens of text that this router holds for programs", registry=self._registry
        )
        self._registry.register(_Loads(self.loads))
        self._registry.register(_Attention(self.attention, self.loads))

    def watch_programs(self, programs: Programs) -> None:
        """Reads the gauges of programs off their table."""
        self._programs.set_function(lambda: len(programs))
        self._program_tokens.set_function(lambda: programs.num_tokens)

    def replica(self, replica_id: str) -> ReplicaTimes:
        times = self._replicas.get(replica_id)
        if times is None:
            times = self._replicas[replica_id] = ReplicaTimes(self, replica_id)
        return times

    def forget(self, replica_id: str) -> None:
        """Removes the metrics of a replica that is gone for good."""
        if self._replicas.pop(replica_id, None) is not None:
            for histogram in (self.first_token, self.inter_token, self.request, self.queue):
                histogram.remove(replica_id)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        """All metrics. Those that this router counts itself are labelled with its name, if it has one."""
        for metric in self._registry.collect():
            if self._router and metric.type in ("counter", "histogram") and metric.name not in _REPORTED:
                metric.samples = [
                    sample._replace(labels={**sample.labels, "router": self._router}) for sample in metric.samples
                ]
            yield metric


class _Loads(Collector):
    """Reports the loads of the replicas as they are when the page is requested."""

    def __init__(self, loads: Mapping[str, ReplicaLoad]) -> None:
        self._loads = loads

    def collect(self) -> Iterable[Metric]:
        loads = dict(self._loads)
        for field, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["replica"])
            for replica_id, load in loads.items():
                gauge.add_metric([replica_id], getattr(load, field))
            yield gauge
        for field, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["replica"])
            for replica_id, load in loads.items():
                counter.add_metric([replica_id], getattr(load, field))
            yield counter
        counter = CounterMetricFamily(*_STAGE_SECONDS, labels=["replica", "stage", "spent"])
        for replica_id, load in loads.items():
            for stage, seconds_by in enumerate(load.stage_seconds):
                for spent, seconds in seconds_by.items():
                    counter.add_metric([replica_id, str(stage), spent], seconds)
        yield counter


class _Attention(Collector):
    """Reports the attention backend of each replica in `loads`."""

    def __init__(self, attention: Mapping[str, tuple[str, str]], loads: Mapping[str, ReplicaLoad]) -> None:
        self._attention, self._loads = attention, loads

    def collect(self) -> Iterable[Metric]:
        gauge = GaugeMetricFamily(
            "shoal_attention_info",
            "The attention that a replica runs: flashinfer, triton, numba or torch; `problem` says why it is not a "
            "faster one, and what to do",
            labels=["replica", "backend", "problem"],
        )
        for replica_id, (backend, problem) in dict(self._attention).items():
            if replica_id in self._loads:
                gauge.add_metric([replica_id, backend, problem], 1)
        yield gauge
