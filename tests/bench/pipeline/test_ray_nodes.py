"""Stages of a replica on Ray nodes."""

import json
from pathlib import Path

import pytest

from bench.pipeline import command
from bench.pipeline.ray_nodes import spread

GPU = {"CPU": 2.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("free", "count", "nodes"),
    [
        ({"a": 8, "b": 8}, 2, ["a", "b"]),
        ({"a": 8, "b": 8}, 4, ["a", "a", "b", "b"]),
        ({"a": 8, "b": 2, "c": 8}, 6, ["a", "a", "a", "b", "c", "c"]),
        ({"a": 1, "b": 4}, 2, ["b", "b"]),
        ({"a": 1.99999, "b": 1}, 1, ["a"]),
    ],
)
def test_stages_are_spread_over_the_nodes_with_room(free: dict[str, float], count: int, nodes: list[str]) -> None:
    assert spread({node: {"CPU": 64.0, "GPU": gpus} for node, gpus in free.items()}, GPU, count) == nodes


@pytest.mark.parametrize("free", [{}, {"a": {"GPU": 8.0, "CPU": 1.0}}, {"a": {"CPU": 64.0}, "b": {"GPU": 2, "CPU": 2}}])
def test_stages_without_room_are_refused(free: dict[str, dict[str, float]]) -> None:
    with pytest.raises(ValueError, match="have room for"):
        spread(free, GPU, 2)


def test_options_without_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--address", "auto", "--nodes", "2"])
    assert command.main(["--address", "auto", "--plan", "falcon-180b"]) == 1
    assert "--address" in capsys.readouterr().err
    assert command.main(["--address", "127.0.0.1:1"]) == 1
    assert "no Ray cluster at 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.bench
@pytest.mark.ray
def test_two_nodes_of_this_machine(tmp_path: Path) -> None:
    line = (
        "--device cpu --model tiny --layouts pp2 --nodes 2 --schedules uniform --traffic , --jobs mini_half --shrink 64"
    )
    out = ["--out", str(tmp_path), "--traces", str(tmp_path)]
    assert command.main([*line.replace(" , ", "  ").split(" "), *out]) == 0
    found = json.loads((tmp_path / "cpu.pipeline.json").read_text())
    assert found["settings"]["nodes"] == 2
    assert [len(point["coefficients"]) for key, point in found["points"].items() if "calibration" in key] == [2]
