"""The chart for tests: `helm/check.py` as a module, what it renders, and the parts of that."""

import importlib.util
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from cluster.deployed import APP

ROOT = Path(__file__).parents[2]
PATH = ROOT / "helm" / "check.py"


def _load() -> Any:
    """The module, from its file: `helm/` is the chart's room and no package that gets installed."""
    spec = importlib.util.spec_from_file_location("helm_check", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = _load()


def render(values: dict[str, Any], release: str = "try") -> Any:
    """The manifests, rendered once for all tests of the same values."""
    return json.loads(_rendered(json.dumps(values), release))


@cache
def _rendered(values: str, release: str) -> str:
    return json.dumps(check.render(json.loads(values), release))


def ray_service(values: dict[str, Any], release: str = "try") -> dict[str, Any]:
    return ray_service_of(render(values, release))


def ray_service_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    (manifest,) = [manifest for manifest in manifests if manifest["kind"] == "RayService"]
    return manifest


def cluster(values: dict[str, Any]) -> Any:
    return ray_service(values)["spec"]["rayClusterConfig"]


def workers(values: dict[str, Any]) -> dict[str, Any]:
    (group,) = cluster(values)["workerGroupSpecs"]
    return dict(group)


def container(group: dict[str, Any]) -> Any:
    (only,) = group["template"]["spec"]["containers"]
    return only


def variables(group: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value") for variable in container(group)["env"]}


def served(values: dict[str, Any]) -> Any:
    return yaml.safe_load(ray_service(values)["spec"]["serveConfigV2"])


def arguments(values: dict[str, Any]) -> Any:
    (application,) = served(values)["applications"]
    assert application["name"] == APP
    return application["args"]


def with_notes(folder: Path) -> Path:
    """A copy of the chart that renders its notes as a manifest: `helm template` leaves them out."""
    chart = folder / "shoal"
    shutil.copytree(check.CHART, chart)
    shutil.move(chart / "templates" / "NOTES.txt", chart / "NOTES.txt")
    (chart / "templates" / "notes.yaml").write_text(
        'kind: Notes\ntext: {{ tpl (.Files.Get "NOTES.txt") . | toJson }}\n'
    )
    return chart
