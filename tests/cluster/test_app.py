"""What the application asks of a cluster, and what it settles before it starts."""

from pathlib import Path

import pytest
import ray
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as _as_serve_does

from cluster.app import ListeningRouter, Router, _Router, application, build, model_name, settle
from cluster.config import Config, ConfigError, load
from cluster.replica import CONTROL_CPUS, bundles


@pytest.mark.parametrize(
    ("device", "gpus", "settled", "told"),
    [("auto", 0, "cpu", True), ("auto", 2, "cuda", False), ("cpu", 2, "cpu", False), ("cuda", 0, "cuda", False)],
)
def test_the_device_is_the_same_for_every_process(device: str, gpus: float, settled: str, told: bool) -> None:
    config, note = settle(load(overrides={"device": device}), gpus)
    assert (config.device, note is not None) == (settled, told)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("/models/mine", "mine"),
        ("/models/mine/", "mine"),
        ("./models/v1.5", "v1.5"),
        ("/models/small.Q4_1.gguf", "small.Q4_1"),
    ],
)
def test_a_model_is_named_after_where_it_comes_from(model: str, name: str) -> None:
    assert model_name(model) == name
    assert settle(Config(model=model), 0)[0].served_model_name == name
    assert settle(Config(model=model, served_model_name="own"), 0)[0].served_model_name == "own"


def test_two_parts_that_are_a_folder_are_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_name("models/mine") == "mine"


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        ({"device": "cpu"}, [{"CPU": 1}]),
        ({"device": "cpu", "cpus_per_rank": 3}, [{"CPU": 3}]),
        ({"device": "cuda"}, [{"CPU": 1, "GPU": 1}]),
        ({"device": "cuda", "gpus_per_rank": 0.5}, [{"CPU": 1, "GPU": 0.5}]),
        ({"device": "cuda", "tp": 4, "pp": 2, "cpus_per_rank": 2}, [{"CPU": 8, "GPU": 4}] * 2),
    ],
)
def test_a_replica_is_its_control_actor_and_a_bundle_a_stage(settings: dict, stages: list[dict[str, float]]) -> None:
    assert bundles(load(overrides=settings)) == [{"CPU": CONTROL_CPUS}, *stages]


def test_serve_builds_it_from_the_keys_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    router = _as_serve_does(build, {"model": "org/name", "replicas": "3", "routers": "2"})
    config, replicas = router._bound_deployment.init_args
    assert (config.device, config.replicas, config.served_model_name) == ("cuda", 3, "org/name")
    assert replicas._bound_deployment.num_replicas == 3
    assert router._bound_deployment.num_replicas == 2
    with pytest.raises(ConfigError, match="did you mean replicas"):
        _as_serve_does(build, {"replica": 3})


def test_routers_listen_themselves_on_the_machine_that_is_named_and_else_nowhere() -> None:
    config, _ = settle(load(overrides={"cpus_per_router": 2}), gpus=0)
    here, anywhere = (application(config, node)._bound_deployment for node in ("10.0.0.7", None))
    assert (here.func_or_class, anywhere.func_or_class) == (ListeningRouter, Router)
    assert here.name == anywhere.name == "Router"
    assert here.ray_actor_options == {"num_cpus": 2.0, "resources": {"node:10.0.0.7": 0.001}}
    assert anywhere.ray_actor_options == {"num_cpus": 2.0}


@pytest.mark.parametrize(("asked", "values"), [("model", {"temperature": 0.6}), ("openai", {})])
def test_a_router_samples_as_the_model_says_unless_it_is_told_not_to(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, values: dict[str, float]
) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    monkeypatch.setattr("cluster.app.listen", lambda take: None)
    monkeypatch.setattr("cluster.app.ServePlacer", lambda *its: None)
    router = _Router(load(overrides={"model": str(tmp_path), "sampling_defaults": asked}), None)  # type: ignore[arg-type]
    assert router._service.defaults.values == values
