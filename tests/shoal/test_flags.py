"""Flags are made from a model's fields, and only what is typed is set."""

import argparse
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, Field, SecretStr

from cluster.config import Config
from shoal import flags


class Base(BaseModel):
    """What all have. And more."""

    served_name: str | None = Field(None, description="its name, 100% of it")
    kind: Literal["a", "b"] = Field("a", description="which")


class Settings(Base):
    """Settings of a test."""

    size: int = Field(16, ge=1, description="how large")
    share: float | None = Field(None, description="a part")
    key: SecretStr | None = Field(None, description="a secret")
    file: Path | None = Field(None, description="a file")
    fast: bool = Field(True, description="or not")


def parsed(*argv: str) -> dict:
    parser = argparse.ArgumentParser()
    flags.add(parser, Settings)
    return flags.given(parser.parse_args(list(argv)), Settings)


def test_only_what_is_given_is_set() -> None:
    assert parsed() == {}
    assert parsed("--size", "3") == {"size": 3}


def test_every_type_is_what_the_model_takes() -> None:
    line = "--served-name=x --kind=b --size=2 --share=0.5 --key=k --file=f.txt --no-fast"
    values = parsed(*line.split())
    assert values == {
        "served_name": "x",
        "kind": "b",
        "size": 2,
        "share": 0.5,
        "key": "k",
        "file": Path("f.txt"),
        "fast": False,
    }
    assert Settings(**values).key == SecretStr("k")
    assert parsed("--fast") == {"fast": True}


def test_help_has_groups_descriptions_and_defaults() -> None:
    parser = argparse.ArgumentParser()
    flags.add(parser, Settings)
    shown = " ".join(parser.format_help().split())
    for text in ("settings of a test:", "what all have. And more:", "its name, 100% of it", "(default: 16)", "{a,b}"):
        assert text in shown
    assert "(default: true)" in shown and "None" not in shown


@pytest.mark.parametrize("argv", [["--kind", "c"], ["--size", "x"], ["--share", ""], ["--served_name", "x"]])
def test_what_is_wrong_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parsed(*argv)
    assert raised.value.code == 2 and "error:" in capsys.readouterr().err


def test_a_type_without_a_flag_is_a_mistake_of_ours() -> None:
    class Odd(BaseModel):
        both: int | str = 1

    with pytest.raises(TypeError, match="both: "):
        flags.add(argparse.ArgumentParser(), Odd)


def test_every_setting_of_the_server_has_a_flag_that_its_default_passes() -> None:
    parser = argparse.ArgumentParser()
    flags.add(parser, Config)
    defaults = {name: field.default for name, field in Config.model_fields.items() if field.default not in (None, ())}
    line = [f"--{name.replace('_', '-')}={value}" for name, value in defaults.items() if not isinstance(value, bool)]
    assert Config(**flags.given(parser.parse_args(line), Config)) == Config()
    assert flags.given(parser.parse_args(["--aliases", "a,b"]), Config) == {"aliases": ("a", "b")}
    assert "--models" not in parser.format_help()  # a list of tables: for a file
