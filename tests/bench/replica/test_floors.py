"""The least time of offline workloads: as for the shapes whose limits were worked out by hand, and less with windows
and with few experts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.replica import dummy_models, floors
from bench.replica.offline_workloads import JOBS, bs1, mini
from bench.targets import TARGETS
from pipeline.roofline import DEVICES
from worker.executor.memory_budget import row_bytes

WITH_FLOORS = ("llama-8b", "gpt-oss-20b", "gemma3-12b", "qwen3-30b-a3b", "qwen3-next-cut")


@pytest.mark.bench
@pytest.mark.parametrize("name", WITH_FLOORS)
def test_targets_have_these_floors(name: str) -> None:
    floor, label = floors.of_shape(name), dummy_models.SHAPES[name].label
    close = 0.02 if name == "llama-8b" else 0.005
    decode, output = (TARGETS[f"gpu.{label}.{part}_tok_s"].floor for part in ("bs1.decode", "mini.output"))
    assert floor.decode_tok_s(bs1()) == pytest.approx(decode, rel=close)
    assert floor.output_tok_s(mini()) == pytest.approx(output, rel=close)


def test_only_what_a_step_needs_is_read() -> None:
    tiny = floors.of_shape("tiny")
    with_windows = floors.Floor(replace(tiny.config, windows=(16,) * 2), DEVICES["h200"])
    job = JOBS["bs1"](0.02)
    assert with_windows.decode_tok_s(job) > tiny.decode_tok_s(job)
    sparse = floors.of_shape("gpt-oss-20b")
    assert sparse._experts_used(1) == 4 / 32 and 0.98 < sparse._experts_used(32) < 1
    in_mxfp4 = floors.of_shape("gpt-oss-20b-mxfp4")
    saved = 4 * 3 * 2880**2 * 24 * (2 - 4.25 / 8) / in_mxfp4.device.bytes_per_s
    assert sparse._step_s(np.ones(1)) - in_mxfp4._step_s(np.ones(1)) == pytest.approx(saved, rel=1e-3)


def test_recurrent_states_are_read_and_written() -> None:
    """By each of further sequences, when all experts are read anyway."""
    floor = floors.of_shape("qwen3-next-cut")
    row = row_bytes(floor.config, torch.bfloat16)
    more_s = floor._step_s(np.ones(1024)) - floor._step_s(np.ones(768))
    assert more_s >= 256 * 2 * row / floor.device.bytes_per_s > 0.003


def test_latents_count_once() -> None:
    floor = floors.of_shape("deepseek-v2-lite")
    assert {layer.read_kv for layer in floor._specs} == {576} and floor.input_tok_s(JOBS["prefill"](0.02)) > 100_000


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert floors.main(["--model", "tiny", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("mini ")
