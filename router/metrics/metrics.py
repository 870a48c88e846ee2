"""Prometheus metrics: requests as this router sees them, and replicas as they report themselves.

The metrics of a replica go away with the replica, so the page does not grow with every replica that ever was.
"""

import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, islice

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from router.metrics.aliases import alias, renamed
from router.metrics.build import version
from router.metrics.process import OwnProcess
from router.metrics.replica_times import LATENCY_S, TIMES, ReplicaTimes
from router.programs import Programs
from worker.messages import MAX_COUNTED_STEP_TOKENS, PROTOCOL, ReplicaLoad

SAMPLES_A_PIECE = 100  # of `Metrics.pieces`: about a millisecond's work
# Of decisions, and of an event loop: most take less than a millisecond.
DECISION_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

# Name and help text of the metrics that are read off `ReplicaLoad`, by field.
_GAUGES = {
    "running": ("shoal_running_requests", "Requests in the batch"),
    "waiting": ("shoal_waiting_requests", "Requests that wait for a place in the batch"),
    "waiting_tokens": ("shoal_waiting_tokens", "Prompt tokens still to be computed"),
    "context_tokens": ("shoal_context_tokens", "KV tokens that running requests attend to"),
    "kv_tokens_total": ("shoal_kv_tokens", "Tokens that the KV cache can hold"),
    "kv_tokens_used": ("shoal_kv_tokens_used", "KV tokens held by running requests"),
    "kv_tokens_leased": ("shoal_kv_tokens_leased", "Cached KV tokens of living programs, which are evicted last"),
    "kv_tokens_cached": ("shoal_kv_tokens_cached", "KV tokens of past requests, kept for reuse"),
    "checkpoints_total": ("shoal_checkpoints", "Checkpoints of recurrent states that the replica can hold"),
    "checkpoints": ("shoal_checkpoints_cached", "Checkpoints of recurrent states from which cached prefixes go on"),
    "window_tokens_total": (
        "shoal_window_tokens",
        "Tokens that the layers with a window can hold in pages of their own; 0 if they have none",
    ),
    "window_tokens_used": ("shoal_window_tokens_used", "Tokens of these layers held by running requests"),
    "max_loras": ("shoal_max_loras", "LoRA adapters that the device holds at once"),
    "length_tau": (
        "shoal_output_length_tau",
        "Kendall's tau between the predicted and the real lengths of the newest outputs: 1 if the order is right, 0 if "
        "it is as good as random",
    ),
    "expert_imbalance": (
        "shoal_expert_imbalance",
        "With enable_expert_parallel: tokens that the rank with the most computes with its experts, divided by the "
        "mean of the ranks, of the newest steps; all ranks wait for that one",
    ),
    "length_ratio": ("shoal_output_length_ratio", "Tokens of the newest outputs, divided by those predicted"),
}
_COUNTERS = {
    "steps": ("shoal_steps", "Steps that the scheduler made"),
    "prompt_tokens": ("shoal_prompt_tokens", "Prompt tokens of requests that began"),
    "cached_tokens": ("shoal_cached_tokens", "Prompt tokens that were in the cache"),
    "kv_tokens_evicted": (
        "shoal_kv_tokens_evicted",
        "Cached KV tokens that gave their place to others, or were flushed",
    ),
    "computed_tokens": (
        "shoal_computed_tokens",
        "Tokens that steps computed: of prompts, also again after a preemption or with a draft that was wrong, and one "
        "for each token sampled",
    ),
    "checkpoints_evicted": ("shoal_checkpoints_evicted", "Checkpoints of recurrent states that were evicted"),
    "output_tokens": ("shoal_output_tokens", "Tokens sampled"),
    "adapter_loads": ("shoal_lora_loads", "LoRA adapters that were copied to the device"),
    "preemptions": ("shoal_preemptions", "Times that a running request gave up its KV pages for another"),
    "aborts": ("shoal_aborts", "Requests that the router stopped"),
    "finished": ("shoal_finished_requests", "Requests that finished"),
    "failed": ("shoal_failed_requests", "Requests that ended in an error"),
    "refused_routers": (
        "shoal_refused_routers",
        "Routers that the replica refused because it speaks another protocol; its log names them",
    ),
}
_KV_USAGE = (
    "shoal_kv_usage_ratio",
    "Part of the KV cache that running requests hold: 1 if the next one must wait, or take another's",
)
_KV_CONFIG = ("shoal_kv_config_info", "The KV cache of a replica: tokens of a page, and number of pages")
_STEP_TOKENS = ("shoal_step_tokens", "Tokens that a step of a replica computes")
_STEP_BOUNDS = tuple(1 << bits for bits in range(MAX_COUNTED_STEP_TOKENS.bit_length()))
_STAGE_SECONDS = (
    "shoal_stage_seconds",
    "Time of a replica's pipeline stages: compute, or the cause of a bubble: communication, host, nothing_to_do, "
    "too_few_micro_batches, warm_up, unequal_stages, unequal_prefill, prefill_beside_decode, unequal_context",
)
_EXPERT_TOKENS = (
    "shoal_expert_tokens",
    "With enable_expert_parallel: tokens that each rank has computed with its experts, once for each expert of a "
    "token, in the layers of the last stage",
)
_ADAPTERS = (
    "shoal_lora_adapters",
    "LoRA adapters of a replica: on the device (resident), of running and of waiting requests",
)
_DRAFTS = {
    "proposals": ("shoal_proposals", "Times that a step verified drafts of one sequence, by drafter"),
    "drafted": ("shoal_drafted_tokens", "Drafts of tokens that steps verified, by drafter"),
    "accepted": (
        "shoal_accepted_tokens",
        "Drafts that were right: tokens that needed no step of their own, by drafter",
    ),
}
_REPORTED = {
    name for name, _ in (*_COUNTERS.values(), *_DRAFTS.values(), _STEP_TOKENS, _STAGE_SECONDS, _EXPERT_TOKENS)
}  # by replicas, to all routers alike
# Reasons that alerts and the dashboard look for. Their counters start at 0: the increase of one that begins with 1
# misses the first event.
TAKEN_OUT = ("silent", "lost", "hung", "protocol", "error")
RESUMED = ("replica_lost", "replica_left", "slow_reader")
UPSTREAM_FAILURES = ("unreachable", "timeout", "broken", "unauthorized")
# Gauges of the router's process, which differ from router to router as its counters do.
_OWN_GAUGES = ("process_", "shoal_build_info")


