"""The router's own process, for operators: what it uses, and whether its event loop keeps up."""

import asyncio
import gc
from collections.abc import Callable, Iterable
from time import perf_counter

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

LOOK_EVERY_S = 0.1


class OwnProcess(Collector):
    """CPU, memory, open files and start of the process under the names that Prometheus' clients share, and its
    garbage collections. All are the router's own, so each has the label `router` where there are several."""

    def __init__(self) -> None:
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterable[Metric]:
        yield from self._process.collect()
        collections = CounterMetricFamily(
            "python_gc_collections", "Times that garbage of a generation was collected", labels=["generation"]
        )
        for generation, stats in enumerate(gc.get_stats()):
            collections.add_metric([str(generation)], stats["collections"])
        yield collections


async def watch_loop(observe: Callable[[float], object], every_s: float = LOOK_EVERY_S) -> None:
    """Tells how late the running event loop comes back, in seconds, `every_s` seconds each time, until it is
    cancelled."""
    while True:
        due = perf_counter() + every_s
        await asyncio.sleep(every_s)
        observe(max(0.0, perf_counter() - due))
