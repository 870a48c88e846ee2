"""Which attention a rank takes, on machines that this one is not."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.attention.interface import AttentionShape, LatentHeads
from worker.config import WorkerConfig
from worker.executor import loading, model_runner
from worker.executor.attention_selector import AttentionChoice, choose_attention

PLAIN = AttentionShape(8, 2, 64, 0.125, (None,))
LATENT = AttentionShape(16, 1, 576, 0.07, (None,), latent=LatentHeads(512, 128, 64, 128))
GEMMA = AttentionShape(8, 2, 256, 0.125, (None, 128), softcap=30.0)
GPT_OSS = AttentionShape(8, 2, 64, 0.125, (128, None), has_sinks=True)
NARROW = AttentionShape(8, 2, 80, 0.125, (None,))
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def builds(*asked: object) -> None:
    """FlashInfer where all is well."""


def raising(error: Exception):
    def build(*asked: object) -> None:
        raise error

    return build


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "name"),
    [
        (GPU, torch.bfloat16, PLAIN, "flashinfer"),
        (GPU, torch.float32, PLAIN, "triton"),
        (GPU, torch.bfloat16, LATENT, "flashinfer"),
        (GPU, torch.float32, LATENT, "torch"),
        (CPU, torch.float32, LATENT, "numba"),
        (GPU, torch.bfloat16, GEMMA, "flashinfer"),
        (GPU, torch.bfloat16, GPT_OSS, "flashinfer"),
        (GPU, torch.bfloat16, NARROW, "triton"),
        (CPU, torch.float32, PLAIN, "numba"),
        (CPU, torch.float16, PLAIN, "torch"),
    ],
)
def test_nothing_is_missing_where_flashinfer_works_or_is_of_no_use(device, dtype, shape, name: str) -> None:
    assert choose_attention(device, dtype, shape, builds) == (name, "")


@pytest.mark.parametrize(
    ("error", "what", "remedy"),
    [
        (ModuleNotFoundError("No module named 'flashinfer'"), "is not installed", "requirements.gpu.lock"),
        (RuntimeError("Could not find nvcc\nand more"), "compiled here (Could not find nvcc)", "needs nvcc"),
        (FileNotFoundError(2, "No such file or directory", "ninja"), "'ninja'", "needs nvcc"),
    ],
)
def test_a_gpu_without_flashinfer_runs_tritons_and_says_what_to_do(error: Exception, what: str, remedy: str) -> None:
    choice = choose_attention(GPU, torch.bfloat16, PLAIN, raising(error))
    assert choice.name == "triton"
    assert what in choice.problem and remedy in choice.problem and "\n" not in choice.problem


def test_a_gpu_without_flashinfer_runs_pytorchs_for_latents() -> None:
    choice = choose_attention(GPU, torch.bfloat16, LATENT, raising(ImportError()))
    assert choice.name == "torch" and "on PyTorch's operators" in choice.problem


def test_without_a_gpu_nobody_misses_flashinfer() -> None:
    assert choose_attention(CPU, torch.bfloat16, PLAIN, raising(ImportError())).problem == ""
    assert choose_attention(GPU, torch.float32, PLAIN, raising(ImportError())).problem == ""


def test_a_replica_says_once_that_its_attention_could_be_faster(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "choose_attention", lambda *of: AttentionChoice("torch", "FlashInfer is missing"))
    config = WorkerConfig(device="cpu", dtype="float32", kv_tokens=64)
    with caplog.at_level(logging.WARNING):
        made = model_runner.ModelRunner.load(tiny_model("llama"), config)
    made.close()
    assert [record.message for record in caplog.records] == ["FlashInfer is missing"]
    assert made.attention_choice.problem == "FlashInfer is missing"
