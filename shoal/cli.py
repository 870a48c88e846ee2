"""The `shoal` command: finds the subcommand and hands the rest of the line to it.

Every subcommand is a module with `main(argv) -> exit code`, imported only when it is called. So `shoal --help` answers
at once, and `shoal chat` needs neither torch nor Ray. Errors are printed on stderr, without a traceback. Exit codes:

| code | meaning |
| --- | --- |
| 0 | done |
| 1 | failed |
| 2 | invalid command line |
| 130 | interrupted |
"""

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping

from shoal import __version__
from shoal.help import columns, fill

COMMANDS = {
    "serve": ("shoal.serve", "start a server on this machine or on a Ray cluster"),
    "stop": ("shoal.stop", "end a server, also one whose `shoal serve` was killed"),
    "chat": ("shoal.chat", "talk to a running server in the terminal"),
    "status": ("shoal.status", "what a running server is doing, replica by replica"),
    "doctor": ("shoal.doctor", "whether this machine can run a server, and what to do if not"),
    "logs": ("shoal.logs", "the lines about a request in the logs of all machines"),
    "pull": ("shoal.pull", "get a model, check it, and keep it in the cache"),
    "check-schema": ("shoal.check_schema", "whether structured output enforces a JSON schema, and at what cost"),
    "plan": ("bench.pipeline.plan", "how many replicas, of which layout, carry a traffic: by simulation"),
    "bench": ("", "measure: a server under load, the engine alone, the router"),
}
BENCHES = {
    "serve": ("bench.load.serve", "put a load on any OpenAI-compatible server: latencies, throughput, goodput"),
    "offline": ("bench.replica.offline", "the engine without a server, compared with transformers"),
    "drafts": ("bench.replica.drafts", "what drafts bring on a real model: the same requests with and without"),
    "gpu": ("bench.replica.gpu", "one replica at the full speed of its GPUs, compared with its targets"),
    "online": (
        "bench.replica.online",
        "a server as a user starts it, under load; optionally compared with another checkout",
    ),
    "pipeline": (
        "bench.pipeline.command",
        "pipelines of several stages: bubbles, their causes, and the load they carry",
    ),
    "host": ("bench.replica.host", "the host's time for a step, without the device's"),
    "exactness": ("bench.correctness.exactness", "whether a replica says what transformers says on the same device"),
    "quality": ("bench.correctness.quality", "how much quality a model loses with bfloat16 and fp8, on text"),
    "clients": (
        "bench.correctness.clients.command",
        "what works of the clients that others wrote: openai, anthropic, langchain and more",
    ),
    "router": ("bench.placement.router", "the three placements on a trace with shared prefixes"),
    "chaos": ("bench.chaos.command", "a fleet under load whose processes and machines are killed and stopped"),
    "door": ("bench.door.command", "a bystander at a server that another client attacks"),
    "fleet": ("bench.fleet.command", "placement rules on a simulated fleet, next to those of other systems"),
    "overhead": (
        "bench.overhead.command",
        "the cost of a router: its CPU time for a token, and what it adds to latencies",
    ),
    "traces": ("bench.overhead.traces", "what traces of all requests cost a router, and whether their spans add up"),
    "schemas": ("bench.schemas.command", "published JSON schemas: how many are accepted, whether masks are right"),
    "compare": ("bench.replica.compare", "one of these in this checkout and in an older one, side by side"),
}
HELP = """\
Shoal serves large language models on clusters of GPUs, and on machines without one.

usage: shoal COMMAND [options]

commands:
{commands}

  shoal COMMAND --help   explains a command, with examples
  shoal --version        prints the version

To begin, in one terminal and in another:
  shoal serve
  shoal chat
"""
BENCH_HELP = """\
Measure, and keep what was measured.

usage: shoal bench WHAT [options]

what:
{commands}

  shoal bench WHAT --help   explains it, with examples
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command of `argv` (by default the process's own). Returns the exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has gone, as `| head` does. Python's last flush must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: list[str]) -> int:
    match argv:
        case ["--version" | "-V"]:
            print(f"shoal {__version__}")
            return 0
        case ["bench", *rest]:
            there = {name: bench for name, bench in BENCHES.items() if importlib.util.find_spec(bench[0])}
            return _dispatch("shoal bench", there, BENCH_HELP, rest)
    return _dispatch("shoal", COMMANDS, HELP, argv)


def _dispatch(program: str, commands: Mapping[str, tuple[str, str]], text: str, argv: list[str]) -> int:
    """Calls the command that `argv` begins with, or lists the commands there are."""
    width = max(9, *map(len, commands))
    listed = "\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in commands.items())
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(fill(text.format(commands=listed), columns()), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name = argv[0]
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(commands)}"
        what = "option" if name.startswith("-") else "command"
        print(f"{program}: no {what} {name!r}; {hint}", file=sys.stderr)
        return 2
    return importlib.import_module(commands[name][0]).main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
