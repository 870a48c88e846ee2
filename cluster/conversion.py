"""Converted GGUF files in the cache.

A converted model is a folder with a manifest of its files and of what they were made from. The folder appears by a
rename, under a lock: it is complete or absent, however many processes make it at once or die halfway.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.convert import Kept, convert
from worker.checkpoint.gguf_layout import FILE
from worker.folders import cache_folder

Progress = Callable[[str], None]

_MANIFEST = "manifest.json"
_FORMAT = 3  # raised when the conversion changes, so that older results are made again


class ModelError(Exception):
    """The model is not available. The message says why, and what is possible."""


@dataclass(frozen=True)
class Conversion:
    """The folder of the cache that is, or will be, made from one GGUF file.

    | field | meaning |
    | --- | --- |
    | `source` | identifies the file |
    | `fetch` | returns the path of the file, which it may fetch into the empty folder that it is given |
    | `disk_bytes` | most bytes of disk that fetching and converting need; 0 if unknown |
    | `kept` | what the folder has of the weights, besides configuration and tokenizer |
    """

    name: str
    source: dict[str, str | int]
    fetch: Callable[[Path], Path]
    disk_bytes: int = 0
    kept: Kept = "float32"

    def for_router(self) -> "Conversion":
        """The same file's configuration and tokenizer, in a folder of their own."""
        return replace(self, name=f"{self.name}.tokenizer", disk_bytes=0, kept="nothing")

    def in_blocks(self, disk_bytes: int = 0) -> "Conversion":
        """The same file with its quantized matrices as they are, in a folder of their own."""
        return replace(self, name=f"{self.name}.blocks", disk_bytes=disk_bytes, kept="blocks")

    @property
    def folder(self) -> Path:
        return cache_folder() / "models" / self.name

    def make(self, progress: Progress) -> Path:
        """Fetches and converts under the lock, unless another process has just done so. Returns `folder`. Raises
        ModelError."""
        folder = self.folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder.parent / f".{self.name}.lock", f"waiting for another process: {self.name}", progress):
                if self.damage(thorough=True) is None:
                    return folder
                work = folder.parent / f".{self.name}.partial"
                shutil.rmtree(work, ignore_errors=True)  # left by a process that died: this one has the lock
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
        """Why the folder cannot be used; None if it can. Compares sizes, and with `thorough` checksums too."""
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
        """Puts the converted model, with its manifest, into `work/model`."""
        work.mkdir(parents=True)
        self._check_disk(work, self.disk_bytes)
        gguf = self.fetch(work)
        model = work / "model"
        model.mkdir()
        try:
            convert(gguf, model, progress, self.kept)
            if self.kept == "blocks":
                _keep(gguf, model / FILE, work)
        except Exception as error:  # transformers raises many types, OSError without errno among them
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ModelError(f"{gguf} could not be converted: {type(error).__name__}: {error}") from error
        files = sorted(file for file in model.iterdir() if not file.is_symlink())
        for file in files:
            file.chmod(0o666 & ~_umask())  # safetensors makes files that only their owner may read
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
    """Holds the file's lock. The kernel frees it when this process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _keep(gguf: Path, place: Path, work: Path) -> None:
    """Puts a file that was fetched into `work` at a place, and a link there to any other file."""
    if gguf.is_relative_to(work):
        gguf.rename(place)
    else:
        place.symlink_to(gguf)


def _swap(made: Path, folder: Path) -> None:
    """Puts `made` where `folder` is. The old folder is deleted afterwards, so the model is missing only between two
    renames."""
    old = made.parent / "old"
    if folder.exists():
        folder.rename(old)
    made.rename(folder)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _umask() -> int:
    """The umask of this process. Reading it means setting it, which is safe here: this runs in a command, before any
    thread that makes files."""
    umask = os.umask(0o022)
    os.umask(umask)
    return umask
