"""Help is whole words at any width of the terminal, and an option that is not there gets a hint."""

import re
import shlex
from contextlib import suppress

import pytest

from shoal import cli
from shoal.help import Parser, fill

Captured = pytest.CaptureFixture[str]
COMMANDS = ["", *cli.COMMANDS, *(f"bench {name}" for name in cli.BENCHES)]
WIDTHS = (40, 60, 80, 100, 110, 200)


def shown(command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    with suppress(SystemExit):
        cli.main([*command.split(), "--help"])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_no_width_breaks_a_word(command: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("shoal.help.MAX_COLUMNS", 10_000)
    whole = " ".join(shown(command, 10_000, monkeypatch, capsys)).split()
    monkeypatch.undo()
    assert len(whole) > 10
    for width in WIDTHS:
        lines = shown(command, width, monkeypatch, capsys)
        # A command that goes on in the next line says so, and nothing else is added.
        assert " ".join(line.removesuffix(" \\") for line in lines).split() == whole
        assert [line for line in lines if len(line) > width and len(line.split()) > 1] == []


def test_paragraphs_entries_and_commands() -> None:
    text = """\
A paragraph of a few
words in two lines.

first   what is said of the first one
    shoal serve --one 1 --two 2          all that can be said of it
    printf 'a b\\n' | shoal chat --max-tokens 5
"""
    assert fill(text, 32).split("\n") == [
        "A paragraph of a few words in",
        "two lines.",
        "",
        "first   what is said of the",
        "        first one",
        "    shoal serve --one 1 --two \\",
        "        2",
        "          all that can be said",
        "          of it",
        "    printf 'a b\\n' | shoal \\",
        "        chat --max-tokens 5",
    ]
    command = "  shoal chat --system 'Answer in one sentence.' --seed 1"
    wrapped = fill(command, 30)
    assert " \\\n" in wrapped and shlex.split(wrapped.replace("\\\n", "")) == shlex.split(command)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--modle", "x"], r"'--modle'.* --model\?"),
        (["--modle=x"], r"'--modle'.* --model\?"),
        (["--zzz"], "'--zzz'.*shoal x --help"),
        (["what"], "'what'"),
    ],
)
def test_a_hint_at_what_was_meant(argv: list[str], says: str, capsys: Captured) -> None:
    parser = Parser("shoal x", "X.")
    parser.add_argument("--model")
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(argv)
    said = capsys.readouterr().err
    assert raised.value.code == 2 and re.search(says, said) and said.startswith("usage: shoal x [options]\n")
