"""Simulated queues of outputs whose lengths are predicted."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.lengths import order
from bench.pipeline.simulator import Request


@pytest.mark.parametrize("tau", [0.2, 0.6])
def test_noise_gives_the_wanted_tau(tau: float) -> None:
    logs = np.random.default_rng(0).normal(5, 1, 300)
    requests = [Request(i, 0.0, 10, max(1, round(np.exp(log)))) for i, log in enumerate(logs)]
    lengths = order.predictor(requests, tau, seed=1)
    assert isinstance(lengths, order.NoisyPredictor)
    noisy = np.array([lengths._logs[str(i)] for i in range(300)])
    assert order.kendall_tau(noisy, logs) == pytest.approx(tau, abs=0.06)


def test_short_outputs_first_on_a_full_replica(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lengths of half of the outputs are a tenth of the others'. Nothing is lost, and the same work is done."""
    trace = tmp_path / "lengths.csv"
    rows = ["num_prefill_tokens,num_decode_tokens", *(f"200,{(10, 100)[i % 2]}" for i in range(40))]
    trace.write_text("\n".join(rows))
    options = ["--max-running", "4", "--levels", "3", "--tau", "0.9", "--out", str(tmp_path), "--name", "made"]
    assert order.main(["--trace", str(trace), *options]) == 0
    figures = {
        figure["name"]: figure["value"] for figure in json.loads((tmp_path / "made.json").read_text())["figures"]
    }
    assert figures["made.300.latency_vs_fcfs"] < 0.7
    assert figures["made.300.throughput_vs_fcfs"] > 0.9
    assert "requests/s if all 40 come at once" in capsys.readouterr().out


def test_a_trace_that_cannot_be_read_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        order.main(["--trace", str(tmp_path / "none.csv")])
    assert "none.csv" in capsys.readouterr().err
