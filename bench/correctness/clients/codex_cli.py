"""Codex, OpenAI's agent for the terminal, with a configuration that names the server and nothing else."""

import json

from bench.correctness.clients.agents import MARK, SAID, Agent, agent, came_back, program
from bench.correctness.clients.checks import Checks, ServedModel

checks = Checks()
CONFIG = """
model = "{model}"
model_provider = "shoal"
model_context_window = {context}
[model_providers.shoal]
name = "Shoal"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def _exec(codex: Agent, *arguments: str, ends: tuple[int, ...] = (0,)) -> str:
    home = codex.home / "codex"
    home.mkdir(exist_ok=True)
    config = CONFIG.format(model=codex.model, url=codex.director.url, context=131_072)
    (home / "config.toml").write_text(config)
    flags = ("--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox")
    return codex.run(program("codex"), "exec", *flags, *arguments, ends=ends, CODEX_HOME=str(home))


@checks("a turn, streamed; its tools of namespaces and of the service")
def turn(at: ServedModel) -> None:
    with agent(at) as codex:
        assert SAID in _exec(codex, "Say hello.")
        (first, *_) = codex.all_taken()
        kinds = {tool["type"] for tool in first.sent["tools"]}
        assert {"function", "namespace"} <= kinds, kinds
        ignored = first.headers.get("x-shoal-ignored", "")
        assert all(f"[type={kind}]" in ignored for kind in kinds - {"function", "namespace"}), (kinds, ignored)
        assert first.sent["stream"]


@checks("a command is run, and its result sent back")
def command(at: ServedModel) -> None:
    with agent(at) as codex:
        codex.director.call("exec_command", {"cmd": f"echo {MARK}"})
        assert SAID in _exec(codex, "Run it.")
        codex.director.told()
        assert came_back(codex.all_taken()), codex.answers()


@checks("a function of a namespace is called, and its result sent back")
def namespace(at: ServedModel) -> None:
    with agent(at) as codex:
        codex.director.call("multi_agent_v1.close_agent", {"target": "someone else"})
        assert SAID in _exec(codex, "Send them home.")
        codex.director.told()
        sent = codex.all_taken()[-1].sent["input"]
        (call,) = [item for item in sent if item["type"] == "function_call"]
        assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent"), call
        (result,) = [item for item in sent if item["type"] == "function_call_output"]
        assert "unsupported" not in json.dumps(result), result


@checks("a second turn, with the first one sent back")
def resume(at: ServedModel) -> None:
    with agent(at) as codex:
        codex.director.call("exec_command", {"cmd": f"echo {MARK}"})
        _exec(codex, "Run it.")
        before = len(codex.director.exchanges)
        assert SAID in _exec(codex, "resume", "--last", "And again.")
        assert came_back(codex.all_taken()[before:])


@checks("an answer of a given form")
def output_schema(at: ServedModel) -> None:
    with agent(at) as codex:
        schema = {
            "type": "object",
            "properties": {"word": {"enum": ["blue"]}},
            "required": ["word"],
            "additionalProperties": False,
        }
        (codex.work / "schema.json").write_text(json.dumps(schema))
        said = _exec(codex, "--output-schema", "schema.json", "Which colour?")
        assert '{\\"word\\":' in said.replace(" ", "") and "blue" in said, said
        codex.all_taken()


@checks("a full context is known as one")
def full_context(at: ServedModel) -> None:
    with agent(at) as codex:
        codex.director.overflow(99)
        assert "context window" in _exec(codex, "Go on.", ends=(1,))
