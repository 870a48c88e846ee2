"""Histograms of latencies, next to those of Prometheus' own client."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram

from router.metrics.replica_times import BucketHistogram, ReplicaTimes

BOUNDS = (0.01, 0.1, 1, 25)


@given(st.lists(st.sampled_from((0.0, 0.005, 0.01, 0.0100001, 0.1, 0.5, 1.0, 24.9, 25.0, 300.0))))
def test_samples_are_those_of_prometheus_own_histogram(times_s: list[float]) -> None:
    labels = {"model": "m", "replica": "r0"}
    theirs = Histogram("seconds", "text", labels.keys(), buckets=BOUNDS, registry=None)
    ours = BucketHistogram(BOUNDS)
    counted = theirs.labels(**labels)
    for time_s in times_s:
        counted.observe(time_s)
        ours.observe(time_s)
    (family,) = theirs.collect()
    wanted = [(each.name, each.labels, each.value) for each in family.samples if not each.name.endswith("_created")]
    assert [(each.name, each.labels, each.value) for each in ours.samples("seconds", labels)] == wanted


def test_a_time_may_count_for_several_tokens() -> None:
    times = ReplicaTimes("m", "r0")
    times.inter_token.observe(0.02, 3)
    times.inter_token.observe(0.5)
    assert times.totals("inter_token") == (4, pytest.approx(0.56)) and times.totals("queue") == (0, 0.0)
    by_bound = {each.labels.get("le"): each.value for each in times.samples("inter_token")}
    assert (by_bound["0.01"], by_bound["0.02"], by_bound["+Inf"]) == (0, 3, 4)
