"""Throughput with schemas: the answers are those that were picked, and both kinds of rounds are measured."""

import json
from pathlib import Path

import pytest

from bench.schemas import throughput
from bench.schemas.throughput import Answers

PAIR = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
FLAG = json.dumps({"type": "boolean"})


@pytest.mark.bench
def test_answers_to_schemas_are_as_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [Answers(PAIR, ['{"a": 1}', '{"a": 20}']), Answers(FLAG, ["true"])]
    (tmp_path / "answers.json").write_text(json.dumps([vars(each) for each in answers]))
    asked = ["--answers", str(tmp_path / "answers.json"), "--model", "tiny", "--device", "cpu", "--requests", "6"]
    assert throughput.main([*asked, "--rounds", "1", "--max-running", "4", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "schemas.gpu.json").read_text())
    assert found["tokens"] == 2 * (8 + 1) + (9 + 1) + 3 * (4 + 1)
    assert found["figures"][0]["value"] > 0
    (tmp_path / "answers.json").write_text(json.dumps([vars(Answers(FLAG, ["maybe"]))]))
    with pytest.raises(RuntimeError, match="a request failed"):
        throughput.main([*asked, "--rounds", "1", "--out", str(tmp_path)])
