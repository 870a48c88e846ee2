"""requirements.lock pins all that Shoal and its extras bring, for the builds of PyTorch with CUDA and without."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What the index says of packages that are not installed where there is no GPU.
TORCH, TRITON = "2.13.0", "3.7.1"  # the build with CUDA wants exactly this one
FLASHINFER = "0.7.2.post1"
FLASHINFER_WANTS = """apache-tvm-ffi<0.2,>=0.1.11 click cuda-python>=12.0 cuda-tile>=1.4.0 einops nccl-extensions>=0.1.0
    nccl4py>=0.4.1 ninja numpy nvidia-cudnn-frontend>=1.31.0 nvidia-cutlass-dsl>=4.6.2a0 nvidia-ml-py packaging>=24.2
    requests tabulate tqdm cuda-bindings cuda-core cuda-pathfinder nvidia-cutlass-dsl-libs-base
    nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-cu13""".split()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().split()
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_every_requirement_is_pinned_at_a_version_that_it_allows(extra: str) -> None:
    locked = pins()
    for line in EXTRAS[extra] if extra else PROJECT["dependencies"]:
        wanted = Requirement(line)
        if wanted.name != "torch":  # it comes before, alone
            assert wanted.specifier.contains(locked.get(normal(wanted.name), "0"), prereleases=True), line


def test_what_the_extra_gpu_needs_is_pinned_too() -> None:
    locked = pins()
    assert f"flashinfer-python=={FLASHINFER}" in EXTRAS["gpu"]
    for wanted in map(Requirement, FLASHINFER_WANTS):
        assert wanted.specifier.contains(locked.get(wanted.name, "0"), prereleases=True), wanted


def test_it_fits_pytorch_for_cuda() -> None:
    """Where that is installed, pip finds no solution with another Triton."""
    assert f'"torch=={TORCH}"' in (ROOT / "Makefile").read_text()
    assert pins()["triton"] == TRITON


def test_without_a_gpu_nothing_of_it_is_installed() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert '--editable ".[dev]"' in makefile and "gpu]" not in makefile
    ours = {normal(Requirement(line).name) for line in [*PROJECT["dependencies"], *EXTRAS["dev"]]}
    assert not ours & {normal(Requirement(line).name) for line in EXTRAS["gpu"]}


def test_make_lock_pins_what_is_installed_and_what_the_extra_would_bring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("ci_lock", ROOT / ".ci" / "lock.py")
    assert spec is not None and spec.loader is not None
    lock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lock)
    constraints: list[str] = []

    def pip(command: str, *arguments: str) -> str:
        if command == "freeze":
            return "Beta==1\nalpha==2\n"
        assert "--dry-run" in arguments and list(arguments[-len(EXTRAS["gpu"]) :]) == EXTRAS["gpu"]
        constraints.extend(Path(arguments[arguments.index("--constraint") + 1]).read_text().split())
        return json.dumps({"install": [{"metadata": {"name": "beta-gpu", "version": "3"}}]})

    monkeypatch.setattr(lock, "_pip", pip)
    lock.main()
    assert capsys.readouterr().out == "alpha==2\nBeta==1\nbeta-gpu==3\n"
    assert constraints[:2] == ["Beta==1", "alpha==2"] and constraints[2].startswith("torch==2.13.0")
