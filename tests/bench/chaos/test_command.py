"""The short form of the chaos: a fleet on two Ray nodes, and a few faults."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.chaos import command

FAULTS = ["rank_killed", "router_killed", "events_lost"]


@pytest.mark.bench
def test_no_request_fails_and_no_answer_is_wrong_whatever_is_killed(tmp_path: Path) -> None:
    """In a process of its own: it starts Ray."""
    command = [sys.executable, "-m", "bench.chaos.command", "--rounds", "1", "--out", str(tmp_path), "--clients", "3"]
    ended = subprocess.run([*command, "--faults", *FAULTS], capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads((tmp_path / "fleet.chaos.json").read_text())
    figures = {figure["name"].removeprefix("fleet.chaos."): figure["value"] for figure in result["figures"]}
    assert figures["failed_requests"] == figures["wrong_answers"] == figures["held_tokens"] == 0
    assert figures["faults"] == len(FAULTS) and figures["answered"] > 20
    assert sorted(entry["fault"] for entry in result["log"]) == sorted(FAULTS)


@pytest.mark.parametrize("alone", ["scaled_up", "scaled_down"])
def test_a_fleet_that_only_grows_or_only_shrinks_is_a_wrong_command(
    alone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--faults", "rank_killed", alone])
    assert "need each other" in capsys.readouterr().err
