"""What Prometheus is told, of requests as this router sees them and of replicas as they report themselves.

Everything about a replica goes away with it, so the page does not grow with the replicas that have been.
"""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.messages import Load

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)

# Names and meanings of what replicas report in `Load`, by its fields.
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
    "preemptions": ("shoal_preemptions", "Times that a request gave up its pages for another"),
    "aborts": ("shoal_aborts", "Requests that the router stopped"),
    "finished": ("shoal_finished_requests", "Requests that came to their end"),
    "failed": ("shoal_failed_requests", "Requests that ended in an error"),
}
_STAGE_SECONDS = (
    "shoal_stage_seconds",
    "Time of a replica's pipeline stages: compute, or what they waited for: communication, host, nothing_to_do, "
    "clumped, warm_up, unequal_stages, unequal_prefill, prefill_beside_decode, unequal_context",
)
_REPORTED = {name for name, _ in (*_COUNTERS.values(), _STAGE_SECONDS)}  # by replicas, to every router


class ReplicaTimes:
    """The histograms of one replica. Seconds."""

    def __init__(self, metrics: "Metrics", replica_id: str) -> None:
        self.first_token = metrics.first_token.labels(replica_id)
        self.inter_token = metrics.inter_token.labels(replica_id)
        self.request = metrics.request.labels(replica_id)
        self.queue = metrics.queue.labels(replica_id)


class Metrics:
    """One router's metrics, in a registry of their own. `loads`: the last report of every replica that is connected."""

    def __init__(self, replicas_wanted: int = 0, router: str = "") -> None:
        """`replicas_wanted`: how many there are when all is well. `router`: a name of its own for each of several, any
        of which may be asked: what one has counted would else seem to go back when the next one is."""
        self.loads: dict[str, Load] = {}
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
        self.sequences.labels("failed")  # from 0 on: the rate of a counter that begins with 1 misses that one
        self.resumed = Counter(
            "shoal_resumed_sequences",
            "Sequences that went on after their replica was lost, or after their reader was too slow",
            ("reason",),
            registry=self._registry,
        )
        ready = Gauge("shoal_replicas_ready", "Replicas that this router can send to", registry=self._registry)
        ready.set_function(lambda: len(self.loads))
        wanted = Gauge("shoal_replicas_wanted", "Replicas that the configuration asks for", registry=self._registry)
        wanted.set(replicas_wanted)
        self._registry.register(_Loads(self.loads))

    def replica(self, replica_id: str) -> ReplicaTimes:
        times = self._replicas.get(replica_id)
        if times is None:
            times = self._replicas[replica_id] = ReplicaTimes(self, replica_id)
        return times

    def forget(self, replica_id: str) -> None:
        """The replica is gone for good."""
        if self._replicas.pop(replica_id, None) is not None:
            for histogram in (self.first_token, self.inter_token, self.request, self.queue):
                histogram.remove(replica_id)

    def page(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        """All of them; those that this router has counted, under its name if it has one."""
        for metric in self._registry.collect():
            if self._router and metric.type in ("counter", "histogram") and metric.name not in _REPORTED:
                metric.samples = [
                    sample._replace(labels={**sample.labels, "router": self._router}) for sample in metric.samples
                ]
            yield metric


class _Loads(Collector):
    """Reads the replicas' reports when the page is asked for."""

    def __init__(self, loads: Mapping[str, Load]) -> None:
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
