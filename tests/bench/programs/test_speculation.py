"""The benchmark of API speculation on its scripted endpoint."""

import json

import pytest

from bench.programs import speculation
from bench.programs.scripted_endpoint import ScriptedEndpoint, script, tokenize


@pytest.mark.bench
def test_it_counts_what_was_saved(tmp_path, capsys):
    assert speculation.main(["--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "programs.api.json").read_text())
    figures = {figure["name"]: figure["value"] for figure in result["figures"]}
    assert figures["programs.api.input_tokens_saved"] >= 2.5
    assert figures["programs.api.calls_saved"] == 3 and figures["programs.api.different_documents"] == 0
    names = [f" {name}" for name, _, _ in speculation.PEOPLE]
    assert [fields["name"] for fields in result["fields"]] == names
    # A plain run's three calls each send the whole text.
    sent = 0
    for person in speculation.PEOPLE:
        lines = speculation.answer(*person).split("\n")
        document = speculation.prompt(*person)
        for before in ("", f"{lines[0]}\nYear of birth:", f"{lines[0]}\n{lines[1]}\nProfession:"):
            sent += len(tokenize(document + before))
    assert result["plain"]["input_tokens"] == sent
    assert "24 calls" in capsys.readouterr().out


@pytest.mark.bench
def test_another_endpoint_may_answer_as_it_likes(tmp_path):
    with ScriptedEndpoint(lambda prompt: f" {len(prompt)}\nand so on\n") as endpoint:
        assert speculation.main(["--base-url", f"{endpoint.url}/v1", "--model", "m", "--out", str(tmp_path)]) == 0
    assert endpoint.bodies[0]["model"] == "m"


def test_a_difference_on_the_scripted_endpoint_is_an_error(tmp_path, monkeypatch):
    """As if the answers depended on something else than the text."""
    turns = iter(range(1000))
    monkeypatch.setattr(speculation, "script", lambda known: lambda prompt: f" {next(turns)}\n")
    assert speculation.main(["--out", str(tmp_path)]) == 1


def test_a_script_goes_on_where_a_prompt_has_got_to():
    answer = script({"Q:": " one two", "R:": " three"})
    assert [answer(prompt) for prompt in ("Q:", "x Q: one", "R:", "Q: two", "")] == [
        " one two",
        " two",
        " three",
        "",
        "",
    ]


@pytest.mark.parametrize("text", ["", "a  b\n\nc, d-e 1.5", "é ü\t!"])
def test_tokens_make_up_their_text(text):
    assert "".join(tokenize(text)) == text
