"""The benchmark of the parser: its answers are what it says, and its figures are those of all formats."""

import json

import pytest

from bench import results
from bench.protocols import parser
from router.deltas import CallArguments, CallBegin, CallEnd, TextDelta, ThinkingDelta, joined
from router.formats.families import HARMONY, TOOLS
from router.formats.lexer import Lexer


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("name", [*TOOLS, HARMONY])
def test_answers_think_explain_and_call_two_tools(name: str, as_tokens: bool) -> None:
    answer = parser.answer(name, as_tokens, 2)
    lexer = Lexer(answer.format, [parser.TOOL])
    deltas = joined([delta for text, marks in answer.pieces for delta in lexer.push(text, marks)] + lexer.flush())
    kinds = [type(delta) for delta in deltas]
    prose = [] if TOOLS.get(name) is not None and not TOOLS[name].begin and TOOLS[name].bare else [TextDelta]
    assert kinds == [ThinkingDelta, *prose, *[CallBegin, CallArguments, CallEnd] * 2]
    arguments = [json.loads(delta.text)["text"].strip() for delta in deltas if isinstance(delta, CallArguments)]
    assert arguments == [(parser.CODE * 2).strip(), "x"]


def test_writes_the_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    written = {}
    monkeypatch.setattr(results, "write", lambda name, figures, raw: written.update({name: (figures, raw)}))
    assert parser.main(["--repeats", "1", "--rounds", "1"]) == 0
    figures, raw = written["protocols.parser"]
    assert [figure.name for figure in figures] == [
        "protocols.parser.us_per_token", "protocols.parser.slowest.us_per_token",
    ]  # fmt: skip
    assert raw["us_per_token"].keys() == {*TOOLS, HARMONY}
    assert "hermes" in capsys.readouterr().out
