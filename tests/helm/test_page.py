"""docs/KUBERNETES.md and the comments of values.yaml: commands that run, names that exist, restarts as they are."""

import json
import re
import shlex
from functools import cache
from typing import Any

import pytest
import yaml

from tests.helm.chart import ROOT, check, cluster, container, ray_service_of, served

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "KUBERNETES.md").read_text()
BLOCKS = re.findall(r"(?:^    .+\n)+", PAGE, re.MULTILINE)
LINES = [line for block in BLOCKS for line in re.sub(r"\\\n +", "", block).replace("    ", "").splitlines()]
ROWS = "\n".join(line for line in PAGE.splitlines() if line.startswith("| "))
IN_TABLES = re.findall(r"`((?:kubectl|helm) [^`]+)`", ROWS)
COMMANDS = [shlex.split(line) for line in (*LINES, *IN_TABLES)]


@cache
def installed() -> dict[str, Any]:
    """The RayService of the page's `helm install`."""
    (line,) = [words for words in COMMANDS if words[:2] == ["helm", "install"] and "helm/shoal" in words]
    return dict(ray_service_of(manifests(line)))


def manifests(line: list[str]) -> list[dict[str, Any]]:
    done = check.subprocess.run(
        [str(check.helm()), "template", *line[2:]], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


@pytest.mark.parametrize("words", [words for words in COMMANDS if "helm/shoal" in words], ids=lambda words: words[1])
def test_a_command_of_the_page_renders(words: list[str]) -> None:
    assert words[0] == "helm" and words[1] in ("template", "install", "upgrade")
    check.check_manifests(manifests(words))


def test_every_other_command_is_one_that_is_marked() -> None:
    known = {"kubectl", "docker", "curl", "make"}
    others = {tuple(words[:2]) for words in COMMANDS if words[0] not in known and "helm/shoal" not in words}
    assert others == {("helm", "repo"), ("helm", "install"), ("helm", "uninstall"), ("helm", "rollback")}
    assert [words for words in COMMANDS if words[0] == "make"] == [["make", "helm-test"]]
    assert "\nhelm-test:" in (ROOT / "Makefile").read_text()


def test_names_in_commands_are_those_of_what_is_installed() -> None:
    service = installed()
    names = {service["metadata"]["name"]}
    namespaces, secrets, releases = set(), set(), set()
    for words in COMMANDS:
        line = " ".join(words)
        namespaces |= set(re.findall(r"--namespace (\S+)|create namespace (\S+)", line))
        names |= set(re.findall(r"rayservice (\S+)|service/(\S+)", line)) - {("", "")}
        if "secret" in words:
            made = words.index("secret")
            secrets |= set(words[made + 2 if "create" in words else made + 1 :])
        releases |= set(re.findall(r"helm (?:install|upgrade|uninstall|rollback|template) (\S+)", line))
    spaces = {name for pair in namespaces for name in pair if name}
    assert spaces == {service["metadata"]["namespace"], "kuberay"}
    assert {name for each in names for name in ([each] if isinstance(each, str) else each) if name} == {"shoal"}
    assert releases == {"shoal", "kuberay-operator"}
    text = json.dumps(service)
    for name in {"shoal-keys", "hub", "registry"}:
        assert name in secrets and f'"{name}"' in text
    assert "api-keys=keys.txt" in " ".join(secrets) and '"key": "api-keys"' in text
    labels = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == "shoal" and labels["app.kubernetes.io/component"] == "ray-head"


def test_the_image_is_built_as_its_file_says_and_pulled_by_its_name() -> None:
    built = [words for words in COMMANDS if words[:2] == ["docker", "build"]]
    told = [
        line[2:].strip() for line in (ROOT / "helm" / "Dockerfile").read_text().splitlines() if "docker build" in line
    ]
    assert [" ".join(words).replace("registry.example.org/team/", "") for words in built] == told
    image = container(installed()["spec"]["rayClusterConfig"]["headGroupSpec"])["image"]
    assert image in built[1] and ["docker", "push", image] in COMMANDS


def test_kuberay_is_as_new_as_the_chart_needs() -> None:
    needed = yaml.safe_load((check.CHART / "Chart.yaml").read_text())["annotations"]["shoal/kuberay"].removeprefix(">=")
    (line,) = [words for words in COMMANDS if "kuberay/kuberay-operator" in words]
    assert line[line.index("--version") + 1] == needed and f"{needed} or later" in PAGE


def test_the_model_of_the_request_is_served() -> None:
    (request,) = [words for words in COMMANDS if words[0] == "curl"]
    body = json.loads(request[request.index("-d") + 1])
    (application,) = yaml.safe_load(installed()["spec"]["serveConfigV2"])["applications"]
    assert body["model"] == application["args"]["model"]
    assert f"{installed()['spec']['serveService']['spec']['ports'][0]['port']}:" in " ".join(LINES)


# ---------------------------------------------------------------- what restarts what

# A change of each value of BASE. What cannot be changed (of a claim) is left out.
BASE: dict[str, Any] = {"device": "cuda", "autoscaling": {"enabled": True}, "workers": {"count": 9}}
CHANGES: dict[str, Any] = {
    "model": "org/a",
    "models": [{"name": "a", "model": "org/a"}],
    "replicas": 3,
    "routers": 2,
    "device": "cpu",
    "tp": 2,
    "pp": 2,
    "config": {"context_length": 4096},
    "config.drain_s": {"drain_s": 60},
    "config.cpus_per_rank": {"cpus_per_rank": 3},
    "config.cpus_per_router": {"cpus_per_router": 3},
    "config.gpus_per_rank": {"gpus_per_rank": 0.5},
    "image": {"tag": "b"},
    "image.folders": {"folders": ["/models"]},
    "imagePullSecrets": [{"name": "a"}],
    "apiKey": {"existingSecret": "keys"},
    "hubToken": {"existingSecret": "hub"},
    "cache": {"existingClaim": "models"},
    "head": {"resources": {"requests": {"cpu": 2}}},
    "workers": {"resources": {"requests": {"cpu": 9}}, "count": 9},
    "workers.count": {"count": 10},
    "autoscaling": {"enabled": True, "idleTimeoutSeconds": 9},
    "autoscaling.minWorkers": {"enabled": True, "minWorkers": 1},
    "autoscaling.maxWorkers": {"enabled": True, "maxWorkers": 8},  # in place of workers.count
    "service": {"port": 80, "annotations": {"a": "b"}, "type": "LoadBalancer"},
    "networkPolicy": {"enabled": False},
    "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True, "labels": {"a": "b"}},
    "podAnnotations": {"a": "b"},
    "env": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "a", "emptyDir": {}}],
    "extraVolumeMounts": None,  # not without a volume
}
# What another value needs, or does not bear, to do anything.
WITH: dict[str, dict[str, Any]] = {
    "autoscaling.maxWorkers": {"workers": {}},
    "extraVolumes": {"extraVolumeMounts": [{"name": "a", "mountPath": "/a"}]},
}


