"""The check of exactness passes where all is right, and would notice where it is not."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from bench.correctness import exactness, families, reference
from bench.correctness.exactness import ExactnessCase, agreement, compare
from bench.correctness.reference import RandomModel
from worker.models.config import decoder_config
from worker.models.decoder import Decoder


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        pytest.param("cpu", "cpu", marks=pytest.mark.bench),
        pytest.param("cuda", "gpu", marks=pytest.mark.gpu),
    ],
)
def test_a_tiny_model_is_exact(device: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Decodes in graphs, chunks, the cache and preemptions; on two GPUs in two ranks as well."""
    ranks = ["--tp", "1,2"] if device == "cuda" else []
    asked = ["--device", device, *ranks, "--models", "tiny", "--out", str(tmp_path), "--name", "found"]
    assert exactness.main(asked) == 0
    said = capsys.readouterr().out
    assert "WRONG" not in said and "all right" in said
    found = json.loads((tmp_path / "found.json").read_text())
    figures = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert figures[f"{kind}.exact.tiny.tp1.float32.identical"] == 1
    assert found["tiny.tp1"]["float32"]["preempted"]["preemptions"] > 0
    assert found["tiny.tp1"]["bfloat16"]["decode"]["positions"] == reference.NEW_TOKENS * len(reference.LENGTHS)


@pytest.mark.bench
def test_a_tiny_model_in_two_stages_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exactness, "CASES", (ExactnessCase("chunks of 7", {"token_budget": 7}, longest=32),))
    monkeypatch.setattr(exactness.Check, "bfloat16", lambda *ranks: {})
    asked = ["--models", "tiny", "--pp", "2,3", "--schedules", "uniform,offline", "--drafts", "0.8,0.5"]
    assert exactness.main(["--device", "cpu", *asked, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "WRONG" not in said and "3 stages of 1 ranks" in said
    assert "chunks of 7, uniform" in said and "chunks of 7, offline" in said
    found = json.loads((tmp_path / "cpu.exact.pp2-3.drafts.json").read_text())
    assert found["tiny.tp1pp2"]["float32"]["chunks of 7, offline"]["accepted_drafts"] > 0
    assert found["figures"][0]["name"] == "cpu.exact.tiny.tp1pp2.float32.identical"
    assert found["figures"][0]["value"] == 1


def test_cases_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = exactness.parser().parse_args(["--cases", "chunks of 64,preempted"]).cases
    assert [case.name for case in chosen] == ["preempted", "chunks of 64"]
    with pytest.raises(SystemExit):
        exactness.parser().parse_args(["--cases", "preempted,chunks of 65"])
    said = capsys.readouterr().err
    assert "chunks of 65: " in said and "whole, preempted" in said


@pytest.mark.bench
def test_one_family_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that transformers lacks is named and is no failure; one that cannot run is one."""
    common, tiny = families.common(families.TINY) | {"max_position_embeddings": 512}, families.models(families.TINY)
    models = {
        "unheard": RandomModel("unheard_of", common, (1,)),
        "refused": RandomModel("olmoe", common | tiny["olmoe"][1] | {"clip_qkv": 8.0}, (1,)),
        "hybrid": RandomModel("bamba", common | tiny["bamba"][1], (1,)),
    }
    monkeypatch.setattr(reference, "MODELS", models)
    monkeypatch.setattr(reference, "LENGTHS", (1, 7, 33))
    asked = ["--device", "cpu", "--dtypes", "bfloat16", "--out", str(tmp_path), "--name", "found"]
    assert exactness.main([*asked, "--models", "unheard,refused,hybrid"]) == 1
    said = capsys.readouterr().out
    assert "unheard is not compared: transformers" in said and said.count("WRONG") == 2  # and the last line
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["unheard"]["not_compared"].endswith("has no unheard_of")
    assert "clip_qkv" in found["refused"]["failed"]
    assert found["hybrid.tp1"].keys() == {"bfloat16"}
    assert found["hybrid.tp1"]["bfloat16"]["decode"]["positions"] == 3 * reference.NEW_TOKENS
    assert exactness.main([*asked, "--models", "unheard,hybrid"]) == 0
    assert exactness.main([*asked, "--models", "unheard"]) == 0  # the last of the models, and all of them


def test_all_is_a_model_of_every_family() -> None:
    names = exactness.parser().parse_args(["--models", "all"]).models
    for name in names:
        own = reference.MODELS[name]
        config = decoder_config(AutoConfig.for_model(own.model_type, **own.config))
        assert len(config.windows) == own.layers
        windows = [window for window in config.windows if window is not None]
        assert all(window < max(reference.LENGTHS) for window in windows)


@pytest.mark.bench
def test_a_model_that_is_a_little_off_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: right(self, hidden).roll(1, dims=-1))
    monkeypatch.setattr(exactness, "CASES", (ExactnessCase("whole", {}),))
    assert exactness.main(["--device", "cpu", "--models", "tiny", "--out", str(tmp_path), "--name", "found"]) == 1
    assert capsys.readouterr().out.count("WRONG") == 4  # float32, bfloat16 twice, and the last line


def test_reference_models_have_a_clear_favourite_nearly_everywhere(tmp_path: Path) -> None:
    model = reference.Reference(reference.make("tiny", tmp_path), "cpu", torch.float32)
    scored = [model.score(prompt) for prompt in reference.prompts(512) if len(prompt) > 1]
    margins = torch.cat([one.margins for one in scored])
    assert (margins > 0.01).float().mean() > 0.95
    assert len(set(torch.cat([one.likeliest for one in scored]).tolist())) > 200


def test_outputs_are_compared_to_the_first_difference() -> None:
    said = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]]
    margins = [[1.0, 1.0, 1.0], [1.0, 1e-5, 1.0], [1.0, 1e-3, 1e-6], [1e-6, 1e-6, 1e-6]]
    verdict = compare([[1, 2, 3], [4, 0, 0], [7, 0, 0], [1, 1]], said, margins)
    assert (verdict.sequences, verdict.identical, verdict.right) == (4, 1, False)
    assert [(i, at) for i, at, _ in verdict.ties] == [(1, 1)]
    assert [(i, at) for i, at, _ in verdict.wrong] == [(2, 1), (3, 2)]  # an output that ends early is never a tie


def test_agreement_allows_for_chance_only() -> None:
    exact = torch.arange(10_000)
    ours, theirs = exact.clone(), exact.clone()
    ours[:110], theirs[5000:5100] = -1, -1
    close = agreement(exact, ours, theirs)
    assert close.ours == pytest.approx(0.989) and close.theirs == pytest.approx(0.99) and close.right
    ours[:300] = -1
    assert not agreement(exact, ours, theirs).right
