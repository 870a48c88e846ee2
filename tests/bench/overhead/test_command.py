"""The benchmark of the router's cost, small: a real router, replicas that compute nothing."""

import json
from pathlib import Path

import pytest

from bench.overhead import command


@pytest.mark.bench
def test_a_small_run_finds_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--streams", "3", "--replicas", "2", "--step-ms", "1", "--rounds", "1"]
    assert command.main([*few, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "fleet.overhead.json").read_text())
    values = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert values.keys() == {
        "fleet.overhead.cores_per_100k_tok_s",
        "fleet.overhead.ttft_ms",
        "fleet.overhead.bystander.ttft_p99_ms",
        "fleet.overhead.bystander.tbt_p99_ms",
    }
    assert 0 < values["fleet.overhead.cores_per_100k_tok_s"] < 1000 and values["fleet.overhead.ttft_ms"] > 0
    assert "tokens per event" in capsys.readouterr().out


def test_a_prompt_shares_no_prefix_with_another() -> None:
    firsts = {tuple(command.prompt(number)[:2]) for number in range(10_000)}
    assert len(firsts) == 10_000


def test_percentiles() -> None:
    assert command.p99_ms([number / 1000 for number in range(200)]) == 198