class ModelMetrics:
    """The metrics of one model.

    | attribute | meaning |
    | --- | --- |
    | `loads` | the last report of each connected replica |
    | `silent` | the connected replicas that have not been heard for too long |
    | `leaving` | the connected replicas that are being taken away |
    | `attention` | for each running replica: the attention backend, and why it is not the fastest ("" if it is) |
    | `wanted` | the number of replicas that there should be |
    | `scaled_for` | why autoscaling last changed that number; None where it does not |
    """

    def __init__(self, metrics: "Metrics", model: str) -> None:
        self.loads: dict[str, ReplicaLoad] = {}
        self.silent: set[str] = set()
        self.leaving: set[str] = set()
        self._told_s: dict[str, float] = {}  # when the loads came
        self.attention: dict[str, tuple[str, str]] = {}
        self._metrics = metrics
        self._model = model
        self._replicas: dict[str, ReplicaTimes] = {}
        metrics.ready.labels(model).set_function(lambda: len(self.ready))
        metrics.hit_rate.labels(model).set_function(lambda: _or_nan(self.hit_rate))
        self.placement = metrics.placement.labels(model)
        self._expected_hits = metrics.expected_hits.labels(model)
        self._found_hits = metrics.found_hits.labels(model)
        self.wanted = metrics.wanted.labels(model)
        self.scaled_for: str | None = None
        metrics.sequences.labels(model, "failed")
        for reason in TAKEN_OUT:
            metrics.taken_out.labels(model, reason)
        for reason in RESUMED:
            metrics.resumed.labels(model, reason)

    @property
    def ready(self) -> frozenset[str]:
        """The replicas that requests can be sent to."""
        return frozenset(self.loads.keys() - self.silent - self.leaving)

    @property
    def closed(self) -> frozenset[str]:
        """The connected replicas that get no new requests."""
        return frozenset(self.silent | self.leaving)

    @property
    def hit_rate(self) -> float | None:
        """The part of the prompts' tokens that was cached, since the start of the connected replicas; None before the
        first request."""
        loads = list(self.loads.values())
        prompt_tokens = sum(load.prompt_tokens for load in loads)
        return sum(load.cached_tokens for load in loads) / prompt_tokens if prompt_tokens else None

    def told(self, replica_id: str, load: ReplicaLoad) -> None:
        """Stores a load that has come now."""
        self.loads[replica_id] = load
        self._told_s[replica_id] = self._metrics.clock()

    def lost(self, replica_id: str) -> None:
        """Drops the load of a replica that is connected no longer."""
        self.silent.discard(replica_id)
        self.leaving.discard(replica_id)
        self._told_s.pop(replica_id, None)
        self.loads.pop(replica_id, None)

    def load_ages(self) -> dict[str, float]:
        """Seconds since each replica's load came."""
        now_s = self._metrics.clock()
        return {replica_id: now_s - told_s for replica_id, told_s in dict(self._told_s).items()}

    def taken_out(self, reason: str) -> None:
        """Counts a replica that gets no more requests."""
        self._metrics.taken_out.labels(self._model, reason).inc()

    def autoscaled(self, wanted: int, reason: str) -> None:
        """Takes the number of replicas that autoscaling wants, and why it changed the number last."""
        self.wanted.set(wanted)
        if self.scaled_for not in (None, reason):
            self._metrics.scaled_for.remove(self._model, self.scaled_for)
        self.scaled_for = reason
        self._metrics.scaled_for.labels(self._model, reason).set(1)

    def watch_programs(self, programs: Programs) -> None:
        """Reads the gauges of programs off their table."""
        self._metrics.programs.labels(self._model).set_function(lambda: len(programs))
        self._metrics.program_tokens.labels(self._model).set_function(lambda: programs.num_tokens)

    def replica(self, replica_id: str) -> ReplicaTimes:
        times = self._replicas.get(replica_id)
        if times is None:
            times = self._replicas[replica_id] = ReplicaTimes(self._model, replica_id)
        return times

    def totals(self, replica_id: str, field: str) -> tuple[int, float]:
        """How many times one of a replica's histograms has counted, and their sum in seconds."""
        times = self._replicas.get(replica_id)
        return (0, 0.0) if times is None else times.totals(field)

    def forget(self, replica_id: str) -> None:
        """Removes the metrics of a replica that is gone for good."""
        self._replicas.pop(replica_id, None)

    def samples(self, field: str) -> Iterator[Sample]:
        """The samples of one histogram of all replicas that have one."""
        for times in list(self._replicas.values()):
            yield from times.samples(field)

    def ended(self, reason: str) -> None:
        """Counts a sequence that has ended."""
        self._metrics.sequences.labels(self._model, reason).inc()

    def missed_deadlines(self, how: str) -> None:
        """Counts a request whose timeout was too short."""
        self._metrics.missed_deadlines.labels(self._model, how).inc()

    def found_cached(self, expected: int, found: int) -> None:
        """Counts tokens of a prompt that placement took for cached at a replica, and those that were."""
        self._expected_hits.inc(expected)
        self._found_hits.inc(found)

    def resumed(self, reason: str) -> None:
        """Counts a sequence that goes on elsewhere, or later."""
        self._metrics.resumed.labels(self._model, reason).inc()


