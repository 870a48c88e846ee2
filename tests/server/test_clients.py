"""The clients that are light enough for every run, as their authors ship them, against the whole server; and what the
pages for their users say."""

import gc
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.correctness.clients.catalog import CLIENTS
from bench.correctness.clients.checks import ServedModel
from bench.correctness.clients.director import Director
from bench.correctness.clients.one import checks_of

from .conftest import Whole

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_features(whole: Whole, client: str) -> None:
    found = list(checks_of(CLIENTS[client]).run(ServedModel(whole.url, whole.service.model)))
    assert {each.feature: each.error for each in found if each.error} == {}
    assert len(found) > 10
    gc.collect()  # clients close their connections when they go
    whole.settled()


def called(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of the calls of an answer, by any protocol."""
    if "choices" in answer:
        calls = answer["choices"][0]["message"].get("tool_calls", ())
        return [json.loads(call["function"]["arguments"]) for call in calls]
    if "output" in answer:
        return [json.loads(item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    return [block["input"] for block in answer["content"] if block["type"] == "tool_use"]


FUNCTION = {"name": "forecast", "parameters": {"type": "object"}}
ASKED = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("endpoint", "body", "tool"),
    [
        (
            "chat/completions",
            {"messages": ASKED, "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 8},
            "forecast",
        ),
        (
            "messages",
            {"messages": ASKED, "tools": [{"name": "forecast", "input_schema": {"type": "object"}}], "max_tokens": 8},
            "forecast",
        ),
        (
            "responses",
            {
                "input": ASKED,
                "tools": [{"type": "namespace", "name": "sky", "tools": [{"type": "function", **FUNCTION}]}],
                "max_output_tokens": 8,
            },
            "sky.forecast",
        ),
    ],
)
def test_a_director_tells_the_model_what_to_call(whole: Whole, endpoint: str, body: dict[str, Any], tool: str) -> None:
    limit = "max_output_tokens" if endpoint == "responses" else "max_tokens"
    body = {"model": whole.service.model} | body
    with Director(whole.url) as director:
        director.call(tool, {"city": "Rome", "days": 2})
        told, untold = (
            httpx.post(f"{director.url}/v1/{endpoint}", json=body | {limit: tokens}).json() for tokens in (200, 8)
        )
        assert called(told) == [{"city": "Rome", "days": 2}] and not called(untold)
        director.told()
        director.overflow()
        refused = httpx.post(f"{director.url}/v1/{endpoint}", json=body)
        assert refused.status_code == 400 and len(director.refused) == 1
        assert [each.sent for each in director.exchanges] == [body | {limit: 200}, body, body]
    whole.settled()


def test_the_page_about_clients(whole: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "CLIENTS.md").read_text()
    assert re.findall(r"^\| `(\S+)` \|", page, re.MULTILINE) == list(CLIENTS)
    programs = re.findall(r"(?:^    .*\n|^\n)+", page, re.MULTILINE)
    shown = [textwrap.dedent(text).strip() for text in programs if text.strip()]
    assert [text.split()[1] for text in shown] == ["openai", "anthropic"]
    for program in shown:
        exec(program.replace("http://127.0.0.1:8000", whole.url), {})
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("{'city': '") and " tool_use " in said[-1]
    gc.collect()
    whole.settled()


def test_the_page_about_tools(whole: Whole) -> None:
    page = (DOCS / "TOOLS.md").read_text()
    (shown,) = re.findall(r"-d '(\s*{.*?})'\n", page, re.DOTALL)
    answer = httpx.post(f"{whole.url}/v1/chat/completions", json=json.loads(shown) | {"model": whole.service.model})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] in ("tool_calls", "length")
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
