"""What a `shoal serve` knows of the one before it."""

from typing import Any

import pytest

from cluster import joined
from cluster.app import settle
from cluster.config import load
from cluster.joined import Deployed
from cluster.launch import _as_before, _scaled_as

MODELS = [{"name": "a", "model": "org/a", "max_replicas": 4}, {"name": "b", "model": "org/b"}]


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ({}, {"replicas": 5, "routers": 3}, []),
        ({}, {"page_size": 32, "port": 9000}, ["page_size", "port"]),
        ({"api_key": "one"}, {"api_key": "two"}, ["api_key"]),
        ({"models": MODELS}, {"models": [MODELS[0], {**MODELS[1], "tp": 2}]}, ["models.b.tp"]),
    ],
)
def test_changes_are_named_and_numbers_are_none(
    before: dict[str, Any], after: dict[str, Any], changes: list[str]
) -> None:
    given = load(overrides=before)
    deployed = Deployed.of(given, settle(given, gpus=0)[0], has_serve=True)
    assert sorted(deployed.changes(load(overrides=before | after))) == changes
    assert "one" not in repr(deployed)


def test_a_device_that_is_left_open_stays_while_its_machines_are_away() -> None:
    given = load(overrides={"models": MODELS, "device": "auto"})
    with_gpus = settle(given, gpus=8)[0]
    deployed = Deployed.of(given, with_gpus, has_serve=True)
    again, _ = settle(_as_before(given, deployed.devices), gpus=0)
    assert [each.device for each in again.deployments] == ["cuda", "cuda"]
    fixed = load(overrides={"device": "cpu"})
    assert _as_before(fixed, {fixed.deployments[0].name: "cuda"}).deployments[0].device == "cpu"


@pytest.mark.parametrize(("there", "replicas"), [(3, 3), (9, 4), (0, 1)])
def test_what_autoscaling_has_chosen_stays_within_new_bounds(there: int, replicas: int) -> None:
    config = load(overrides={"models": MODELS})
    now = _scaled_as(config, {"Replica-a": there, "Replica-b": 7})
    assert [each.replicas for each in now.deployments] == [replicas, 2]
    assert _scaled_as(config, {}) == config.changed(lambda each: each)


def test_routers_that_no_machine_can_hold_are_refused_before_ray_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 4.0}}]
    monkeypatch.setattr(joined.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(joined, "_reserved", dict)
    monkeypatch.setattr(joined, "placement_group", lambda *its, **more: pytest.fail("Ray is asked"))
    with pytest.raises(joined.NoRoom, match=r"^20 routers .*=1 .* on 10\.0\.0\.1, which has 4 CPUs: 16 are missing\."):
        joined.reserve({"10.0.0.1": 20, "10.0.0.2": 20}, 1.0)
