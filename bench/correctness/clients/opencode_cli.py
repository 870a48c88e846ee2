"""opencode, an agent for the terminal, with the server as a provider of its configuration."""

import json

from bench.correctness.clients.agents import MARK, SAID, Agent, agent, came_back, program
from bench.correctness.clients.checks import Checks, ServedModel

checks = Checks()


def _run(opencode: Agent, *arguments: str, ends: tuple[int, ...] = (0,)) -> str:
    models = {opencode.model: {"name": "Shoal's", "limit": {"context": 131_072, "output": 4096}}}
    options = {"baseURL": f"{opencode.director.url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Shoal", "options": options, "models": models}
    config = {
        "provider": {"shoal": provider},
        "permission": {"bash": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    (opencode.work / "opencode.json").write_text(json.dumps(config))
    return opencode.run(program("opencode"), "run", "--model", f"shoal/{opencode.model}", *arguments, ends=ends)


@checks("a turn, streamed")
def turn(at: ServedModel) -> None:
    with agent(at) as opencode:
        assert SAID in _run(opencode, "Say hello.")
        assert any(each.sent.get("stream") and each.sent.get("tools") for each in opencode.all_taken())


@checks("a command is run, and its result sent back")
def command(at: ServedModel) -> None:
    with agent(at) as opencode:
        opencode.director.call("bash", {"command": f"echo {MARK}", "description": "says it"})
        assert SAID in _run(opencode, "Run it.")
        opencode.director.told()
        assert came_back(opencode.all_taken()), opencode.answers()


@checks("a second turn, with the first one sent back")
def resume(at: ServedModel) -> None:
    with agent(at) as opencode:
        opencode.director.call("bash", {"command": f"echo {MARK}", "description": "says it"})
        _run(opencode, "Run it.")
        before = len(opencode.director.exchanges)
        assert SAID in _run(opencode, "--continue", "And again.")
        assert came_back(opencode.all_taken()[before:])


@checks("a full context is known as one: it is compacted, and the turn goes on")
def full_context(at: ServedModel) -> None:
    with agent(at) as opencode:
        _run(opencode, "Say hello.")
        before = len(opencode.director.exchanges)
        opencode.director.overflow()
        assert SAID in _run(opencode, "--continue", "Go on.", ends=(1,))  # it shows the error nevertheless
        refused, summary, again = opencode.director.exchanges[before:]
        assert refused.status == 400 and not summary.sent.get("tools") and again.sent["tools"], opencode.answers()
        assert summary.status == again.status == 200
