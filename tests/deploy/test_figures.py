"""The figures of the rehearsals are made of what their commands write."""

import json
from pathlib import Path

import pytest

from bench.results import FOLDER
from tests.deploy import figures


def test_the_file_is_made_again_of_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = json.loads((FOLDER / "deploy.json").read_text())
    with pytest.raises(SystemExit):
        figures.main([str(tmp_path)])
    assert "has no ray_up.json, kubernetes.json, ray_up_600.json" in capsys.readouterr().err
    for name in figures.PARTS:
        (tmp_path / f"{name}.json").write_text(json.dumps(there[name]))
    assert figures.main([str(tmp_path), "--about", "text", "--out", str(tmp_path)]) == 0
    made = json.loads((tmp_path / "deploy.json").read_text())
    assert made["figures"] == there["figures"] and made["about"] == "text"
    assert {name: made[name] for name in figures.PARTS} == {name: there[name] for name in figures.PARTS}
