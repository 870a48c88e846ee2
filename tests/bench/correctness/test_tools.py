"""The benchmark of calls: the tools that it makes, its judgement of calls, and its figures from a server that follows a
script.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from bench.correctness import tools
from bench.correctness.tool_schemas import made_tools
from bench.correctness.tool_validity import Called, CallingAnswer, Validity, problem_of

TOOL = {
    "type": "function",
    "function": {
        "name": "plan",
        "parameters": {
            "type": "object",
            "properties": {"when": {"format": "time"}, "long": {"format": "duration"}, "n": {"maximum": 3}},
            "required": ["n"],
        },
    },
}


def test_a_number_brings_the_same_tools_back() -> None:
    for number in range(40):
        made = made_tools(number)
        assert made == made_tools(number) != made_tools(number + 1)
        assert len({tool["function"]["name"] for tool in made}) == len(made)
        for tool in made:
            jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])


def test_the_schemas_use_all_of_the_language() -> None:
    text = json.dumps([made_tools(number) for number in range(200)])
    words = """$ref $defs anyOf oneOf allOf enum const prefixItems patternProperties propertyNames additionalProperties
    format pattern minLength maxLength minimum exclusiveMaximum multipleOf minItems maxItems""".split()
    assert [word for word in words if f'"{word}"' not in text] == []


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (Called("plan", '{"n": 3, "when": "10:00:00.5Z", "long": "P1DT2H"}'), None),
        (Called("plan", '{"n": 4}'), "4 "),
        (Called("plan", "{}"), "'n' "),
        (Called("plan", '{"n": 1, "when": "25:00:00Z"}'), "'25:00:00Z' "),
        (Called("plan", '{"n": 1, "long": "P"}'), "'P' "),
        (Called("plan", '{"n": 1'), "Expecting "),
        (Called("plan", "[]"), "[] "),
        (Called("other", "{}"), "no tool "),
    ],
)
def test_a_call_is_judged(call: Called, problem: str | None) -> None:
    found = problem_of([TOOL], call)
    assert found is None if problem is None else found is not None and found.startswith(problem)


def test_what_counts_as_a_call() -> None:
    good, bad = Called("plan", '{"n": 1}'), Called("plan", '{"n": 9}')
    found = Validity()
    found.add([TOOL], CallingAnswer("required", (good, good), "tool_calls"))
    found.add([TOOL], CallingAnswer("required", (good, bad), "length"))  # the last one was cut
    found.add([TOOL], CallingAnswer("auto", (), "stop"))
    found.add([TOOL], CallingAnswer("named", error="no", status=400))
    assert (found.share, found.calls, found.cut, len(found.refused)) == (1.0, 3, 1, 1)
    found.add([TOOL], CallingAnswer("named", (), "stop"))
    found.add([TOOL], CallingAnswer("auto", (bad,), "tool_calls"))
    found.add([TOOL], CallingAnswer("auto", error="broken", status=500))
    assert found.share == 3 / 5
    assert (len(found.missing), len(found.wrong), found.failed) == (1, 1, ["broken"])


class ScriptedEngine:
    """In place of `shoal.Engine`: every answer calls the first tool with the same arguments."""

    base_url, model = "http://engine/v1", "tiny"

    def __init__(self, arguments: str) -> None:
        self.transport = httpx.MockTransport(self.answer)
        self._arguments = arguments

    def __call__(self, *_: Any, **__: Any) -> "ScriptedEngine":
        return self

    def __enter__(self) -> "ScriptedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        function = {"name": body["tools"][0]["function"]["name"], "arguments": self._arguments}
        usage = {"completion_tokens": 7}
        if not body.get("stream"):
            message = {"tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
            return httpx.Response(
                200, json={"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage}
            )
        first = {"index": 0, "id": "call_1", "function": {**function, "arguments": ""}}
        pieces = [first, *({"index": 0, "function": {"arguments": piece}} for piece in self._arguments)]
        chunks: list[dict[str, Any]] = [
            {"choices": [{"delta": {"tool_calls": [piece]}, "finish_reason": None}]} for piece in pieces
        ]
        chunks += [{"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}, {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        return httpx.Response(200, text=text)


@pytest.mark.parametrize(("arguments", "valid"), [('{"a": "\\n\\n"}', 1.0), ('{"b": 1}', 0.0)])
def test_the_figures(
    arguments: str, valid: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    monkeypatch.setattr(tools, "made_tools", lambda number: [tool])
    monkeypatch.setattr(tools.shoal, "Engine", ScriptedEngine(arguments))
    found = tools.main(["--requests", "12", "--rounds", "2", "--out", str(tmp_path)])
    assert found == (0 if valid else 1)
    result = json.loads((tmp_path / "protocols.tools.json").read_text())
    figures = {figure["name"].removeprefix("protocols.tools."): figure["value"] for figure in result["figures"]}
    assert (figures["valid"], figures["calls"], figures["refused"], figures["cut"]) == (valid, 12, 0, 0)
    assert figures["auto_called"] == 1.0 and figures["throughput_vs_text"] > 0
    assert len(result["ratios"]) == 2 and result["answers"] == {"required": 4, "named": 4, "auto": 4}
    assert "protocols.tools.valid" in capsys.readouterr().out
