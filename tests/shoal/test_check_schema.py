"""`shoal check-schema`: the verdict on a schema, in words and as an exit code."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest

from shoal import check_schema


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    """A model's folder without weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(tiny_model / name, folder)
    return folder


def test_the_engine_and_the_cost_of_a_schema_that_is_enforced(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "string", "pattern": "^a.*", "maxLength": 5}))
    assert check_schema.main([str(file), "--model", str(model)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"\bllguidance: .*\d s\b", said)


def test_the_keyword_that_is_not_enforced_and_its_place(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"properties": {"a": {"contains": {}}}}'))
    assert check_schema.main(["-", "--model", str(model)]) == 1
    refused, without, named, _, narrowed = capsys.readouterr().out.splitlines()
    assert "contains at #/properties/a" in refused
    assert '"strict": false' in without and re.search(r"\d s\b", without)
    assert named == "  contains at #/properties/a" and narrowed == "  other members at #"


def test_what_is_enforced_more_narrowly_and_its_place(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    many = {f"p{i}": {"type": "string", "format": "date", "maxLength": 10 + i} for i in range(30)}
    file.write_text(json.dumps({"type": "object", "properties": many, "additionalProperties": False}))
    assert check_schema.main([str(file), "--model", str(model)]) == 0
    _, _, first, *others, more = capsys.readouterr().out.splitlines()
    assert first == "  format at #/properties/p0" and len(others) == 19 and "10" in more


def test_what_is_no_schema_is_refused_either_way(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"type": "strnig"}'))
    assert check_schema.main(["-", "--model", str(model)]) == 1
    (refused,) = capsys.readouterr().out.splitlines()
    assert "not valid at #/type" in refused


def test_a_file_that_is_not_there(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_schema.main([str(tmp_path / "gone.json"), "--model", str(model)]) == 2
    assert "gone.json" in capsys.readouterr().err
