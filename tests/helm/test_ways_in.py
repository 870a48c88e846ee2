"""What the chart makes around the RayService: ways in, a budget for workers, and the pod of `helm test`."""

from typing import Any

import pytest
import yaml

from router.config import RouterConfig
from router.http.own_port import MAX_PORTS_TRIED
from tests.helm.chart import ROOT, cluster, render

INGRESS = {"enabled": True, "className": "nginx", "host": "a.example", "tlsSecret": "a-tls"}
INGRESS |= {"annotations": {"x/y": "z"}}


def one(kind: str, values: dict[str, Any]) -> Any:
    (manifest,) = [manifest for manifest in render(values) if manifest["kind"] == kind]
    return manifest


def test_by_default_there_are_none() -> None:
    assert {m["kind"] for m in render({})} == {"NetworkPolicy", "Pod", "RayService"}


def test_an_ingress_leads_to_the_service_with_tls() -> None:
    ingress = one("Ingress", {"ingress": INGRESS, "service": {"port": 80}})
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert rule["host"] == "a.example" and path["backend"]["service"] == {"name": "shoal-try", "port": {"number": 80}}
    assert ingress["spec"]["tls"] == [{"hosts": ["a.example"], "secretName": "a-tls"}]
    assert ingress["spec"]["ingressClassName"] == "nginx" and ingress["metadata"]["annotations"] == {"x/y": "z"}
    assert "tls" not in one("Ingress", {"ingress": {"enabled": True, "host": "a.example"}})["spec"]


def test_an_ingress_of_nginx_takes_all_requests_that_a_router_takes() -> None:
    """Its own limit is a mebibyte, and it answers 413."""
    values = yaml.safe_load((ROOT / "helm" / "examples" / "observed.yaml").read_text())
    size = one("Ingress", values)["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"]
    assert size.endswith("m") and int(size[:-1]) << 20 >= RouterConfig.model_fields["max_body_bytes"].default


def test_a_route_leads_to_the_service_and_cuts_no_stream() -> None:
    gateways = [{"name": "public", "namespace": "gateways"}]
    route = one("HTTPRoute", {"httpRoute": {"enabled": True, "parentRefs": gateways, "hostnames": ["a.example"]}})
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "shoal-try", "port": 8000}] and rule["timeouts"] == {"request": "0s"}
    assert route["spec"]["parentRefs"] == gateways and route["spec"]["hostnames"] == ["a.example"]


def test_a_budget_is_for_the_workers_alone() -> None:
    values = {"disruptionBudget": {"enabled": True, "maxUnavailable": 2}}
    spec = one("PodDisruptionBudget", values | {"workers": {"count": 5}})["spec"]
    wanted = spec["selector"]["matchLabels"].items()
    made = cluster(values)
    (worker,) = made["workerGroupSpecs"]
    assert wanted <= worker["template"]["metadata"]["labels"].items()
    assert not wanted <= made["headGroupSpec"]["template"]["metadata"]["labels"].items()
    # A RayCluster has no subresource scale: Kubernetes cannot tell of how many maxUnavailable would be.
    assert spec["minAvailable"] == 3 and "maxUnavailable" not in spec


@pytest.mark.parametrize(
    ("values", "stay"),
    [
        ({}, [1]),
        ({"replicas": 1}, []),
        ({"workers": {"count": 4}}, [3]),
        ({"autoscaling": {"enabled": True, "maxWorkers": 6}}, []),
        ({"autoscaling": {"enabled": True, "minWorkers": 3, "maxWorkers": 6}}, [2]),
    ],
)
def test_a_budget_counts_the_workers_that_are_always_there(values: dict[str, Any], stay: list[int]) -> None:
    budgets = [
        m for m in render(values | {"disruptionBudget": {"enabled": True}}) if m["kind"] == "PodDisruptionBudget"
    ]
    assert [budget["spec"]["minAvailable"] for budget in budgets] == stay


@pytest.mark.parametrize("first", [9464, 65530])
def test_prometheus_reaches_the_port_of_every_router(first: int) -> None:
    prometheus = [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    values = {"config": {"metrics_port": first}, "networkPolicy": {"metricsFrom": prometheus}}
    (metrics,) = [rule for rule in one("NetworkPolicy", values)["spec"]["ingress"] if rule.get("from") == prometheus]
    (ports,) = [ports for ports in metrics["ports"] if "endPort" in ports]
    tried = range(first, min(first + MAX_PORTS_TRIED, 1 << 16))
    assert (ports["port"], ports["endPort"]) == (tried[0], tried[-1])
    assert not any(
        "endPort" in each for rule in one("NetworkPolicy", {})["spec"]["ingress"] for each in rule.get("ports", ())
    )


def test_helm_test_runs_on_a_node_of_the_workers() -> None:
    where = {"nodeSelector": {"gpu": "a"}, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}
    spec = one("Pod", {"workers": where})["spec"]
    assert {key: spec[key] for key in where} == where
    assert not where.keys() & one("Pod", {})["spec"].keys()


def test_helm_test_runs_the_doctor_and_asks_the_service() -> None:
    pod = one("Pod", {"service": {"port": 80}})
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    script = container["command"][-1]
    assert script.startswith("shoal doctor\n") and "http://shoal-try:80/ready" in script
    assert container["image"] == cluster({})["headGroupSpec"]["template"]["spec"]["containers"][0]["image"]
    # Neither the Service nor the budget, nor the NetworkPolicy takes it for a pod of the server.
    labels = one("NetworkPolicy", {})["spec"]["podSelector"]["matchLabels"]
    assert not labels.items() <= pod["metadata"]["labels"].items()
    # As Pod Security's level "restricted" wants it.
    security = pod["spec"]["securityContext"] | container["securityContext"]
    assert security["runAsNonRoot"] and security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not security["allowPrivilegeEscalation"] and security["capabilities"] == {"drop": ["ALL"]}
