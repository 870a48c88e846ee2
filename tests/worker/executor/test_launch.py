"""Processes for ranks, where there are fewer GPUs than ranks."""

import io
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from worker.config import WorkerConfig
from worker.executor import launch

HOST = "NCCL_HOSTID"
CONFIG = WorkerConfig.model_validate({"tp": 2, "pp": 2})


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """On a machine with 3 GPUs: the machine that NCCL takes each rank to be on, the leading one's last. Nothing is
    started."""
    found: list[str] = []

    def start(command: list[str], env: dict[str, str], **kwargs: object) -> SimpleNamespace:
        found.append(env[HOST])
        return SimpleNamespace(stdin=io.BytesIO())

    monkeypatch.setattr(launch, "resolve_device", lambda config: (torch.device("cuda"), torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
    monkeypatch.setattr(launch, "MultiRankExecutor", lambda *args, **kwargs: found.append(os.environ[HOST]))
    monkeypatch.setenv(HOST, "as it was")
    return found


def test_more_ranks_than_gpus_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"tp=2, pp=2, .*\b3 GPUs"):
        launch.launch(Path("none"), CONFIG)
    assert not names


def test_ranks_that_share_gpus_are_on_machines_of_their_own_to_nccl(names: list[str]) -> None:
    launch.launch(Path("none"), CONFIG, share_gpus=True)
    assert len(set(names)) == 4 and "as it was" not in names


def test_ranks_with_gpus_of_their_own_are_on_one_machine(names: list[str]) -> None:
    launch.launch(Path("none"), WorkerConfig.model_validate({"tp": 3}), share_gpus=True)
    assert names == ["as it was"] * 3
