"""Two checkouts that are fakes, and what is made of their figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.replica import compare
from bench.results import Figure

CLI = """
import json, pathlib, sys
arguments = sys.argv[1:]
options = dict(zip(arguments[-4::2], arguments[-3::2]))
assert arguments[:3] == ["bench", "gpu", "--model"], arguments
log = pathlib.Path({log!r})
log.write_text(log.read_text() + {mark!r} if log.exists() else {mark!r})
if {status}:
    sys.exit({status})
number = log.read_text().count({mark!r})
figures = [
    dict(name="gpu.m.mini.output_tok_s", value={rate} + number, unit="tokens/s", higher_is_better=True),
    dict(name="gpu.m.first_token.s", value=2.0, unit="s", higher_is_better=False),
    dict(name="gpu.m." + {mark!r}, value=1.0, unit="s", higher_is_better=False),
]
(pathlib.Path(options["--out"]) / (options["--name"] + ".json")).write_text(json.dumps(dict(figures=figures)))
"""


def checkout(folder: Path, log: Path, mark: str, rate: float, status: int = 0) -> Path:
    (folder / "shoal").mkdir(parents=True)
    (folder / "shoal" / "__init__.py").touch()
    (folder / "shoal" / "cli.py").write_text(CLI.format(log=str(log), mark=mark, rate=rate, status=status))
    return folder


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where each run of the fake checkouts leaves its letter: n for this one, o for the older one."""
    log = tmp_path / "log"
    monkeypatch.setattr(compare, "ROOT", checkout(tmp_path / "new", log, "n", 110.0))
    return log


def line(old: Path, out: Path) -> list[str]:
    return ["--before", str(old), "--name", "c", "--out", str(out), "--turns", "3", "gpu", "--model", "m"]


def test_both_run_in_turns_and_their_medians_are_compared(log: Path, tmp_path: Path) -> None:
    old = checkout(tmp_path / "old", log, "o", 100.0)
    assert compare.main(line(old, tmp_path)) == 0
    assert log.read_text() == "onnoon"
    found: dict[str, Any] = json.loads((tmp_path / "c.json").read_text())
    figures = {figure["name"]: (figure["value"], figure["higher_is_better"]) for figure in found["figures"]}
    assert figures == {"c.m.mini.vs_before": (112 / 102, True), "c.m.first_token.s.vs_before": (1.0, False)}
    assert [run["gpu.m.mini.output_tok_s"] for run in found["runs"]["before"]] == [101.0, 102.0, 103.0]


def test_a_run_that_fails_is_no_result(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = checkout(tmp_path / "old", log, "o", 100.0, status=3)
    assert compare.main(line(old, tmp_path)) == 1
    said = capsys.readouterr().err
    assert "shoal bench gpu --model m" in said and "status 3" in said and str(old) in said
    assert not (tmp_path / "c.json").exists()


def test_what_makes_no_sense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--before", str(tmp_path)], ["--before", str(tmp_path), "gpu"]):
        with pytest.raises(SystemExit) as refused:
            compare.main(arguments)
        assert refused.value.code == 2
    said = capsys.readouterr().err
    assert "say which benchmark" in said and "not a checkout of Shoal" in said


def test_a_figure_that_one_run_lacks_is_left_out() -> None:
    both, one = Figure("gpu.a.x", 2.0, "s", False), Figure("gpu.b.x", 2.0, "s", False)
    before, now = [{"gpu.a.x": both}], [{"gpu.a.x": both, "gpu.b.x": one}]
    assert [figure.name for figure in compare.ratios("c", before, now)] == ["c.a.x.vs_before"]
