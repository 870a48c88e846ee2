"""The host's benchmark: every step that it times is the one that it says."""

import json
from pathlib import Path

import pytest

from bench.replica import host
from bench.replica.null_executor import NullExecutor


def test_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(["--batches", "1,5", "--steps", "10", "--name", "found", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    names = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert names.keys() == {"cpu.host.b1.step_us", "cpu.host.b5.step_us", "cpu.host.mixed.step_us"}
    for name, value in names.items():
        parts = found["us_a_step"][name.split(".")[2]]
        assert parts["step"] == value > 0
        assert parts.keys() == {"step", "schedule", "tables", "launch sampling", "update", "message"}
    assert "us a step: schedule" in capsys.readouterr().out


def test_steps_are_what_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    real = NullExecutor.forward
    monkeypatch.setattr(
        NullExecutor, "forward", lambda self, plan: seen.append((len(plan), plan.num_tokens)) or real(self, plan)
    )
    host.decoding(6, 20)
    assert seen[-20:] == [(6, 6)] * 20
    seen.clear()
    host.mixed(4)
    chunks, tokens = seen[-1]
    assert chunks > host.DECODES_BESIDE and tokens == host.PROMPTS * host.PROMPT_TOKENS
