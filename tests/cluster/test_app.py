"""What the application asks of a cluster, and what it settles before it starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as _as_serve_does
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.build_app import build_app
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.deployment_state import DeploymentTargetState
from ray.serve._private.version import DeploymentVersion
from ray.serve.schema import ServeApplicationSchema

from cluster.app import ROUTER_CPUS, ListeningRouter, Router, _Router, application, build, numbers, settle
from cluster.config import Config, ConfigError, ReplicaConfig, load
from cluster.deployed import APP, STREAMS_S
from cluster.models import model_name
from cluster.replica import CONTROL_CPUS, STOP_S, bundles
from router.service import Service
from tests.plane import SECRET


@pytest.mark.parametrize(
    ("device", "gpus", "settled", "told"),
    [("auto", 0, "cpu", True), ("auto", 2, "cuda", False), ("cpu", 2, "cpu", False), ("cuda", 0, "cuda", False)],
)
def test_the_device_is_the_same_for_every_process(device: str, gpus: float, settled: str, told: bool) -> None:
    config, note = settle(load(overrides={"device": device}), gpus)
    assert (config.deployments[0].device, note is not None) == (settled, told)


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
    assert settle(Config(model=model), 0)[0].deployments[0].name == name
    assert settle(Config(model=model, served_model_name="own"), 0)[0].deployments[0].name == "own"


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
    config, keys, replicas = router._bound_deployment.init_args
    (model,) = config.deployments
    assert (model.device, model.name, keys) == ("cuda", "org/name", {})
    assert replicas._bound_deployment.num_replicas == 3
    assert router._bound_deployment.num_replicas == 2
    with pytest.raises(ConfigError, match=r"replica: unknown.* replicas\?"):
        _as_serve_does(build, {"replica": 3})


def versions(replicas: int, routers: int, **settings: object) -> dict[str, DeploymentVersion]:
    """What Serve's controller makes of a RayService's application: by deployment, what it compares with what runs."""
    scale = [{"name": "Replica", "num_replicas": replicas}, {"name": "Router", "num_replicas": routers}]
    told = {"name": APP, "import_path": "cluster.app:build", "args": settings, "deployments": scale}
    config = ServeApplicationSchema.model_validate(told)
    built = build_app(
        _as_serve_does(build, config.args), name=APP, make_deployment_handle=lambda deployment, name: deployment.name
    )
    infos = {
        deployment.name: DeploymentInfo(
            deployment._deployment_config, deployment._replica_config, 0, "", version=get_app_code_version(config)
        )
        for deployment in built.deployments
    }
    targets = override_deployment_info(infos, config)
    return {name: DeploymentTargetState.create(info, replicas).version for name, info in targets.items()}


def test_another_number_of_replicas_or_routers_starts_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    before, after = versions(2, 1, page_size=32), versions(5, 3, page_size=32)
    assert {name: version.deployment_config.num_replicas for name, version in after.items()} == {
        "Replica": 5,
        "Router": 3,
    }
    assert before == after  # hashes of all that a running replica would be started anew, or told, for
    other = versions(2, 1, page_size=16)
    assert all(version.requires_actor_restart(other[name]) for name, version in before.items())


def test_what_is_bound_knows_no_number() -> None:
    def bound(**scale: int) -> list[ReplicaConfig]:
        router = application(settle(load(overrides=scale), gpus=0)[0])._bound_deployment
        return [router.init_args[0], *(replicas._bound_deployment.init_args[0] for replicas in router.init_args[2:])]

    settled, _ = settle(Config(), gpus=0)
    assert bound(replicas=2, routers=1) == bound(replicas=5, routers=3) == [settled, *settled.deployments]


def test_serve_waits_for_streams_as_long_as_they_may_take() -> None:
    config, _ = settle(load(overrides={"drain_s": 7}), gpus=0)
    for nodes in (["10.0.0.7"], []):
        router = application(config, nodes)._bound_deployment
        replicas = router.init_args[2]._bound_deployment
        assert replicas.init_args[1] == 7
        assert replicas._deployment_config.graceful_shutdown_timeout_s == 7 + STOP_S
        assert router._deployment_config.graceful_shutdown_timeout_s == STREAMS_S
        assert router._deployment_config.max_surge_percent > 0


def test_routers_listen_themselves_on_the_machine_that_is_named_and_else_nowhere() -> None:
    config, _ = settle(load(overrides={"cpus_per_router": 2}), gpus=0)
    here, anywhere = (application(config, nodes)._bound_deployment for nodes in (["10.0.0.7"], []))
    assert (here.func_or_class, anywhere.func_or_class) == (ListeningRouter, Router)
    assert here.name == anywhere.name == "Router"
    assert here.ray_actor_options == {"num_cpus": 0.0, "resources": {"node:10.0.0.7": 0.001}}
    assert anywhere.ray_actor_options == {"num_cpus": ROUTER_CPUS}


def test_routers_behind_proxies_have_no_certificate(tmp_path: Path) -> None:
    files = {"ssl_certfile": tmp_path / "cert.pem", "ssl_keyfile": tmp_path / "key.pem"}
    config, _ = settle(Config(**files), gpus=0)
    assert application(config, ["10.0.0.1"])
    with pytest.raises(ConfigError, match="ssl_certfile"):
        application(config)


def test_each_machine_has_routers_of_its_own_in_front_of_the_same_replicas() -> None:
    hosts = ["10.0.0.7", "10.0.0.8"]
    config, _ = settle(load(overrides={"replicas": 8, "address": "auto", "router_hosts": hosts}), gpus=0)
    first = application(config, hosts)._bound_deployment
    (other,) = (each._bound_deployment for each in first.init_kwargs["others"])
    assert [each.name for each in (first, other)] == [f"Router-{host}" for host in hosts]
    assert first.init_args[2] is other.init_args[2]
    assert [each.num_replicas for each in (first, other)] == [2, 2]
    assert numbers(config) == {"Replica": 8, "Router-10.0.0.7": 2, "Router-10.0.0.8": 2}


def test_a_new_version_of_a_replica_comes_first_where_there_is_room() -> None:
    config, _ = settle(Config(), gpus=0)
    for spare, most in (([], 0), ([config.deployments[0].name], 1)):
        replicas = application(config, spare=spare)._bound_deployment.init_args[2]._bound_deployment
        assert replicas._deployment_config.max_surge_percent == most


@pytest.mark.parametrize(("asked", "values"), [("model", {"temperature": 0.6}), ("openai", {})])
def test_a_router_samples_as_the_model_says_unless_it_is_told_not_to(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, values: dict[str, float]
) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    (service,) = services(monkeypatch, model=str(tmp_path), sampling_defaults=asked)
    assert service.defaults.values == values


def test_a_router_knows_the_models_context_before_a_replica_runs(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (service,) = services(monkeypatch, model=str(tiny_model))
    config = json.loads((tiny_model / "config.json").read_text())
    assert service.context_length == config["max_position_embeddings"]
    (service,) = services(monkeypatch, model=str(tiny_model), context_length=64)
    assert service.context_length == 64


MODELS = [
    {"name": "org/small", "model": "org/one", "replicas": 3, "page_size": 32},
    {"name": "large", "model": "org/two", "replicas": 1, "tp": 2, "cpus_per_rank": 4},
    {"name": "far", "upstream": {"url": "http://far:1/v1", "api_key_env": "FAR_KEY"}},
]


def test_each_model_has_a_deployment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    monkeypatch.setenv("FAR_KEY", "sesame")
    router = _as_serve_does(build, {"models": MODELS, "kv_tokens": 4096})._bound_deployment
    config, keys, *replicas = router.init_args
    small, large = (application._bound_deployment for application in replicas)
    assert [each.name for each in (router, small, large)] == ["Router", "Replica-org-small", "Replica-large"]
    assert [each.num_replicas for each in (router, small, large)] == [2, 3, 1]
    assert small._deployment_config.request_router_config == large._deployment_config.request_router_config
    assert small._replica_config.placement_group_bundles == [{"CPU": CONTROL_CPUS}, {"CPU": 1}]
    assert large._replica_config.placement_group_bundles == [{"CPU": CONTROL_CPUS}, {"CPU": 8}]
    (one, drain_s, log_format), (two, *_) = small.init_args, large.init_args
    assert (drain_s, log_format) == (120, "text")
    assert (one.name, one.page_size, one.kv_tokens) == ("org/small", 32, 4096)
    assert (two.name, two.page_size, two.kv_tokens) == ("large", 16, 4096)
    assert config.deployments == (one, two) and [entry.name for entry in config.upstreams] == ["far"]
    assert keys["far"].get_secret_value() == "sesame" and "sesame" not in repr(router.init_args)


def test_a_key_that_the_environment_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    monkeypatch.delenv("FAR_KEY", raising=False)
    with pytest.raises(ConfigError, match="far: api_key_env: FAR_KEY"):
        build({"models": MODELS})


def test_a_router_hears_of_each_models_replicas(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: dict[str, Any] = {}
    models = [{"name": name, "model": str(tiny_model)} for name in ("a", "b")]
    one, two = services(monkeypatch, heard.__setitem__, models=models)
    one.replicas.set_replicas({})
    published = {"address": "tcp://127.0.0.1:1", "context_length": 64, "attention": ("torch", "")}
    heard["Replica-b"]({"r": published})
    assert (one.model, one.replicas.known, two.model, two.replicas.known) == ("a", frozenset(), "b", {"r"})
    assert two.context_length == 64 < one.context_length
    assert two.metrics.attention == {"r": ("torch", "")} and not one.metrics.attention


def test_a_router_uses_no_replica_of_another_version_with_another_model(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    heard: dict[str, Any] = {}
    (service,) = services(monkeypatch, heard.__setitem__, model=str(tiny_model))
    (take,) = heard.values()
    published = {"address": "tcp://127.0.0.1:1", "context_length": 64, "attention": ("torch", "")}
    take({"old": published, "same": published | {"model": str(tiny_model)}, "other": published | {"model": "org/name"}})
    assert service.replicas.known == {"old", "same"} == service.metrics.attention.keys()


def services(
    monkeypatch: pytest.MonkeyPatch, listen: Callable[..., None] = lambda *its: None, **settings: object
) -> list[Service]:
    """Those of a router's models, without Serve around it."""
    monkeypatch.setattr("cluster.app.listen", listen)
    for name in ("ServePlacer", "watch", "end_if_stuck"):
        monkeypatch.setattr(f"cluster.app.{name}", lambda *its: None)
    monkeypatch.setattr("cluster.app.cluster_secret", lambda: SECRET)
    config = load(overrides=settings)
    return _Router(config, {}, *(None for _ in config.deployments))._models.services  # type: ignore[arg-type]
