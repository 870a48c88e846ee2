"""The benchmark of many states in one process, with a few."""

import json

import pytest

from bench.programs import states


@pytest.mark.bench
def test_all_states_live_at_once_and_get_their_own_answers(tmp_path, capsys):
    assert states.main(["--states", "20", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "programs.states.json").read_text())
    figures = {figure["name"]: figure["value"] for figure in result["figures"]}
    assert figures["programs.states.wrong"] == 0
    assert figures["programs.states.cpu_ms"] > 0 and result["states"] == 20
    assert "wrong 0" in capsys.readouterr().out
