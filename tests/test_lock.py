"""The locks pin all that Shoal and its extras bring, with checksums, for PyTorch with CUDA and without."""

import importlib.metadata
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCKS = {"": "requirements.lock", "dev": "requirements.dev.lock", "gpu": "requirements.gpu.lock"}
# What the index says of packages that are not installed where there is no GPU.
TORCH, TRITON = "2.13.0", "3.7.1"  # the build with CUDA wants exactly this one
FLASHINFER = "0.7.2.post1"
FLASHINFER_WANTS = """apache-tvm-ffi<0.2,>=0.1.11 click cuda-python>=12.0 cuda-tile>=1.4.0 einops nccl-extensions>=0.1.0
    nccl4py>=0.4.1 ninja numpy nvidia-cudnn-frontend>=1.31.0 nvidia-cutlass-dsl>=4.6.2a0 nvidia-ml-py packaging>=24.2
    requests tabulate tqdm cuda-bindings cuda-core cuda-pathfinder nvidia-cutlass-dsl-libs-base
    nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-cu13""".split()


@pytest.fixture(scope="module")
def lock() -> Any:
    """`.ci/lock.py`."""
    spec = importlib.util.spec_from_file_location("ci_lock", ROOT / ".ci" / "lock.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(lock: Any, *extras: str) -> dict[str, str]:
    """Versions by name."""
    found = [Requirement(pin) for extra in extras for pin in lock.pins((ROOT / LOCKS[extra]).read_text())]
    names = [normal(each.name) for each in found]
    assert len(set(names)) == len(names)  # no lock repeats what another has
    return {normal(each.name): str(each.specifier).removeprefix("==") for each in found}


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_every_requirement_is_pinned_at_a_version_that_it_allows(extra: str, lock: Any) -> None:
    locked = pinned(lock, "", "gpu" if extra == "gpu" else "dev")
    for line in EXTRAS[extra] if extra else PROJECT["dependencies"]:
        wanted = Requirement(line)
        if wanted.name != "torch":  # it comes before, alone
            assert wanted.specifier.contains(locked.get(normal(wanted.name), "0"), prereleases=True), line


def test_all_that_is_installed_here_comes_from_the_locks(lock: Any) -> None:
    """Nothing is installed that they do not name: `make env` takes no dependencies of theirs."""
    locked = pinned(lock, "", "dev")
    queue, seen = [Requirement("shoal[dev]")], set()
    while queue:
        wanted = queue.pop()
        name = normal(wanted.name)
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            marker = needed.marker
            applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras))
            key = normal(needed.name), *sorted(needed.extras)
            if applies and key not in seen:
                seen.add(key)
                queue.append(needed)
    assert {name for name, *_ in seen} - {"torch"} <= locked.keys()


def test_every_file_has_a_checksum(lock: Any) -> None:
    for name in LOCKS.values():
        found = lock.pins((ROOT / name).read_text())
        assert found and all(re.fullmatch(r"(sha256:[0-9a-f]{64} ?)+", hashes) for hashes in found.values())
        assert lock.text(found) == (ROOT / name).read_text()


def test_what_the_extra_gpu_needs_is_pinned_too(lock: Any) -> None:
    locked = pinned(lock, "", "gpu")
    assert f"flashinfer-python=={FLASHINFER}" in EXTRAS["gpu"]
    for wanted in map(Requirement, FLASHINFER_WANTS):
        assert wanted.specifier.contains(locked.get(wanted.name, "0"), prereleases=True), wanted


def test_it_fits_pytorch_for_cuda(lock: Any) -> None:
    """Where that is installed, no other Triton works with it."""
    assert f"torch=={TORCH}\n" in (ROOT / "Makefile").read_text()
    assert pinned(lock, "")["triton"] == TRITON


def test_machines_without_a_gpu_get_nothing_of_it() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert f"LOCKS  := {LOCKS['']} {LOCKS['dev']}\n" in makefile


def test_make_lock_keeps_what_is_pinned_and_writes_each_pin_once(
    lock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / lock.BASE).write_text(lock.text({"alpha==1": "sha256:aa"}))
    for name in lock.EXTRAS.values():
        (tmp_path / name).write_text("")
    asked = []

    def run(command: list[Any], **_: Any) -> None:
        if "--output-file" not in command:  # pip's
            return
        fixed, made = (Path(command[command.index(name) + 1]) for name in ("--constraint", "--output-file"))
        asked.append((lock.pins(made.read_text()), fixed.read_text()))
        extra = command[command.index("--extra") + 1] if "--extra" in command else ""
        more = {f"{extra}==2 ; sys_platform == 'linux'": "sha256:cc"} if extra else {}
        made.write_text(lock.text({"alpha==1": "sha256:aa sha256:bb"} | more))

    monkeypatch.setattr(lock, "ROOT", tmp_path)
    monkeypatch.setattr(lock.subprocess, "run", run)
    lock.main()
    assert asked == [({"alpha==1": "sha256:aa"}, fixed) for fixed in ("", "alpha==1", "alpha==1")]
    assert lock.pins((tmp_path / lock.BASE).read_text()) == {"alpha==1": "sha256:aa sha256:bb"}
    assert lock.pins((tmp_path / "requirements.gpu.lock").read_text()) == {
        "gpu==2 ; sys_platform == 'linux'": "sha256:cc"
    }
