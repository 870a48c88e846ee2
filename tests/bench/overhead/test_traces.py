"""The benchmark of the cost of traces, small: two real routers, a receiver, replicas that compute nothing."""

import json
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from bench.overhead import traces
from bench.overhead.span_receiver import sums_s


@pytest.mark.bench
def test_a_small_run_finds_every_figure(tmp_path: Path) -> None:
    few = ["--streams", "2", "--requests", "2", "--replicas", "1", "--step-ms", "1", "--rounds", "2"]
    assert traces.main([*few, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "operate.trace.json").read_text())
    values = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert values.keys() == {"operate.trace.throughput", "operate.trace.cpu", "operate.trace.error"}
    assert values["operate.trace.error"] < 0.1 and values["operate.trace.throughput"] > 0.5


def test_sums_of_spans_by_request() -> None:
    def message(*spans: Span) -> bytes:
        whole = ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])
        return ExportTraceServiceRequest(resource_spans=[whole]).SerializeToString()

    named = [KeyValue(key="shoal.request_id", value=AnyValue(string_value="a"))]
    own = Span(span_id=b"1", attributes=named, end_time_unix_nano=9_000_000_000)
    parts = [Span(span_id=b"2", parent_span_id=b"1", end_time_unix_nano=each * 10**9) for each in (2, 3)]
    stranger = Span(span_id=b"3", parent_span_id=b"9", end_time_unix_nano=10**9)
    assert sums_s([message(own, parts[0]), message(parts[1], stranger)]) == {"a": 5.0}
