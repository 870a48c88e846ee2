"""The simulation of a client that floods a fleet."""

import pytest

from bench.fleet import fairness as module
from bench.fleet.fairness import fairness, figures
from bench.fleet.hardware import ReplicaHardware


def test_a_quiet_client_hardly_notices_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUESTS", 120)
    runs = fairness([1.5], num_replicas=2, num_routers=1, hardware=ReplicaHardware(), seed=0)
    run, by_name = runs["1.5"], {figure.name: figure.value for figure in figures(runs)}
    assert run["fcfs_quiet_ttft_mean_s"] > 5 * run["alone_quiet_ttft_mean_s"]
    assert by_name["fleet.fair.quiet_client_ttft_vs_alone"] < 2.5
    assert by_name["fleet.fair.throughput_vs_fcfs"] > 0.95
    assert run["fair_hit_rate"] == pytest.approx(run["fcfs_hit_rate"], abs=0.02)
