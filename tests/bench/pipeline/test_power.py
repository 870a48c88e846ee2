"""The command that reads what the power limit does out of a pipeline's result."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.pipeline.power import joules_per_token, main, measured
from pipeline.shape import FEATURES

COSTS = {"constant": 5e-3, "decodes": 2e-5, "rows_above_128": 5e-5}


def point(given_up: str | None, joules: float = 400.0) -> dict[str, Any]:
    about = {"given_up": given_up, "seconds": 10.0, "input_tok_s": 90.0, "output_tok_s": 10.0}
    return about | {"joules": [joules, joules], "watts": 700.0, "limit_watts": 1400.0}


@pytest.fixture
def result() -> dict[str, Any]:
    """A result of two GPUs in two stages."""
    learned = [COSTS.get(name, 0.0) for name in FEATURES]
    loads = {
        "uniform/8192@200ms/strict@200ms/3": point("delay"),
        "uniform/8192@200ms/strict@200ms/2": point(None),
        "uniform/8192@200ms/strict@200ms/2.5": point("tbt"),
        "fixed_chunk/256/strict@200ms/2": point("tbt"),
        "fixed_chunk/512/strict@200ms/2": point(None, 300.0),
        "hybrid/8192/strict@200ms/0.5": point("tbt"),
    }
    points: dict[str, Any] = {f"pp2/long/{key}": value for key, value in loads.items()}
    points |= {
        "tp2/long/uniform/8192@200ms/strict@200ms/9": point(None),
        "pp2/decode_iteration": {"tbt_s": {"p50": 0.04}},
        "pp2/calibration": {"coefficients": [learned, learned], "kv_tokens": 200_000},
        "link": {"latency_s": 1e-4, "bytes_per_s": 1e10},
    }
    settings = {"model": "llama-70b", "replica": {"max_running": 64}, "requests": 4, "seconds": 2.0, "seed": 0}
    machine = {"gpus": ["NVIDIA H200, 143771 MiB"]}
    return {"points": points, "settings": settings | {"shrink": 8}, "machine": machine, "commit": "abc"}


def test_rates_that_were_carried_and_missed_are_those_next_to_the_capacity(result: dict[str, Any]) -> None:
    layout, schedules = measured(result["points"])
    assert str(layout) == "pp2" and set(schedules) == {"uniform", "fixed_chunk", "hybrid"}
    ours, fixed = schedules["uniform"], schedules["fixed_chunk"]
    assert ours.carried is not None and ours.carried[0] == 2.0
    assert ours.missed is not None and (ours.missed[0], ours.missed[1]["given_up"]) == (2.5, "tbt")
    assert fixed.carried is not None and sorted(fixed.budgets) == [256, 512] and fixed.missed is None
    assert schedules["hybrid"].carried is None
    assert joules_per_token(fixed.carried[1]) == pytest.approx(2 * 300 / 1000)


@pytest.mark.bench
def test_capacities_are_simulated_with_and_without_the_limit(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "found.json").write_text(json.dumps(result))
    assert main([str(tmp_path / "found.json"), "--out", str(tmp_path)]) == 0
    made = json.loads((tmp_path / "pipeline.power.json").read_text())
    values = {figure["name"].removeprefix("pipeline.power."): figure["value"] for figure in made["figures"]}
    assert values["uniform.joules_per_token"] == pytest.approx(0.8) and values["uniform.capacity.measured"] == 2.0
    assert values["uniform.capacity.simulated_unlimited"] >= values["uniform.capacity.simulated"] > 0
    assert not any(name.startswith("hybrid") for name in values)
    shown = capsys.readouterr().out
    assert "2.5 (tbt)" in shown and "50%" in shown


def test_a_file_that_says_nothing_of_it_is_refused(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    for wrong, why in (
        ({"points": {}}, "--traffic long"),
        ({"machine": {"gpus": []}}, "none"),
        ({"points": {"pp2/long/uniform/8192/strict@200ms/1": point(None)}}, "decode_iteration"),
    ):
        path.write_text(json.dumps(result | wrong))
        assert main([str(path), "--out", str(tmp_path)]) == 1
        assert why in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere.json")]) == 1 and "No such file" in capsys.readouterr().err
