"""What `shoal bench clients` writes of clients that work, fail, or end in the middle."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.correctness.clients import command
from bench.correctness.clients.command import ClientError, main

SAID: dict[str, list[dict[str, Any]]] = {
    "openai": [{"feature": "chat", "error": None, "seconds": 1.0}],
    "anthropic": [
        {"feature": "messages", "error": None, "seconds": 1.0},
        {"feature": "tools", "error": "AssertionError: none", "seconds": 1.0},
    ],
}


@pytest.fixture(autouse=True)
def clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that say what `SAID` has; others end before their first feature."""

    def attempt(client: str, *_: object) -> Iterator[dict[str, Any]]:
        yield {"versions": {client: "1.0"}}
        if client not in SAID:
            raise ClientError(f"{client}: killed")
        yield from SAID[client]

    monkeypatch.setattr(command, "attempt", attempt)
    monkeypatch.setattr(command, "first_model", lambda url: "a-model")


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, float], dict[str, Any]]:
    """The exit code, the figures, and the clients of the result."""
    code = main(["--out", str(folder), *arguments])
    result = json.loads((folder / "clients.json").read_text())
    return code, {figure["name"]: figure["value"] for figure in result["figures"]}, result["clients"]


def test_a_client_that_ends_takes_no_other_with_it(tmp_path: Path) -> None:
    code, figures, found = run(tmp_path, "--client", "openai,aider,anthropic")
    assert code == 1 and figures == {"clients.openai.working": 1.0}
    assert found["openai"]["versions"] == {"openai": "1.0"} and found["openai"]["features"] == {"chat": "works"}


def test_others_are_added_to_a_result(tmp_path: Path) -> None:
    assert run(tmp_path, "--client", "openai")[0] == 0
    code, figures, found = run(tmp_path, "--client", "anthropic", "--add")
    assert code == 1 and figures == {"clients.openai.working": 1.0, "clients.anthropic.working": 0.5}
    assert found["anthropic"]["features"] == {"messages": "works", "tools": "AssertionError: none"}
    assert found["openai"]["commit"] == found["anthropic"]["commit"] is not None
    _, figures, found = run(tmp_path, "--client", "anthropic")
    assert [*figures] == ["clients.anthropic.working"] and [*found] == ["anthropic"]
