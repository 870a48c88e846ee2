"""Stages of a replica on Ray nodes."""

import json
from pathlib import Path

import pytest

from bench.pipeline import command, ray_nodes
from bench.pipeline.ray_nodes import Nodes, spread
from cluster.config import Config

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


def test_stages_wait_until_the_last_replica_has_given_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"a": {"CPU": 3.0}, "b": {"CPU": 3.0}}
    views = [whole, {"a": {"CPU": 3.0}, "b": {}}, {"a": {"CPU": 3.0}, "b": {"CPU": 1.0}}, whole]
    monkeypatch.setattr(ray_nodes, "available_resources_per_node", lambda: views.pop(0))
    monkeypatch.setattr(ray_nodes, "_alive", lambda: ["a", "b"])
    monkeypatch.setattr(ray_nodes.time, "sleep", lambda s: None)
    nodes, config = Nodes(), Config(model="m", device="cpu", pp=2)
    assert nodes.stages(config) == ["a", "b"]
    assert nodes.stages(config) == ["a", "b"]
    assert not views


def test_the_control_actor_has_room_beside_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_nodes, "available_resources_per_node", lambda: {"a": {"CPU": 2.0}, "b": {"CPU": 2.0}})
    monkeypatch.setattr(ray_nodes, "_alive", lambda: ["a", "b"])
    assert Nodes().stages(Config(model="m", device="cpu", pp=2)) == ["a", "b"]
    monkeypatch.setattr(ray_nodes, "FREE_S", 0.0)
    with pytest.raises(ValueError, match="have room for"):
        Nodes().stages(Config(model="m", device="cpu", pp=4))


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
