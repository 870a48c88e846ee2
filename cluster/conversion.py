"""What a GGUF file was converted to, in the cache.

A folder there has a manifest of what was written and what it was made of. It appears by a rename, under a lock: it is
whole or not there, however many processes make it at once or die halfway.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.convert import convert
from cluster.folders import cache_folder

Progress = Callable[[str], None]

_MANIFEST = "manifest.json"
_FORMAT = 1  # raised when the conversion changes: older results are then made anew


class ModelError(Exception):
    """The model is not to be had; the message says why and what is possible."""


@dataclass(frozen=True)
class Conversion:
    """The folder of the cache that is, or will be, made of one GGUF file.

    `source` identifies the file; `fetch` gets it, into the empty folder that it is given or from elsewhere; fetching
    and converting need at most `disk_bytes`, if that is known before.
    """

    name: str
    source: dict[str, str | int]
    fetch: Callable[[Path], Path]
    disk_bytes: int = 0

    @property
    def folder(self) -> Path:
        return cache_folder() / "models" / self.name

    def make(self, progress: Progress) -> Path:
        """Fetch and convert under the lock, unless another process has just done so. Returns `folder`. Raises
        ModelError."""
        folder = self.folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder.parent / f".{self.name}.lock", f"waiting for another process: {self.name}", progress):
                if self.damage(thorough=True) is None:
                    return folder
                work = folder.parent / f".{self.name}.partial"
                shutil.rmtree(work, ignore_errors=True)  # of a process that died: the lock is ours
                try:
                    self._fill(work, progress)
                    _swap(work / "model", folder)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
        except OSError as error:
            raise ModelError(
                f"{self.name} cannot be kept in {folder.parent}: {error}. Set SHOAL_CACHE to a folder that can be "
                "written, with enough room"
            ) from error
        progress(f"{self.name} is in {folder}")
        return folder

    def damage(self, thorough: bool = False) -> str | None:
        """What is wrong with the folder, None if nothing. Sizes are compared always, checksums if `thorough`."""
        folder = self.folder
        if not folder.is_dir():
            return "there is no such folder"
        try:
            manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
            files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
            if manifest["format"] != _FORMAT or manifest["source"] != self.source:
                return "it was made of another file, or by another version of Shoal"
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"its {_MANIFEST} cannot be read"
        for name, (size_bytes, sha256) in files.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != size_bytes:
                return f"{name} is missing or has another size"
            if thorough and _sha256(file) != sha256:
                return f"{name} has another checksum"
        return None

    def _fill(self, work: Path, progress: Progress) -> None:
        """Put the converted model, with its manifest, into `work/model`."""
        work.mkdir(parents=True)
        self._check_disk(work, self.disk_bytes)
        gguf = self.fetch(work)
        model = work / "model"
        model.mkdir()
        try:
            convert(gguf, model, progress)
        except Exception as error:  # transformers raises of all kinds, OSError without a number among them
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ModelError(f"{gguf} could not be converted: {type(error).__name__}: {error}") from error
        for file in model.iterdir():
            file.chmod(0o666 & ~_umask())  # safetensors writes files that nobody else may read
        files = sorted(model.iterdir())
        manifest = {
            "name": self.name,
            "format": _FORMAT,
            "source": self.source,
            "files": {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files},
        }
        (model / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")

    def _check_disk(self, work: Path, needed: int) -> None:
        free = shutil.disk_usage(work).free
        if free < needed:
            raise ModelError(
                f"{self.name} needs {needed / 1e6:.0f} MB of disk and {work.parent} has {free / 1e6:.0f} MB: "
                "free some, or set SHOAL_CACHE to a folder with more"
            )


@contextmanager
def _locked(path: Path, waiting: str, progress: Progress) -> Iterator[None]:
    """Hold the file's lock; the kernel frees it when this process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _swap(made: Path, folder: Path) -> None:
    """Put `made` where `folder` is. What was there goes away after, not before: it is missing for no longer than
    between two renames."""
    old = made.parent / "old"
    if folder.exists():
        folder.rename(old)
    made.rename(folder)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _umask() -> int:
    """Reading it means setting it; this runs in a command, before any thread that makes files."""
    umask = os.umask(0o022)
    os.umask(umask)
    return umask
