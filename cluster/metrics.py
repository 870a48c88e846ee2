"""What `/metrics` can say, read off a router's metrics themselves: for the reference page."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from router.metrics import Metrics
from worker.messages import Load


@dataclass(frozen=True)
class Described:
    """One metric. `name` is as a query names it, but for what Prometheus adds to a histogram's; `labels` are without
    `le`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def described() -> Iterator[Described]:
    """Every metric in the page's order."""
    metrics = Metrics()
    metrics.replica("0")
    metrics.loads["0"] = Load(incarnation="", stage_seconds=[{"compute": 0.0}])
    for counter in vars(metrics).values():
        if isinstance(counter, Counter):
            counter.labels(*counter._labelnames)  # there is no sample, and so no label to be read, before the first
    for family in text_string_to_metric_families(metrics.page().decode()):
        if family.name.endswith("_created"):
            continue
        labels = tuple(label for label in family.samples[0].labels if label != "le")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield Described(name, family.type, labels, family.documentation)