class Metrics:
    """The metrics of one router, in a registry of their own. Those of each model are its `ModelMetrics`."""

    def __init__(self, router: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`router`: a unique name for each of several routers behind one address, any of which may answer a scrape. It
        becomes a label. Without it, counters would seem to go back when another router answers. `clock` returns
        seconds."""
        self.router = router
        self.clock = clock
        self._registry = CollectorRegistry()
        self._models: dict[str, ModelMetrics] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self._registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ("model",), registry=self._registry)

        self.responses = counter(
            "shoal_http_responses",
            "Answers by path and HTTP status, and by model where the request named one",
            *("model", "path", "status"),
        )
        self.sequences = counter(
            "shoal_sequences",
            "Sequences by how they ended: stop, length, error (the request's: a 4xx), failed (the server's: a 5xx), or "
            "abandoned by the client",
            *("model", "finish_reason"),
        )
        self.resumed = counter(
            "shoal_resumed_sequences",
            "Sequences that were resumed: their replica died (replica_lost) or was taken away (replica_left), or their "
            "reader was too slow (slow_reader)",
            *("model", "reason"),
        )
        self.refused = counter(
            "shoal_refused_requests",
            "Requests that were refused with 429 or 503, by reason: the code of the error, or upstream for the refusal "
            "of another endpoint",
            *("model", "status", "reason"),
        )
        self.taken_out = counter(
            "shoal_replicas_taken_out",
            "Times that a replica got no more requests: it was connected and silent, its connection was lost, its "
            "work did not get on (hung), it has a protocol that this router has not, or does not encrypt (protocol), "
            "or the connection ended with an error in this router (error)",
            *("model", "reason"),
        )
        self.missed_deadlines = counter(
            "shoal_missed_deadlines",
            "Requests whose timeout was shorter than the queue, and which were refused, or which it ended (expired)",
            *("model", "how"),
        )
        self.upstream_seconds = Histogram(
            "shoal_upstream_seconds",
            "From the arrival of a request that is passed on to the first bytes of the other endpoint",
            ("model",),
            buckets=LATENCY_S,
            registry=self._registry,
        )
        self.upstream_failures = counter(
            "shoal_upstream_failures",
            "Requests that were passed on and failed: the other endpoint was unreachable, silent for too long "
            "(timeout), broke off (broken), or refused this server's key (unauthorized)",
            *("model", "reason"),
        )
        self.placement = Histogram(
            "shoal_placement_seconds",
            "Time of a decision which replica gets a request; other requests of this router wait meanwhile",
            ("model",),
            buckets=DECISION_S,
            registry=self._registry,
        )
        self.expected_hits = counter(
            "shoal_expected_cached_tokens", "Prompt tokens that placement took for cached where it sent them", "model"
        )
        self.found_hits = counter(
            "shoal_found_cached_tokens", "Prompt tokens of the same requests that were cached there", "model"
        )
        self.loop_lag = Histogram(
            "shoal_event_loop_lag_seconds",
            "How late the router's event loop comes to what is due: what every chunk of every stream waits",
            buckets=DECISION_S,
            registry=self._registry,
        )
        build = Gauge(
            "shoal_build_info",
            "1, with the version of Shoal, of its protocol between routers and replicas, and of Python",
            ("version", "protocol", "python"),
            registry=self._registry,
        )
        build.labels(version(), str(PROTOCOL), platform.python_version()).set(1)
        self._registry.register(OwnProcess())
        self.trace_spans = counter(
            "shoal_trace_spans",
            "Spans of requests' traces, by what became of them: sent, or lost because too many waited already "
            "(queue_full), the receiver refused them (refused), they could not be written (failed), or the router "
            "ended first (closed)",
            "result",
        )
        self.client_requests = counter(
            "shoal_client_requests",
            "Requests for text, embeddings or scores, by the name of the client's key and by what became of them at "
            "the door: admitted, or refused because of the client's limit (requests, tokens, concurrent)",
            *("client", "result"),
        )
        self.client_tokens = counter(
            "shoal_client_tokens",
            "Tokens of requests that have ended, by the name of the client's key: those of prompts, cached ones "
            "included, and those of outputs",
            *("client", "kind"),
        )
        self.key_file_errors = Counter(
            "shoal_key_file_errors",
            "Times that a changed key file was refused because it was missing or wrong",
            registry=self._registry,
        )
        self.api_keys = Gauge("shoal_api_keys", "API keys that are accepted", registry=self._registry)
        self.ready = gauge("shoal_replicas_ready", "Replicas that this router can send to")
        self.wanted = gauge("shoal_replicas_wanted", "Replicas that there should be")
        self.scaled_for = Gauge(
            "shoal_replicas_wanted_because",
            "1, with the reason for which autoscaling last changed shoal_replicas_wanted: request (it came, and there "
            "was no replica), queue (requests would wait too long), idle (the load has fit on one replica fewer), "
            "bounds, or steady (not yet)",
            ("model", "reason"),
            registry=self._registry,
        )
        self.hit_rate = gauge(
            "shoal_prefix_hit_rate",
            "Part of the prompts' tokens that was cached, since the start of the connected replicas",
        )
        self.programs = gauge("shoal_programs", "Programs whose text this router holds, or that have a request")
        self.program_tokens = gauge("shoal_program_tokens", "Tokens of text that this router holds for programs")
        self._registry.register(_Loads(self._models))
        self._registry.register(_Attention(self._models))

    def model(self, name: str) -> ModelMetrics:
        """The metrics of a model."""
        if name not in self._models:
            self._models[name] = ModelMetrics(self, name)
        return self._models[name]

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The same in pieces. Each takes about a millisecond to make, however many replicas there are: an event loop
        can do other work between them."""
        for metric, samples, is_own in self._families():
            more, header = {"router": self.router} if self.router and is_own else {}, True
            kept = (sample for sample in samples if not sample.name.endswith("_created"))  # no use in this format
            while True:
                metric.samples = [
                    sample._replace(labels={**sample.labels, **more}) if more else sample
                    for sample in islice(kept, SAMPLES_A_PIECE)
                ]
                if not metric.samples and not header:
                    break
                text = generate_latest(_OneFamily(metric))
                yield text if header else text.split(b"\n", 2)[2]
                header = False

    def _families(self) -> Iterator[tuple[Metric, Iterator[Sample], bool]]:
        """All metrics without samples, the samples of each, and whether they are the router's own. Those that other
        servers have under another name come under that name, too."""
        for field, (name, text, _) in TIMES.items():
            metric = Metric(name, text, "histogram")
            yield metric, self._samples(field), True
            if (other := alias(metric)) is not None:
                yield other, renamed(self._samples(field), name), True
        for metric in self._registry.collect():
            samples = metric.samples
            is_own = metric.name.startswith(_OWN_GAUGES) or (
                metric.type in ("counter", "histogram") and metric.name not in _REPORTED
            )
            yield metric, iter(samples), is_own
            if (other := alias(metric)) is not None:
                yield other, renamed(iter(samples), metric.name), is_own

    def _samples(self, field: str) -> Iterator[Sample]:
        """The samples of one histogram of all models' replicas."""
        return (sample for model in list(self._models.values()) for sample in model.samples(field))


def values(metric: Counter | Gauge) -> dict[tuple[str, ...], float]:
    """The values of a metric, by the values of its labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in metric.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


class _OneFamily(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


class _Loads(Collector):
    """Reports the loads of the replicas as they are when the page is requested."""

    def __init__(self, models: Mapping[str, ModelMetrics]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        loads = [
            ([model, replica_id], load)
            for model, metrics in dict(self._models).items()
            for replica_id, load in dict(metrics.loads).items()
        ]
        labels = ["model", "replica"]
        for field, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for which, load in loads:
                if (value := getattr(load, field)) is not None:
                    gauge.add_metric(which, value)
            yield gauge
        gauge = GaugeMetricFamily(
            "shoal_replica_load_age_seconds",
            "Time since a replica told its load, which it does every second while idle, and between steps: it grows "
            "in a long step, and when the replica hangs",
            labels=labels,
        )
        for model, metrics in dict(self._models).items():
            for replica_id, age_s in metrics.load_ages().items():
                gauge.add_metric([model, replica_id], age_s)
        yield gauge
        gauge = GaugeMetricFamily(*_ADAPTERS, labels=[*labels, "adapter", "state"])
        for which, load in loads:
            for state in ("resident", "running", "waiting"):
                for adapter in getattr(load, f"adapters_{state}"):
                    gauge.add_metric([*which, adapter, state], 1)
        yield gauge
        gauge = GaugeMetricFamily(*_KV_USAGE, labels=labels)
        config = GaugeMetricFamily(*_KV_CONFIG, labels=[*labels, "page_size", "pages"])
        for which, load in loads:
            if load.kv_tokens_total:
                gauge.add_metric(which, load.kv_tokens_used / load.kv_tokens_total)
            if load.page_size:
                pages = load.kv_tokens_total // load.page_size
                config.add_metric([*which, str(load.page_size), str(pages)], 1)
        yield gauge
        yield config
        histogram = HistogramMetricFamily(*_STEP_TOKENS, labels=labels)
        for which, load in loads:
            if load.step_tokens:
                at_most = [*map(str, _STEP_BOUNDS), "+Inf"]
                buckets = [*zip(at_most, accumulate(load.step_tokens), strict=False)]
                histogram.add_metric(which, buckets, load.computed_tokens)
        yield histogram
        for field, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for which, load in loads:
                counter.add_metric(which, getattr(load, field))
            yield counter
        for field, (name, text) in _DRAFTS.items():
            counter = CounterMetricFamily(name, text, labels=[*labels, "drafter"])
            for which, load in loads:
                for drafter, count in getattr(load, field).items():
                    counter.add_metric([*which, drafter], count)
            yield counter
        counter = CounterMetricFamily(*_EXPERT_TOKENS, labels=[*labels, "rank"])
        for own, load in loads:
            for rank, tokens in enumerate(load.expert_tokens):
                counter.add_metric([*own, str(rank)], tokens)
        yield counter
        counter = CounterMetricFamily(*_STAGE_SECONDS, labels=[*labels, "stage", "spent"])
        for which, load in loads:
            for stage, seconds_by in enumerate(load.stage_seconds):
                for spent, seconds in seconds_by.items():
                    counter.add_metric([*which, str(stage), spent], seconds)
        yield counter


class _Attention(Collector):
    """Reports the attention backend of each replica that reports its load."""

    def __init__(self, models: Mapping[str, ModelMetrics]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        gauge = GaugeMetricFamily(
            "shoal_attention_info",
            "The attention that a replica runs: flashinfer, triton, numba or torch; `problem` says why it is not a "
            "faster one, and what to do",
            labels=["model", "replica", "backend", "problem"],
        )
        for model, metrics in dict(self._models).items():
            for replica_id, (backend, problem) in dict(metrics.attention).items():
                if replica_id in metrics.loads:
                    gauge.add_metric([model, replica_id, backend, problem], 1)
        yield gauge