def restarted(values: dict[str, Any]) -> str:
    """What becomes of a server with BASE when its values become these: as KubeRay and Serve compare what they get."""

    def pods(values: dict[str, Any]) -> Any:
        spec = json.loads(json.dumps(cluster(values)))
        for group in spec["workerGroupSpecs"]:
            for number in ("replicas", "minReplicas", "maxReplicas"):
                del group[number]
        return spec

    def code(values: dict[str, Any]) -> Any:
        (application,) = served(values)["applications"]
        for deployment in application["deployments"]:
            del deployment["num_replicas"]
        return application

    if pods(BASE) != pods(values):
        return "pods"
    return "replicas" if code(BASE) != code(values) else "nothing"


@cache
def restarts() -> dict[str, str]:
    found = {}
    for key, change in CHANGES.items():
        if change is not None:
            also = WITH.get(key, {})
            found[key] = restarted({**BASE, **also, key.split(".")[0]: change})
    return found | {"extraVolumeMounts": found["extraVolumes"]}


def test_every_value_is_tried() -> None:
    schema = json.loads(check.SCHEMA.read_text())
    assert set(schema["properties"]) - {"global"} == {key.split(".")[0] for key in CHANGES}


def test_the_page_says_what_restarts_what() -> None:
    table = PAGE[PAGE.index("| a change of | restarts |") :].split("\n\n")[0]
    said = {}
    for row in table.splitlines()[2:]:
        keys, what = row.split(" | ")
        for key in re.findall(r"`([\w.]+)`", keys):
            said.setdefault(key, what.split()[0].strip(":"))
    # A Secret's content is none of the chart's values.
    said["apiKey"] = "pods"
    assert said == restarts()


def test_the_comments_of_the_values_say_what_restarts_what() -> None:
    said: dict[str, str] = {}
    section, pending = "", ""
    for line in (check.CHART / "values.yaml").read_text().splitlines():
        marked = re.findall(r"\[(nothing|replicas|pods)\]", line)
        if line.startswith("#"):
            pending = marked[0] if marked else pending
        elif match := re.match(r"( *)(\w+):", line):
            key = f"{section}.{match[2]}" if match[1] else match[2]
            section = section if match[1] else match[2]
            if marked or (pending and not match[1]):
                said[key] = marked[0] if marked else pending
        elif not line:
            pending = ""
    assert said["apiKey"] and said["config"] == "replicas"
    for key, what in restarts().items():
        if key in said or "." not in key:
            assert said[key] == what, key
