"""Drafts that are right as often as asked, and the speed with them, on a tiny model without a GPU."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.replica import draft_speed, gpu
from bench.replica.synthetic_drafts import RecordedOutputs, SyntheticDrafter

PROMPTS = [[7, row] for row in range(40)]


@pytest.fixture
def outputs() -> list[list[int]]:
    return np.random.default_rng(1).integers(0, 500, (len(PROMPTS), 100)).tolist()


def test_drafts_are_right_as_often_as_asked(outputs: list[list[int]]) -> None:
    recording = RecordedOutputs(PROMPTS, outputs, [0.8, 0.5, 1.0], 500)
    drafter = SyntheticDrafter(recording)
    right = np.zeros(4)
    for key, prompt in enumerate(PROMPTS):
        drafter.add(key, prompt, outputs[key][:2], [], None)
        for place in range(2, 97):
            guess = drafter.propose(key, 8).token_ids
            assert len(guess) == 3 and all(0 <= token < 500 for token in guess)
            said = [token == outputs[key][place + i] for i, token in enumerate(guess)]
            right[sum(np.logical_and.accumulate(said))] += 1
            drafter.extend(key, outputs[key][place : place + 1])
        assert drafter.propose(key, 2).token_ids == recording.guesses[key][97][:2]
        drafter.remove(key)
    tried = np.cumsum(right[::-1])[::-1]
    assert tried[1:] / tried[:-1] == pytest.approx([0.8, 0.5, 1.0], abs=0.03)
    assert RecordedOutputs(PROMPTS, outputs, [0.8, 0.5, 1.0], 500).guesses == recording.guesses
    assert RecordedOutputs(PROMPTS, outputs, [0.8, 0.5, 1.0], 500, seed=1).guesses != recording.guesses


@pytest.mark.bench
def test_the_speed_with_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("PROMPT_TOKENS", 40), ("OUTPUT_TOKENS", 40), ("SETTLE_STEPS", 2), ("TRACED_STEPS", 3)):
        monkeypatch.setattr(draft_speed, name, value)
    monkeypatch.setattr(draft_speed, "HOST_STEP_BATCH", 3)
    flags = ["--model", "tiny", "--device", "cpu", "--kv-tokens", "8192", "--overlap", "--max-running", "8"]
    asked = ["--acceptance", "1,1,1", "--batches", "3,9,1", "--rounds", "1", "--out", str(tmp_path)]
    assert gpu.main([*flags, *asked]) == 1, "a batch of 9 with 8 slots"
    said = capsys.readouterr().err
    assert "9 sequences" in said and "max_running" in said
    found = json.loads((tmp_path / "drafts.cpu.tiny.json").read_text())
    figures = {figure["name"]: figure["value"] for figure in found["figures"]}
    kinds = ("vs_off", "output_tok_s", "tokens_a_step", "drafted_a_step", "accepted_a_step")
    expected = {f"drafts.cpu.b{batch}.{kind}" for batch in (1, 3) for kind in kinds} | {"drafts.cpu.host_step"}
    assert figures.keys() == expected | {"cpu.tiny.start_to_first_token.seconds"}
    for batch in (1, 3):
        (once,) = found[f"drafts.b{batch}"]["rounds"]
        off, on = once["off"], once["on"]
        assert off["drafted"] == 0 and off["tokens"] == pytest.approx(batch * off["steps"], abs=batch)
        assert on["accepted"] == on["drafted"], "all are right"
        assert on["tokens"] == pytest.approx(batch * on["steps"] + on["accepted"], abs=4 * batch)
    assert figures["drafts.cpu.b3.vs_off"] > 0 and figures["drafts.cpu.host_step"] >= 0


@pytest.mark.parametrize(("wrong", "why"), [("0.8,x", "are not numbers"), ("0.8,1.2", "from 0 to 1")])
def test_wrong_probabilities(wrong: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--acceptance", wrong])
    assert why in capsys.readouterr().err
