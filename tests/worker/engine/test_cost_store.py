"""What steps cost is learned, kept, and found again; what cannot be read is ignored, and that is said."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from bench.replica import dummy_models
from kernels.recurrent.shape import StateShape
from pipeline.policy import Objective
from pipeline.shape import BatchShape
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore
from worker.executor import gpu_defaults
from worker.executor.gpu_defaults import on_gpu
from worker.models.config import decoder_config, read_config
from worker.models.gated_delta_net import DeltaNetConfig

SHAPE = BatchShape([(100, 1)] * 8)


@pytest.fixture
def of(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[..., CostStore]:
    def make(**changes: object) -> CostStore:
        config = WorkerConfig.model_validate({"pp": 2, **changes})
        return CostStore.load(tiny_model("llama"), config, torch.device("cpu"), tmp_path / "costs")

    return make


def learned(costs: CostStore) -> CostStore:
    for _ in range(20):
        costs.observe(SHAPE, [0.5, 0.75])
    costs.save()
    return costs


def test_what_was_learned_is_found_again(of: Callable[..., CostStore], tmp_path: Path) -> None:
    first = learned(of())
    assert [model.predict(SHAPE) for model in first.models] == pytest.approx([0.5, 0.75], rel=0.05)
    again = of()
    assert [model.predict(SHAPE) for model in again.models] == [model.predict(SHAPE) for model in first.models]
    assert [model.predict(SHAPE) for model in of(tp=2).models] != [model.predict(SHAPE) for model in first.models]
    files = sorted((tmp_path / "costs").iterdir())
    assert [file.name for file in files] == [f"{files[0].name[:-6]}{stage}.json" for stage in range(2)]
    assert files[0].name.endswith("_cpu_auto_tp1_pp2_stage0.json")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("[]", "not a saved cost model"),
        ("{}", "not a saved cost model"),
        ('{"version": 0}', "another version"),
        (None, "measured on"),
    ],
)
def test_what_cannot_be_used_is_ignored(
    of: Callable[..., CostStore], tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None, why: str
) -> None:
    guess = of().models[0].predict(SHAPE)
    learned(of())
    for file in (tmp_path / "costs").iterdir():
        saved = json.loads(file.read_text())
        saved["identity"]["sizes"] = [1, 2, 3, 4, 5]
        file.write_text(json.dumps(saved) if text is None else text)
    with caplog.at_level(logging.WARNING):
        assert of().models[0].predict(SHAPE) == guess
    assert [record.message for record in caplog.records if "is ignored" in record.message and why in record.message]


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(
    of: Callable[..., CostStore], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "costs").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        store = learned(learned(of()))
    assert caplog.text.count("is not kept") == 1
    (tmp_path / "costs").unlink()  # as a disk that is full no longer
    store.save()
    assert of().models[0].num_observed


def test_models_whose_names_begin_alike_are_kept_apart(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    config, kept = WorkerConfig(pp=2), tmp_path / "costs"
    for name in ("Llama-3.1-8B", "Llama-3.2-3B"):
        (tmp_path / name).symlink_to(tiny_model("llama"))
        learned(CostStore.load(tmp_path / name, config, torch.device("cpu"), kept))
    assert len(list(kept.iterdir())) == 4
    again = CostStore.load(tmp_path / "Llama-3.1-8B", config, torch.device("cpu"), kept)
    assert [model.num_observed for model in again.models] == [20, 20]


def test_which_objective() -> None:
    """A GPU has one of its own, which the configuration changes or takes away; only one schedule keeps to it."""
    on_gpu = CostStore(objective=Objective(0.05, 5))
    assert on_gpu.objective(WorkerConfig(schedule="uniform")) == Objective(0.05, 5)
    assert on_gpu.objective(WorkerConfig(schedule="uniform", tbt_slo=0.1)) == Objective(0.1)
    assert on_gpu.objective(WorkerConfig(schedule="uniform", tbt_slo=0)) is None
    assert on_gpu.objective(WorkerConfig(schedule="offline")) is None
    assert CostStore().objective(WorkerConfig(pp=2)) is None


def test_what_a_gpu_settles(tmp_path: Path) -> None:
    """As many sequences as the memory is for; whatever is said stays."""
    model = decoder_config(read_config(dummy_models.write("llama-8b", tmp_path / "llama-8b")))
    config = on_gpu(WorkerConfig(), model, 141 * 10**9)
    assert config.schedule == "uniform" and config.token_budget > WorkerConfig().token_budget
    assert config.max_running == gpu_defaults.MAX_RUNNING
    assert on_gpu(WorkerConfig(), model, 24 * 10**9).max_running == gpu_defaults.MIN_RUNNING
    split = on_gpu(WorkerConfig(tp=4), model, 24 * 10**9).max_running
    assert gpu_defaults.MIN_RUNNING < split < gpu_defaults.MAX_RUNNING, "the weights take a part of each GPU only"
    held = on_gpu(WorkerConfig(kv_tokens=100_000), model, 141 * 10**9).max_running
    assert held <= 100_000 / gpu_defaults.TOKENS_A_SEQUENCE < held + 16
    nets = DeltaNetConfig(StateShape(16, 32, 128, 128, 4), (True,) * model.num_layers, 1e-6, is_fused=True)
    with_states = on_gpu(WorkerConfig(), replace(model, recurrent=nets), 141 * 10**9).max_running
    state_bytes = model.num_layers * nets.states.row_bytes(torch.bfloat16)
    assert gpu_defaults.MIN_RUNNING < with_states <= 0.15 * 141e9 / state_bytes < with_states + 16
    experts = decoder_config(read_config(dummy_models.write("gpt-oss-20b-mxfp4", tmp_path / "gpt-oss")))
    ways: list[dict] = [{}, {"dtype": "float16"}, {"dequantize": True}]
    in_4_bits, *multiplied_out = [on_gpu(WorkerConfig(**way), experts, 48 * 10**9).max_running for way in ways]
    assert in_4_bits > multiplied_out[0] == multiplied_out[1]
    said = {"schedule": "offline", "max_running": 64, "token_budget": 512}
    config = on_gpu(WorkerConfig.model_validate(said), model, 141 * 10**9)
    assert config.model_dump(include=set(said)) == said
    assert on_gpu(config, model, 10**9) == config, "twice is as once"


def test_which_schedule() -> None:
    assert WorkerConfig().schedule_name == "fixed_chunk"
    assert WorkerConfig(pp=2).schedule_name == WorkerConfig(tbt_slo=0.1).schedule_name == "uniform"
    assert WorkerConfig(pp=2, schedule="fixed_chunk").schedule_name == "fixed_chunk"
    with pytest.raises(ValidationError, match=r"tbt_slo=0\.1 .*\buniform\b.*\boffline\b"):
        WorkerConfig(schedule="offline", tbt_slo=0.1)
