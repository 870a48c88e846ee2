"""What the chart makes around the RayService: ways in, a budget for workers, and the pod of `helm test`."""

from typing import Any

from tests.helm.chart import cluster, render

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


def test_a_route_leads_to_the_service_and_cuts_no_stream() -> None:
    gateways = [{"name": "public", "namespace": "gateways"}]
    route = one("HTTPRoute", {"httpRoute": {"enabled": True, "parentRefs": gateways, "hostnames": ["a.example"]}})
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "shoal-try", "port": 8000}] and rule["timeouts"] == {"request": "0s"}
    assert route["spec"]["parentRefs"] == gateways and route["spec"]["hostnames"] == ["a.example"]


def test_a_budget_is_for_the_workers_alone() -> None:
    values = {"disruptionBudget": {"enabled": True, "maxUnavailable": 2}}
    spec = one("PodDisruptionBudget", values)["spec"]
    wanted = spec["selector"]["matchLabels"].items()
    made = cluster(values)
    (worker,) = made["workerGroupSpecs"]
    assert wanted <= worker["template"]["metadata"]["labels"].items()
    assert not wanted <= made["headGroupSpec"]["template"]["metadata"]["labels"].items()
    assert spec["maxUnavailable"] == 2


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
