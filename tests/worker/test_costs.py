"""What steps cost is learned, kept, and found again; what cannot be read is ignored, and that is said."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from pipeline.shape import BatchShape
from worker.config import WorkerConfig
from worker.costs import Costs

SHAPE = BatchShape([(100, 1)] * 8)


@pytest.fixture
def of(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[..., Costs]:
    def make(**changes: object) -> Costs:
        config = WorkerConfig.model_validate({"pp": 2, **changes})
        return Costs.of(tiny_model("llama"), config, torch.device("cpu"), tmp_path / "costs")

    return make


def learned(costs: Costs) -> Costs:
    for _ in range(20):
        costs.observe(SHAPE, [0.5, 0.75])
    costs.save()
    return costs


def test_what_was_learned_is_found_again(of: Callable[..., Costs], tmp_path: Path) -> None:
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
        ("[]", "no saved cost model"),
        ("{}", "no saved cost model"),
        ('{"version": 0}', "another version"),
        (None, "measured on"),
    ],
)
def test_what_cannot_be_used_is_ignored(
    of: Callable[..., Costs], tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None, why: str
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
    of: Callable[..., Costs], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "costs").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        learned(learned(of()))
    assert caplog.text.count("is not kept") == 1


def test_models_whose_names_begin_alike_are_kept_apart(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    config, kept = WorkerConfig(pp=2), tmp_path / "costs"
    for name in ("Llama-3.1-8B", "Llama-3.2-3B"):
        (tmp_path / name).symlink_to(tiny_model("llama"))
        learned(Costs.of(tmp_path / name, config, torch.device("cpu"), kept))
    assert len(list(kept.iterdir())) == 4
    again = Costs.of(tmp_path / "Llama-3.1-8B", config, torch.device("cpu"), kept)
    assert [model.num_observed for model in again.models] == [20, 20]


def test_which_schedule() -> None:
    assert WorkerConfig().schedule_name == "fixed_chunk"
    assert WorkerConfig(pp=2).schedule_name == WorkerConfig(tbt_slo=0.1).schedule_name == "uniform"
    assert WorkerConfig(pp=2, schedule="hybrid").schedule_name == "hybrid"
    with pytest.raises(ValidationError, match=r"tbt_slo=0\.1 needs schedule uniform: throttle keeps to no time"):
        WorkerConfig(schedule="throttle", tbt_slo=0.1)
