"""The metrics that `/metrics` can have, read off a router's `Metrics` itself, and the spans of traces: for the
reference page."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from router.metrics.aliases import ALIASES
from router.metrics.metrics import Metrics
from router.metrics.traces import PHASES
from router.programs import Programs
from worker.messages import ReplicaLoad

OTHER_NAMES = ALIASES  # of vLLM, by Shoal's
SPANS = PHASES  # what traces can have within a request's span


@dataclass(frozen=True)
class Described:
    """A metric. `name` is its name in queries, without the suffixes that Prometheus adds for a histogram. `labels` are
    without `le`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def described() -> Iterator[Described]:
    """Every metric, in the order of the page."""
    metrics = Metrics()
    model = metrics.model("")
    model.watch_programs(Programs())
    model.replica("0")
    counts = {"": 0}
    load = ReplicaLoad(
        incarnation="",
        proposals=counts,
        drafted=counts,
        accepted=counts,
        max_loras=0,
        adapters_resident=[""],
        stage_seconds=[{"compute": 0.0}],
        expert_tokens=[0],
        expert_imbalance=1.0,
        length_tau=0.0,
        length_ratio=1.0,
        kv_tokens_total=1,
        page_size=1,
        step_tokens=[1],
    )
    model.told("0", load)
    model.attention["0"] = ("torch", "")
    for metric in vars(metrics).values():
        if isinstance(metric, Counter | Gauge | Histogram) and metric._labelnames:
            metric.labels(*metric._labelnames)  # makes a sample, from which the labels can be read
    for family in text_string_to_metric_families(metrics.page().decode()):
        if family.name.endswith("_created") or family.name in ALIASES.values():
            continue
        labels = tuple(label for label in family.samples[0].labels if label != "le")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield Described(name, family.type, labels, family.documentation)
