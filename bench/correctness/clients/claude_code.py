"""Claude Code, Anthropic's agent for the terminal, pointed at the server by its environment variables."""

import json
from typing import Any

from bench.correctness.clients.agents import MARK, SAID, Agent, agent, came_back, program
from bench.correctness.clients.checks import Checks, ServedModel

checks = Checks()


def _ask(claude: Agent, *arguments: str) -> str:
    kinds = ("HAIKU", "SONNET", "OPUS")
    variables: Any = {f"ANTHROPIC_DEFAULT_{kind}_MODEL": claude.model for kind in kinds} | {
        "ANTHROPIC_MODEL": claude.model
    }
    flags = ("--output-format", "json", "--allowedTools", "Bash")
    said = claude.run(
        program("claude"),
        "-p",
        *arguments,
        *flags,
        ANTHROPIC_BASE_URL=claude.director.url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        **variables,
    )
    ended = json.loads(said[said.index("{") :])
    assert not ended["is_error"], ended
    return str(ended["result"])


@checks("a turn, streamed")
def turn(at: ServedModel) -> None:
    with agent(at) as claude:
        assert SAID in _ask(claude, "Say hello.")
        assert any(each.sent.get("stream") and each.sent.get("tools") for each in claude.all_taken())


@checks("a command is run, and its result sent back")
def command(at: ServedModel) -> None:
    with agent(at) as claude:
        claude.director.call("Bash", {"command": f"echo {MARK}", "description": "says it"})
        assert SAID in _ask(claude, "Run it.")
        claude.director.told()
        assert came_back(claude.all_taken()), claude.answers()


@checks("a second turn, with the first one sent back")
def resume(at: ServedModel) -> None:
    with agent(at) as claude:
        claude.director.call("Bash", {"command": f"echo {MARK}", "description": "says it"})
        _ask(claude, "Run it.")
        before = len(claude.director.exchanges)
        assert SAID in _ask(claude, "And again.", "--continue")
        assert came_back(claude.all_taken()[before:])


@checks("a full context is known as one: it is compacted, and the turn goes on")
def full_context(at: ServedModel) -> None:
    with agent(at) as claude:
        claude.director.call("Bash", {"command": f"echo {MARK}", "description": "says it"})
        _ask(claude, "Run it.")
        _ask(claude, "And again.", "--continue")
        before = len(claude.director.exchanges)
        claude.director.overflow()
        assert SAID in _ask(claude, "Go on.", "--continue")
        (first, *rest) = [each for each in claude.director.exchanges[before:] if each.sent.get("tools")]
        assert first.status == 400 and rest and all(each.status == 200 for each in rest), claude.answers()
        assert any("summary" in json.dumps(each.sent["messages"][-1]) for each in claude.director.exchanges[before:])
