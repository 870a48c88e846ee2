"""The reference page says all that the code knows, and notices when it no longer does."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, SecretStr

from cluster.config import DEFAULTS, UPSTREAM_FIELDS, Config
from router.metrics.metrics import Metrics
from shoal import cli, reference
from shoal.reference import Unexplained


@pytest.fixture(scope="module")
def page() -> str:
    return reference.page()


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """The tables under a heading, by their first cell's name."""
    section = page.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    return {row[0].split("`")[1]: row for row in cells}


def test_every_setting_is_there_once_with_its_meaning(page: str) -> None:
    settings = rows(page, "Settings")
    assert settings.keys() == Config.model_fields.keys()
    assert all(settings[name][-1] == field.description for name, field in Config.model_fields.items())
    names = re.findall(r"^\| `(\w+)` \|", page.split("\n## ")[1], re.MULTILINE)
    assert len(names) == len(set(names))
    assert settings["page_size"][1:3] == ["integer, at least 1 and at most 64", "`16`"]
    assert settings["placement"][1] == "`cache_aware`, `least_load` or `round_robin`"


def test_the_keys_of_several_models_are_there(page: str) -> None:
    entries = rows(page, "Several models")
    assert entries.keys() == {"name", "aliases"} | UPSTREAM_FIELDS.keys()  # model is in both tables
    section = page.split("\n## Several models\n")[1].split("\n## ")[0]
    assert {f"`{name}`" for name in DEFAULTS} <= set(re.findall("`[a-z_]+`", section))


def test_every_metric_is_there_as_the_server_prints_it(page: str) -> None:
    metrics = rows(page, "Metrics")
    printed = {
        (name, kind)
        for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", Metrics().page().decode(), re.MULTILINE)
        if not name.endswith("_created") and not name.startswith("vllm:")
    }
    assert {(name, row[1]) for name, row in metrics.items()} == printed
    assert metrics["shoal_http_responses_total"][2] == "`model`, `path`, `status`"
    assert metrics["shoal_time_to_first_token_seconds"][2] == "`model`, `replica`"


def test_every_variable_of_the_source_is_there(page: str) -> None:
    assert {"SHOAL_CACHE", *reference.ENVIRONMENT} <= rows(page, "Environment variables").keys()


def test_every_command_explains_itself(page: str) -> None:
    for command in reference.COMMANDS:
        assert f"### shoal {command}\n\n```text\nusage: shoal {command} " in page
    assert set(reference.COMMANDS) | {"serve", "plan", "bench"} == set(cli.COMMANDS)
    benches = page.split("\n### shoal bench\n")[1]
    assert [name for name in cli.BENCHES if f"\n| `{name}` | " not in benches] == []


def test_the_page_does_not_depend_on_the_terminal(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert reference.page() == page
    assert os.environ["COLUMNS"] == "40"


def test_a_stale_page_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "PAGE", tmp_path / "REFERENCE.md")
    monkeypatch.setattr(reference, "environment", dict)
    assert reference.main(["--check"]) == 1
    assert "python -m shoal.reference" in capsys.readouterr().err
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    reference.PAGE.write_text(reference.PAGE.read_text() + "by hand\n")
    assert reference.main(["--check"]) == 1


def test_a_variable_without_a_meaning_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "router"
    room.mkdir()
    file = room / "new.py"
    file.write_text('import os\nx = [os.environ.get(n) for n in ("A",)]\ny = os.environ["SHOAL_CACHE"]\n')
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "ENVIRONMENT", {"SHOAL_CACHE": "a folder"})
    assert reference.environment() == {"SHOAL_CACHE": "a folder"}
    file.write_text('import os\ny = os.environ["SHOAL_CACHE"] or os.getenv("SHOAL_NEW")\n')
    with pytest.raises(Unexplained, match="SHOAL_NEW"):
        reference.environment()
    file.write_text("")
    with pytest.raises(Unexplained, match="SHOAL_CACHE"):
        reference.environment()


@pytest.mark.parametrize(
    "line",
    [
        'os.environ.get("X")',
        'os.environ.setdefault("X", "0")',
        'os.environ.pop("X", None)',
        'os.environ["X"]',
        'os.environ["X"] = "0"',
        '"X" in os.environ',
        'os.getenv("X", "0")',
        'environ.get("X")',
    ],
)
def test_ways_to_a_variable(line: str) -> None:
    assert reference.variables(f"def f():\n    {line}\n") == {"X"}


def test_what_only_looks_like_a_variable() -> None:
    assert reference.variables('settings.get("X"); environment["X"]; "X" in names; "X"') == set()


class Sample(BaseModel):
    count: int | None = Field(None, ge=1)
    share: float = Field(0.5, gt=0, lt=1)
    name: Annotated[str, Field(min_length=1)] = "a"
    on: bool = True
    only: Literal["a"] = "a"
    secret: SecretStr | None = None
    file: Path | None = None
    free: str | None = None


@pytest.mark.parametrize(
    ("name", "kind", "default"),
    [
        ("count", "integer, at least 1", ""),
        ("share", "number, over 0 and under 1", "`0.5`"),
        ("name", "text, not empty", "`a`"),
        ("on", "true or false", "`true`"),
        ("only", "`a`", "`a`"),
        ("secret", "text, never printed", ""),
        ("file", "file", ""),
        ("free", "text", ""),
    ],
)
def test_values_in_words(name: str, kind: str, default: str) -> None:
    field = Sample.model_fields[name]
    assert reference.kind(field) == kind
    assert reference.default(field) == default


def test_what_has_no_words_is_an_error() -> None:
    class Odd(BaseModel):
        pairs: dict[str, Any] = {}
        even: int = Field(2, multiple_of=2)

    for field in Odd.model_fields.values():
        with pytest.raises(Unexplained, match="no words"):
            reference.kind(field)
