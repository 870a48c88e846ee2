"""`shoal doctor`, on this very machine: what it finds differs from machine to machine, its form does not."""

import json
from pathlib import Path

import pytest

from cluster import doctor as checks
from cluster.doctor import Finding
from shoal import doctor

Captured = pytest.CaptureFixture[str]


def test_every_check_is_told(capsys: Captured, tiny_model: Path) -> None:
    code = doctor.main(["--json", "--model", str(tiny_model)])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (code == 0)
    found = [Finding(**each) for each in told["findings"]]
    assert list(dict.fromkeys(each.check for each in found)) == list(checks.CHECKS)
    assert not [each for each in found if "could not be checked" in each.says]
    assert all(bool(each.remedy) == (each.state in ("warning", "failed")) for each in found)


def test_a_failure_is_the_exit_code(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Finding("python", "ok", "Python 3.11"), Finding("ray", "warning", "odd", "mend it")]
    monkeypatch.setattr(checks, "examine", lambda machine, wanted: found)
    assert doctor.main([]) == 0
    found.append(Finding("shared memory", "failed", "none", "mount it"))
    assert doctor.main([]) == 1
    shown = capsys.readouterr().out
    assert "shared memory  FAILED   none\n" in shown and "→ mount it" in shown


def test_the_configuration_says_what_is_looked_at(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setattr(checks, "examine", lambda machine, wanted: asked.append(wanted) or [Finding("x", "ok", "y")])
    file = tmp_path / "shoal.yaml"
    file.write_text("model: some/model\nport: 8123\nmetrics_port: 9001\n")
    assert doctor.main(["--config", str(file)]) == 0
    (wanted,) = asked
    assert (wanted.port, wanted.metrics_port, wanted.model) == (8123, 9001, "some/model")
    file.write_text("prot: 1\n")
    assert doctor.main(["--config", str(file)]) == 2
    assert "did you mean port" in capsys.readouterr().err


def test_compiling_needs_a_model(capsys: Captured) -> None:
    assert doctor.main(["--compile"]) == 1
    assert "--model" in capsys.readouterr().err


@pytest.mark.slow
def test_compiling_starts_the_model(capsys: Captured, tiny_model: Path) -> None:
    assert doctor._compiled(str(tiny_model), 1) is None
    why = doctor._compiled(str(tiny_model / "not-there"), 1)
    assert why is not None and "does not start" in why
