"""The corpus: schemas that packages publish, fetched with pip and npm.

A schema is taken if it stands by itself: all its references lead into itself, as they must in a request. Components of
OpenAPI descriptions are taken with the components that they refer to.
"""

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

SOURCES = Path(__file__).with_name("sources.toml")
MAX_BYTES = 100_000  # of a schema's text; longer ones are hardly sent with a request
MAX_COMPONENTS = 60  # of one description
_COMPONENTS = "#/components/schemas/"


@dataclass(frozen=True)
class PublishedSchema:
    """A published schema. `name`: package and file, and the component if there is one."""

    name: str
    schema: Any

    @property
    def text(self) -> str:
        """The schema as a request brings it."""
        return json.dumps(self.schema)


def corpus(folder: Path) -> list[PublishedSchema]:
    """All schemas, from `corpus.json` in the folder; gathered first if that is not there. Raises OSError, and
    CalledProcessError if pip or npm fails."""
    path = folder / "corpus.json"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({each.name: each.schema for each in gathered(folder)}))
    return [PublishedSchema(name, schema) for name, schema in json.loads(path.read_text()).items()]


def gathered(folder: Path) -> Iterator[PublishedSchema]:
    """The schemas of all sources, each text once. Archives are kept in the folder."""
    seen: set[str] = set()
    for tool, sources in tomllib.loads(SOURCES.read_text()).items():
        for source, most in sources.items():
            with _archive(folder, tool, source) as archive:
                found = {each.name: each for each in _schemas(archive, source)}
            for name in sorted(found, key=_shuffled):
                if most and found[name].text not in seen and _is_taken(found[name].schema):
                    seen.add(found[name].text)
                    most -= 1
                    yield found[name]


def _shuffled(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


class _archive:
    """Files of a package, by name. A context manager."""

    def __init__(self, folder: Path, tool: str, source: str) -> None:
        kept = folder / "archives" / source.replace("/", "+")
        kept.mkdir(parents=True, exist_ok=True)
        if not any(kept.iterdir()):
            with tempfile.TemporaryDirectory(dir=folder) as into:
                if tool == "pip":
                    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", into, source]
                else:
                    command = ["npm", "pack", "--silent", "--pack-destination", into, source]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                (file,) = Path(into).iterdir()
                file.rename(kept / file.name)
        (self._path,) = kept.iterdir()

    def __enter__(self) -> "_archive":
        is_zip = self._path.suffix in (".whl", ".zip")
        self._file: Any = zipfile.ZipFile(self._path) if is_zip else tarfile.open(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Names and contents of the files in JSON, in the order of their names."""
        if isinstance(self._file, zipfile.ZipFile):
            for name in sorted(self._file.namelist()):
                if name.endswith(".json"):
                    yield name, self._file.read(name)
        else:
            for member in sorted(self._file.getmembers(), key=lambda member: member.name):
                if member.isfile() and member.name.endswith(".json"):
                    yield member.name, self._file.extractfile(member).read()


def _schemas(archive: _archive, source: str) -> Iterator[PublishedSchema]:
    for name, data in archive.files():
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            continue
        if not isinstance(value, dict):
            continue
        components = value.get("components")
        if isinstance(components, dict) and isinstance(components.get("schemas"), dict):
            for component in sorted(components["schemas"], key=_shuffled)[:MAX_COMPONENTS]:
                schema = _closed(components["schemas"][component], components["schemas"])
                yield PublishedSchema(f"{source}:{name}:{component}", schema)
        elif _is_schema(value):
            yield PublishedSchema(f"{source}:{name}", value)


def _is_schema(value: dict[str, Any]) -> bool:
    if "json-schema.org" in str(value.get("$schema")):
        return True
    inner = value.get("properties", value.get("items"))
    return value.get("type") in ("object", "array") and isinstance(inner, dict)


def _closed(schema: Any, components: dict[str, Any]) -> Any:
    """A component with all that it refers to in its `$defs`."""
    found: dict[str, Any] = {}
    todo = [schema]
    while todo:
        for ref in _refs(todo.pop()):
            name = ref.removeprefix(_COMPONENTS)
            if name != ref and name in components and name not in found:
                found[name] = components[name]
                todo.append(components[name])
    text = json.dumps({**schema, "$defs": found} if found else schema)
    return json.loads(text.replace(f'"{_COMPONENTS}', '"#/$defs/'))


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "$ref" and isinstance(each, str):
                yield each
            else:
                yield from _refs(each)
    elif isinstance(value, list):
        for each in value:
            yield from _refs(each)


def _is_taken(schema: Any) -> bool:
    """Whether a schema is valid by its own draft, of moderate size, and refers to nothing outside of it."""
    text = json.dumps(schema)
    if len(text) > MAX_BYTES:
        return False
    own = schema.get("$id", schema.get("id", ""))
    base = own.split("#")[0] if isinstance(own, str) else ""
    for ref in _refs(schema):
        if not ref.startswith("#") and not (base and ref.split("#")[0] == base):
            return False
    try:
        validator_for(schema).check_schema(schema)
    except (SchemaError, RecursionError):
        return False
    return True
