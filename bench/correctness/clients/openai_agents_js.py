"""@openai/agents, the agents of OpenAI's in JavaScript: `openai_agents.mjs` by chat completions and by Responses."""

from bench.correctness.clients import javascript
from bench.correctness.clients.checks import Checks, ServedModel
from bench.correctness.clients.director import Director

SCRIPT = "openai_agents.mjs"
FEATURES = {
    "text": "a run, and a streamed one",
    "tools": "a tool is called and its result sent back, whole and streamed",
    "turns": "second turns: a session, and a list with everything that was said",
    "output": "outputType",
    "full": "a full context has its own code",
}

checks = Checks()
javascript.add(checks, SCRIPT, FEATURES)


@checks("chat: an answer with a text and a call is sent back")
def said(at: ServedModel) -> None:
    with Director(at.url) as director:
        director.preface = "I look."
        director.call("forecast", {"city": "Paris", "days": 3})
        javascript.run(SCRIPT, "said", director.url, at.model)
        director.told()
        (_, second, *_) = director.exchanges
        assert not director.refused and "messages[].content[].role" in second.headers["x-shoal-ignored"], second
