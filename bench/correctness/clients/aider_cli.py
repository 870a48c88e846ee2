"""aider, which edits the files of a repository: it asks for whole files or differences in text, without tools."""

import sys
from pathlib import Path

from bench.correctness.clients.agents import MARK, SAID, Agent, agent
from bench.correctness.clients.checks import Checks, ServedModel

checks = Checks()


def _aider(aider: Agent, *arguments: str) -> str:
    flags: tuple[str, ...] = (
        "--no-check-update",
        "--no-show-model-warnings",
        "--no-show-release-notes",
        "--analytics-disable",
    )
    flags += ("--yes-always", "--no-auto-commits", "--map-tokens", "0", "--no-gitignore", "--no-detect-urls")
    return aider.run(
        str(Path(sys.executable).with_name("aider")),
        *("--model", f"openai/{aider.model}"),
        *flags,
        *arguments,
        OPENAI_API_BASE=f"{aider.director.url}/v1",
        OPENAI_API_KEY="none",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )


@checks("a message, streamed and whole, in each format of edits")
def message(at: ServedModel) -> None:
    for edits in ("whole", "diff", "udiff"):
        with agent(at) as aider:
            assert SAID in _aider(aider, "--edit-format", edits, "--message", "Say hello.")
            assert SAID in _aider(aider, "--edit-format", edits, "--no-stream", "--message", "Say hello.")
            assert {bool(each.sent.get("stream")) for each in aider.all_taken()} == {True, False}


@checks("an edit of a file, in each format")
def edit(at: ServedModel) -> None:
    written = {
        "whole": f"hello.txt\n```\n{MARK}\n```",
        "diff": f"hello.txt\n```\n<<<<<<< SEARCH\nhello\n=======\n{MARK}\n>>>>>>> REPLACE\n```",
        "udiff": f"```diff\n--- hello.txt\n+++ hello.txt\n@@ ... @@\n-hello\n+{MARK}\n```",
    }
    for edits, text in written.items():
        with agent(at) as aider:
            (aider.work / "hello.txt").write_text("hello\n")
            aider.director.say(text)
            _aider(aider, "--edit-format", edits, "--message", "Change it.", "hello.txt")
            aider.all_taken()
            assert (aider.work / "hello.txt").read_text() == f"{MARK}\n", edits


@checks("a second turn, with the first one sent back, and prompts marked for a cache")
def turns(at: ServedModel) -> None:
    with agent(at) as aider:
        _aider(aider, "--message", "Say hello.")
        before = len(aider.director.exchanges)
        assert SAID in _aider(aider, "--cache-prompts", "--restore-chat-history", "--message", "Again.")
        assert SAID in str([each.sent["messages"] for each in aider.all_taken()[before:]])


@checks("a full context is known as one")
def full_context(at: ServedModel) -> None:
    with agent(at) as aider:
        (aider.work / "long.txt").write_text("so it goes on, " * 60_000)
        said = _aider(aider, "--message", "Say hello.", "long.txt")
        assert "context window" in said.lower() or "token limit" in said.lower(), said[-2000:]
