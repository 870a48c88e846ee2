"""@openai/agents, the agents of OpenAI's in JavaScript: `openai_agents.mjs` by chat completions and by Responses."""

from bench.correctness.clients import javascript
from bench.correctness.clients.checks import Checks, ServedModel
from bench.correctness.clients.director import Director

checks = Checks()
SCRIPT = "openai_agents.mjs"


def _run(at: ServedModel, feature: str) -> None:
    javascript.run(SCRIPT, feature, at.url, at.model)


@checks("a run, and a streamed one")
def text(at: ServedModel) -> None:
    _run(at, "text")


@checks("a tool is called and its result sent back, whole and streamed")
def tools(at: ServedModel) -> None:
    _run(at, "tools")


@checks("chat: an answer with a text and a call is sent back")
def said(at: ServedModel) -> None:
    with Director(at.url) as director:
        director.preface = "I look."
        director.call("forecast", {"city": "Paris", "days": 3})
        javascript.run(SCRIPT, "said", director.url, at.model)
        director.told()
        (_, second, *_) = director.exchanges
        assert not director.refused and "messages[].content[].role" in second.headers["x-shoal-ignored"], second


@checks("second turns: a session, and a list with everything that was said")
def turns(at: ServedModel) -> None:
    _run(at, "turns")


@checks("outputType")
def output(at: ServedModel) -> None:
    _run(at, "output")


@checks("a full context has its own code")
def full(at: ServedModel) -> None:
    _run(at, "full")
